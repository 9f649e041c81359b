"""Handlers, one module for each kind of endpoint."""

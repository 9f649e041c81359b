"""A module for each kind of endpoint."""

"""Engines come and go with the load."""

"""Starts, and why they fail."""

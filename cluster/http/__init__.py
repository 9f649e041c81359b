"""The HTTP application: the table of its endpoints."""

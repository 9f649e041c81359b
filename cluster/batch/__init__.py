"""Batches: their lines, and what brings each to its end."""

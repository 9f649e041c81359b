"""Runs batches: each line once, whatever dies."""

"""Batches as files and records in a storage."""

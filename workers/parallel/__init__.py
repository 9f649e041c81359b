"""Ranks that share a model: their group, and who holds which part."""

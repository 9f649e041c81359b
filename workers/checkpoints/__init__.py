"""Checkpoint folders: configuration, tensors, formats of weights, and the memory that they take."""

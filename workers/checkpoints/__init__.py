"""Folders of checkpoints: configuration, tensors, schemes of weights, and the memory that they take."""

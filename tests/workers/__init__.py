"""Tests of what computes: models, checkpoints, platforms and ranks, with folders for kernels and for sampling."""

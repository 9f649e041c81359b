"""Tests of the sampler: its draws, and the masks and logits processors that it applies."""

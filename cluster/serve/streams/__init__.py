"""Streams of tokens from engines to ingresses, and runs that survive the loss of their engine."""

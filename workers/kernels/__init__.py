"""Kernels and linears of all devices, and the metadata of a step that they read."""

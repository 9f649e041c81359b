"""Tests of the kernels and linears, for the CPU and in Triton."""

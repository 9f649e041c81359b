"""The worker on torch, for CPUs and CUDA GPUs."""

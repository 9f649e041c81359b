"""The kernels of CUDA GPUs, in Triton."""

"""What computes on a device: kernels, linears, and the metadata of a step."""

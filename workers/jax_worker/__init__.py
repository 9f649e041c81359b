"""The worker of TPU hosts, in JAX: jitted functions of static shape over a mesh of devices."""

"""Eight simulated devices for JAX on this machine's CPU. Import it before anything that imports JAX."""

from __future__ import annotations

import os

NUM_DEVICES = 8

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={NUM_DEVICES}"

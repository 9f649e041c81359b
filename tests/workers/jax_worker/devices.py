"""Eight simulated devices for JAX on this machine's CPU. Import it before anything that imports JAX.

`make test` compiles programs with few optimisations, which takes three quarters of the time, and `make prove` as they
are for users.
"""

from __future__ import annotations

import os

NUM_DEVICES = 8

_QUICKLY = " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={NUM_DEVICES}" + (
    "" if os.environ.get("MANTA_PROVE") == "1" else _QUICKLY
)

"""The CPU: prepacked oneDNN linears and the kernels of `workers/kernels/cpu.py`, on every core this process may use."""

from __future__ import annotations

import types

import torch

from workers import host
from workers.attention import allocate_kv
from workers.kernels import cpu as cpu_kernels
from workers.layers import make_cpu_gated_linear, make_cpu_linear


class CpuPlatform:
    name = "cpu"
    kernels: types.ModuleType = cpu_kernels
    make_linear = staticmethod(make_cpu_linear)
    make_gated_linear = staticmethod(make_cpu_gated_linear)
    allocate_kv = staticmethod(allocate_kv)

    def __init__(self, num_threads: int | None) -> None:
        self.device = torch.device("cpu")
        # Ray sets OMP_NUM_THREADS to an actor's num_cpus (1 by default), which would leave the other cores idle.
        torch.set_num_threads(num_threads or host.num_cores())

    def resolve_dtype(self, requested: str, checkpoint: str) -> str:
        if requested != "auto":
            return requested
        return "float32" if checkpoint == "float32" else "bfloat16"

    def torch_dtype(self, dtype: str) -> torch.dtype:
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]

    def free_memory(self) -> int:
        return host.free_memory()

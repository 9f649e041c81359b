"""The CPU: packed linears and the kernels of `workers/kernels/`, on every core this process may use."""

from __future__ import annotations

import types

import torch

from workers import host
from workers.attention import allocate_kv
from workers.kernels import build, cpu_decoder, processor
from workers.kernels import cpu as cpu_kernels
from workers.platforms.cpu_linears import make_cpu_gated_linear, make_cpu_linear


class CpuPlatform:
    name = "cpu"
    kernels: types.ModuleType = cpu_kernels
    make_linear = staticmethod(make_cpu_linear)
    make_gated_linear = staticmethod(make_cpu_gated_linear)
    compile_decoder = staticmethod(cpu_decoder.compile_decoder)
    allocate_kv = staticmethod(allocate_kv)

    def __init__(self, num_threads: int | None) -> None:
        self.device = torch.device("cpu")
        # Ray sets OMP_NUM_THREADS to an actor's num_cpus (1 by default), which would leave the other cores idle.
        num_threads = num_threads or host.num_cores()
        torch.set_num_threads(num_threads)
        self.kernel_form = build.form_in_use()
        self.advice = build.why_none()
        library = build.load_library()
        if library is not None:
            library.manta_set_num_threads(num_threads)

    def resolve_dtype(self, requested: str, checkpoint: str) -> str:
        if requested != "auto":
            return requested
        # Where the processor has no instructions for bfloat16, torch alone takes several times as long as in float32
        is_slow = build.load_library() is None and not processor.form().has_bfloat16
        return "float32" if checkpoint == "float32" or is_slow else "bfloat16"

    def torch_dtype(self, dtype: str) -> torch.dtype:
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]

    def free_memory(self) -> int:
        return host.free_memory()

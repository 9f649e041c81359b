"""What every Triton kernel's launch needs to know of the device, and how arrays get there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch
import triton
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether the kernels run in Triton's interpreter, on the CPU: `TRITON_INTERPRET=1` when triton was first imported."""

_INTERPRETED_PROCESSORS = 4
"""So that the interpreter splits long contexts as a GPU does, but into few programs: it runs them one by one."""


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of the device."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def needs_wide_dot(dtype: torch.dtype) -> bool:
    """The interpreter keeps bfloat16 as bits, which it would multiply as integers: products are made in float32."""
    return INTERPRETED and dtype == torch.bfloat16


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def place(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device, in the order of its stream. Through pinned memory, so that the host does not wait; torch
    keeps that memory until it has been read.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)


def padded_size(size: int, least: int = 1) -> int:
    """The power of two that a Triton block of so many elements has."""
    return max(least, triton.next_power_of_2(size))


def free_memory(device: torch.device, largest_step: Callable[[], object]) -> int:
    """Bytes of the device that are free beside what `largest_step` takes while it runs. Waits for the device."""
    if device.type != "cuda":
        largest_step()
        return psutil.virtual_memory().available
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    free = torch.cuda.mem_get_info(device)[0]
    held = torch.cuda.memory_allocated(device)
    largest_step()
    torch.cuda.synchronize(device)
    taken = torch.cuda.max_memory_allocated(device) - held
    torch.cuda.empty_cache()
    return max(0, min(free, torch.cuda.mem_get_info(device)[0]) - taken)


def capture(device: torch.device, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], object]]:
    """(result, replay): `run` is captured as a CUDA graph, and `replay` computes the result anew, from what its tensors
    hold then, into the same memory. Without a GPU `replay` calls `run` again.
    """
    if device.type != "cuda":
        result = run()
        return result, lambda: result.copy_(run())
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()  # compiles kernels and makes cuBLAS's workspace, neither of which can be captured
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_graph_pool()):
        result = run()
    return result, graph.replay


@functools.cache
def _graph_pool() -> Any:
    """Memory that all graphs share: one runs at a time."""
    return torch.cuda.graph_pool_handle()


def used_memory(device: torch.device) -> int:
    """Bytes of the device that are in use, by whomever."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free

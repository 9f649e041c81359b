"""Device properties for launching Triton kernels, transfers of several arrays at once, and graph capture."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import numpy as np
import torch
import triton
from triton import knobs

from manta.structured import host
from manta.workers.kernels.transfer import move, staging

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether the kernels run in Triton's interpreter on the CPU: `TRITON_INTERPRET=1` was set when triton was first
imported.
"""

_ALIGNMENT = 4
"""Words to which every array is aligned. For an address that is not a multiple of 16 bytes Triton compiles another
version of a kernel, which takes about a second.
"""
_INTERPRETED_PROCESSORS = 4
"""Processors that the interpreter assumes: enough to split long contexts as a GPU does, and few, because it runs
programs one by one.
"""
_INTERPRETED_SHARED_BYTES = 227 << 10
_INTERPRETED_CAPABILITY = (9, 0)


@functools.cache
def num_processors(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors of the device."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Returns the bytes of shared memory that one program may use: 227 KiB on an H100, 163 on an A100, 99 on most other
    GPUs.
    """
    if device.type != "cuda":
        return _INTERPRETED_SHARED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]


def needs_wide_dot(dtype: torch.dtype) -> bool:
    """Returns whether products must be computed in float32: the interpreter stores bfloat16 as bits and would multiply
    these as integers.
    """
    return INTERPRETED and dtype == torch.bfloat16


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of the device; an H100 has 9.0."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else _INTERPRETED_CAPABILITY


def has_bfloat16(device: torch.device) -> bool:
    """Returns whether the device multiplies bfloat16 matrices."""
    return capability(device) >= (8, 0)


def has_float8(device: torch.device) -> bool:
    """Returns whether the device multiplies E4M3 matrices."""
    return capability(device) >= (8, 9)


def aligned_places(sizes: dict[str, int]) -> tuple[dict[str, slice], int]:
    """Returns the slices of arrays of `sizes` int32 words in one buffer, and the words of the buffer."""
    places, end = {}, 0
    for name, size in sizes.items():
        places[name] = slice(end, end + size)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, end


def place_together(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Copies int32 arrays to the device in one transfer; returns them flat."""
    places, end = aligned_places({name: array.size for name, array in arrays.items()})
    staged = staging(end, device)
    packed = staged.numpy()
    for name, array in arrays.items():
        packed[places[name]] = array.ravel()
    buffer = move(staged, device)
    return {name: buffer[where] for name, where in places.items()}


def padded_size(size: int, least: int = 1) -> int:
    """Returns the size of a Triton block for `size` elements: a power of two, at least `least`."""
    return max(least, triton.next_power_of_2(size))


def free_garbage(device: torch.device) -> None:
    """Frees unused memory. The weights and the KV cache of a dropped engine may be in reference cycles, which Python
    would collect much later.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def record_event(device: torch.device) -> torch.Event | None:
    """Records an event on the current stream. Returns None on a CPU, whose calls return when their work is done."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def free_memory(device: torch.device, largest_step: Callable[[], object]) -> int:
    """Returns the bytes of the device that stay free while `largest_step` runs. Waits for the device."""
    if device.type != "cuda":
        largest_step()
        return host.free_memory()
    free_garbage(device)
    torch.cuda.reset_peak_memory_stats(device)
    free = torch.cuda.mem_get_info(device)[0]
    held = torch.cuda.memory_allocated(device)
    largest_step()
    torch.cuda.synchronize(device)
    taken = torch.cuda.max_memory_allocated(device) - held
    torch.cuda.empty_cache()
    return max(0, min(free, torch.cuda.mem_get_info(device)[0]) - taken)


class GraphCapture:
    """Captures CUDA graphs on one stream, where they share cuBLAS's workspace, and in one memory pool, because only one
    graph runs at a time. Without a GPU, a graph is the function that it was captured from.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], object]]:
        """Returns (result, replay). `replay` computes `run` again, from the present values of its tensors, into the
        same memory.
        """
        if self._device.type != "cuda":
            result = run()
            return result, lambda: result.copy_(run())
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()  # compiles and loads kernels and makes cuBLAS's workspace, none of which can be captured
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: calls of other threads to the device do not break this capture
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            result = run()
        return result, graph.replay


def used_memory(device: torch.device) -> int:
    """Returns the bytes of the device that any process uses."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def synchronize(device: torch.device) -> None:
    """Waits for the device. Raises the errors of its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

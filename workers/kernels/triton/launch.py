"""What every Triton kernel's launch needs to know of the device, and how several arrays get there at once."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import numpy as np
import psutil
import torch
import triton
from triton import knobs

from workers.kernels.transfer import move, staging

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether the kernels run in Triton's interpreter, on the CPU: `TRITON_INTERPRET=1` when triton was first imported."""

_ALIGNMENT = 4
"""Every array begins at a multiple of so many words: Triton compiles another form of a kernel for an address that is no
multiple of 16 bytes, and a step would wait a second for it.
"""
_INTERPRETED_PROCESSORS = 4
"""So that the interpreter splits long contexts as a GPU does, but into few programs: it runs them one by one."""
_INTERPRETED_SHARED_BYTES = 227 << 10


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of the device."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may use: 227 KiB on an H100, 163 on an A100, 99 on most other GPUs."""
    if device.type != "cuda":
        return _INTERPRETED_SHARED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]


def needs_wide_dot(dtype: torch.dtype) -> bool:
    """The interpreter keeps bfloat16 as bits, which it would multiply as integers: products are made in float32."""
    return INTERPRETED and dtype == torch.bfloat16


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def aligned_places(sizes: dict[str, int]) -> tuple[dict[str, slice], int]:
    """Where arrays of so many int32 words lie in one buffer, and its words."""
    places, end = {}, 0
    for name, size in sizes.items():
        places[name] = slice(end, end + size)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, end


def place_together(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Copies of int32 arrays on the device, flat, by one transfer."""
    places, end = aligned_places({name: array.size for name, array in arrays.items()})
    staged = staging(end, device)
    packed = staged.numpy()
    for name, array in arrays.items():
        packed[places[name]] = array.ravel()
    buffer = move(staged, device)
    return {name: buffer[where] for name, where in places.items()}


def padded_size(size: int, least: int = 1) -> int:
    """The power of two that a Triton block of so many elements has."""
    return max(least, triton.next_power_of_2(size))


def free_garbage(device: torch.device) -> None:
    """Gives back what nobody uses. The weights and the KV cache of an engine that was dropped may lie in cycles, which
    Python would collect much later.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def record_event(device: torch.device) -> torch.Event | None:
    """Of the current stream; None on a CPU, whose calls return when their work is done."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def free_memory(device: torch.device, largest_step: Callable[[], object]) -> int:
    """Bytes of the device that are free beside what `largest_step` takes while it runs. Waits for the device."""
    if device.type != "cuda":
        largest_step()
        return psutil.virtual_memory().available
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
    """Captures CUDA graphs, all on one stream, where they share cuBLAS's workspace, and in one pool of memory, for one
    of them runs at a time. Without a GPU a graph is the function that it was captured from.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], object]]:
        """(result, replay): `replay` computes the result of `run` anew, from what its tensors hold then, into the same
        memory.
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
        # What other threads ask of the device meanwhile does not break this capture
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            result = run()
        return result, graph.replay


def used_memory(device: torch.device) -> int:
    """Bytes of the device that are in use, by whomever."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def synchronize(device: torch.device) -> None:
    """Waits for the device; raises what went wrong there."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

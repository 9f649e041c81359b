"""Memory for the KV cache on the CPU: on huge pages if Linux grants them."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

from manta.workers.kernels.kv_cache import layer_shape


def allocate_kv(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    num_cached: int = 2,
) -> torch.Tensor:
    """The uninitialised KV cache: [num_layers, num_cached, *shape of a layer's keys], which `kv_cache.py` explains.
    `num_cached` is 2 for keys and values, and 1 for keys that are the values too.

    `kv_cache.layer_caches` returns the layers' caches. In the order [KV slot, kv_head, dim] one token's heads are
    adjacent, so a kernel that serves all KV heads of a sequence reads whole blocks in a row.
    """
    shape = [num_layers, num_cached, *layer_shape(dtype, num_blocks, block_size, num_kv_heads, head_dim)]
    return _huge_page_buffer(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def _huge_page_buffer(num_bytes: int) -> torch.Tensor:
    """Bytes on huge pages, if Linux grants them. Otherwise each access to a KV block would miss the TLB, because blocks
    are scattered.
    """
    if not num_bytes or not hasattr(mmap, "MADV_HUGEPAGE"):  # no layer, no Linux, or a C library that does not know it
        return torch.empty(num_bytes, dtype=torch.uint8)
    buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(buffer, dtype=torch.uint8)

"""CUDA graphs of decode steps: all layers of a step of one token a sequence, captured at start for a few batch sizes.

Launching a layer's dozen kernels from Python takes longer than a small model takes to run them. A step is padded to the
next size; rows that pad have no context and write no key. Everything else (prefill, drafts, larger batches) runs kernel
by kernel. `workers/platforms/cuda.py` decides what is captured; `launch.GraphCapture` does it.
"""

from __future__ import annotations

import bisect
import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from workers.attention import AttentionMetadata
from workers.kernels.protocol import Forward, KVCaches
from workers.kernels.triton.launch import GraphCapture, synchronize
from workers.kernels.triton.metadata import DeviceMetadata, padded_views, padding, prefix_rows_of

SMALL_SIZES = (1, 2, 4, 8)
SIZE_STEP, LARGE_SIZE_STEP, LARGE_SIZE = 16, 32, 64
"""Then every 16 sequences, and above 64 every 32: a padded row costs little beside the weights."""
MOST_SEQUENCES = 256
MOST_SECONDS = 60.0
"""For all captures of a model. Large sizes come first: smaller ones then fit in the memory of theirs, and a step whose
size was not captured by then is padded to one that was.
"""


def sizes_to_capture(max_num_sequences: int) -> tuple[int, ...]:
    """Batch sizes to capture, ascending; the last one is the largest batch, or `MOST_SEQUENCES`."""
    most = min(max_num_sequences, MOST_SEQUENCES)
    sizes = {*SMALL_SIZES, *range(SIZE_STEP, LARGE_SIZE, SIZE_STEP), *range(LARGE_SIZE, most, LARGE_SIZE_STEP), most}
    return tuple(size for size in sorted(sizes) if size <= most)


def padded_to(sizes: Sequence[int], query_lens: np.ndarray) -> int:
    """The size that a step is padded to; 0 if it is no decode step or too large."""
    index = bisect.bisect_left(sizes, len(query_lens))
    is_decode = len(query_lens) > 0 and query_lens.max() == 1
    return sizes[index] if is_decode and index < len(sizes) else 0


@dataclasses.dataclass(slots=True)
class _Graph:
    """One captured size: what it reads, what it computes, and how to run it."""

    residual: torch.Tensor
    """[size, hidden]. Rows that pad keep what they last held: no other row reads them."""
    metadata: DeviceMetadata
    hidden: torch.Tensor
    replay: Callable[[], object]


class GraphedLayers:
    """A `Forward` that replays the graph of a step's size if it has one, else runs the layers one by one."""

    def __init__(self, run_layers: Forward) -> None:
        self.capture: GraphCapture | None = None
        """While there is one, each call captures a graph of its metadata's layout."""
        self._run_layers = run_layers
        self._kv_caches: KVCaches | None = None
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        """By padded size, and whether groups of sequences share prefixes."""

    def __call__(
        self, residual: torch.Tensor, cos_sin: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches
    ) -> torch.Tensor:
        if not isinstance(metadata, DeviceMetadata):
            return self._run_layers(residual, cos_sin, metadata, kv_caches)
        key = (metadata.num_padded, metadata.prefix_rows is not None)
        if self.capture is not None:
            self._kv_caches = kv_caches
            self._graphs[key] = self._record(self.capture, residual, cos_sin, metadata, kv_caches)
        graph = self._graphs.get(key)
        if graph is None or kv_caches is not self._kv_caches:
            return self._run_layers(residual, cos_sin, metadata, kv_caches)
        assert metadata.packed is not None
        assert graph.metadata.packed is not None
        num_rows, num_blocks = metadata.block_tables.shape
        graph.residual[:num_rows].copy_(residual)
        graph.metadata.packed.copy_(metadata.packed)
        graph.metadata.block_tables[:num_rows, :num_blocks].copy_(metadata.block_tables)
        graph.replay()
        return graph.hidden[:num_rows]

    def _record(
        self,
        capture: GraphCapture,
        residual: torch.Tensor,
        cos_sin: torch.Tensor,
        metadata: DeviceMetadata,
        kv_caches: KVCaches,
    ) -> _Graph:
        """`metadata` is as long and wide as a step of this size can be, and so is the table of rotary angles."""
        own_residual = residual.clone()
        hidden, replay = capture.capture(lambda: self._run_layers(own_residual, cos_sin, metadata, kv_caches))
        return _Graph(own_residual, metadata, hidden, replay)

    def forget_graphs(self) -> None:
        self._graphs.clear()


def record(
    layers: GraphedLayers,
    forward: Callable[[torch.Tensor, AttentionMetadata], object],
    sizes: Sequence[int],
    block_size: int,
    max_model_len: int,
    device: torch.device,
    share_prefixes: bool = True,
) -> tuple[int, ...]:
    """Captures `layers` at every size, ascending, by `forward` (token ids, metadata) of their model; with
    `share_prefixes` once more for steps with groups that share prefixes. Returns the sizes that were captured in time.
    """
    deadline = time.perf_counter() + MOST_SECONDS
    # One for all graphs: each reads of it what its sequences' lengths say
    tables = torch.zeros((max(sizes), -(-max_model_len // block_size)), dtype=torch.int32, device=device)
    captured: list[int] = []
    layers.capture = GraphCapture(device)
    try:
        for size in reversed(sizes):
            if time.perf_counter() > deadline:
                break
            for has_groups in (False, True)[: 1 + (share_prefixes and size > 1)]:
                metadata = empty_step(tables[:size], block_size, max_model_len, has_groups)
                forward(torch.zeros(size, dtype=torch.int64, device=device), metadata)
            captured.append(size)
        synchronize(device)
    finally:
        layers.capture = None
    return tuple(reversed(captured))


def empty_step(tables: torch.Tensor, block_size: int, max_model_len: int, has_groups: bool) -> DeviceMetadata:
    """A step of rows that all pad, in the layout of any step of so many; `tables` are their block tables."""
    size = tables.shape[0]
    packed = padding(size, has_groups).to(tables.device)
    arrays = padded_views(packed, size, has_groups)
    return DeviceMetadata(
        positions=arrays["positions"].view(torch.int64),
        slot_mapping=arrays["slot_mapping"].view(torch.int64),
        query_start=arrays["query_start"],
        context_lens=arrays["context_lens"],
        block_tables=tables,
        block_size=block_size,
        max_query_len=1,
        max_context_len=max_model_len,
        total_context_len=size * max_model_len,
        prefix_rows=prefix_rows_of(arrays) if has_groups else None,
        packed=packed,
        num_padded=size,
    )

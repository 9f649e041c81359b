"""CUDA graphs of steps that decode, verify drafts or compute a few hundred tokens of prompts: all layers of a step,
captured at start for a few sizes.

Launching a layer's dozen kernels from Python takes longer than a small model takes to run them. A step is padded to the
next size; what pads writes no key, and nobody reads what is computed of it. Larger steps, which take the device longer
than the host, run kernel by kernel. Ranks that share a model capture the same graphs, sums over ranks among them, and
agree on each. `workers/platforms/cuda.py` decides what is captured; `launch.GraphCapture` does it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from workers.kernels.attention_metadata import AttentionMetadata
from workers.kernels.protocol import DecodeLimits, Forward, KVCaches
from workers.kernels.triton.launch import GraphCapture, synchronize
from workers.kernels.triton.metadata import (
    DeviceMetadata,
    Layout,
    padded_views,
    padding,
    prefix_rows_of,
    work_of,
)
from workers.kernels.triton.work import WorkShape

logger = logging.getLogger(__name__)

SMALL_SIZES = (1, 2, 4, 8)
SIZE_STEP, LARGE_SIZE_STEP, LARGE_SIZE = 16, 32, 64
"""Then every 16 sequences, and above 64 every 32: a padded row costs little beside the weights."""
MOST_SEQUENCES = 256
MOST_VERIFIED_TOKENS = 128
"""Of a step that verifies drafts. Every sequence is padded to the most drafts, which costs little only as long as
reading the weights takes longer than multiplying them.
"""
MIXED_TOKENS = (64, 128, 192, 256, 320, 384, 448, 512)
"""Tokens of steps that also compute prompts. Larger ones keep the device busy for longer than the host needs to launch
their kernels.
"""
MOST_SECONDS = 60.0
"""For all captures of a model. Of each kind large sizes come first: smaller ones then fit in the memory of theirs, and
a step whose size was not captured by then is padded to one that was.
"""


def layouts_to_capture(
    max_num_sequences: int, max_draft_tokens: int = 0, max_num_tokens: int = 0
) -> tuple[Layout, ...]:
    """Returns the layouts to capture, ascending: those of decode steps, whose last one is the largest batch, or
    `MOST_SEQUENCES`; with drafts those of steps that verify up to `max_draft_tokens` of each sequence; and those of
    steps that compute prompts too, of `max_num_tokens` at most.
    """
    most = min(max_num_sequences, MOST_SEQUENCES)
    sizes = {*SMALL_SIZES, *range(SIZE_STEP, LARGE_SIZE, SIZE_STEP), *range(LARGE_SIZE, most, LARGE_SIZE_STEP), most}
    layouts = [Layout(tokens, size) for tokens in {1, 1 + max_draft_tokens} for size in sizes if size <= most]
    decodes = sorted(each for each in layouts if each.tokens_each == 1 or each.num_tokens <= MOST_VERIFIED_TOKENS)
    sizes_before = zip((0, *MIXED_TOKENS), MIXED_TOKENS, strict=False)
    return *decodes, *(Layout(size, most, size) for before, size in sizes_before if before < max_num_tokens)


def padded_to(layouts: Sequence[Layout], query_lens: np.ndarray) -> Layout | None:
    """The first of the ascending layouts that a step fits in; None if it fits in none."""
    if not len(query_lens):
        return None
    return next((each for each in layouts if each.fits(query_lens)), None)


def compile_prompts(
    forward: Callable[[torch.Tensor, AttentionMetadata], object],
    limits: DecodeLimits,
    shape: WorkShape,
    device: torch.device,
) -> None:
    """Has `forward` run empty steps of more than one token a sequence, without and with groups: else the first prompts,
    and all that run beside them, would wait seconds for their attention to be compiled.
    """
    layout = Layout(2, min(2, limits.max_num_sequences))
    tables = _empty_tables(layout.num_sequences, limits, device)
    for has_groups in _group_forms(layout, limits):
        step = empty_step(tables, layout, limits, has_groups, shape)
        token_ids = torch.zeros(layout.num_tokens, dtype=torch.int64, device=device)
        forward(token_ids, dataclasses.replace(step, layout=None))


@dataclasses.dataclass(slots=True)
class _Graph:
    """One captured layout: what it reads, what it computes, and how to run it."""

    residual: torch.Tensor
    """[num_tokens, hidden]. Rows that pad keep what they last held: no other row reads them."""
    metadata: DeviceMetadata
    cos_sin: torch.Tensor
    """The graph reads the memory of this table of rotary angles."""
    hidden: torch.Tensor
    replay: Callable[[], object]


class GraphedLayers:
    """A `Forward` that replays the graph of a step's layout if it has one, else runs the layers one by one."""

    def __init__(self, run_layers: Forward) -> None:
        self.capture: GraphCapture | None = None
        """While there is one, each call captures a graph of its metadata's layout."""
        self._run_layers = run_layers
        self._kv_caches: KVCaches | None = None
        self._graphs: dict[tuple[Layout, bool], _Graph] = {}
        """By layout, and whether groups of sequences share prefixes."""

    def __call__(
        self, residual: torch.Tensor, cos_sin: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches
    ) -> torch.Tensor:
        if not isinstance(metadata, DeviceMetadata) or metadata.layout is None:
            return self._run_layers(residual, cos_sin, metadata, kv_caches)
        key = (metadata.layout, metadata.prefix_rows is not None)
        if self.capture is not None:
            self._kv_caches = kv_caches
            self._graphs[key] = self._record(self.capture, residual, cos_sin, metadata, kv_caches)
        graph = self._graphs.get(key)
        if graph is None or kv_caches is not self._kv_caches:
            return self._run_layers(residual, cos_sin, metadata, kv_caches)
        assert metadata.packed is not None
        assert graph.metadata.packed is not None
        num_sequences, num_blocks = metadata.block_tables.shape
        graph.residual[: metadata.num_tokens].copy_(residual)
        graph.metadata.packed.copy_(metadata.packed)
        graph.metadata.block_tables[:num_sequences, :num_blocks].copy_(metadata.block_tables)
        graph.replay()
        return graph.hidden[: metadata.num_tokens]

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
        return _Graph(own_residual, metadata, cos_sin, hidden, replay)

    def forget(self, layout: Layout) -> None:
        for has_groups in (False, True):
            self._graphs.pop((layout, has_groups), None)


def record(
    layers: GraphedLayers,
    forward: Callable[[torch.Tensor, AttentionMetadata], object],
    layouts: Sequence[Layout],
    limits: DecodeLimits,
    shape: WorkShape,
    device: torch.device,
    agree: Callable[[int], int] = int,
    alone: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> tuple[Layout, ...]:
    """Captures `layers` in every layout by `forward` (token ids, metadata) of their model; once more for steps with
    groups that share prefixes, if there are any. Returns the layouts that were captured, ascending, as far as time
    went. The log says which ones cannot be captured: others may be, because smaller ones take less memory.

    Ranks that share the model call this with the same layouts. `agree` is the least of what all of them give it, so
    that no rank captures sums over ranks in which another one takes no part. Within `alone` a rank leaves those sums
    out: each layout is run so first, because a rank that failed there (for lack of memory, say) would leave the others
    waiting in a sum.
    """
    deadline = time.perf_counter() + MOST_SECONDS
    # One for all graphs: each reads of it what its sequences' lengths say
    most = max(each.num_sequences for each in layouts)
    tables = _empty_tables(most, limits, device)
    captured: list[Layout] = []
    failed: dict[Layout, str] = {}
    capture = GraphCapture(device)
    try:
        for layout in sorted(layouts, key=_capture_order):
            if not agree(int(time.perf_counter() <= deadline)):
                break
            layers.capture = None
            with alone():
                why_not = _run_empty(layout, tables, forward, limits, shape)
            if agree(int(why_not is None)):
                layers.capture = capture
                why_not = _run_empty(layout, tables, forward, limits, shape)
                if agree(int(why_not is None)):
                    captured.append(layout)
                else:
                    layers.forget(layout)
            if why_not is not None:
                failed[layout] = why_not
    finally:
        layers.capture = None
    if failed:
        sizes = ", ".join(f"{each.num_tokens} tokens of {each.num_sequences} sequences" for each in failed)
        logger.warning(
            "steps of these sizes run kernel by kernel, for they cannot be captured: %s (%s)",
            sizes,
            next(iter(failed.values())),
        )
    return tuple(each for each in layouts if each in captured)


def _capture_order(layout: Layout) -> tuple[bool, int, int]:
    """Returns the key that sorts decodes before verifications before prompts, and of each kind large layouts first."""
    if layout.most_tokens is not None:
        return True, 0, -layout.most_tokens
    return False, layout.tokens_each, -layout.num_sequences


def _run_empty(
    layout: Layout,
    tables: torch.Tensor,
    forward: Callable[[torch.Tensor, AttentionMetadata], object],
    limits: DecodeLimits,
    shape: WorkShape,
) -> str | None:
    """Has `forward` run empty steps in the layout, which it captures if it is told to. Returns why that failed."""
    device = tables.device
    try:
        for has_groups in _group_forms(layout, limits):
            metadata = empty_step(tables, layout, limits, has_groups, shape)
            forward(torch.zeros(layout.num_tokens, dtype=torch.int64, device=device), metadata)
        synchronize(device)
    except RuntimeError as error:
        return str(error)
    return None


def _empty_tables(num_sequences: int, limits: DecodeLimits, device: torch.device) -> torch.Tensor:
    """Returns block tables of sequences of the largest length, int32 [num_sequences, blocks]."""
    shape = num_sequences, -(-limits.max_model_len // limits.block_size)
    return torch.zeros(shape, dtype=torch.int32, device=device)


def _group_forms(layout: Layout, limits: DecodeLimits) -> tuple[bool, ...]:
    """Returns the forms of a layout: without groups that share prefixes, and with them if there can be some."""
    return (False, True) if limits.shares_prefixes and layout.num_sequences > 1 else (False,)


def empty_step(
    tables: torch.Tensor, layout: Layout, limits: DecodeLimits, has_groups: bool, shape: WorkShape
) -> DeviceMetadata:
    """Returns a step all of which pads; the first of `tables` are its block tables."""
    packed = padding(layout, has_groups, shape).to(tables.device)
    arrays = padded_views(packed, layout, has_groups, shape)
    return DeviceMetadata(
        positions=arrays["positions"].view(torch.int64),
        slot_mapping=arrays["slot_mapping"].view(torch.int64),
        query_start=arrays["query_start"],
        context_lens=arrays["context_lens"],
        block_tables=tables[: layout.num_sequences],
        block_size=limits.block_size,
        max_query_len=layout.tokens_each,
        max_context_len=limits.max_model_len,
        total_context_len=layout.num_sequences * limits.max_model_len,
        work=work_of(arrays, None, layout.item_tokens(shape)),
        prefix_rows=prefix_rows_of(arrays) if has_groups else None,
        packed=packed,
        layout=layout,
    )

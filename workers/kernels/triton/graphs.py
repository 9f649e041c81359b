"""CUDA graphs of whole steps, captured at start for a few sizes: decodes, verification of drafts, and up to a few
hundred prompt tokens.

Launching a layer's dozen kernels from Python takes longer than a small model's kernels run. A step is padded to the
next size; padding writes no key, and its results are not used. Larger steps take the device longer than the host and
run kernel by kernel. Ranks that share a model capture the same graphs, which include sums over ranks, and agree on
each. `workers/platforms/cuda.py` decides what to capture, and `launch.GraphCapture` captures it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from manta.structured.visible_logs import logger_of
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import DecodeLimits, Forward, KVCaches, RotaryTables
from manta.workers.kernels.triton.launch import GraphCapture, synchronize
from manta.workers.kernels.triton.metadata import (
    DeviceMetadata,
    Layout,
    add_other_groups,
    padded_views,
    padding,
    prefix_rows_of,
    states_of,
    work_of,
)
from manta.workers.kernels.triton.work import WorkShape

logger = logger_of(__name__)

SMALL_SIZES = (1, 2, 4, 8)
SIZE_STEP, LARGE_SIZE_STEP, LARGE_SIZE = 16, 32, 64
"""Steps between the sizes above `SMALL_SIZES`: 16 sequences, and 32 from 64 sequences on, because padded rows cost
little beside reading the weights.
"""
MOST_SEQUENCES = 256
MOST_VERIFIED_TOKENS = 128
"""Most tokens of a captured step that verifies drafts. Every sequence is padded to the most drafts, which costs little
only while reading the weights takes longer than multiplying them.
"""
MIXED_TOKENS = (64, 128, 192, 256, 320, 384, 448, 512)
"""Sizes in tokens of captured steps that also compute prompts. Larger steps keep the device busy for longer than the
host needs to launch their kernels.
"""
MOST_SECONDS = 60.0
"""Time limit in seconds for all captures of a model.

Of each kind large sizes come first, so that smaller ones fit in their memory. A step whose size was not captured is
padded to one that was.
"""


def layouts_to_capture(
    max_num_sequences: int, max_draft_tokens: int = 0, max_num_tokens: int = 0
) -> tuple[Layout, ...]:
    """Returns the layouts to capture, ascending:

    - decode steps, of which the last is the largest batch or `MOST_SEQUENCES`;
    - with drafts, steps that verify up to `max_draft_tokens` of each sequence;
    - steps that also compute prompts, of at most `max_num_tokens`.
    """
    most = min(max_num_sequences, MOST_SEQUENCES)
    sizes = {*SMALL_SIZES, *range(SIZE_STEP, LARGE_SIZE, SIZE_STEP), *range(LARGE_SIZE, most, LARGE_SIZE_STEP), most}
    layouts = [Layout(tokens, size) for tokens in {1, 1 + max_draft_tokens} for size in sizes if size <= most]
    decodes = sorted(each for each in layouts if each.tokens_each == 1 or each.num_tokens <= MOST_VERIFIED_TOKENS)
    sizes_before = zip((0, *MIXED_TOKENS), MIXED_TOKENS, strict=False)
    return *decodes, *(Layout(size, most, size) for before, size in sizes_before if before < max_num_tokens)


def padded_to(layouts: Sequence[Layout], query_lens: np.ndarray) -> Layout | None:
    """Returns the first of the ascending layouts that a step fits in, or None."""
    if not len(query_lens):
        return None
    return next((each for each in layouts if each.fits(query_lens)), None)


def prompt_sizes(max_num_tokens: int) -> tuple[int, ...]:
    """Returns sizes in tokens of steps that are not captured, each twice the one before."""
    sizes = []
    size = MIXED_TOKENS[-1]
    while size < max_num_tokens:
        size = min(2 * size, max_num_tokens)
        sizes.append(size)
    return tuple(sizes)


def compile_prompts(
    forward: Callable[[torch.Tensor, AttentionMetadata], object],
    limits: DecodeLimits,
    shape: WorkShape,
    device: torch.device,
    has_experts: bool = False,
) -> None:
    """Runs empty steps of more than one token for each sequence by `forward`, without and with groups.

    Otherwise the first prompts, and all sequences beside them, would wait seconds for attention to be compiled. The
    products of experts have forms for several numbers of rows, so `has_experts` runs steps of many sizes.
    """
    if has_experts:
        for num_tokens in prompt_sizes(limits.max_num_tokens):
            layout = Layout(num_tokens, 1)
            step = empty_step(_empty_tables(1, limits, device), layout, limits, has_groups=False, shape=shape)
            token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
            forward(token_ids, dataclasses.replace(step, layout=None))
    layout = Layout(2, min(2, limits.max_num_sequences))
    tables = _empty_tables(layout.num_sequences, limits, device)
    for has_groups in _group_forms(layout, limits):
        step = empty_step(tables, layout, limits, has_groups, shape)
        token_ids = torch.zeros(layout.num_tokens, dtype=torch.int64, device=device)
        forward(token_ids, dataclasses.replace(step, layout=None))


@dataclasses.dataclass(slots=True)
class _Graph:
    """A captured layout: its inputs, its result and its replay."""

    residual: torch.Tensor
    """Input [num_tokens, hidden]. Padding rows keep their last values, which no other row reads."""
    inputs: torch.Tensor | None
    """The inputs that each layer has of its own, [num_layers, num_tokens, width]; None for none."""
    metadata: DeviceMetadata
    cos_sin: RotaryTables
    """Tables of rotary angles, kept because the graph reads their memory."""
    hidden: torch.Tensor
    replay: Callable[[], object]


class GraphedLayers:
    """A `Forward` that replays the graph of a step's layout if there is one, and otherwise runs the
    layers one by one.
    """

    def __init__(self, run_layers: Forward) -> None:
        self.capture: GraphCapture | None = None
        """The capture under way, or None. With it, each call captures a graph of its metadata's layout."""
        self._run_layers = run_layers
        self._kv_caches: KVCaches | None = None
        self._graphs: dict[tuple[Layout, bool], _Graph] = {}
        """Graphs by layout and by whether groups of sequences share prefixes."""

    def __call__(
        self,
        residual: torch.Tensor,
        cos_sin: RotaryTables,
        metadata: AttentionMetadata,
        kv_caches: KVCaches,
        inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not isinstance(metadata, DeviceMetadata) or metadata.layout is None:
            return self._run_layers(residual, cos_sin, metadata, kv_caches, inputs)
        key = (metadata.layout, metadata.prefix_rows is not None)
        if self.capture is not None:
            self._kv_caches = kv_caches
            self._graphs[key] = self._record(self.capture, residual, cos_sin, metadata, kv_caches, inputs)
        graph = self._graphs.get(key)
        if graph is None or kv_caches is not self._kv_caches:
            return self._run_layers(residual, cos_sin, metadata, kv_caches, inputs)
        assert metadata.packed is not None
        assert graph.metadata.packed is not None
        num_sequences, num_blocks = metadata.block_tables.shape
        graph.residual[: metadata.num_tokens].copy_(residual)
        if graph.inputs is not None:
            assert inputs is not None
            graph.inputs[:, : metadata.num_tokens].copy_(inputs)
        graph.metadata.packed.copy_(metadata.packed)
        groups = (metadata, *metadata.other_groups), (graph.metadata, *graph.metadata.other_groups)
        for group, own in zip(*groups, strict=True):
            own.block_tables[:num_sequences, :num_blocks].copy_(group.block_tables)
        graph.replay()
        return graph.hidden[: metadata.num_tokens]

    def _record(
        self,
        capture: GraphCapture,
        residual: torch.Tensor,
        cos_sin: RotaryTables,
        metadata: DeviceMetadata,
        kv_caches: KVCaches,
        inputs: torch.Tensor | None,
    ) -> _Graph:
        """Captures a graph. `metadata` and the tables of rotary angles must have the largest size of steps with this
        layout.
        """
        own_residual, own_inputs = residual.clone(), None if inputs is None else inputs.clone()
        hidden, replay = capture.capture(
            lambda: self._run_layers(own_residual, cos_sin, metadata, kv_caches, own_inputs)
        )
        return _Graph(own_residual, own_inputs, metadata, cos_sin, hidden, replay)

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
    """Captures `layers` in every layout by `forward(token_ids, metadata)` of their model, and again for groups that
    share prefixes. Returns the captured layouts, ascending, as far as time allowed.

    The log names layouts that cannot be captured; others still may be, because smaller ones take less memory.

    Ranks that share the model call this with the same layouts. `agree` returns the minimum of all ranks' values, so
    that no rank captures sums over ranks that another rank does not join. Within `alone` a rank leaves those sums out.
    Each layout first runs so, because a rank that failed in a sum, for lack of memory say, would leave the others
    waiting.
    """
    deadline = time.perf_counter() + MOST_SECONDS
    # All graphs share one; each reads as much of it as the lengths of its sequences require
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
    """Returns the sort key that puts decodes before verifications before prompts, and large layouts first
    within each.
    """
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
    """Runs empty steps in the layout by `forward`, which captures it if told to. Returns the error, or None."""
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
    """Returns block tables of sequences of the maximum length, int32 [num_groups, num_sequences, num_blocks]."""
    shape = limits.num_groups, num_sequences, -(-limits.max_model_len // limits.block_size)
    return torch.zeros(shape, dtype=torch.int32, device=device)


def _group_forms(layout: Layout, limits: DecodeLimits) -> tuple[bool, ...]:
    """Returns the values of `has_groups` for a layout: False, and True if groups can share prefixes."""
    return (False, True) if limits.shares_prefixes and layout.num_sequences > 1 else (False,)


def empty_step(
    tables: torch.Tensor, layout: Layout, limits: DecodeLimits, has_groups: bool, shape: WorkShape
) -> DeviceMetadata:
    """Returns the metadata of a step that is all padding. Its block tables are the first of each group's `tables`."""
    sizes = layout, has_groups, shape, limits.num_groups - 1, limits.has_states
    packed = padding(*sizes).to(tables.device)
    arrays = padded_views(packed, *sizes)
    step = DeviceMetadata(
        positions=arrays["positions"].view(torch.int64),
        slot_mapping=arrays["slot_mapping"].view(torch.int64),
        query_start=arrays["query_start"],
        context_lens=arrays["context_lens"],
        block_tables=tables[0, : layout.num_sequences],
        block_size=limits.block_size,
        max_query_len=layout.tokens_each,
        max_context_len=limits.max_model_len,
        total_context_len=layout.num_sequences * limits.max_model_len,
        work=work_of(arrays, None, layout.item_tokens(shape)),
        prefix_rows=prefix_rows_of(arrays) if has_groups else None,
        packed=packed,
        layout=layout,
        states=states_of(arrays, layout.tokens_each == 1) if limits.has_states else None,
    )
    add_other_groups(step, arrays, tables[1:, : layout.num_sequences])
    return step

"""A step's attention metadata on an accelerator, copied from the host at once, with shared prefixes in the kernels'
form.

All arrays are in one int32 buffer, so that a step waits for one transfer instead of a dozen. A step may be padded; its
buffer then has the layout of a larger batch, which a captured graph reads (`workers/kernels/triton/graphs.py`).
`workers/platforms/cuda.py` builds it once in each step.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import torch

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.kernels.shared_prefixes import SharedPrefixes
from manta.workers.kernels.transfer import move, staging
from manta.workers.kernels.triton.adapter_blocks import AdapterBlocks, place_blocks
from manta.workers.kernels.triton.launch import aligned_places
from manta.workers.kernels.triton.work import ITEM_COLUMNS, MERGE_COLUMNS, WorkShape, plan_work


class Layout(NamedTuple):
    """The sizes that a step is padded to."""

    tokens_each: int
    """Most tokens of a sequence: 1 if steps only decode, more if they also verify drafts or compute prompts."""
    num_sequences: int
    most_tokens: int | None = None
    """Most tokens of all sequences together; None if each may have `tokens_each`."""

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.tokens_each if self.most_tokens is None else self.most_tokens

    def fits(self, query_lens: np.ndarray) -> bool:
        """Returns whether a step with `query_lens` tokens of each sequence, integers [num_sequences], can be padded to
        this layout.
        """
        if len(query_lens) > self.num_sequences or query_lens.max() > self.tokens_each:
            return False
        return self.most_tokens is None or int(query_lens.sum()) <= self.most_tokens

    def item_tokens(self, shape: WorkShape) -> int:
        """Returns the most query tokens of an item (`work.py`)."""
        return self.tokens_each if self.most_tokens is None else shape.item_tokens

    def most_items(self, shape: WorkShape) -> int:
        """Returns the most items of a step with this layout, for any context lengths."""
        num_runs = self.num_sequences
        if self.most_tokens is not None:
            num_runs += self.most_tokens // shape.item_tokens
        return num_runs + shape.num_programs


@dataclasses.dataclass(slots=True)
class DeviceWork:
    """`Work` on the device. In a padded step, padding items and merges do nothing."""

    items: torch.Tensor
    """The items, int32 [num_items, 6]; the sequence of a padding item is -1."""
    merges: torch.Tensor
    """The merges, int32 [num_merges, 3]; the count of a padding merge is 0."""
    num_slots: int
    item_tokens: int
    """Most query tokens of an item."""


@dataclasses.dataclass(slots=True)
class PrefixRows:
    """The rows of query tokens whose group reads its shared keys once, group by group.

    Group `g` has the rows `[row_start[g], row_start[g + 1])`; row `r` is the flat token `tokens[r]`.
    """

    row_start: torch.Tensor
    """First row of each group and the end of the last, int32 [num_groups + 1]."""
    tokens: torch.Tensor
    """Flat token of each row, int32 [num_rows]."""
    leaders: torch.Tensor
    """A sequence of each group, whose block table is read, int32 [num_groups]."""
    group_lens: torch.Tensor
    """Number of keys that each group shares, int32 [num_groups]."""
    prefix_lens: torch.Tensor
    """Number of keys that each sequence shares with its group, int32 [num_sequences]; 0 without a group."""
    first_rows: torch.Tensor
    """Row of each sequence's first query token, int32 [num_sequences]; -1 without a group."""

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_groups(self) -> int:
        return self.leaders.shape[0]


@dataclasses.dataclass(slots=True)
class DeviceMetadata(AttentionMetadata):
    """`AttentionMetadata` on a device. `shared_prefixes` is None, and `prefix_rows` takes its place in
    these kernels.
    """

    work: DeviceWork | None = None
    """The items of attention, set by `build_metadata`."""
    prefix_rows: PrefixRows | None = None
    packed: torch.Tensor | None = None
    """All arrays except the block tables, int32, in the sizes of `layout`; None if not padded."""
    layout: Layout | None = None
    """The layout that the step is padded to, if a graph may run it."""
    adapter_blocks: AdapterBlocks | None = None
    """The rows of `adapters` in blocks; None if no row has an adapter."""
    chunk_size: int | None = None
    """Length of the chunks whose tokens see one another; None for layers without chunks."""

    def in_chunks(self, chunk_size: int) -> DeviceMetadata:
        """Returns the same step for layers whose tokens see those of their chunk. The kernels find a token's chunk by
        its position, so that no length has to come to the host.
        """
        return dataclasses.replace(self, chunk_size=chunk_size, prefix_rows=None)


def build_metadata(
    tokens: QueryTokens, device: torch.device, layout: Layout | None = None, shape: WorkShape | None = None
) -> DeviceMetadata:
    """Builds a step's metadata on the device.

    With a `layout`, which the step must fit, the step is padded to it. `shape` is that of the model's attention;
    without it the work is cut for one KV head.
    """
    host = AttentionMetadata.build(tokens)
    tables = np.stack([each.block_tables.numpy() for each in (host, *host.other_groups)])
    shape = shape or WorkShape.of(1, 1, device)
    arrays = _arrays(host)
    if layout is not None:
        item_tokens = layout.item_tokens(shape)
    else:
        item_tokens = 1 if host.max_query_len == 1 else shape.item_tokens
    first_keys = arrays.get("prefix_lens", np.zeros(len(tokens.starts), dtype=np.int32))
    work = plan_work(tokens.starts, tokens.lens, first_keys, item_tokens, shape.num_programs)
    arrays |= {"items": work.items.ravel(), "merges": work.merges.ravel()}
    num_others = len(host.other_groups)
    if num_others:
        arrays["other_slots"] = _other_slots(host, host.num_tokens if layout is None else layout.num_tokens)
    if host.states is not None:
        arrays |= {name: getattr(host.states, name).numpy().astype(np.int32) for name in STATE_ARRAYS}
    if layout is not None:
        has_groups, has_states = host.shared_prefixes is not None, host.states is not None
        arrays = _padded(arrays, padded_sizes(layout, has_groups, shape, num_others, has_states))
    words = {name: array.view(np.int32) for name, array in arrays.items()}
    places, end = aligned_places({name: len(array) for name, array in words.items()})
    staged = staging(end + tables.size, device)
    packed = staged.numpy()
    for name, where in places.items():
        packed[where] = words[name]
    packed[end:].reshape(tables.shape)[:] = tables
    buffer = move(staged, device)
    views = {name: buffer[where] for name, where in places.items()}
    num_tokens, num_sequences = host.num_tokens, host.num_sequences
    device_tables = buffer[end:].view(tables.shape)
    step = DeviceMetadata(
        positions=views["positions"].view(torch.int64)[:num_tokens],
        slot_mapping=views["slot_mapping"].view(torch.int64)[:num_tokens],
        query_start=views["query_start"][: num_sequences + 1],
        context_lens=views["context_lens"][:num_sequences],
        block_tables=device_tables[0],
        block_size=tokens.block_size,
        max_query_len=host.max_query_len,
        max_context_len=host.max_context_len,
        total_context_len=host.total_context_len,
        work=work_of(views, work.num_slots if layout is None else None, item_tokens),
        prefix_rows=prefix_rows_of(views) if host.shared_prefixes is not None else None,
        packed=None if layout is None else buffer[:end],
        layout=layout,
        states=None if host.states is None else states_of(views, host.states.is_decode),
        adapters=tokens.adapters,
        adapter_blocks=None if tokens.adapters is None else place_blocks(tokens.adapters, device),
    )
    add_other_groups(step, views, device_tables[1:])
    return step


def add_other_groups(step: DeviceMetadata, views: dict[str, torch.Tensor], tables: torch.Tensor) -> None:
    """Adds the further groups of layers to a step: their slots are among `views`, and `tables` are their block tables,
    int32 [num_groups - 1, num_sequences, max_blocks]. They read shared prefixes as other keys.
    """
    if not len(tables):
        return
    slots = views["other_slots"].view(torch.int64).view(len(tables), -1)[:, : step.num_tokens]
    step.other_groups = tuple(
        dataclasses.replace(step, slot_mapping=own_slots, block_tables=own_tables, prefix_rows=None, packed=None)
        for own_slots, own_tables in zip(slots, tables, strict=True)
    )


def work_of(views: dict[str, torch.Tensor], num_slots: int | None, item_tokens: int) -> DeviceWork:
    """Returns the work whose arrays are among `views`. In a padded step, where `num_slots` is None, any item may have a
    slot.
    """
    items = views["items"].view(-1, len(ITEM_COLUMNS))
    merges = views["merges"].view(-1, len(MERGE_COLUMNS))
    return DeviceWork(items, merges, len(items) if num_slots is None else num_slots, item_tokens)


def prefix_rows_of(views: dict[str, torch.Tensor]) -> PrefixRows:
    return PrefixRows(**{field.name: views[field.name] for field in dataclasses.fields(PrefixRows)})


def states_of(views: dict[str, torch.Tensor], is_decode: bool) -> RecurrentStep:
    """Returns the recurrent states that a step reads and writes, whose arrays are among `views`, padded as they are."""
    arrays = {name: views[name] for name in STATE_ARRAYS}
    return RecurrentStep(**arrays, sequence_starts=views["query_start"], is_decode=is_decode)


def padded_sizes(
    layout: Layout, has_groups: bool, shape: WorkShape, num_others: int = 0, has_states: bool = False
) -> dict[str, int]:
    """Returns the int32 words of each array. Layers have `num_others` groups besides the first, and recurrent states if
    `has_states`.
    """
    num_tokens, num_sequences = layout.num_tokens, layout.num_sequences
    sizes = {
        "positions": 2 * num_tokens,
        "slot_mapping": 2 * num_tokens,
        "query_start": num_sequences + 1,
        "context_lens": num_sequences,
        "items": layout.most_items(shape) * len(ITEM_COLUMNS),
        "merges": num_tokens * len(MERGE_COLUMNS),
    }
    if num_others:
        sizes["other_slots"] = num_others * 2 * num_tokens
    if has_states:
        sizes |= {
            "starts": num_tokens + 1,
            "reads": num_tokens,
            "writes": num_tokens,
            "first_segments": num_sequences + 1,
            "row_sequences": num_tokens,
            "row_segments": num_tokens,
        }
    if has_groups:
        most_groups = max(1, num_sequences // 2)
        sizes |= {
            "row_start": most_groups + 1,
            "tokens": num_tokens,
            "leaders": most_groups,
            "group_lens": most_groups,
            "prefix_lens": num_sequences,
            "first_rows": num_sequences,
        }
    return sizes


STATE_ARRAYS = ("starts", "reads", "writes", "first_segments", "row_sequences", "row_segments")
"""The tensors of a `RecurrentStep` besides `sequence_starts`, which is `query_start`."""
_PADDING = {
    "slot_mapping": -1,
    "other_slots": -1,
    "first_rows": -1,
    "items": -1,
    "reads": -1,
    "writes": -1,
    "row_sequences": -1,
    "row_segments": -1,
}
"""Values that pad arrays. Cumulative arrays are padded with their last value, and others with 0.

A padding sequence has no tokens, and a padding segment reads and writes no state. A padding token belongs to no
sequence: it writes no key, and attention and recurrences do not write its output.
"""
_CUMULATIVE = ("query_start", "row_start", "starts", "first_segments")


def padding(
    layout: Layout, has_groups: bool, shape: WorkShape, num_others: int = 0, has_states: bool = False
) -> torch.Tensor:
    """Returns the buffer of a step without sequences, int32 on the CPU."""
    places, end = aligned_places(padded_sizes(layout, has_groups, shape, num_others, has_states))
    buffer = torch.zeros(end, dtype=torch.int32)
    for name, value in _PADDING.items():
        if name in places:
            buffer[places[name]] = value  # -1 is all ones in 64 bits too
    return buffer


def padded_views(
    buffer: torch.Tensor,
    layout: Layout,
    has_groups: bool,
    shape: WorkShape,
    num_others: int = 0,
    has_states: bool = False,
) -> dict[str, torch.Tensor]:
    """Returns the arrays of a buffer with that layout, int32."""
    places, _ = aligned_places(padded_sizes(layout, has_groups, shape, num_others, has_states))
    return {name: buffer[where] for name, where in places.items()}


def _arrays(host: AttentionMetadata) -> dict[str, np.ndarray]:
    arrays = {
        name: getattr(host, name).numpy() for name in ("positions", "slot_mapping", "query_start", "context_lens")
    }
    if host.shared_prefixes is not None:
        arrays |= _group_arrays(host.shared_prefixes, arrays["query_start"])
    return arrays


def _other_slots(host: AttentionMetadata, num_tokens: int) -> np.ndarray:
    """Returns the slots of the further groups, int64 [(num_groups - 1) * num_tokens], each group padded by itself."""
    slots = np.full((len(host.other_groups), num_tokens), _PADDING["other_slots"], dtype=np.int64)
    for own, group in zip(slots, host.other_groups, strict=True):
        own[: host.num_tokens] = group.slot_mapping.numpy()
    return slots.ravel()


def _padded(arrays: dict[str, np.ndarray], sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Returns the arrays padded to `sizes`, in int32 words."""
    padded = {}
    for name, words in sizes.items():
        array = arrays[name]
        size = words * 4 // array.itemsize
        value = array[-1] if name in _CUMULATIVE else _PADDING.get(name, 0)
        padded[name] = np.full(size, value, dtype=array.dtype)
        padded[name][: len(array)] = array
    return padded


def _group_arrays(groups: SharedPrefixes, query_start: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the fields of `PrefixRows`."""
    group_start, members = groups.group_start.numpy(), groups.members.numpy()
    counts = (query_start[1:] - query_start[:-1])[members]
    member_rows = np.zeros(len(members) + 1, dtype=np.int32)
    np.cumsum(counts, out=member_rows[1:])
    tokens = np.arange(member_rows[-1], dtype=np.int32) + np.repeat(query_start[members] - member_rows[:-1], counts)
    num_sequences = len(query_start) - 1
    prefix_lens = np.zeros(num_sequences, dtype=np.int32)
    prefix_lens[members] = np.repeat(groups.prefix_lens.numpy(), np.diff(group_start))
    first_rows = np.full(num_sequences, -1, dtype=np.int32)
    first_rows[members] = member_rows[:-1]
    return {
        "row_start": member_rows[group_start],
        "tokens": tokens.astype(np.int32),
        "leaders": members[group_start[:-1]],
        "group_lens": groups.prefix_lens.numpy(),
        "prefix_lens": prefix_lens,
        "first_rows": first_rows,
    }

"""Cuts a step's attention into items of like length: a run of query tokens of one sequence, and a range of its keys.

The host plans the items by the lengths of the contexts, and the kernel takes one item and one KV head a program. One
long context among many short ones is thus read by as many programs as its share of the keys asks for. A captured graph
has a fixed grid, so the number of items is bounded by the sizes of the step alone, whatever its lengths are
(`Layout.most_items`). The idea is FlashInfer's (Ye et al., 2025, arXiv:2501.01005). Numpy only: `metadata.py` brings
the items to the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from workers.kernels.triton.launch import num_processors

TILE_ROWS = 64
"""Rows of a tile, query tokens times the heads that read one KV head, in a step that does more than decode."""
PROGRAMS_PER_PROCESSOR = 2
"""Contexts are cut until there are so many programs for each multiprocessor."""
LEAST_KEYS = 128
"""Fewer keys are not worth an item of their own."""
KEYS_STEP = 64
"""Items have multiples of so many keys, where their sequence has no fewer left: tiles of keys are then full."""

ITEM_COLUMNS = ("sequence", "first_token", "first_key", "end_key", "slot", "split")
"""Columns of `Work.items`."""
MERGE_COLUMNS = ("token", "row", "count")
"""Columns of `Work.merges`."""


class WorkShape(NamedTuple):
    """How the attention of a model is cut on its device."""

    item_tokens: int
    """Query tokens of an item in a step with prompts. Kernels take any number; best is a tile of theirs."""
    num_programs: int
    """Programs for each KV head that keep the device busy."""

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, device: torch.device) -> WorkShape:
        num_programs = PROGRAMS_PER_PROCESSOR * num_processors(device) // num_kv_heads
        return cls(max(1, TILE_ROWS // (num_heads // num_kv_heads)), max(1, num_programs))


class Work(NamedTuple):
    """The attention of one step; every array is int32."""

    items: np.ndarray
    """[num_items, 6], see `ITEM_COLUMNS`: `item_tokens` query tokens of `sequence` from its `first_token` of this step
    on, as far as it has them, and the keys `[first_key, end_key)`. An item that shares its query tokens with others is
    number `split` of these, and writes its result to `slot`; else `slot` is -1.
    """
    merges: np.ndarray
    """[num_merges, 3], see `MERGE_COLUMNS`: the flat query token `token` is in `count` items with slots in a row. `row`
    is its row in the first of them; each slot has `item_tokens` rows.
    """
    num_slots: int


def plan_work(
    starts: np.ndarray, query_lens: np.ndarray, first_keys: np.ndarray, item_tokens: int, num_programs: int
) -> Work:
    """Cuts the attention of sequences with `starts[s]` computed tokens and `query_lens[s]` new ones, which read their
    keys from `first_keys[s]` on (those before are read for a whole group). All are integers [num_sequences].

    At most `num_programs` items more than runs of `item_tokens` query tokens come of it.
    """
    num_runs = -(-query_lens // item_tokens)
    sequence = np.repeat(np.arange(len(starts)), num_runs)
    first_token = _count_up(num_runs) * item_tokens
    num_tokens = np.minimum(item_tokens, query_lens[sequence] - first_token)
    begin, end = first_keys[sequence], starts[sequence] + first_token + num_tokens
    most_keys = max(LEAST_KEYS, -(-int((end - begin).sum()) // num_programs))
    num_splits = np.maximum(1, -(-(end - begin) // most_keys))
    split_keys = _round_up(-(-(end - begin) // num_splits), KEYS_STEP)
    num_splits = np.maximum(1, -(-(end - begin) // split_keys))

    run = np.repeat(np.arange(len(sequence)), num_splits)
    split = _count_up(num_splits)
    first_key = begin[run] + split * split_keys[run]
    end_key = np.minimum(end[run], first_key + split_keys[run])
    shares = num_splits[run] > 1
    slot = np.where(shares, np.cumsum(shares) - 1, -1)
    items = np.stack([sequence[run], first_token[run], first_key, end_key, slot, split], axis=1)

    merged = np.flatnonzero(num_splits > 1)
    first_slot = np.cumsum(num_splits[merged]) - num_splits[merged]
    counts = num_tokens[merged]
    row = _count_up(counts)
    query_start = np.cumsum(query_lens) - query_lens
    token = np.repeat(query_start[sequence[merged]] + first_token[merged], counts) + row
    rows = np.repeat(first_slot * item_tokens, counts) + row
    merges = np.stack([token, rows, np.repeat(num_splits[merged], counts)], axis=1)
    return Work(items.astype(np.int32), merges.astype(np.int32), int(shares.sum()))


def _count_up(counts: np.ndarray) -> np.ndarray:
    """Returns 0 to `counts[i] - 1` for each `i`, one after the other."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def _round_up(values: np.ndarray, step: int) -> np.ndarray:
    return -(-values // step) * step

"""Cuts a step's attention into items of similar length: a run of query tokens of one sequence, and a range of its keys.

The host plans the items by context lengths, and each program of the kernel computes one item and one KV head. A long
context among many short ones is thus read by as many programs as its share of the keys requires. A captured graph has a
fixed grid, so the step's sizes bound the number of items for any context lengths (`Layout.most_items`). The idea is
FlashInfer's (Ye et al., 2025, arXiv:2501.01005). Numpy only: `metadata.py` copies the items to the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from manta.workers.kernels.triton.launch import num_processors

TILE_ROWS = 64
"""Rows of a tile (query tokens times query heads of one KV head) in a step that does more than decode."""
PROGRAMS_PER_PROCESSOR = 2
"""Programs for each multiprocessor, up to which contexts are cut."""
LEAST_KEYS = 128
"""Context length up to which a run is not split, because smaller items cost more than they gain."""
SLACK = 1.25
"""Factor by which a run's keys may exceed an item's share before the run is split. Its merge would cost more, most of
all with latent attention, whose results are as long as its keys for every query head.
"""
KEYS_STEP = 64
"""Multiple to which an item's keys are rounded up, unless its sequence has fewer left, so that tiles
of keys are full.
"""

ITEM_COLUMNS = ("sequence", "first_token", "first_key", "end_key", "slot", "split")
"""Columns of `Work.items`."""
MERGE_COLUMNS = ("token", "row", "count")
"""Columns of `Work.merges`."""


class WorkShape(NamedTuple):
    """The sizes of a model's attention work on its device."""

    item_tokens: int
    """Query tokens of an item in a step with prompts. Kernels take any number, and are fastest with that
    of their tile.
    """
    num_programs: int
    """Number of programs for each KV head that keeps the device busy."""

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, device: torch.device) -> WorkShape:
        num_programs = PROGRAMS_PER_PROCESSOR * num_processors(device) // num_kv_heads
        return cls(max(1, TILE_ROWS // (num_heads // num_kv_heads)), max(1, num_programs))


class Work(NamedTuple):
    """The attention of one step; every array is int32."""

    items: np.ndarray
    """The items, [num_items, 6] with the columns `ITEM_COLUMNS`.

    An item has up to `item_tokens` query tokens of `sequence`, from its `first_token` in this step, and the keys
    `[first_key, end_key)`. If several items have the same query tokens, each is number `split` of them and writes its
    result to `slot`. Otherwise `slot` is -1.
    """
    merges: np.ndarray
    """The merges, [num_merges, 3] with the columns `MERGE_COLUMNS`.

    The flat query token `token` is in `count` items with consecutive slots. `row` is its row in the first of them; each
    slot has `item_tokens` rows.
    """
    num_slots: int


def plan_work(
    starts: np.ndarray, query_lens: np.ndarray, first_keys: np.ndarray, item_tokens: int, num_programs: int
) -> Work:
    """Cuts the attention of sequences with `starts[s]` computed tokens and `query_lens[s]` new ones.

    Sequences read their keys from `first_keys[s]` on; earlier keys are read once for a whole group. All arguments are
    integers [num_sequences]. Returns at most `num_programs` more items than there are runs of `item_tokens` query
    tokens.
    """
    num_runs = -(-query_lens // item_tokens)
    sequence = np.repeat(np.arange(len(starts)), num_runs)
    first_token = _count_up(num_runs) * item_tokens
    num_tokens = np.minimum(item_tokens, query_lens[sequence] - first_token)
    begin, end = first_keys[sequence], starts[sequence] + first_token + num_tokens
    most_keys = max(LEAST_KEYS, -(-int((end - begin).sum()) // num_programs))
    num_splits = np.where(end - begin <= SLACK * most_keys, 1, -(-(end - begin) // most_keys))
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
    """Returns 0 to `counts[i] - 1` for each `i`, concatenated."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def _round_up(values: np.ndarray, step: int) -> np.ndarray:
    return -(-values // step) * step

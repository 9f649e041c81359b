"""The query tokens of one step as plain arrays, from which its attention metadata is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from manta.workers.kernels.adapter_rows import AdapterRows
from manta.workers.step import SCRATCH_STATE, ZERO_STATE, StateUse


class QueryTokens(NamedTuple):
    """The tokens at positions `[starts[s], starts[s] + lens[s])` of each sequence `s` of a step."""

    starts: np.ndarray
    """Integers [num_sequences]: the position of each sequence's first token in the step."""
    lens: np.ndarray
    """Integers [num_sequences]: tokens of each sequence in the step, at least 1."""
    block_tables: np.ndarray
    """int32 [num_sequences, max_blocks], which cover the step's tokens too."""
    block_size: int
    """Tokens of a KV block."""
    may_share: bool = True
    """Whether groups of sequences that share a prefix are looked for."""
    other_tables: tuple[np.ndarray, ...] = ()
    """The block tables of further groups of layers (`workers/kv_groups.py`), in the form of `block_tables`, which are
    those of the first group. Empty if all layers have the same blocks.
    """
    states: Sequence[StateUse] = ()
    """The slots of recurrent states of each sequence; empty for a model without such states."""
    adapters: AdapterRows | None = None
    """The rows with adapters; None if no sequence has one."""
    is_tapped: bool = True
    """Whether the step has to give out the residual streams of `ModelConfig.taps`."""

    @classmethod
    def measuring(cls, num_tokens: int, block_size: int, has_states: bool) -> QueryTokens:
        """Builds a step of `num_tokens` tokens from position 0, in the first blocks of the cache, whose result nobody
        reads. With `has_states` it writes the scratch slot of a model with recurrent states.
        """
        blocks = np.arange(-(-num_tokens // block_size), dtype=np.int32)[None]
        states = [StateUse(ZERO_STATE, [(num_tokens, SCRATCH_STATE)])] if has_states else ()
        return cls(np.array([0]), np.array([num_tokens]), blocks, block_size, states=states)

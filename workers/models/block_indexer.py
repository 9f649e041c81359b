"""The choice of blocks of tokens that grouped-query attention reads (Qwen4-Exp's QSA): sizes and weights. Plain data;
imports no framework. `workers/decoders/block_choice.py` computes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from manta.workers.models.weight_specs import LinearSpec, NormSpec


class BlockIndexerShape(msgspec.Struct, frozen=True, kw_only=True):
    """A token attends to the best blocks of neighbouring tokens, and to those after the last whole block."""

    num_heads: int
    head_dim: int
    """Width of a head, and of a token's key, which is cached beside the keys and values of attention."""
    block_len: int
    """Tokens of a block, whose key is the mean of theirs. Blocks begin at its multiples."""
    num_chosen: int
    """The largest number of blocks that a token attends to."""

    @property
    def most_tokens(self) -> int:
        """The largest number of tokens that a token attends to."""
        return (self.num_chosen + 1) * self.block_len - 1


class BlockIndexerSpec(NamedTuple):
    """Each rank has all of it."""

    shape: BlockIndexerShape
    projection: LinearSpec
    """The linear from hidden states to the queries of all heads, then the key."""
    query_norm: NormSpec
    key_norm: NormSpec
    """The norm of a block's key."""

    def linears(self) -> Iterator[LinearSpec]:
        yield self.projection

    def norms(self) -> Iterator[NormSpec]:
        yield from (self.query_norm, self.key_norm)

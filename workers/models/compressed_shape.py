"""The sizes of compressed attention (DeepSeek-V4). Plain data; imports no framework."""

from __future__ import annotations

import math

import msgspec

from manta.workers.models.recurrent_shapes import StateShape

MOST_SPREAD = 16
"""Largest number of tokens over whose rows of the cache an entry of compressed attention is spread."""


class CompressedShape(msgspec.Struct, frozen=True, kw_only=True):
    """Attention over the last tokens, and over entries that each stand for several tokens (DeepSeek-V4, 2026, section
    2.3), which `workers/decoders/compressed_attention.py` computes. All heads have one key, which is their value too.
    """

    query_rank: int
    """Width of the latent vector of which the queries are products."""
    head_dim: int
    rope_dim: int
    """Last dimensions of a head that rotate, of which neighbours rotate together."""
    window: int
    """Last tokens that a token attends to, itself included."""
    rates: tuple[int, ...]
    """Tokens that one entry stands for in each layer; 0 for a layer without entries."""
    overlapping_layers: tuple[int, ...]
    """Layers whose entries also read the tokens of the entry before, and are chosen by an indexer."""
    num_output_groups: int
    """Groups of heads, each of whose values a linear of its own makes narrower."""
    output_rank: int
    """Width of a group's values after it."""
    index_dim: int
    """Width of a head of the indexers."""

    @property
    def spread(self) -> int:
        """Number of tokens over whose rows of the cache an entry is spread: the last ones that it stands for."""
        return math.gcd(MOST_SPREAD, *self.rates)

    @property
    def stored_dim(self) -> int:
        """Width of the part of entries that a token's row of the cache holds, in the layer that needs most."""
        widths = (
            self.head_dim + self.index_dim * (layer in self.overlapping_layers) if rate else 0
            for layer, rate in enumerate(self.rates)
        )
        return max(widths) // self.spread

    @property
    def cached_dim(self) -> int:
        """Width of a token's row of the cache: its key, and a part of an entry; a multiple of that of kernels."""
        return -(-(self.head_dim + self.stored_dim) // MOST_SPREAD) * MOST_SPREAD

    def num_terms(self, layer: int) -> int:
        """Returns the number of tokens that an entry of a layer is made of."""
        return self.rates[layer] * (2 if layer in self.overlapping_layers else 1)

    def state(self, layer: int) -> StateShape | None:
        """Returns what a layer keeps of the last tokens, of which its next entry will be made; None for no entries.
        Every rank has it whole.
        """
        if not self.rates[layer]:
            return None
        widths = 2 * (self.head_dim + self.index_dim) if layer in self.overlapping_layers else self.head_dim
        num_before = self.num_terms(layer) - 1
        return StateShape(((num_before, 2 * widths),), kept_whole=(num_before,))

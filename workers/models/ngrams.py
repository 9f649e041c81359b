"""Tables of hashed n-grams, whose rows some layers add to their residual streams (Qwen4-Exp): sizes, weights, and the
numbers of the hash. Plain data; imports no framework. `workers/decoders/ngram_streams.py` computes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from typing import NamedTuple

import msgspec

from manta.workers.models.recurrent_shapes import StateShape
from manta.workers.models.weight_specs import LinearSpec, NormSpec, TensorSpec, WeightPart

_WORD = (1 << 64) - 1
_SEED_OF_LAYER = 10007
"""The distance between the seeds of two layers."""


class NgramShape(msgspec.Struct, frozen=True, kw_only=True):
    """The tables of each layer that has some, and what is made of their rows."""

    layers: tuple[int, ...]
    """The layers that have tables, ascending."""
    size: int
    """Tokens of the longest n-gram. There are n-grams of 2 tokens to so many, which do not reach over an end token."""
    num_tables: int
    """Tables for n-grams of one size, each with a hash of its own."""
    width: int
    """Width of the rows of all tables of a layer, side by side."""
    least_rows: int
    """Each table has a prime number of rows, at least so many, that no other table has."""
    rows_multiple: int
    """The tables of a layer are one, whose number of rows is a multiple of this."""
    num_pieces: int
    """Number of tensors of equal size in which the checkpoint stores it, at most."""
    seed: int
    num_tokens: int
    """Size of the vocabulary that the hash is made for."""
    end_token: int
    """The token that ends a text; it stands for those before a sequence too."""
    conv_width: int
    """Taps of the convolution, which are `size` tokens apart."""

    @property
    def row_width(self) -> int:
        return self.width // ((self.size - 1) * self.num_tables)

    @property
    def window(self) -> int:
        """Number of earlier tokens whose numbers the convolution reads."""
        return (self.conv_width - 1) * self.size

    def with_states(self, state: StateShape, channels: int) -> StateShape:
        """Returns the state of a layer with these tables and another state: behind that, the last tokens, and the
        inputs of the convolution of `channels` channels. Every rank has all of them.
        """
        own = ((1, self.size - 1), (channels, self.window))
        kept = state.kept_whole or (0,) * len(state.tensors)
        return StateShape((*state.tensors, *own), (*kept, 1, channels))

    def table_rows(self, layer: int) -> tuple[int, ...]:
        """Returns the number of rows of each table of a layer, those of the shortest n-grams first."""
        each = (self.size - 1) * self.num_tables
        first = self.layers.index(layer) * each
        primes = _primes(self.least_rows)
        return tuple(next(primes) for _ in range(first + each))[first:]

    def piece_rows(self, layer: int) -> tuple[int, ...]:
        """Returns the number of rows of each tensor in which the checkpoint stores the tables of a layer."""
        num_rows = -(-sum(self.table_rows(layer)) // self.rows_multiple) * self.rows_multiple
        rows_of_piece = -(-num_rows // self.num_pieces)
        return tuple(min(rows_of_piece, num_rows - first) for first in range(0, num_rows, rows_of_piece))

    def multipliers(self, layer: int) -> tuple[int, ...]:
        """Returns the factor on a token by its distance from the last one of an n-gram: odd numbers of which no
        product with a token exceeds 63 bits.
        """
        bound = max(1, ((1 << 63) - 1) // max(self.num_tokens, 1) // 2)
        seed = self.seed + _SEED_OF_LAYER * self.layers.index(layer)
        return tuple(2 * (_mixed(seed, distance + 1) % bound) + 1 for distance in range(self.size))


def _mixed(seed: int, count: int) -> int:
    """Returns a number of 64 bits: SplitMix64 (Steele et al., 2014) after `count + 1` steps from a seed."""
    value = (seed + 0x9E3779B97F4A7C15 * (count + 1)) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def _primes(least: int) -> Iterator[int]:
    """Yields the prime numbers from `least` on."""
    number = max(2, least)
    while True:
        if all(number % divisor for divisor in range(2, isqrt(number) + 1)):
            yield number
        number += 1


class NgramSpec(NamedTuple):
    """The weights of a layer's tables, by what they read: the rows of all tables side by side, or the streams."""

    layer: int
    pieces: tuple[WeightPart, ...]
    """The lookup table of all n-grams, in pieces one after the other."""
    keys: LinearSpec
    """The linear to a key of each residual stream."""
    values: LinearSpec
    """The linear to what is added to all streams."""
    key_norm: NormSpec
    """Norm of each stream's key; `query_norm` is that of the streams, and `conv_norm` that of what is added."""
    query_norm: NormSpec
    conv_norm: NormSpec
    kernel: TensorSpec
    """[channels, 1, conv_width]"""

    def linears(self) -> Iterator[LinearSpec]:
        yield from (self.keys, self.values)

    def norms(self) -> Iterator[NormSpec]:
        yield from (self.key_norm, self.query_norm, self.conv_norm)

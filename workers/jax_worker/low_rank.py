"""Linears with low-rank adapters (LoRA; Hu et al., 2021) on the mesh: what adapters add to the tokens of a step.

Each linear has a pool of ranks, of which an adapter has some. A step reads the ranks of its own adapters. It multiplies
all tokens by all of these ranks, and drops the products of a token with ranks of other adapters than its own. So a
program depends on numbers of tokens and ranks, and on no adapter. `kernels/adapted_linear.py` defines the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from manta.workers.jax_worker.layer_arrays import LinearArrays, Parameters
from manta.workers.models.specs import AttentionSpec, DecoderSpec, GatedMlpSpec, LayerSpec, SideBySideSpec
from manta.workers.models.weight_specs import LinearSpec

_NOBODY = -1, -2
"""The adapter of a token without one, and the owner of a rank that is padding."""


class RankPool(NamedTuple):
    """The ranks of one linear: those of all adapters, or those that a step reads."""

    a: jax.Array
    """[num_ranks, in_features]"""
    b: jax.Array
    """[num_ranks, out_features]"""
    scales: jax.Array
    """Factor on the product of each rank, float32 [num_ranks]."""


RankPools = dict[str, RankPool]
"""The pools of a model's linears, by `Taker.name`."""


class AdaptedArrays(NamedTuple):
    """A linear with the adapters of a step."""

    linear: LinearArrays
    ranks: RankPool
    """The ranks of the step's adapters."""
    factors: jax.Array
    """Factor on the product of each token with each rank, float32 [num_tokens, num_ranks]; 0 for ranks of other
    adapters.
    """


class Taker(NamedTuple):
    """A part of a linear that takes adapters."""

    fields: tuple[str, ...]
    """The names of the fields that lead to it from its `Layer`."""
    spec: LinearSpec
    part: int
    """The number of the part."""

    @property
    def name(self) -> str:
        """The name of its pool."""
        return pool_name(self.spec, self.part)


def pool_name(spec: LinearSpec, part: int) -> str:
    """Returns the name of the pool of one of a linear's parts."""
    return f"{spec.name} {part}"


def takers_of(spec: LayerSpec) -> Iterator[Taker]:
    """Yields the parts of a layer's linears that take adapters."""
    attention, fields = spec.mixer, ["mixer"]
    if isinstance(attention, SideBySideSpec):
        attention, fields = attention.attention, ["mixer", "attention"]
    if isinstance(attention, AttentionSpec):
        for part, field in enumerate(("query", "key", "value")):
            yield Taker((*fields, field), attention.qkv, part)
        yield Taker((*fields, "output"), attention.output, 0)
    if isinstance(spec.mlp, GatedMlpSpec):
        names = ("gate", "up")[-len(spec.mlp.gated.parts) :]
        for part, field in enumerate(names):
            yield Taker(("mlp", field), spec.mlp.gated, part)
        yield Taker(("mlp", "down"), spec.mlp.down, 0)


# ---- the batch of a step ---------------------------------------------------------------------------------------------


class TokenAdapter(NamedTuple):
    """The adapter of a sequence's tokens."""

    ranks: tuple[int, ...]
    """Its places in the pools."""
    scale: float
    """Factor on what it adds."""


def num_packed(num_tokens: int, num_ranks: int) -> int:
    """Returns the size of what `pack_adapters` returns."""
    return 2 * (num_tokens + num_ranks)


def pack_adapters(
    num_tokens: int, num_ranks: int, adapters: Sequence[TokenAdapter | None], lens: np.ndarray
) -> np.ndarray:
    """Packs the adapters of a step for one transfer. `adapters` are those of its sequences, which have `lens` tokens
    each, and at most `num_ranks` ranks together. Returns int32 [2 * (num_tokens + num_ranks)]: of each token the number
    of its adapter in the step and the bits of the factor on what it adds; of each rank its place in the pools and the
    number of its adapter.
    """
    packed = np.zeros(num_packed(num_tokens, num_ranks), dtype=np.int32)
    numbers, factors, places, owners = _fields(packed, num_tokens, num_ranks)
    distinct = list(dict.fromkeys(adapter.ranks for adapter in adapters if adapter is not None))
    of_sequence = [_NOBODY[0] if each is None else distinct.index(each.ranks) for each in adapters]
    count, ranks = int(lens.sum()), [rank for ranks in distinct for rank in ranks]
    numbers[:] = _NOBODY[0]
    numbers[:count] = np.repeat(of_sequence, lens)
    scales = np.array([0 if each is None else each.scale for each in adapters], dtype=np.float32)
    factors[:count] = np.repeat(scales, lens).view(np.int32)
    places[: len(ranks)] = ranks
    owners[:] = _NOBODY[1]
    owners[: len(ranks)] = np.repeat(np.arange(len(distinct)), [len(each) for each in distinct])
    return packed


def _fields(packed: Any, num_tokens: int, num_ranks: int) -> tuple[Any, Any, Any, Any]:
    of_tokens, of_ranks = packed[: 2 * num_tokens], packed[2 * num_tokens :]
    return of_tokens[:num_tokens], of_tokens[num_tokens:], of_ranks[:num_ranks], of_ranks[num_ranks:]


# ---- on the devices --------------------------------------------------------------------------------------------------


def with_adapters(
    spec: DecoderSpec, parameters: Parameters, pools: RankPools, packed: jax.Array, num_tokens: int
) -> Parameters:
    """Returns parameters whose linears compute with the adapters of a step of `num_tokens` tokens. `packed` is from
    `pack_adapters`.
    """
    numbers, bits, places, owners = _fields(packed, num_tokens, len(packed) // 2 - num_tokens)
    scales = jax.lax.bitcast_convert_type(bits, jnp.float32)
    factors = jnp.where(numbers[:, None] == owners, scales[:, None], 0.0)

    layers = []
    for layer, of_layer in zip(parameters.layers, spec.layers, strict=True):
        for taker in takers_of(of_layer):
            if (pool := pools.get(taker.name)) is not None:
                ranks = RankPool(*(each[places] for each in pool))
                layer = _replaced(layer, taker.fields, ranks, factors)
        layers.append(layer)
    return parameters._replace(layers=tuple(layers))


def _replaced(arrays: Any, fields: tuple[str, ...], ranks: RankPool, factors: jax.Array) -> Any:
    """Returns arrays in which the linear at the end of `fields` has adapters."""
    if not fields:
        return AdaptedArrays(arrays, ranks, factors)
    first, *others = fields
    return arrays._replace(**{first: _replaced(getattr(arrays, first), tuple(others), ranks, factors)})


def add_low_rank(y: jax.Array, x: jax.Array, weights: AdaptedArrays) -> jax.Array:
    """Returns what the linear alone has computed, y [num_tokens, out_features] of x [num_tokens, in_features], with
    what adapters add. It is computed in float32.
    """
    ranks, precision = weights.ranks, jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    inputs = (((1,), (1,)), ((), ()))
    products = jax.lax.dot_general(x, ranks.a, inputs, precision=precision, preferred_element_type=jnp.float32)
    # Another adapter's product may be infinite, which a factor of 0 would turn into NaN.
    own = jnp.where(weights.factors == 0, 0.0, products * weights.factors * ranks.scales)
    added = jnp.matmul(own, ranks.b.astype(jnp.float32), precision=precision)
    return (y.astype(jnp.float32) + added).astype(y.dtype)


def write_ranks(pools: RankPools, places: jax.Array, values: RankPools) -> RankPools:
    """Returns pools whose ranks at `places`, int32 [n], are those of `values`. Places past the last are left out."""
    return jax.tree.map(lambda pool, new: pool.at[places].set(new, mode="drop"), pools, values)

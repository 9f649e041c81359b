"""The weights of a decoder as JAX arrays, which are sharded over a mesh. Plain pytrees; nothing is computed here.

They mirror the descriptions of `workers/models/specs.py`. `workers/jax_worker/parameters.py` reads them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax


class LinearArrays(NamedTuple):
    weight: jax.Array
    """The weight [out_features, in_features]."""
    bias: jax.Array | None
    """The bias [out_features], or None."""


class AttentionArrays(NamedTuple):
    """The weights of a layer's attention."""

    query: LinearArrays
    key: LinearArrays
    value: LinearArrays
    output: LinearArrays
    q_norm: jax.Array | None
    """The norm of query heads [head_dim], or of all of them together [num_heads * head_dim]; `k_norm` is that of key
    heads.
    """
    k_norm: jax.Array | None
    sinks: jax.Array | None
    """A logit of each head, float32 [num_heads]."""
    gate: LinearArrays | None
    """The linear to numbers whose sigmoids multiply the attended values: one for each value, or one for each head."""


class LatentArrays(NamedTuple):
    """The weights of a layer's latent attention (`LatentAttentionSpec`)."""

    query: LinearArrays
    """The linear from hidden states to the latent vector of the queries, or to the queries of all heads."""
    cached: LinearArrays
    """The linear from hidden states to the cached latent vector, then the key that rotates."""
    query_norm: jax.Array | None
    queries: LinearArrays | None
    """The linear from the queries' latent vector to the queries of all heads; None if there is none."""
    latent_norm: jax.Array
    keys: LinearArrays
    """The linear from the cached latent vector to the unrotated keys of all heads; `values` is that to their values."""
    values: LinearArrays
    output: LinearArrays
    gate: LinearArrays | None
    """The linear to a number for each head, whose sigmoid multiplies its values."""


class RecurrentArrays(NamedTuple):
    """The weights of a recurrent mixer, by the names of `RecurrentSpec`."""

    inputs: dict[str, tuple[LinearArrays, ...]]
    """The parts of each linear."""
    output: LinearArrays
    tensors: dict[str, tuple[jax.Array, ...]]
    """The pieces of each other tensor, float32. Kernels of convolutions are [channels, width]."""


class GatedMlpArrays(NamedTuple):
    gate: LinearArrays | None
    """The linear to gates; None in an MLP without."""
    up: LinearArrays
    down: LinearArrays


class ExpertsArrays(NamedTuple):
    """The weights of a mixture of experts. Each linear has those of all experts, a weight [num_experts, in_features,
    out_features] and a bias [num_experts, out_features].
    """

    router: LinearArrays
    """The linear from hidden states to a logit of each expert, of the usual form."""
    experts: GatedMlpArrays
    choice_bias: jax.Array | None
    """Numbers that are added to the scores for the choice alone, float32 [num_experts]."""
    shared: GatedMlpArrays | None
    """The expert that computes every token, of the usual form."""
    shared_gate: LinearArrays | None
    """The linear to a number whose sigmoid multiplies the result of `shared`."""


class SideBySideArrays(NamedTuple):
    attention: AttentionArrays
    recurrent: RecurrentArrays


MixerArrays = AttentionArrays | LatentArrays | RecurrentArrays | SideBySideArrays


class Layer(NamedTuple):
    """The weights of one layer; norms are [size], and None where `LayerSpec` has none."""

    input_norm: jax.Array | None
    mixer: MixerArrays | None
    mixer_norm: jax.Array | None
    """The norm after the mixer; `output_norm` is that after the MLP."""
    mlp_norm: jax.Array | None
    mlp: GatedMlpArrays | ExpertsArrays | None
    output_norm: jax.Array | None


class Parameters(NamedTuple):
    """The weights of a model, a pytree."""

    embedding: jax.Array
    """The lookup table [padded vocabulary, hidden]."""
    layers: tuple[Layer, ...]
    final_norm: jax.Array
    head: LinearArrays
    """The linear from hidden states to logits of the padded vocabulary."""
    rotary_tables: tuple[jax.Array, ...]
    """Rotary cosines then sines of each of `distinct_ropes`, float32 [max_model_len, rotated width of a head]."""

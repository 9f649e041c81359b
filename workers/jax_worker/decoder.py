"""The decoder for the families of `workers/models/`, as pure functions of its parameters.

A step is `forward`, which writes keys and values and keeps the hidden states on the devices, then `compute_logits` for
the rows to draw from. XLA partitions both over the mesh by the sharding of the parameters.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from manta.workers.jax_worker.attention import AttentionForm, attend
from manta.workers.jax_worker.batch import BatchShape, StepBatch
from manta.workers.jax_worker.parameters import Layer, LinearArrays, Parameters
from manta.workers.models.model_config import ModelConfig

Pages = list[jax.Array]
"""The KV cache: the pages of each layer."""


def forward(
    config: ModelConfig,
    form: AttentionForm,
    shape: BatchShape,
    parameters: Parameters,
    pages: Pages,
    hidden: jax.Array,
    drawn: jax.Array,
    packed: jax.Array,
) -> tuple[Pages, jax.Array]:
    """Returns the pages with the batch's keys and values, and `hidden` with the batch's hidden states in its first
    rows.

    `hidden` is [max tokens of a step, hidden size], after the last norm. `drawn` is int32 [n], the tokens of the
    previous step's draw. `packed` is from `batch.pack`.
    """
    batch = StepBatch.unpack(packed, shape)
    token_ids = jnp.where(batch.sources < 0, batch.token_ids, drawn[jnp.maximum(batch.sources, 0)])
    residual = parameters.embedding[token_ids]
    cos_sin = parameters.cos_sin[jnp.maximum(batch.positions, 0)]
    eps = config.rms_norm_eps
    new_pages = []
    for layer, layer_pages, window in zip(parameters.layers, pages, config.sliding_windows, strict=True):
        normed = rms_norm(residual, layer.input_norm, eps)
        query, key, value = _heads(config, layer, normed, cos_sin)
        attended, layer_pages = attend(form, query, key, value, layer_pages, batch, window)
        new_pages.append(layer_pages)
        residual = residual + linear(attended.reshape(len(normed), -1), layer.output)
        normed = rms_norm(residual, layer.mlp_norm, eps)
        gate, up = linear(normed, layer.gate).astype(jnp.float32), linear(normed, layer.up)
        residual = residual + linear((jax.nn.silu(gate) * up).astype(normed.dtype), layer.down)
    normed = rms_norm(residual, parameters.final_norm, eps)
    return new_pages, hidden.at[: shape.num_tokens].set(normed)


def compute_logits(vocab_size: int, head: LinearArrays, hidden: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the logits of `rows` of `hidden`, float32 [len(rows), vocab_size]."""
    return linear(hidden[rows], head)[:, :vocab_size].astype(jnp.float32)


def _heads(
    config: ModelConfig, layer: Layer, normed: jax.Array, cos_sin: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns rotated queries and keys, and values, [num_tokens, heads, head_dim]."""
    query, key, value = (
        linear(normed, each).reshape(len(normed), -1, config.head_dim) for each in (layer.query, layer.key, layer.value)
    )
    eps = config.rms_norm_eps
    return rotate(query, cos_sin, layer.q_norm, eps), rotate(key, cos_sin, layer.k_norm, eps), value


def linear(x: jax.Array, weights: LinearArrays) -> jax.Array:
    """Returns x [n, in_features] times the weight, [n, out_features]. In float32 a TPU uses full precision."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    product = jax.lax.dot_general(x, weights.weight, (((1,), (1,)), ((), ())), precision=precision)
    return product if weights.bias is None else product + weights.bias


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Returns the root-mean-square norm (Zhang and Sennrich, 2019) of x [..., size] by `weight` [size], computed in
    float32.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
    return (wide * weight.astype(jnp.float32)).astype(x.dtype)


def rotate(heads: jax.Array, cos_sin: jax.Array, norm: jax.Array | None, eps: float) -> jax.Array:
    """Applies rotary embedding (Su et al., 2021) in Hugging Face's half-split order, after a norm of each head if
    given.

    `cos_sin` is float32 [num_tokens, head_dim].
    """
    wide = heads.astype(jnp.float32)
    if norm is not None:
        wide = rms_norm(wide, norm, eps)
    low, high = jnp.split(wide, 2, axis=-1)
    cos, sin = jnp.split(cos_sin[:, None, :], 2, axis=-1)
    return jnp.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1).astype(heads.dtype)

"""The decoder for the families of `workers/models/`, as pure functions of its parameters.

A step is `forward`, which writes keys and values and keeps the hidden states on the devices, then `compute_logits` for
the rows to draw from. XLA partitions both over the mesh by the sharding of the parameters.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from manta.workers.jax_worker.attention import AttentionForm, attend, soft_cap
from manta.workers.jax_worker.batch import BatchShape, StepBatch
from manta.workers.jax_worker.mlp import gate, linear, run_experts
from manta.workers.jax_worker.parameters import (
    AttentionArrays,
    ExpertsArrays,
    GatedMlpArrays,
    LinearArrays,
    Parameters,
    distinct_ropes,
)
from manta.workers.kv_groups import LayerPlace
from manta.workers.models.families import describe
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.specs import AttentionSpec

Pages = list[jax.Array]
"""The KV cache: the pages of each layer of a block, which a layer of each group uses (`workers/kv_groups.py`)."""


def forward(
    config: ModelConfig,
    places: tuple[LayerPlace, ...],
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

    `places` are those of the layers' keys and values. `hidden` is [max tokens of a step, hidden size], after the last
    norm. `drawn` is int32 [n], the tokens of the previous step's draw. `packed` is from `batch.pack`.
    """
    batch = StepBatch.unpack(packed, shape)
    token_ids = jnp.where(batch.sources < 0, batch.token_ids, drawn[jnp.maximum(batch.sources, 0)])
    residual = parameters.embedding[token_ids]
    if config.embedding_scale != 1:
        residual = residual * jnp.asarray(config.embedding_scale, residual.dtype)
    positions = jnp.maximum(batch.positions, 0)
    tables = [table[positions] for table in parameters.rotary_tables]
    by_rope = dict(zip(distinct_ropes(config), tables, strict=True))
    pages = list(pages)
    for layer, spec, place, rope, window in zip(
        parameters.layers, describe(config).layers, places, config.ropes, config.sliding_windows, strict=True
    ):
        normed = _norm(config, residual, layer.input_norm)
        query, key, value = _heads(config, spec.attention, layer.attention, normed, by_rope[rope])
        attended, pages[place.number] = attend(
            form, query, key, value, pages[place.number], batch.of_group(place.group), window, layer.attention.sinks
        )
        update = linear(attended.reshape(len(normed), -1), layer.attention.output)
        update = _norm(config, update, layer.attention_norm)
        if spec.is_parallel:
            residual = _add(config, residual, update + _mlp(config, form, layer.mlp, normed))
            continue
        residual = _add(config, residual, update)
        update = _mlp(config, form, layer.mlp, _norm(config, residual, layer.mlp_norm))
        residual = _add(config, residual, _norm(config, update, layer.output_norm))
    normed = _norm(config, residual, parameters.final_norm)
    return pages, hidden.at[: shape.num_tokens].set(normed)


def compute_logits(config: ModelConfig, head: LinearArrays, hidden: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the scaled and capped logits of `rows` of `hidden`, float32 [len(rows), vocab_size]."""
    logits = linear(hidden[rows], head)[:, : config.vocab_size].astype(jnp.float32)
    return soft_cap(logits * config.logits_scale, config.final_cap)


def _heads(
    config: ModelConfig, spec: AttentionSpec, attention: AttentionArrays, normed: jax.Array, cos_sin: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns rotated queries and keys, and values, [num_tokens, heads, head_dim]."""
    eps = config.rms_norm_eps
    query, key, value = (linear(normed, each) for each in (attention.query, attention.key, attention.value))
    q_norm, k_norm = attention.q_norm, attention.k_norm
    if spec.has_wide_norms and q_norm is not None and k_norm is not None:
        query, key = rms_norm(query, q_norm, eps), rms_norm(key, k_norm, eps)
        q_norm = k_norm = None
    query, key, value = (each.reshape(len(normed), -1, config.head_dim) for each in (query, key, value))
    return rotate(query, cos_sin, q_norm, eps), rotate(key, cos_sin, k_norm, eps), value


def _norm(config: ModelConfig, x: jax.Array, weight: jax.Array | None) -> jax.Array:
    """Returns the norm of x, or x itself where there is none."""
    if weight is None:
        return x
    return (layer_norm if config.has_layer_norms else rms_norm)(x, weight, config.rms_norm_eps)


def _add(config: ModelConfig, residual: jax.Array, update: jax.Array) -> jax.Array:
    return residual + (update if config.residual_scale == 1 else update * config.residual_scale)


def _mlp(config: ModelConfig, form: AttentionForm, mlp: GatedMlpArrays | ExpertsArrays, normed: jax.Array) -> jax.Array:
    if isinstance(mlp, ExpertsArrays):
        return run_experts(config, form.mesh, mlp, normed)
    return linear(gate(config.activation, linear(normed, mlp.gate), linear(normed, mlp.up)), mlp.down)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Returns the root-mean-square norm (Zhang and Sennrich, 2019) of x [..., size] by `weight` [size], computed in
    float32.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
    return (wide * weight.astype(jnp.float32)).astype(x.dtype)


def layer_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Returns the norm by mean and deviation (Ba et al., 2016) of x [..., size] by `weight` [size], without a bias,
    computed in float32.
    """
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
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

"""The decoder for the families of `workers/models/`, as pure functions of its parameters.

A step is `forward`, which writes keys, values and recurrent states and keeps the hidden states on the devices, then
`compute_logits` for the rows to draw from. XLA partitions both over the mesh by the sharding of the parameters.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from manta.workers.jax_worker.attention import AttentionForm, attend, soft_cap
from manta.workers.jax_worker.batch import BatchShape, StepBatch
from manta.workers.jax_worker.latent_attention import attend_latent
from manta.workers.jax_worker.layer_arrays import (
    AttentionArrays,
    LatentArrays,
    Layer,
    LinearArrays,
    MixerArrays,
    Parameters,
    RecurrentArrays,
    SideBySideArrays,
)
from manta.workers.jax_worker.mixers import States, run_mixer
from manta.workers.jax_worker.mlp import gated_heads, linear, run_mlp
from manta.workers.jax_worker.norms import layer_norm, rms_norm, rotate
from manta.workers.jax_worker.parameters import distinct_ropes
from manta.workers.kv_groups import LayerPlace
from manta.workers.models.families import describe
from manta.workers.models.model_config import ModelConfig, QueryGrowth
from manta.workers.models.specs import AttentionSpec, LayerSpec, MixerSpec, RecurrentSpec, ShortConvSpec, SideBySideSpec

Pages = list[jax.Array]
"""The KV cache: the pages of each layer of a block, which a layer of each group uses (`workers/kv_groups.py`)."""


def forward(
    config: ModelConfig,
    places: tuple[LayerPlace | None, ...],
    form: AttentionForm,
    shape: BatchShape,
    parameters: Parameters,
    pages: Pages,
    states: tuple[States, ...],
    hidden: jax.Array,
    drawn: jax.Array,
    packed: jax.Array,
) -> tuple[Pages, tuple[States, ...], jax.Array]:
    """Returns the pages with the batch's keys and values, the recurrent states of each layer with those that the step
    keeps, and `hidden` with the batch's hidden states in its first rows.

    `places` are those of the layers' keys and values; None for a layer without attention. `hidden` is [max tokens of a
    step, hidden size], after the last norm. `drawn` is int32 [n], the tokens of the previous step's draw. `packed` is
    from `batch.pack`.
    """
    batch = StepBatch.unpack(packed, shape)
    token_ids = jnp.where(batch.sources < 0, batch.token_ids, drawn[jnp.maximum(batch.sources, 0)])
    residual = parameters.embedding[token_ids]
    if config.embedding_scale != 1:
        residual = residual * jnp.asarray(config.embedding_scale, residual.dtype)
    positions = jnp.maximum(batch.positions, 0)
    tables = [table[positions] for table in parameters.rotary_tables]
    by_rope = dict(zip(distinct_ropes(config), tables, strict=True))
    growth = None if config.query_growth is None else _query_growth(config.query_growth, positions)
    pages, written = list(pages), list(states)
    for index, (layer, spec, place, rope) in enumerate(
        zip(parameters.layers, describe(config).layers, places, config.ropes, strict=True)
    ):
        grows = config.query_growth is not None and config.query_growth.is_of(rope, config.sliding_windows[index])
        of_layer = by_rope[rope], config.sliding_windows[index], growth if grows else None
        step = _LayerStep(config, form, batch if place is None else batch.of_group(place.group), *of_layer)
        own = None if place is None else pages[place.number]
        residual, own, written[index] = _run_layer(step, spec, layer, residual, own, states[index])
        if place is not None and own is not None:
            pages[place.number] = own
    normed = _norm(config, residual, parameters.final_norm)
    return pages, tuple(written), hidden.at[: shape.num_tokens].set(normed)


def compute_logits(config: ModelConfig, head: LinearArrays, hidden: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the scaled and capped logits of `rows` of `hidden`, float32 [len(rows), vocab_size]."""
    logits = linear(hidden[rows], head)[:, : config.vocab_size].astype(jnp.float32)
    return soft_cap(logits * config.logits_scale, config.final_cap)


class _LayerStep(NamedTuple):
    """What a layer's mixers read besides weights, hidden states and what they keep."""

    config: ModelConfig
    form: AttentionForm
    batch: StepBatch
    """The batch, with the block tables of the layer's group."""
    cos_sin: jax.Array
    """The rows of the layer's rotary table, float32 [num_tokens, rotated width of a head]."""
    sliding_window: int | None
    growth: jax.Array | None
    """Factors on queries, float32 [num_tokens, 1]; None for none."""


def _run_layer(
    step: _LayerStep, spec: LayerSpec, layer: Layer, residual: jax.Array, pages: jax.Array | None, states: States
) -> tuple[jax.Array, jax.Array | None, States]:
    """Returns the residual stream [num_tokens, hidden] after a layer, and the layer's pages and states with what the
    step writes. There are no pages for a layer without attention.
    """
    config, mesh = step.config, step.form.mesh
    normed = _norm(config, residual, layer.input_norm)
    if layer.mixer is not None and spec.mixer is not None:
        update, pages, states = _mix(step, spec.mixer, layer.mixer, normed, pages, states)
        update = _norm(config, update, layer.mixer_norm)
        if spec.is_parallel and layer.mlp is not None and spec.mlp is not None:
            return _add(config, residual, update + run_mlp(config, mesh, spec.mlp, layer.mlp, normed)), pages, states
        residual = _add(config, residual, update)
        normed = _norm(config, residual, layer.mlp_norm)
    if layer.mlp is not None and spec.mlp is not None:
        update = run_mlp(config, mesh, spec.mlp, layer.mlp, normed)
        residual = _add(config, residual, _norm(config, update, layer.output_norm))
    return residual, pages, states


def _mix(
    step: _LayerStep,
    spec: MixerSpec,
    weights: MixerArrays,
    normed: jax.Array,
    pages: jax.Array | None,
    states: States,
) -> tuple[jax.Array, jax.Array | None, States]:
    """Returns a mixer's result [num_tokens, hidden] of normed hidden states, and the layer's pages and states with what
    the step writes.
    """
    if isinstance(weights, SideBySideArrays):
        assert isinstance(spec, SideBySideSpec)
        attended, pages, _ = _mix(step, spec.attention, weights.attention, normed, pages, ())
        update, _, states = _mix(step, spec.recurrent, weights.recurrent, normed, None, states)
        return attended + update, pages, states
    if isinstance(weights, RecurrentArrays):
        assert isinstance(spec, RecurrentSpec | ShortConvSpec)
        update, states = run_mixer(spec, step.form.mesh, weights, normed, states, step.batch)
        return update, pages, states
    assert pages is not None
    if isinstance(weights, LatentArrays):
        assert step.config.latent is not None
        of_step = step.cos_sin, pages, step.batch, step.growth
        return *attend_latent(step.config.latent, step.form, weights, normed, *of_step), states
    assert isinstance(spec, AttentionSpec)
    return *_attend(step, spec, weights, normed, pages), states


def _attend(
    step: _LayerStep, spec: AttentionSpec, attention: AttentionArrays, normed: jax.Array, pages: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the attention's result [num_tokens, hidden], and the pages with the tokens' keys and values."""
    query, key, value = _heads(step.config, spec, attention, normed, step.cos_sin)
    if step.growth is not None:
        query = query * step.growth[..., None].astype(query.dtype)
    attended, pages = attend(step.form, query, key, value, pages, step.batch, step.sliding_window, attention.sinks)
    return linear(gated_heads(attended, normed, attention.gate), attention.output), pages


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


def _query_growth(growth: QueryGrowth, positions: jax.Array) -> jax.Array:
    """Returns the factors on the queries of tokens, float32 [num_tokens, 1]."""
    steps = jnp.floor((positions.astype(jnp.float32) + growth.first) / growth.period)
    return (1 + growth.rate * jnp.log1p(steps))[:, None]


def _norm(config: ModelConfig, x: jax.Array, weight: jax.Array | None) -> jax.Array:
    """Returns the norm of x, or x itself where there is none."""
    if weight is None:
        return x
    return (layer_norm if config.has_layer_norms else rms_norm)(x, weight, config.rms_norm_eps)


def _add(config: ModelConfig, residual: jax.Array, update: jax.Array) -> jax.Array:
    return residual + (update if config.residual_scale == 1 else update * config.residual_scale)

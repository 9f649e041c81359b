"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1) over a cache of latent vectors, in JAX.

As in `workers/decoders/latent_attention.py`, the weights between latent vectors and heads are absorbed into queries and
results, so all query heads attend over one head that is key and value. A cached token is its latent vector, then its
rotated key.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from manta.workers.jax_worker.attention import AttentionForm, attend
from manta.workers.jax_worker.batch import StepBatch
from manta.workers.jax_worker.layer_arrays import LatentArrays, LinearArrays
from manta.workers.jax_worker.mlp import gated_heads, linear, precision_of
from manta.workers.jax_worker.norms import rms_norm, rotate
from manta.workers.models.model_config import LatentShape


def attend_latent(
    shape: LatentShape,
    form: AttentionForm,
    weights: LatentArrays,
    normed: jax.Array,
    cos_sin: jax.Array,
    pages: jax.Array,
    batch: StepBatch,
    growth: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the attention's result [num_tokens, hidden] of normed hidden states, and the pages with the tokens'
    latent vectors and rotated keys.

    `cos_sin` is float32 [num_tokens, rope_dim]. `growth`, float32 [num_tokens, 1], multiplies the queries.
    """
    num_tokens = len(normed)
    queries = linear(normed, weights.query)
    if weights.queries is not None:
        assert weights.query_norm is not None
        queries = linear(rms_norm(queries, weights.query_norm, shape.norm_eps), weights.queries)
    latent, key = jnp.split(linear(normed, weights.cached), (shape.kv_rank,), axis=-1)
    latent = rms_norm(latent, weights.latent_norm, shape.norm_eps)
    rotated_key = rotate(key[:, None], cos_sin)
    by_head = queries.reshape(num_tokens, -1, shape.plain_dim + shape.rope_dim)
    plain, rotated = jnp.split(by_head, (shape.plain_dim,), axis=-1)
    precision = precision_of(normed)
    keys, values = _by_head(weights.keys, shape.plain_dim), _by_head(weights.values, shape.value_dim)
    absorbed = jnp.einsum("thd,hdk->thk", plain, keys, precision=precision)
    query = jnp.concatenate((absorbed, rotate(rotated, cos_sin)), axis=-1)
    if growth is not None:
        query = query * growth[..., None].astype(query.dtype)
    cached = jnp.concatenate((latent[:, None], rotated_key), axis=-1)
    attended, pages = attend(form, query, cached, None, pages, batch, None)
    results = jnp.einsum("thk,hdk->thd", attended[..., : shape.kv_rank], values, precision=precision)
    return linear(gated_heads(results, normed, weights.gate), weights.output), pages


def _by_head(weights: LinearArrays, size: int) -> jax.Array:
    """Returns the weight of each head, [num_heads, size, kv_rank]."""
    return weights.weight.reshape(-1, size, weights.weight.shape[1])

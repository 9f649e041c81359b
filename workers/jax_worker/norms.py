"""Norms, and the rotary embedding of heads, in JAX. They compute in float32 and round once."""

from __future__ import annotations

import jax
import jax.numpy as jnp


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


def rotate(heads: jax.Array, cos_sin: jax.Array, norm: jax.Array | None = None, eps: float = 0.0) -> jax.Array:
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

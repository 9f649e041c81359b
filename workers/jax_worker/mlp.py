"""Linears, gates and experts in JAX.

Each device computes its share of the inner width of every expert, and a sum over the mesh follows. Tokens are sorted by
expert, so that a ragged product multiplies the rows of each by its weights, and by no others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from manta.workers.jax_worker.low_rank import AdaptedArrays, add_low_rank
from manta.workers.jax_worker.mesh import AXIS
from manta.workers.jax_worker.parameters import ExpertsArrays, GatedMlpArrays, LinearArrays
from manta.workers.models.model_config import ModelConfig


def linear(x: jax.Array, weights: LinearArrays | AdaptedArrays) -> jax.Array:
    """Returns x [n, in_features] times the weight, [n, out_features]. In float32 a TPU uses full precision."""
    if isinstance(weights, AdaptedArrays):
        return add_low_rank(linear(x, weights.linear), x, weights)
    product = jax.lax.dot_general(x, weights.weight, (((1,), (1,)), ((), ())), precision=_precision(x))
    return product if weights.bias is None else product + weights.bias


def _precision(x: jax.Array) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def _clamped(gates: jax.Array, up: jax.Array) -> jax.Array:
    """Returns gpt-oss's gates (`reference.clamped_gate`)."""
    gates, up = jnp.minimum(gates, 7.0), jnp.clip(up, -7.0, 7.0)
    return (up + 1) * (gates * jax.nn.sigmoid(gates * 1.702))


_GATES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "silu": lambda gates, up: jax.nn.silu(gates) * up,
    "gelu": lambda gates, up: jax.nn.gelu(gates, approximate=False) * up,
    "gelu_tanh": lambda gates, up: jax.nn.gelu(gates, approximate=True) * up,
    "clamped": _clamped,
}
"""The functions of gates, by the names of `ModelConfig.activation`."""


def gate(activation: str, gates: jax.Array, up: jax.Array) -> jax.Array:
    """Returns `activation(gates) * up`, computed in float32, in the dtype of the gates."""
    return _GATES[activation](gates.astype(jnp.float32), up.astype(jnp.float32)).astype(gates.dtype)


def run_experts(config: ModelConfig, mesh: Mesh | AbstractMesh, weights: ExpertsArrays, x: jax.Array) -> jax.Array:
    """Returns the weighted sum of the results of the experts that the router chooses for each row of x [num_tokens,
    hidden]; `kernels/expert_choice.py` defines it.
    """
    assert config.experts is not None
    router: LinearArrays = jax.tree.map(lambda each: each.astype(jnp.float32), weights.router)
    scores = jax.nn.softmax(linear(x.astype(jnp.float32), router), axis=-1)
    shares, chosen = jax.lax.top_k(scores, config.experts.num_chosen)
    if config.experts.normalises:
        shares = shares / shares.sum(-1, keepdims=True)
    whole = PartitionSpec()
    inner = LinearArrays._make((PartitionSpec(None, None, AXIS), PartitionSpec(None, AXIS)))
    outer = LinearArrays._make((PartitionSpec(None, AXIS, None), whole))
    body = functools.partial(_on_device, config.activation)
    specs = (GatedMlpArrays(inner, inner, outer), whole, whole, whole)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False)
    total: jax.Array = mapped(weights.experts, x, chosen, shares)
    return total.astype(x.dtype)


def _on_device(
    activation: str, experts: GatedMlpArrays, x: jax.Array, chosen: jax.Array, shares: jax.Array
) -> jax.Array:
    """Returns the weighted sum, float32. `chosen` are int32 [num_tokens, number of chosen experts], `shares` their
    weights.
    """
    num_rows, num_chosen = chosen.shape
    owners = chosen.reshape(-1)
    order = jnp.argsort(owners)
    sizes = jnp.bincount(owners, length=len(experts.down.weight))

    def multiply(rows: jax.Array, weight: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(rows, weight, sizes, precision=_precision(rows))

    def of_gate(rows: jax.Array, weights: LinearArrays) -> jax.Array:
        product = multiply(rows, weights.weight)
        return product if weights.bias is None else product + weights.bias[owners[order]]

    rows = x[order // num_chosen]
    gated = gate(activation, of_gate(rows, experts.gate), of_gate(rows, experts.up))
    results = jax.lax.psum(multiply(gated, experts.down.weight), AXIS)
    by_token = results[jnp.argsort(order)].reshape(num_rows, num_chosen, -1)
    if experts.down.bias is not None:
        by_token = by_token + experts.down.bias[chosen]
    return jnp.einsum("nk,nkh->nh", shares, by_token.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)

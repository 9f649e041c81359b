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

from manta.workers.jax_worker.layer_arrays import ExpertsArrays, GatedMlpArrays, LinearArrays
from manta.workers.jax_worker.low_rank import AdaptedArrays, add_low_rank
from manta.workers.jax_worker.mesh import AXIS
from manta.workers.models.model_config import LEAST_SUM, ExpertsConfig, ModelConfig
from manta.workers.models.specs import ExpertsSpec, GatedMlpSpec, LinearSpec


def linear(x: jax.Array, weights: LinearArrays | AdaptedArrays) -> jax.Array:
    """Returns x [n, in_features] times the weight, [n, out_features]. In float32 a TPU uses full precision."""
    if isinstance(weights, AdaptedArrays):
        return add_low_rank(linear(x, weights.linear), x, weights)
    product = jax.lax.dot_general(x, weights.weight, (((1,), (1,)), ((), ())), precision=precision_of(x))
    return product if weights.bias is None else product + weights.bias


def precision_of(x: jax.Array) -> jax.lax.Precision | None:
    """Returns the precision of products with x: full in float32."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def gated_heads(attended: jax.Array, x: jax.Array, weights: LinearArrays | None) -> jax.Array:
    """Returns attended values [num_tokens, num_heads, value_dim] as rows, times the sigmoids of a linear of x, which
    has one for each value or one for each head; as they are without a linear.
    """
    if weights is not None:
        gates = jax.nn.sigmoid(linear(x, weights).astype(jnp.float32))
        attended = (attended * gates.reshape(*attended.shape[:2], -1)).astype(attended.dtype)
    return attended.reshape(len(attended), -1)


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


_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
"""Activations of MLPs without gates, by the names of `LinearSpec.activation`."""


def gate(activation: str, gates: jax.Array | None, up: jax.Array) -> jax.Array:
    """Returns `activation(gates) * up`, or `activation(up)` without gates, computed in float32, in the dtype of up."""
    wide = up.astype(jnp.float32)
    if gates is None:
        return _ACTIVATIONS[activation](wide).astype(up.dtype)
    return _GATES[activation](gates.astype(jnp.float32), wide).astype(up.dtype)


def run_mlp(
    config: ModelConfig,
    mesh: Mesh | AbstractMesh,
    spec: GatedMlpSpec | ExpertsSpec,
    weights: GatedMlpArrays | ExpertsArrays,
    x: jax.Array,
) -> jax.Array:
    """Returns the result of a layer's MLP or experts for x [num_tokens, hidden]."""
    if isinstance(weights, ExpertsArrays):
        assert isinstance(spec, ExpertsSpec)
        return _run_experts(config, mesh, spec, weights, x)
    assert isinstance(spec, GatedMlpSpec)
    gates = None if weights.gate is None else linear(x, weights.gate)
    return linear(gate(_activation(config, spec.gated), gates, linear(x, weights.up)), weights.down)


def _activation(config: ModelConfig, spec: LinearSpec) -> str:
    return spec.activation or config.activation


def route(logits: jax.Array, choice_bias: jax.Array | None, config: ExpertsConfig) -> tuple[jax.Array, jax.Array]:
    """Returns the weights of the chosen experts and their indices, float32 and int32 [num_tokens, num_chosen], from
    float32 logits [num_tokens, num_experts]; `kernels/expert_choice.py` defines it.
    """
    scores = jax.nn.sigmoid(logits) if config.scores == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    ranked = scores if choice_bias is None else scores + choice_bias
    if config.num_groups > 1:
        by_group = ranked.reshape(len(ranked), config.num_groups, -1)
        sums = jax.lax.top_k(by_group, config.ranks_groups_by)[0].sum(-1)
        best = jax.lax.top_k(sums, config.num_chosen_groups)[1]
        is_searched = (best[:, :, None] == jnp.arange(config.num_groups)).any(1)
        others = 0.0 if config.scores_others_zero else -jnp.inf
        ranked = jnp.where(is_searched[:, :, None], by_group, others).reshape(ranked.shape)
    chosen = jax.lax.top_k(ranked, config.num_chosen)[1]
    shares = jnp.take_along_axis(scores, chosen, axis=-1)
    if config.normalises:
        shares = shares / (shares.sum(-1, keepdims=True) + LEAST_SUM)
    return shares * config.scale, chosen


def _run_experts(
    config: ModelConfig, mesh: Mesh | AbstractMesh, spec: ExpertsSpec, weights: ExpertsArrays, x: jax.Array
) -> jax.Array:
    """Returns the weighted sum of the results of the experts that the router chooses for each row of x [num_tokens,
    hidden], and of the expert that computes every row.
    """
    assert config.experts is not None
    wide = x.astype(jnp.float32)
    shares, chosen = route(linear(wide, _in_float32(weights.router)), weights.choice_bias, config.experts)
    whole = PartitionSpec()
    inner = LinearArrays._make((PartitionSpec(None, None, AXIS), PartitionSpec(None, AXIS)))
    outer = LinearArrays._make((PartitionSpec(None, AXIS, None), whole))
    body = functools.partial(_on_device, _activation(config, spec.experts[0].gated))
    specs = (GatedMlpArrays(inner, inner, outer), whole, whole, whole)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False)
    total: jax.Array = mapped(weights.experts, x, chosen, shares)
    if weights.shared is not None and spec.shared is not None:
        result = run_mlp(config, mesh, spec.shared, weights.shared, x).astype(jnp.float32)
        if weights.shared_gate is not None:
            result = result * jax.nn.sigmoid(linear(wide, _in_float32(weights.shared_gate)))
        total = total + result
    return total.astype(x.dtype)


def _in_float32(weights: LinearArrays) -> LinearArrays:
    """Returns a small linear in float32, because its choice should not depend on rounding."""
    converted: LinearArrays = jax.tree.map(lambda each: each.astype(jnp.float32), weights)
    return converted


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
        return jax.lax.ragged_dot(rows, weight, sizes, precision=precision_of(rows))

    def of_gate(rows: jax.Array, weights: LinearArrays) -> jax.Array:
        product = multiply(rows, weights.weight)
        return product if weights.bias is None else product + weights.bias[owners[order]]

    rows = x[order // num_chosen]
    gates = None if experts.gate is None else of_gate(rows, experts.gate)
    gated = gate(activation, gates, of_gate(rows, experts.up))
    results = jax.lax.psum(multiply(gated, experts.down.weight), AXIS)
    by_token = results[jnp.argsort(order)].reshape(num_rows, num_chosen, -1)
    if experts.down.bias is not None:
        by_token = by_token + experts.down.bias[chosen]
    return jnp.einsum("nk,nkh->nh", shares, by_token.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)

"""Mixers with a recurrent state in JAX: what `workers/decoders/mixers/` does in torch, and the states that each keeps.

`decoder.py` calls them. None knows of sequences, drafts or snapshots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from manta.workers.jax_worker.batch import StepBatch
from manta.workers.jax_worker.layer_arrays import LinearArrays, RecurrentArrays
from manta.workers.jax_worker.mesh import AXIS
from manta.workers.jax_worker.mlp import linear
from manta.workers.jax_worker.recurrence import ChannelInputs, HeadInputs, convolve, recur_channels, recur_heads
from manta.workers.models.recurrent_shapes import DeltaShape, RecurrentKind, SelectiveShape, StateSpaceShape
from manta.workers.models.specs import MixerSpec, RecurrentSpec, ShortConvSpec, SideBySideSpec

States = tuple[jax.Array, ...]
"""The arrays of a layer's recurrent state, each float32 [num_slots, ...]; empty for a layer without one."""
_UNIT_EPS = 1e-6
"""The constant in the norms of queries and keys of delta nets."""


class StateArray(NamedTuple):
    """One array of a layer's recurrent state. On a TPU the last two dimensions of an array are padded, so channels come
    last in windows.
    """

    shape: tuple[int, ...]
    """The shape of a slot."""
    split: PartitionSpec
    """The split of all slots over the devices."""


_HEADS = PartitionSpec(None, AXIS, None, None)
_CHANNELS = PartitionSpec(None, None, AXIS)
_WHOLE = PartitionSpec()


def state_arrays(spec: MixerSpec | None) -> tuple[StateArray, ...]:
    """Returns the arrays of a layer's state, as the function of its mixer reads them; none for a layer without."""
    if isinstance(spec, SideBySideSpec):
        return state_arrays(spec.recurrent)
    if isinstance(spec, ShortConvSpec):
        channels, _, width = spec.kernel.shape
        return (StateArray((width - 1, channels), _CHANNELS),)
    if not isinstance(spec, RecurrentSpec):
        return ()
    shape = spec.shape
    if isinstance(shape, DeltaShape):
        windows = [StateArray((shape.width - 1, size), _CHANNELS) for size in shape.sizes]
        return *windows, StateArray((shape.num_value_heads, shape.key_dim, shape.value_dim), _HEADS)
    if isinstance(shape, SelectiveShape):
        window = StateArray((shape.width - 1, shape.channels), _CHANNELS)
        return window, StateArray((shape.state_size, shape.channels), _CHANNELS)
    assert isinstance(shape, StateSpaceShape), "variants.py refuses other kinds"
    of_groups = StateArray(
        (shape.width - 1, shape.num_groups * shape.state_size), _WHOLE if shape.num_groups == 1 else _CHANNELS
    )
    of_heads = StateArray((shape.num_heads, shape.state_size, shape.head_dim), _HEADS)
    return StateArray((shape.width - 1, shape.inner), _CHANNELS), of_groups, of_groups, of_heads


def run_mixer(
    spec: RecurrentSpec | ShortConvSpec,
    mesh: Mesh | AbstractMesh,
    weights: RecurrentArrays,
    x: jax.Array,
    states: States,
    batch: StepBatch,
) -> tuple[jax.Array, States]:
    """Returns what a layer adds to the residual stream, from its normed hidden states x [num_tokens, hidden], and the
    states with those that the step writes.
    """
    if isinstance(spec, ShortConvSpec):
        return _short_conv(mesh, weights, x, states, batch)
    return MIXERS[spec.kind](spec, mesh, weights, x, states, batch)


def _short_conv(
    mesh: Mesh | AbstractMesh, weights: RecurrentArrays, x: jax.Array, states: States, batch: StepBatch
) -> tuple[jax.Array, States]:
    b, c, values = _wide(x, weights.inputs["input"])
    (kernel,), (bias,) = weights.tensors["kernel"], weights.tensors.get("bias", (None,))
    convolved, windows = convolve(mesh, b * values, kernel, bias, states[0], batch)
    return linear((c * convolved).astype(x.dtype), weights.output), (windows,)


def _gated_delta(
    spec: RecurrentSpec,
    mesh: Mesh | AbstractMesh,
    weights: RecurrentArrays,
    x: jax.Array,
    states: States,
    batch: StepBatch,
) -> tuple[jax.Array, States]:
    """Gated delta nets (Yang et al., 2024). `input` gives queries, keys, values, gates, betas and time steps."""
    shape, tensors = spec.shape, weights.tensors
    assert isinstance(shape, DeltaShape)
    *mixed, gate, beta, time = _wide(x, weights.inputs["input"])
    heads, windows = _delta_heads(shape, mesh, tensors["kernel"], mixed, states[:3], batch)
    (rates,), (time_bias,) = tensors["rates"], tensors["time_bias"]
    log_decay = rates * jax.nn.softplus(time + time_bias)
    inputs = HeadInputs(*heads, log_decay, jax.nn.sigmoid(beta) * shape.beta_scale)
    outputs, written = recur_heads(mesh, inputs, states[3], batch)
    return _gated(shape, weights, outputs, jax.nn.silu(gate), x), (*windows, written)


def _kimi_delta(
    spec: RecurrentSpec,
    mesh: Mesh | AbstractMesh,
    weights: RecurrentArrays,
    x: jax.Array,
    states: States,
    batch: StepBatch,
) -> tuple[jax.Array, States]:
    """Kimi's delta attention (Kimi Team, 2025). `input` gives queries, keys, values and betas. `decay` and `gate` read
    hidden states, or narrow products of them, `decay_input` and `gate_input`.
    """
    shape, tensors = spec.shape, weights.tensors
    assert isinstance(shape, DeltaShape)
    *mixed, beta = _wide(x, weights.inputs["input"])
    heads, windows = _delta_heads(shape, mesh, tensors["kernel"], mixed, states[:3], batch)
    (rates,), (time_bias,) = tensors["rates"], tensors["time_bias"]
    time = (_projected("decay", weights, x) + time_bias).reshape(len(x), -1, shape.key_dim)
    if shape.least_log_decay:
        log_decay = jax.nn.sigmoid(time * -rates[:, None]) * shape.least_log_decay
    else:
        log_decay = jax.nn.softplus(time) * rates[:, None]
    inputs = HeadInputs(*heads, log_decay, jax.nn.sigmoid(beta))
    outputs, written = recur_heads(mesh, inputs, states[3], batch)
    return _gated(shape, weights, outputs, jax.nn.sigmoid(_projected("gate", weights, x)), x), (*windows, written)


def _gated(
    shape: DeltaShape, weights: RecurrentArrays, outputs: jax.Array, gates: jax.Array, x: jax.Array
) -> jax.Array:
    """Returns a delta net's result, in the dtype of `x`: the output linear of its normed heads times gates."""
    (norm,) = weights.tensors["norm"]
    normed = _unit_mean(outputs, shape.norm_eps) * norm * gates.reshape(outputs.shape)
    return linear(normed.reshape(len(x), -1).astype(x.dtype), weights.output)


def _projected(name: str, weights: RecurrentArrays, x: jax.Array) -> jax.Array:
    """Returns the product of hidden states and a linear, float32, which another one to a narrow vector may precede."""
    narrow = weights.inputs.get(f"{name}_input")
    rows = x if narrow is None else linear(x, narrow[0])
    return linear(rows, weights.inputs[name][0]).astype(jnp.float32)


def _delta_heads(
    shape: DeltaShape,
    mesh: Mesh | AbstractMesh,
    kernels: tuple[jax.Array, ...],
    mixed: list[jax.Array],
    windows: States,
    batch: StepBatch,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], list[jax.Array]]:
    """Returns queries and keys of length 1, queries scaled, and values, of their rows before the convolution; and the
    written windows.
    """
    convolved, written = [], []
    for rows, kernel, window in zip(mixed, kernels, windows, strict=True):
        rows, window = convolve(mesh, rows, kernel, None, window, batch)
        convolved.append(jax.nn.silu(rows))
        written.append(window)
    query, key = (_unit(each.reshape(len(each), -1, shape.key_dim)) for each in convolved[:2])
    value = convolved[2].reshape(len(query), -1, shape.value_dim)
    return (query * shape.key_dim**-0.5, key, value), written


def _state_space(
    spec: RecurrentSpec,
    mesh: Mesh | AbstractMesh,
    weights: RecurrentArrays,
    x: jax.Array,
    states: States,
    batch: StepBatch,
) -> tuple[jax.Array, States]:
    """Mamba 2 (Dao and Gu, 2024). `input` gives gates, x, B, C and time steps."""
    shape, tensors = spec.shape, weights.tensors
    assert isinstance(shape, StateSpaceShape)
    gate, *mixed, time = _wide(x, weights.inputs["input"])
    kernels = *tensors["kernel"], *tensors["shared_kernel"]
    biases = *tensors.get("kernel_bias", (None,)), *tensors.get("shared_bias", (None, None))
    convolved, windows = [], []
    for number, (rows, kernel, bias, window) in enumerate(zip(mixed, kernels, biases, states[:3], strict=True)):
        is_whole = number > 0 and shape.num_groups == 1
        rows, window = convolve(mesh, rows, kernel, bias, window, batch, is_whole=is_whole)
        convolved.append(jax.nn.silu(rows))
        windows.append(window)
    (rates,), (time_bias,), (skip,) = (tensors[name] for name in ("rates", "time_bias", "skip"))
    b, c = (each.reshape(len(x), shape.num_groups, -1) for each in convolved[1:])
    values = convolved[0].reshape(len(x), -1, shape.head_dim)
    time = jnp.clip(jax.nn.softplus(time + time_bias), *shape.step_limits)
    inputs = HeadInputs(c, b, values * time[..., None], time * rates)
    outputs, written = recur_heads(mesh, inputs, states[3], batch)
    outputs = (outputs + values * skip[:, None]).reshape(len(x), -1)
    gated = _norm_and_gate(outputs, jax.nn.silu(gate), shape, tensors)
    return linear(gated.astype(x.dtype), weights.output), (*windows, written)


def _norm_and_gate(
    outputs: jax.Array, gates: jax.Array, shape: StateSpaceShape, tensors: dict[str, tuple[jax.Array, ...]]
) -> jax.Array:
    """Returns outputs [num_tokens, inner] after their gates and the norm of each group."""
    if shape.norm_eps is None:
        return outputs * gates
    (norm,) = tensors["norm"]
    gated = outputs if shape.norms_before_gate else outputs * gates
    by_group = gated.reshape(len(gated), shape.num_groups, -1)
    normed = _unit_mean(by_group, shape.norm_eps).reshape(gated.shape) * norm
    return normed * gates if shape.norms_before_gate else normed


def _selective_scan(
    spec: RecurrentSpec,
    mesh: Mesh | AbstractMesh,
    weights: RecurrentArrays,
    x: jax.Array,
    states: States,
    batch: StepBatch,
) -> tuple[jax.Array, States]:
    """Mamba 1 (Gu and Dao, 2023). `input` gives x and gates, and `selection` the vector of time steps, B and C."""
    shape, tensors = spec.shape, weights.tensors
    assert isinstance(shape, SelectiveShape)
    values, gate = _wide(x, weights.inputs["input"])
    (kernel,), (bias,) = tensors["kernel"], tensors.get("kernel_bias", (None,))
    values, window = convolve(mesh, values, kernel, bias, states[0], batch)
    values = jax.nn.silu(values)
    selected = linear(values.astype(x.dtype), weights.inputs["selection"][0])
    ends = shape.step_rank, shape.step_rank + shape.state_size
    parts = []
    for name, part in zip(("time_norm", "b_norm", "c_norm"), jnp.split(selected, ends, axis=-1), strict=True):
        if shape.norm_eps is not None:
            normed = _unit_mean(part.astype(jnp.float32), shape.norm_eps)
            part = (normed * tensors.get(name, (1.0,))[0]).astype(x.dtype)
        parts.append(part)
    (rates,), (time_bias,), (skip,) = (tensors[name] for name in ("rates", "time_bias", "skip"))
    time = jax.nn.softplus(linear(parts[0], weights.inputs["time"][0]).astype(jnp.float32) + time_bias)
    b, c = (each.astype(jnp.float32) for each in parts[1:])
    outputs, written = recur_channels(mesh, ChannelInputs(c, b, values * time, time), rates, states[1], batch)
    outputs = (outputs + values * skip) * jax.nn.silu(gate)
    return linear(outputs.astype(x.dtype), weights.output), (window, written)


def _wide(x: jax.Array, parts: tuple[LinearArrays, ...]) -> list[jax.Array]:
    """Returns the outputs of each part of a linear, float32."""
    return [linear(x, part).astype(jnp.float32) for part in parts]


def _unit(heads: jax.Array) -> jax.Array:
    """Returns heads [num_tokens, num_heads, size] of length 1."""
    return heads * jax.lax.rsqrt(jnp.square(heads).sum(-1, keepdims=True) + _UNIT_EPS)


def _unit_mean(x: jax.Array, eps: float) -> jax.Array:
    """Returns x [..., size] divided by the root of its mean square."""
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)


RecurrentMixer = Callable[
    [RecurrentSpec, Mesh | AbstractMesh, RecurrentArrays, jax.Array, States, StepBatch], tuple[jax.Array, States]
]
MIXERS: dict[RecurrentKind, RecurrentMixer] = {
    RecurrentKind.GATED_DELTA: _gated_delta,
    RecurrentKind.KIMI_DELTA: _kimi_delta,
    RecurrentKind.STATE_SPACE: _state_space,
    RecurrentKind.SELECTIVE_SCAN: _selective_scan,
}
"""The mixers by kind; `workers/models/variants.py` refuses the others."""

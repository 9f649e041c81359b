"""Linear recurrences over the sequences of a batch, and the convolutions before them, whose states are in slots.

They compute what `workers/kernels/recurrence.py` and `workers/kernels/convolution.py` define. Each device computes its
own heads and channels. Sequences with few tokens advance together, one token of each at a time; longer ones in chunks.
A step never writes a slot that another sequence reads, so their order does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from manta.workers.jax_worker.batch import CHUNK_TOKENS, SHORT_TOKENS, StateBatch, StepBatch
from manta.workers.jax_worker.mesh import AXIS
from manta.workers.step import SCRATCH_STATE

_EXACT = jax.lax.Precision.HIGHEST
_WHOLE = PartitionSpec()
_CHANNELS = PartitionSpec(None, AXIS)
_HEADS = PartitionSpec(None, AXIS, None)
_ANY_CHANNELS = PartitionSpec(None, None, AXIS)
"""The split of windows [num_slots, width - 1, channels] and of states of channels [num_slots, state_size, channels]."""

Form = Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]
"""Advances states by tokens: (inputs, states) -> (outputs, new states)."""


class HeadInputs(NamedTuple):
    """The inputs of a recurrence whose heads keep a matrix [key_dim, value_dim], float32; see `RecurrentInputs` of
    `workers/kernels/recurrence.py`.
    """

    query: jax.Array
    """[num_tokens, num_groups, key_dim]; `key` has this shape too."""
    key: jax.Array
    value: jax.Array
    """[num_tokens, num_heads, value_dim]"""
    log_decay: jax.Array
    """[num_tokens, num_heads], or [num_tokens, num_heads, key_dim]."""
    beta: jax.Array | None = None
    """The rate of the delta rule, [num_tokens, num_heads]; None adds values uncorrected."""


class ChannelInputs(NamedTuple):
    """The inputs of Mamba 1, whose channels keep a vector [state_size] each, float32."""

    query: jax.Array
    """C [num_tokens, state_size]; `key` is B of this shape."""
    key: jax.Array
    value: jax.Array
    """x times the time step, [num_tokens, channels]."""
    time: jax.Array
    """[num_tokens, channels]"""


def recur_heads(
    mesh: Mesh | AbstractMesh, inputs: HeadInputs, states: jax.Array, batch: StepBatch
) -> tuple[jax.Array, jax.Array]:
    """Returns outputs [num_tokens, num_heads, value_dim] and the written `states`, float32 [num_slots, num_heads,
    key_dim, value_dim]. All devices have queries and keys if they are those of a single group.
    """
    of_groups = _HEADS if inputs.query.shape[1] > 1 else _WHOLE
    of_decay = _HEADS if inputs.log_decay.ndim == 3 else _CHANNELS
    specs = HeadInputs._make((of_groups, of_groups, _HEADS, of_decay, _CHANNELS))
    chunk = one_chunk if inputs.log_decay.ndim == 2 else _token_by_token(advance_heads)

    def on_device(inputs: HeadInputs, states: jax.Array, batch: StepBatch) -> tuple[jax.Array, jax.Array]:
        return _advance_all(inputs, states, jnp.zeros_like(inputs.value), batch, advance_heads, chunk)

    of_states = PartitionSpec(None, AXIS, None, None)
    return _mapped(mesh, on_device, (specs, of_states, _WHOLE), (_HEADS, of_states))(inputs, states, batch)


def recur_channels(
    mesh: Mesh | AbstractMesh, inputs: ChannelInputs, rates: jax.Array, states: jax.Array, batch: StepBatch
) -> tuple[jax.Array, jax.Array]:
    """Returns outputs [num_tokens, channels] and the written `states`, float32 [num_slots, state_size, channels], which
    decay by `exp(time * rates)`. `rates` are float32 [channels, state_size].
    """

    def on_device(
        inputs: ChannelInputs, rates: jax.Array, states: jax.Array, batch: StepBatch
    ) -> tuple[jax.Array, jax.Array]:
        def advance(inputs: ChannelInputs, states: jax.Array) -> tuple[jax.Array, jax.Array]:
            states = states * jnp.exp(inputs.time[:, None] * rates.T)
            states = states + inputs.key[:, :, None] * inputs.value[:, None]
            return (states * inputs.query[:, :, None]).sum(1), states

        empty = jnp.zeros_like(inputs.value)
        return _advance_all(inputs, states, empty, batch, advance, _token_by_token(advance))

    specs = ChannelInputs._make((_WHOLE, _WHOLE, _CHANNELS, _CHANNELS))
    in_specs = (specs, PartitionSpec(AXIS, None), _ANY_CHANNELS, _WHOLE)
    return _mapped(mesh, on_device, in_specs, (_CHANNELS, _ANY_CHANNELS))(inputs, rates, states, batch)


def _mapped(mesh: Mesh | AbstractMesh, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    mapped: Callable[..., Any] = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return mapped


# ---- sequences -------------------------------------------------------------------------------------------------------


def _advance_all(
    inputs: Any, states: jax.Array, outputs: jax.Array, batch: StepBatch, advance: Form, chunk: Form
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs of all tokens, and the states after those of the step.

    `inputs` is a tuple of arrays [num_tokens, ...]. `advance` takes one token of each of several sequences, `chunk`
    several tokens of one. Both get zeros for tokens that there are not, which change no state.
    """
    slots = batch.states
    assert slots is not None
    num_tokens = len(outputs)

    def taken(rows: jax.Array) -> Any:
        return jax.tree.map(lambda each: each.at[rows].get(mode="fill", fill_value=0), inputs)

    outputs, states = _advance_short(taken, states, outputs, batch, slots, advance)
    if num_tokens <= SHORT_TOKENS:
        return outputs, states
    offsets = jnp.arange(min(CHUNK_TOKENS, num_tokens))

    def add_chunk(index: jax.Array, kept: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        outputs, states = kept
        first, length, read, write = slots.chunks[:, index]
        rows = jnp.where(offsets < length, first + offsets, num_tokens)
        output, state = chunk(taken(rows), states[read])
        return outputs.at[rows].set(output, mode="drop"), states.at[write].set(state)

    outputs, states = jax.lax.fori_loop(0, slots.num_chunks[0], add_chunk, (outputs, states))
    return outputs, states


def _advance_short(
    taken: Callable[[jax.Array], Any],
    states: jax.Array,
    outputs: jax.Array,
    batch: StepBatch,
    slots: StateBatch,
    advance: Form,
) -> tuple[jax.Array, jax.Array]:
    """Advances the sequences of at most `SHORT_TOKENS` tokens. `taken` returns the inputs of some tokens."""
    num_tokens = len(outputs)
    count = min(num_tokens, len(slots.reads))
    starts = batch.query_start[:count]
    lens = batch.query_start[1 : count + 1] - starts
    lens = jnp.where(lens <= SHORT_TOKENS, lens, 0)
    written = jnp.full(num_tokens, SCRATCH_STATE).at[slots.ends].set(slots.slots, mode="drop")

    def add_tokens(number: jax.Array, kept: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        outputs, current, states = kept
        rows = jnp.where(number < lens, starts + number, num_tokens)
        output, current = advance(taken(rows), current)
        to = written.at[rows].get(mode="fill", fill_value=SCRATCH_STATE)
        return outputs.at[rows].set(output, mode="drop"), current, states.at[to].set(current)

    kept = (outputs, states[slots.reads[:count]], states)
    outputs, _, states = jax.lax.fori_loop(0, jnp.max(lens), add_tokens, kept)
    return outputs, states


def _token_by_token(advance: Form) -> Form:
    """Returns a form that advances one sequence by several tokens, one after the other."""

    def chunk(inputs: Any, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        def add_token(state: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:
            output, state = advance(jax.tree.map(lambda each: each[None], token), state)
            return state, output[0]

        state, outputs = jax.lax.scan(add_token, state[None], inputs)
        return outputs, state[0]

    return chunk


# ---- heads -----------------------------------------------------------------------------------------------------------


def advance_heads(inputs: HeadInputs, states: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Advances n sequences by one token. `states` are [n, num_heads, key_dim, value_dim]. Returns outputs
    [n, num_heads, value_dim] and the new states.
    """
    repeats = inputs.value.shape[1] // inputs.key.shape[1]
    query, key = (jnp.repeat(each, repeats, axis=1) for each in (inputs.query, inputs.key))
    decay = jnp.exp(inputs.log_decay)
    states = states * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
    value = inputs.value
    if inputs.beta is not None:
        value = (value - _einsum("nhk,nhkv->nhv", key, states)) * inputs.beta[..., None]
    states = states + key[..., None] * value[:, :, None]
    return _einsum("nhk,nhkv->nhv", query, states), states


def one_chunk(inputs: HeadInputs, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Advances one sequence by several tokens in products of matrices (Yang et al., 2024; Dao and Gu, 2024), if heads
    have one decay. `state` is [num_heads, key_dim, value_dim]. Returns outputs [num_tokens, num_heads, value_dim] and
    the new state.

    Decays between two tokens are summed for each pair. Differences of sums since the chunk's start would lose those
    that follow a strong one, in float32.
    """
    num_tokens, num_heads, value_dim = inputs.value.shape
    num_groups = inputs.key.shape[1]

    def by_group(x: jax.Array) -> jax.Array:
        """[num_tokens, num_heads, ...] -> [num_groups, repeats, num_tokens, ...]"""
        return jnp.moveaxis(x.reshape(num_tokens, num_groups, -1, *x.shape[2:]), 0, 2)

    query, key = (jnp.moveaxis(each, 0, 1) for each in (inputs.query, inputs.key))  # [groups, tokens, key_dim]
    value, decay = by_group(inputs.value), by_group(inputs.log_decay)
    state = state.reshape(num_groups, -1, *state.shape[1:])
    tokens = jnp.arange(num_tokens)
    is_earlier = tokens[:, None] > tokens  # [later, earlier]
    sums = jnp.cumsum(jnp.where(is_earlier, decay[..., None], 0.0), axis=-2)
    between = jnp.where(tokens[:, None] >= tokens, jnp.exp(sums), 0.0)  # [groups, repeats, later, earlier]
    decayed = jnp.exp(jnp.cumsum(decay, axis=-1))[..., None]
    to_end = between[:, :, -1, :, None]
    if inputs.beta is not None:
        beta = by_group(inputs.beta)[..., None]
        of_state = _einsum("gtk,grkv->grtv", key, state) * decayed
        products = beta * _einsum("gtk,gsk->gts", key, key)[:, None] * between
        value = jax.lax.linalg.triangular_solve(
            products, beta * (value - of_state), left_side=True, lower=True, unit_diagonal=True
        )
    output = _einsum("gtk,grkv->grtv", query, state) * decayed
    output = output + _einsum("grts,grsv->grtv", _einsum("gtk,gsk->gts", query, key)[:, None] * between, value)
    state = state * decayed[:, :, -1:] + _einsum("gtk,grtv->grkv", key, value * to_end)
    return jnp.moveaxis(output, 2, 0).reshape(num_tokens, num_heads, value_dim), state.reshape(num_heads, -1, value_dim)


def _einsum(products: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(products, *operands, precision=_EXACT)


# ---- convolutions ----------------------------------------------------------------------------------------------------


def convolve(
    mesh: Mesh | AbstractMesh,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    windows: jax.Array,
    batch: StepBatch,
    *,
    is_whole: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns the causal convolution of x, both float32 [num_tokens, channels], plus the bias [channels]; and the
    written `windows`, float32 [num_slots, width - 1, channels], the inputs of the last tokens.

    `kernel` is float32 [channels, width], whose last number is that of the newest token. Devices split the channels,
    unless each has all of them (`is_whole`).
    """
    of_rows, of_kernel, of_bias, of_windows = _CHANNELS, PartitionSpec(AXIS, None), PartitionSpec(AXIS), _ANY_CHANNELS
    if is_whole:
        of_rows = of_kernel = of_bias = of_windows = _WHOLE
    in_specs = (of_rows, of_kernel, of_bias, of_windows, _WHOLE)
    mapped = _mapped(mesh, _convolve_on_device, in_specs, (of_rows, of_windows))
    convolved, windows = mapped(x, kernel, bias, windows, batch)
    return convolved, windows


def _convolve_on_device(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None, windows: jax.Array, batch: StepBatch
) -> tuple[jax.Array, jax.Array]:
    slots = batch.states
    assert slots is not None
    num_tokens, width = len(x), kernel.shape[1]
    before = windows[slots.reads]
    offsets = jnp.arange(num_tokens) - batch.query_start[batch.sequences]

    def earlier(rows: jax.Array, distance: int) -> jax.Array:
        """Returns the inputs so many tokens before those of `rows`, [len(rows), channels]."""
        offset = offsets[rows]
        place = jnp.clip(offset + width - 1 - distance, 0, width - 2)
        own = x[jnp.maximum(rows - distance, 0)]
        return jnp.where((offset >= distance)[:, None], own, before[batch.sequences[rows], place])

    every = jnp.arange(num_tokens)
    convolved = jnp.zeros_like(x)
    for number in range(width):
        convolved = convolved + earlier(every, width - 1 - number) * kernel[:, number]
    if bias is not None:
        convolved = convolved + bias
    at_a_time = min(num_tokens, len(slots.reads))

    def write(index: jax.Array, windows: jax.Array) -> jax.Array:
        ends, to = (
            jax.lax.dynamic_slice_in_dim(each, index * at_a_time, at_a_time) for each in (slots.ends, slots.slots)
        )
        rows = jnp.minimum(ends, num_tokens - 1)
        inputs = [earlier(rows, distance) for distance in range(width - 2, -1, -1)]
        return windows.at[to].set(jnp.stack(inputs, axis=1))

    num_parts = -(-slots.num_segments[0] // at_a_time)
    windows = jax.lax.fori_loop(0, num_parts, write, windows)
    return convolved, windows

"""Recurrences and convolutions: the forms against each other, and against transformers' own functions."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from manta.workers.decoders.mixers.gated_delta import gated_delta
from manta.workers.kernels import convolution, cpu_recurrence, recurrence, recurrent_layer
from manta.workers.kernels.recurrence import RecurrentInputs, advance, chunked, one_token, sequential
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.kernels.weights import RecurrentWeights
from manta.workers.models.recurrent_shapes import DeltaShape, RecurrentKind
from manta.workers.step import StateUse
from tests.checkpoints import on_one_thread
from tests.workers.cpu_forms import COMPILED, EMULATED, in_form, threads

NUM_TOKENS, GROUPS, HEADS, KEY_DIM, VALUE_DIM = 150, 2, 6, 24, 16
KINDS = {
    "gated delta net": (False, True),
    "Kimi delta attention": (True, True),
    "state space": (False, False),
    "decays of a key's dimensions": (True, False),
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs_of(kind: str, num_tokens: int = NUM_TOKENS, num_groups: int = GROUPS) -> RecurrentInputs:
    has_fine_decays, is_delta = KINDS[kind]
    decays = random(num_tokens, HEADS, *([KEY_DIM] if has_fine_decays else []), seed=4)
    return RecurrentInputs(
        query=F.normalize(random(num_tokens, num_groups, KEY_DIM, seed=1), dim=-1),
        key=F.normalize(random(num_tokens, num_groups, KEY_DIM, seed=2), dim=-1),
        value=random(num_tokens, HEADS, VALUE_DIM, seed=3),
        log_decay=-F.softplus(3 * decays),
        beta=random(num_tokens, HEADS, seed=5).sigmoid() if is_delta else None,
    )


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-5 * expected.abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 15, 64, 150])
def test_chunks_compute_what_one_token_after_the_other_does(kind: str, num_tokens: int) -> None:
    inputs, state = inputs_of(kind, num_tokens), random(HEADS, KEY_DIM, VALUE_DIM, seed=6)
    expected, expected_state = sequential(inputs, state)
    outputs, after = chunked(inputs, state)
    assert close(outputs, expected)
    assert close(after, expected_state)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sequential_form_has_the_same_bits_wherever_it_is_cut(kind: str) -> None:
    inputs, state = inputs_of(kind), torch.zeros(HEADS, KEY_DIM, VALUE_DIM)
    expected, expected_state = sequential(inputs, state)
    pieces = []
    for start, stop in ((0, 1), (1, 40), (40, 41), (41, NUM_TOKENS)):
        outputs, state = sequential(inputs.of(slice(start, stop)), state)
        pieces.append(outputs)
    assert torch.equal(torch.cat(pieces), expected)
    assert torch.equal(state, expected_state)


@pytest.mark.parametrize("kind", KINDS)
def test_decays_of_any_strength_stay_finite(kind: str) -> None:
    inputs = inputs_of(kind)
    for factor in (0.0, 1e-8, 1e4):
        strong = inputs._replace(log_decay=inputs.log_decay * factor)
        state = random(HEADS, KEY_DIM, VALUE_DIM, seed=6)
        outputs, after = chunked(strong, state)
        expected, expected_state = sequential(strong, state)
        assert close(outputs, expected)
        assert close(after, expected_state)


@pytest.mark.parametrize("kind", KINDS)
def test_several_sequences_advance_as_each_alone(kind: str) -> None:
    inputs, states = inputs_of(kind, 3), random(3, HEADS, KEY_DIM, VALUE_DIM, seed=6)
    outputs, after = advance(inputs, states.clone())
    for sequence in range(3):
        expected, expected_state = one_token(inputs.of(sequence), states[sequence])
        assert close(outputs[sequence], expected)
        assert close(after[sequence], expected_state)


@pytest.mark.parametrize("form", [sequential, chunked])
def test_the_delta_rule_is_that_of_transformers(form: Any) -> None:
    raw, state = inputs_of("gated delta net"), random(HEADS, KEY_DIM, VALUE_DIM, seed=6)
    expected, expected_state = qwen3_next.torch_recurrent_gated_delta_rule(
        *(each[None] for each in raw[:4]), raw.beta[None], initial_state=state[None], output_final_state=True
    )
    outputs, after = form(raw._replace(query=raw.query * KEY_DIM**-0.5), state)
    assert close(outputs, expected[0])
    assert close(after, expected_state[0])


@pytest.mark.parametrize("form", [sequential, chunked])
def test_kimi_delta_attention_is_that_of_transformers(form: Any) -> None:
    raw, state = inputs_of("Kimi delta attention", num_groups=HEADS), random(HEADS, KEY_DIM, VALUE_DIM, seed=6)
    expected, expected_state = kimi_linear.recurrent_kimi_delta_attention(
        *(each[None] for each in raw[:4]), raw.beta[None], initial_state=state[None], output_final_state=True
    )
    outputs, after = form(raw._replace(query=raw.query * KEY_DIM**-0.5), state)
    assert close(outputs, expected[0])
    assert close(after, expected_state[0])


@pytest.mark.parametrize("form", [sequential, chunked])
def test_a_state_space_is_that_of_transformers(form: Any) -> None:
    """Mamba 2: keys are B, queries C, values x times the step, and the decay is the step times A."""
    x, steps = random(NUM_TOKENS, HEADS, VALUE_DIM, seed=1), F.softplus(random(NUM_TOKENS, HEADS, seed=2))
    b, c = random(NUM_TOKENS, GROUPS, KEY_DIM, seed=3), random(NUM_TOKENS, GROUPS, KEY_DIM, seed=4)
    rates, state = -random(HEADS, seed=5).exp(), random(HEADS, KEY_DIM, VALUE_DIM, seed=6)
    expected, expected_state = mamba2.mamba2_chunk_scan(
        x[None], steps[None], rates, b[None], c[None], 16, initial_states=state.mT[None], return_final_states=True
    )
    outputs, after = form(RecurrentInputs(c, b, x * steps[..., None], steps * rates), state)
    assert close(outputs, expected[0])
    assert close(after, expected_state[0].mT)


def test_a_selective_scan_is_that_of_transformers() -> None:
    """Mamba 1: a head is a channel, whose value is one number and whose state's numbers have decays of their own."""
    channels, state_size = 12, 8
    x, steps = random(NUM_TOKENS, channels, seed=1), F.softplus(random(NUM_TOKENS, channels, seed=2))
    b, c = random(NUM_TOKENS, state_size, seed=3), random(NUM_TOKENS, state_size, seed=4)
    rates = -random(channels, state_size, seed=5).exp()
    expected, expected_state = mamba.mamba_selective_scan(
        x.T[None], steps.T[None], rates, b.T[None], c.T[None], return_last_state=True
    )
    inputs = RecurrentInputs(c[:, None], b[:, None], (x * steps)[..., None], steps, rates=rates)
    in_full = inputs._replace(log_decay=steps[..., None] * rates, rates=None)
    for form, given in ((sequential, inputs), (sequential, in_full), (chunked, in_full)):
        outputs, after = form(given, torch.zeros(channels, state_size, 1))
        assert close(outputs[..., 0], expected[0].T)
        assert close(after[..., 0], expected_state[0])


NUM_SLOTS = 16
STARTS, LENS = (0, 7, 0, 30), (60, 1, 2, 40)
"""A prompt, a decode, a short prompt and a chunk."""
USES = [
    StateUse(0, [(16, 2), (59, 3), (60, 4)]),
    StateUse(5, [(8, 6)]),
    StateUse(0, [(1, 7), (2, 8)]),
    StateUse(9, [(31, 10), (70, 11)]),
]
DECODES = [StateUse(5, [(4, 2)]), StateUse(9, [(10, 3)]), StateUse(0, [(1, 4)])]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with on_one_thread():
        yield


@pytest.fixture(scope="module", params=[*COMPILED, *EMULATED])
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    with in_form(request.param):
        yield request.param


def states_of(*shape: int) -> torch.Tensor:
    """States of all slots, the first of which is zeros."""
    states = random(NUM_SLOTS, *shape, seed=9)
    states[0] = 0
    return states


def steps() -> list[RecurrentStep]:
    return [RecurrentStep.build(STARTS, LENS, USES), RecurrentStep.build([3, 9, 0], [1, 1, 1], DECODES)]


@pytest.mark.parametrize("value_dim", [1, 20, 100])
@pytest.mark.parametrize("kind", [*KINDS, "rates"])
def test_compiled_recurrences_are_those_of_torch(form: str, kind: str, value_dim: int) -> None:
    for step in steps():
        num_tokens = int(step.starts[-1])
        inputs = inputs_of("state space" if kind == "rates" else kind, num_tokens)
        inputs = inputs._replace(value=random(num_tokens, HEADS, value_dim, seed=3))
        if kind == "rates":
            inputs = inputs._replace(rates=random(HEADS, KEY_DIM, seed=7).exp())
        expected_states, states = states_of(HEADS, KEY_DIM, value_dim), states_of(HEADS, KEY_DIM, value_dim)
        expected = recurrence.recur(inputs, expected_states, step)
        assert close(cpu_recurrence.recur(inputs, states, step), expected)
        assert close(states, expected_states)


@pytest.mark.parametrize("value_dim", [1, VALUE_DIM])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_recurrences_have_the_same_bits_wherever_a_step_begins(form: str, kind: str, value_dim: int) -> None:
    inputs, states = inputs_of(kind, 60), states_of(HEADS, KEY_DIM, value_dim)
    inputs = inputs._replace(value=inputs.value[..., :value_dim].contiguous())
    whole = RecurrentStep.build([0], [60], [StateUse(0, [(60, 1)])])
    expected = cpu_recurrence.recur(inputs, states, whole)
    pieces, slot = [], 0
    for start, end in ((0, 1), (1, 30), (30, 31), (31, 60)):
        step = RecurrentStep.build([start], [end - start], [StateUse(slot, [(end, slot + 2)])])
        pieces.append(cpu_recurrence.recur(inputs.of(slice(start, end)), states, step))
        slot += 2
    assert torch.equal(torch.cat(pieces), expected)
    assert torch.equal(states[slot], states[1])


@pytest.mark.parametrize("activates", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("width", [3, 4, 5])
def test_compiled_convolutions_are_those_of_torch(form: str, width: int, has_bias: bool, activates: bool) -> None:
    channels = 300
    kernel, bias = random(channels, width, seed=2), random(channels, seed=3) if has_bias else None
    for step in steps():
        x = random(int(step.starts[-1]), channels, seed=1)
        expected_states, states = states_of(channels, width - 1), states_of(channels, width - 1)
        expected = convolution.convolve(x, kernel, bias, expected_states, step, activates)
        found = cpu_recurrence.convolve(x, kernel, bias, states, step, activates)
        assert close(found, expected) if activates else torch.equal(found, expected)
        assert torch.equal(states, expected_states)


def test_a_convolution_is_that_of_transformers() -> None:
    channels, width = 10, 4
    x, kernel, bias = random(60, channels, seed=1), random(channels, width, seed=2), random(channels, seed=3)
    expected = qwen3_next.causal_conv1d_fn(x.T[None], kernel, bias, "silu")[0].T
    step = RecurrentStep.build([0], [60], USES[:1])
    assert close(convolution.convolve(x, kernel, bias, states_of(channels, width - 1), step, True), expected)


@pytest.mark.parametrize("size", [20, 64])
def test_compiled_norms_and_gates_are_those_of_torch(form: str, size: int) -> None:
    x, gate = random(7, 3, size, seed=1), random(7, 5 * 3 * size, seed=2)[:, : 3 * size]
    for weight in (random(size, seed=3), random(3 * size, seed=3)):
        for options in ({}, {"has_sigmoid": True}, {"gates_first": True}):
            expected = recurrent_layer.gated_norm(x, gate, weight, 1e-6, **options)
            assert close(cpu_recurrence.gated_norm(x, gate, weight, 1e-6, **options), expected)
    assert close(cpu_recurrence.unit_heads(x, 0.25, 1e-6), recurrent_layer.unit_heads(x, 0.25, 1e-6))
    wide = torch.linspace(-90, 40, size)[None]
    expected = recurrent_layer.softplus(wide, torch.zeros(size))
    assert (cpu_recurrence.softplus(wide, torch.zeros(size)) - expected).abs().max() < 1e-5
    assert close(cpu_recurrence.sigmoid(wide), recurrent_layer.sigmoid(wide))
    assert close(cpu_recurrence.silu(wide), recurrent_layer.silu(wide))
    assert close(cpu_recurrence.sums_of_squares(wide), recurrent_layer.sums_of_squares(wide))
    squares = recurrent_layer.sums_of_squares(gate)
    for weight in (None, random(3 * size, seed=3)):
        expected = recurrent_layer.row_norm(gate, squares, 4 * size, weight, 1e-6)
        assert close(cpu_recurrence.row_norm(gate, squares, 4 * size, weight, 1e-6), expected)
    assert close(cpu_recurrence.exp(wide), recurrent_layer.exp(wide))
    assert close(cpu_recurrence.cap(wide, 30.0), recurrent_layer.cap(wide, 30.0))
    positive = wide.exp()
    assert torch.equal(cpu_recurrence.sqrt(positive), torch.from_numpy(np.sqrt(positive.numpy())))
    assert close(cpu_recurrence.centred_heads(x, 1e-6), recurrent_layer.centred_heads(x, 1e-6))
    assert cpu_recurrence.softplus(torch.full((1, 1), torch.nan), torch.zeros(1)).isnan().all()


def test_the_largest_number_so_far_has_the_same_bits_wherever_a_step_begins(form: str) -> None:
    for step in steps():
        num_tokens = int(step.starts[-1])
        numbers, log_decay = random(num_tokens, HEADS, seed=1), -random(num_tokens, HEADS, seed=2).abs()
        expected_states, states = states_of(HEADS, 1), states_of(HEADS, 1)
        expected = recurrent_layer.running_max(numbers, log_decay, expected_states, step)
        assert close(cpu_recurrence.running_max(numbers, log_decay, states, step), expected)
        assert close(states, expected_states)


class Unchanged:
    """A linear that returns its input."""

    def forward(self, x: torch.Tensor, step: Any = None) -> torch.Tensor:
        return x


def delta_net(shape: DeltaShape) -> RecurrentWeights:
    """A gated delta net without linears."""
    channels, heads = sum(shape.sizes), shape.num_value_heads
    tensors = {
        "kernel": random(channels, shape.width, seed=1),
        "rates": -random(heads, seed=2).exp(),
        "time_bias": random(heads, seed=3),
        "norm": random(shape.value_dim, seed=4),
    }
    inputs = {"input": Unchanged()}
    squares: Any = None  # of mixers whose norms are over ranks
    return RecurrentWeights(RecurrentKind.GATED_DELTA, shape, inputs, Unchanged(), tensors, 1, squares)


@pytest.mark.parametrize(
    ("dtype", "width", "value_dim", "beta_scale"),
    [(torch.bfloat16, 4, 150, 1.0), (torch.float32, 3, 100, 2.0), (torch.float32, 4, 6, 1.0)],
)
def test_a_delta_net_in_one_call_has_the_bits_of_its_parts(
    form: str, dtype: torch.dtype, width: int, value_dim: int, beta_scale: float
) -> None:
    shape = DeltaShape(
        num_key_heads=GROUPS,
        num_value_heads=HEADS,
        key_dim=KEY_DIM,
        value_dim=value_dim,
        width=width,
        norm_eps=1e-6,
        beta_scale=beta_scale,
    )
    weights, step = delta_net(shape), RecurrentStep.build([3, 9, 0], [1, 1, 1], DECODES)
    x = random(3, sum(shape.sizes) + HEADS * value_dim + 2 * HEADS, seed=5).to(dtype)
    apart = types.SimpleNamespace(**vars(cpu_recurrence))
    apart.delta_step = recurrent_layer.delta_step

    def computed(kernels: Any) -> tuple[torch.Tensor, ...]:
        states = tuple(states_of(*each) for each in shape.state.tensors)
        metadata: Any = None
        return gated_delta(weights, x, metadata, step, states, kernels), *states

    expected = computed(apart)
    for count in (1, 2):
        with threads(count):
            found = computed(cpu_recurrence)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    by_torch = computed(recurrent_layer)
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-5
    assert all(
        (one - other).abs().max() <= tolerance * other.abs().max() for one, other in zip(found, by_torch, strict=True)
    )


def test_what_one_call_of_a_delta_net_does_not_take_is_left_as_it_is(form: str) -> None:
    shape = DeltaShape(num_key_heads=1, num_value_heads=2, key_dim=8, value_dim=4, width=5, norm_eps=1e-6)
    weights, states = delta_net(shape), tuple(states_of(*each) for each in shape.state.tensors)
    before = [each.clone() for each in states]
    for step in steps():
        x = random(int(step.starts[-1]), 2 * 8 + 3 * 8 + 2 * 2, seed=5)
        assert cpu_recurrence.delta_step(x, weights.tensors, shape, 1e-6, states, step) is None
    assert all(torch.equal(*pair) for pair in zip(states, before, strict=True))


def test_one_call_of_a_delta_net_goes_on_where_a_prompt_ended(form: str) -> None:
    shape = DeltaShape(
        num_key_heads=GROUPS, num_value_heads=HEADS, key_dim=KEY_DIM, value_dim=40, width=4, norm_eps=1e-6
    )
    weights, states = delta_net(shape), tuple(states_of(*each) for each in shape.state.tensors)
    x = random(6, sum(shape.sizes) + HEADS * 40 + 2 * HEADS, seed=5)
    metadata: Any = None

    def computed(first: int, end: int, use: StateUse) -> torch.Tensor:
        step = RecurrentStep.build([first], [end - first], [use])
        return gated_delta(weights, x[first:end], metadata, step, states, cpu_recurrence)

    whole = computed(0, 6, StateUse(0, [(6, 1)]))
    pieces = [computed(0, 3, StateUse(0, [(3, 2)]))]
    pieces += [computed(at, at + 1, StateUse(at - 1, [(at + 1, at)])) for at in (3, 4, 5)]
    assert torch.equal(torch.cat(pieces), whole)
    assert all(torch.equal(each[5], each[1]) for each in states)

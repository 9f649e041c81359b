"""Recurrences and convolutions: the forms against each other, and against transformers' own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from manta.workers.kernels.recurrence import RecurrentInputs, advance, chunked, one_token, sequential

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

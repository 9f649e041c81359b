"""Recurrences, convolutions and gates in Triton compute what torch does: in the interpreter, or on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from manta.workers.kernels import convolution, recurrence, recurrent_layer
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kernels.recurrence import RecurrentInputs
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.kernels.triton import recurrent_layer as triton_layer
from manta.workers.kernels.triton.metadata import Layout, build_metadata
from manta.workers.step import StateUse
from tests.workers.triton_device import DEVICE, THOROUGH

Steps = tuple[list[int], list[int], list[StateUse]]
STEPS: dict[str, Steps] = {
    "decode": ([3, 9, 0], [1, 1, 1], [StateUse(5, [(4, 2)]), StateUse(9, [(10, 3)]), StateUse(0, [(1, 4)])]),
    "mixed": (
        [0, 7, 0, 30],
        [70, 1, 2, 9],
        [
            StateUse(0, [(16, 2), (64, 3), (69, 4), (70, 12)]),
            StateUse(5, [(8, 6)]),
            StateUse(0, [(1, 7), (2, 8)]),
            StateUse(9, [(31, 10), (39, 11)]),
        ],
    ),
    "drafts": (
        [8, 20],
        [3, 2],
        [StateUse(5, [(9, 2), (10, 3), (11, 4)]), StateUse(6, [(21, 7), (22, 8)])],
    ),
}
"""Decodes; a prompt, a decode, a short prompt and a chunk of a prompt, with snapshots; verifications of drafts."""
LAYOUTS = {"decode": Layout(1, 4), "mixed": Layout(90, 6, 90), "drafts": Layout(3, 4)}
"""Layouts of graphs that the steps are padded to."""
NUM_SLOTS = 16
SHAPES = {
    "delta": {"small": (2, 4, 12, 20), "Qwen3-Next": (16, 32, 128, 128)},
    "fine delta": {"small": (2, 2, 12, 12), "Kimi Linear": (32, 32, 128, 128)},
    "space": {"small": (2, 4, 12, 16), "Nemotron-H": (8, 128, 128, 64), "Falcon-H1": (1, 24, 256, 64)},
    "rates": {"small": (1, 40, 12, 1), "wide values": (2, 4, 24, 20), "Falcon Mamba": (1, 8192, 16, 1)},
    "fine": {"small": (1, 2, 12, 20)},
}
"""Key heads, heads, key_dim and value_dim, by kind of recurrence and model."""
CASES = [(kind, shape) for kind, shapes in SHAPES.items() for shape in (shapes if THOROUGH else ("small",))]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def inputs_of(
    kind: str, shape: tuple[int, int, int, int], num_tokens: int, dtype: torch.dtype = torch.float32
) -> RecurrentInputs:
    num_groups, num_heads, key_dim, value_dim = shape
    has_fine_decays, is_delta = "fine" in kind, "delta" in kind
    decays = random(num_tokens, num_heads, *([key_dim] if has_fine_decays else []), seed=4)
    return RecurrentInputs(
        query=F.normalize(random(num_tokens, num_groups, key_dim, seed=1), dim=-1),
        key=F.normalize(random(num_tokens, num_groups, key_dim, seed=2), dim=-1),
        value=random(num_tokens, num_heads, value_dim, seed=3),
        log_decay=-F.softplus(3 * decays),
        beta=random(num_tokens, num_heads, seed=5).sigmoid() if is_delta else None,
        rates=random(num_heads, key_dim, seed=7).exp() if kind == "rates" else None,
        dtype=dtype,
    )


def states_of(*shape: int) -> torch.Tensor:
    """States of all slots, of which the first is zeros, and those that a step has not written are NaN."""
    states = random(NUM_SLOTS, *shape, seed=9)
    states[0] = 0
    return states


def plain_step(steps: Steps) -> RecurrentStep:
    step = RecurrentStep.build(*steps)
    return RecurrentStep(*(each.to(DEVICE) for each in step[:-1]), step.is_decode)


def device_step(steps: Steps, layout: Layout | None) -> RecurrentStep:
    starts, lens, uses = steps
    tables = np.zeros((len(starts), 1 + (max(starts) + max(lens)) // 16), dtype=np.int32)
    tokens = QueryTokens(np.array(starts), np.array(lens), tables, 16, may_share=False, states=uses)
    step = build_metadata(tokens, DEVICE, layout).states
    assert step is not None
    return step


def forms_of(name: str) -> list[RecurrentStep]:
    """The step alone, and padded."""
    return [device_step(STEPS[name], layout) for layout in (None, LAYOUTS[name])]


def differences(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest number."""
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("kind", "shape"), CASES)
@pytest.mark.parametrize("name", STEPS)
def test_recurrences_agree(name: str, kind: str, shape: str) -> None:
    sizes = SHAPES[kind][shape]
    inputs = inputs_of(kind, sizes, sum(STEPS[name][1]))
    expected_states = states_of(*sizes[1:])
    expected = recurrence.recur(inputs, expected_states, plain_step(STEPS[name]))
    for step in forms_of(name):
        states = states_of(*sizes[1:])
        assert differences(triton_layer.recur(inputs, states, step), expected) < 1e-5
        assert differences(states, expected_states) < 1e-5


@pytest.mark.parametrize("kind", ["delta", "fine delta", "space"])
def test_chunks_in_bfloat16_stay_near_float32(kind: str) -> None:
    """Products of rounded numbers: the differences are those of bfloat16."""
    sizes = SHAPES[kind]["small"]
    inputs = inputs_of(kind, sizes, sum(STEPS["mixed"][1]), torch.bfloat16)
    expected_states, states = states_of(*sizes[1:]), states_of(*sizes[1:])
    expected = recurrence.recur(inputs, expected_states, plain_step(STEPS["mixed"]))
    assert differences(triton_layer.recur(inputs, states, device_step(STEPS["mixed"], None)), expected) < 0.02
    assert differences(states, expected_states) < 0.02


@pytest.mark.parametrize("kind", ["delta", "fine delta", "space"])
@pytest.mark.parametrize("strength", [0.0, 1e-8, 1e4])
def test_decays_of_any_strength_stay_finite(kind: str, strength: float) -> None:
    """Keys of a sequence are alike, so that the delta rule's system is as hard as it can be."""
    sizes, steps = SHAPES[kind]["small"], STEPS["mixed"]
    inputs = inputs_of(kind, sizes, sum(steps[1]))
    alike = inputs.key[:1].expand_as(inputs.key).contiguous()
    inputs = inputs._replace(log_decay=inputs.log_decay * strength, key=alike)
    if inputs.beta is not None:
        inputs = inputs._replace(beta=torch.ones_like(inputs.beta))
    expected_states, states = states_of(*sizes[1:]), states_of(*sizes[1:])
    expected = recurrence.recur(inputs, expected_states, plain_step(steps))
    assert differences(triton_layer.recur(inputs, states, device_step(steps, None)), expected) < 1e-4
    assert differences(states, expected_states) < 1e-4


def test_a_sequence_of_nan_leaves_others_alone() -> None:
    """Its slots too: neither a state that nobody reads nor rows beside a chunk come into it."""
    sizes, steps = SHAPES["delta"]["small"], STEPS["mixed"]
    inputs = inputs_of("delta", sizes, sum(steps[1]))
    first = slice(0, steps[1][0])
    for tensor in (inputs.query, inputs.key, inputs.value, inputs.log_decay):
        tensor[first] = torch.nan
    states = states_of(*sizes[1:])
    expected_states = states.clone()
    states[[1, 2, 3, 4, 12, 13, 14]] = torch.nan  # the scratch slot, those of the first sequence, and free ones
    expected = recurrence.recur(inputs, expected_states, plain_step(steps))
    for step in (device_step(steps, None), device_step(steps, LAYOUTS["mixed"])):
        output = triton_layer.recur(inputs, states, step)
        others = slice(first.stop, None)
        assert differences(output[others], expected[others]) < 1e-5
        assert differences(states[[0, 5, 6, 7, 8, 9, 10, 11]], expected_states[[0, 5, 6, 7, 8, 9, 10, 11]]) < 1e-5


@pytest.mark.parametrize(("width", "has_bias", "activates"), [(3, False, False), (4, True, False), (4, False, True)])
@pytest.mark.parametrize("name", STEPS)
def test_convolutions_agree(name: str, width: int, has_bias: bool, activates: bool) -> None:
    channels = 8192 if THOROUGH else 150
    kernel, bias = random(channels, width, seed=2), random(channels, seed=3) if has_bias else None
    x = random(sum(STEPS[name][1]), 2 * channels, seed=1)[:, channels:]  # a part of a linear's results
    expected_states = states_of(channels, width - 1)
    expected = convolution.convolve(x, kernel, bias, expected_states, plain_step(STEPS[name]), activates)
    for step in forms_of(name):
        states = states_of(channels, width - 1)
        found = triton_layer.convolve(x, kernel, bias, states, step, activates)
        assert differences(found, expected) < 1e-6
        assert activates or torch.equal(found, expected)
        assert torch.equal(states, expected_states)


@pytest.mark.parametrize("size", [20, 128])
def test_norms_and_gates_agree(size: int) -> None:
    x, gate = random(7, 3, size, seed=1), random(7, 5 * 3 * size, seed=2)[:, : 3 * size]
    for weight in (random(size, seed=3), random(3 * size, seed=3)):
        for options in ({}, {"has_sigmoid": True}, {"gates_first": True}):
            expected = recurrent_layer.gated_norm(x, gate, weight, 1e-6, **options)
            assert differences(triton_layer.gated_norm(x, gate, weight, 1e-6, **options), expected) < 1e-5
    assert differences(triton_layer.unit_heads(x, 0.25, 1e-6), recurrent_layer.unit_heads(x, 0.25, 1e-6)) < 1e-5


def test_gates_agree_on_extreme_numbers() -> None:
    x = torch.linspace(-85, 40, 300, device=DEVICE)[None]
    bias = torch.zeros(300, device=DEVICE)
    pairs: list[tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = [
        (functools.partial(triton_layer.softplus, bias=bias), functools.partial(recurrent_layer.softplus, bias=bias)),
        (triton_layer.sigmoid, recurrent_layer.sigmoid),
    ]
    for own, other in pairs:
        expected = other(x)
        assert ((own(x) - expected).abs() <= 3e-5 * expected).all()
        assert own(torch.full((1, 300), torch.nan, device=DEVICE)).isnan().all()

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
IN_CHUNKS = ("delta", "fine delta", "space")
"""Kinds whose prompts are computed in chunks, if activations are in bfloat16."""
ROUNDED = 1e-5 if DEVICE.type == "cpu" else 0.02
"""Largest difference of products of numbers that are rounded to bfloat16."""
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
    return RecurrentStep.build(*steps).to(DEVICE)


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


@pytest.mark.axes_in_turns
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "shape"), CASES)
@pytest.mark.parametrize("name", STEPS)
def test_recurrences_agree(name: str, kind: str, shape: str, dtype: torch.dtype) -> None:
    """The tensor cores multiply rounded numbers for activations in bfloat16, where the interpreter rounds none."""
    if dtype == torch.bfloat16 and (name == "decode" or kind not in IN_CHUNKS):
        pytest.skip("the same kernel as in float32")
    most = ROUNDED if dtype == torch.bfloat16 else 1e-5
    sizes = SHAPES[kind][shape]
    inputs = inputs_of(kind, sizes, sum(STEPS[name][1]), dtype)
    expected_states = states_of(*sizes[1:])
    expected = recurrence.recur(inputs, expected_states, plain_step(STEPS[name]))
    for step in forms_of(name):
        states = states_of(*sizes[1:])
        assert differences(triton_layer.recur(inputs, states, step), expected) < most
        assert differences(states, expected_states) < most


@pytest.mark.axes_in_turns
@pytest.mark.parametrize("kind", IN_CHUNKS)
@pytest.mark.parametrize("strength", [0.0, 1e-8, 1e4])
def test_decays_of_any_strength_stay_finite(kind: str, strength: float) -> None:
    """Keys of a sequence are alike, so that the delta rule's system is as hard as it can be."""
    sizes, steps = SHAPES[kind]["small"], STEPS["mixed"]
    inputs = inputs_of(kind, sizes, sum(steps[1]), torch.bfloat16)
    alike = inputs.key[:1].expand_as(inputs.key).contiguous()
    inputs = inputs._replace(log_decay=inputs.log_decay * strength, key=alike)
    if inputs.beta is not None:
        inputs = inputs._replace(beta=torch.ones_like(inputs.beta))
    expected_states, states = states_of(*sizes[1:]), states_of(*sizes[1:])
    expected = recurrence.recur(inputs, expected_states, plain_step(steps))
    assert differences(triton_layer.recur(inputs, states, device_step(steps, None)), expected) < max(ROUNDED, 1e-4)
    assert differences(states, expected_states) < max(ROUNDED, 1e-4)


@pytest.mark.axes_in_turns
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", IN_CHUNKS)
def test_a_sequence_of_nan_leaves_others_alone(kind: str, dtype: torch.dtype) -> None:
    """Its slots too: neither states that nobody reads nor the rows of others beside a chunk count."""
    sizes, steps = SHAPES[kind]["small"], STEPS["mixed"]
    inputs = inputs_of(kind, sizes, sum(steps[1]), dtype)
    first = slice(0, steps[1][0])
    for tensor in (inputs.query, inputs.key, inputs.value, inputs.log_decay):
        tensor[first] = torch.nan
    states = states_of(*sizes[1:])
    expected_states = states.clone()
    states[[1, 2, 3, 4, 12, 13, 14]] = torch.nan  # the scratch slot, those of the first sequence, and free ones
    expected = recurrence.recur(inputs, expected_states, plain_step(steps))
    for step in (device_step(steps, None), device_step(steps, LAYOUTS["mixed"])):
        output = triton_layer.recur(inputs, states, step)
        others, slots = slice(first.stop, None), [0, *range(5, 12)]
        assert differences(output[others], expected[others]) < max(ROUNDED, 1e-5)
        assert differences(states[slots], expected_states[slots]) < max(ROUNDED, 1e-5)


@pytest.mark.axes_in_turns
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


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the host gives memory that nobody touches for nothing")
@pytest.mark.parametrize("lens", [[1, 1], [2, 3]])
def test_states_beyond_2_31_numbers_are_addressed(lens: list[int]) -> None:
    """An address that is computed in 32 bits would wrap around: to another slot, or outside of the memory."""
    sizes, channels = (1, 1, 128, 128), 128
    slots = [2**31 // 128**2 + 1, 2**31 // (3 * channels) + 1]
    shapes = (sizes[1:], (channels, 3))
    states, windows = (torch.empty(slot + 6, *shape) for slot, shape in zip(slots, shapes, strict=True))
    for memory, slot in ((states, slots[0]), (windows, slots[1])):
        memory[slot:] = random(6, *memory.shape[1:], seed=slot)
    small = [memory[slot:].clone() for memory, slot in ((states, slots[0]), (windows, slots[1]))]
    inputs = [inputs_of("delta", sizes, sum(lens), dtype) for dtype in (torch.float32, torch.bfloat16)]
    x, kernel = random(sum(lens), channels), random(channels, 4, seed=1)

    def steps(first: int) -> Steps:
        uses = [StateUse(first + row, [(length, first + 2 + row)]) for row, length in enumerate(lens)]
        return [0, 0], lens, uses

    for each in inputs:
        expected = recurrence.recur(each, small[0], plain_step(steps(0)))
        assert differences(triton_layer.recur(each, states, device_step(steps(slots[0]), None)), expected) < 1e-5
        assert differences(states[slots[0] :], small[0]) < 1e-5
    expected = convolution.convolve(x, kernel, None, small[1], plain_step(steps(0)))
    found = triton_layer.convolve(x, kernel, None, windows, device_step(steps(slots[1]), None))
    assert torch.equal(found, expected)
    assert torch.equal(windows[slots[1] :], small[1])


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

"""Recurrent layers in Triton beside the torch reference: the part `recurrent` of `make gpu-check`.

A decode step cannot be faster than reading and writing each state once at the speed of a copy, and a prefill not faster
than its inputs and results at that speed or its products at the rate of a large one. Each case has as many copies of
its states as the device's cache does not hold.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.gpu_device import Device, device_seconds, graph_seconds, measure_device
from benchmarks.gpu_rows import Figure
from manta.workers.kernels import convolution, recurrence
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kernels.recurrence import RecurrentInputs
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.kernels.triton import recurrent_layer
from manta.workers.kernels.triton.metadata import build_metadata
from manta.workers.step import NUM_FIXED_STATES, ZERO_STATE, StateUse

LEAST_BYTES = 256 << 20
"""All copies of the states: several times what the device's cache holds."""
WIDTH = 4
"""Tokens that a convolution sees."""
MOST_DIFFERENCE = 0.02
"""Norm of the difference from the reference over that of the reference: what rounding to bfloat16 adds."""


class Shape(NamedTuple):
    """A recurrent layer of a model."""

    num_groups: int
    num_heads: int
    key_dim: int
    value_dim: int
    is_delta: bool

    @property
    def channels(self) -> int:
        """Channels of the layer's convolutions."""
        return 2 * self.num_groups * self.key_dim + self.num_heads * self.value_dim


SHAPES = {"Qwen3-Next": Shape(16, 32, 128, 128, True), "Nemotron-H": Shape(8, 128, 128, 64, False)}
BATCHES = {
    "decode of 1": [1],
    "decode of 64": [1] * 64,
    "decode of 256": [1] * 256,
    "prefill of 4 x 2048": [2048] * 4,
}
"""Tokens of each sequence."""


class Case:
    """The inputs of one layer and step on the device."""

    def __init__(self, shape: Shape, lens: list[int]) -> None:
        self.shape = shape
        num_tokens, num_sequences = sum(lens), len(lens)
        is_decode = num_tokens == num_sequences
        reads = [NUM_FIXED_STATES + number if is_decode else ZERO_STATE for number in range(num_sequences)]
        first_write = NUM_FIXED_STATES + num_sequences
        uses = [StateUse(reads[row], [(lens[row], first_write + row)]) for row in range(num_sequences)]
        tables = np.zeros((num_sequences, 1 + max(lens) // 16), dtype=np.int32)
        starts = np.zeros(num_sequences, dtype=np.int64)
        tokens = QueryTokens(starts, np.array(lens), tables, 16, may_share=False, states=uses)
        device = torch.device("cuda")
        step = build_metadata(tokens, device).states
        assert step is not None
        self.step: RecurrentStep = step
        plain = RecurrentStep.build([0] * num_sequences, lens, uses)
        self.plain_step = plain.to(device)
        random = functools.partial(torch.randn, device=device)
        keys = num_tokens, shape.num_groups, shape.key_dim
        self.inputs = RecurrentInputs(
            query=F.normalize(random(keys), dim=-1),
            key=F.normalize(random(keys), dim=-1),
            value=random(num_tokens, shape.num_heads, shape.value_dim),
            log_decay=-F.softplus(random(num_tokens, shape.num_heads)),
            beta=random(num_tokens, shape.num_heads).sigmoid() if shape.is_delta else None,
            dtype=torch.bfloat16,
        )
        self.x, self.kernel = random(num_tokens, shape.channels), random(shape.channels, WIDTH)
        num_slots = first_write + num_sequences
        sizes = num_slots, shape.num_heads, shape.key_dim, shape.value_dim
        copies = -(-LEAST_BYTES // (8 * num_sequences * math.prod(sizes[1:]))) if is_decode else 1
        self.states = [random(sizes) for _ in range(copies)]
        self.windows = random(num_slots, shape.channels, WIDTH - 1)
        for states in self.states:
            states[ZERO_STATE] = 0
        self.num_states = num_sequences * (2 if is_decode else 1)
        """States that the step reads or writes."""

    def floor(self, device: Device) -> float:
        """Seconds to read and write states, inputs and results once, or to make the products of each token."""
        of_tokens = [each for each in self.inputs[:5] if isinstance(each, torch.Tensor)]
        num_bytes = sum(each.nbytes for each in of_tokens) + self.inputs.value.nbytes
        num_bytes += self.num_states * self.states[0][0].nbytes
        products = (6 if self.shape.is_delta else 4) * self.inputs.value.numel() * self.shape.key_dim
        return max(num_bytes / device.bytes_per_second, products / device.operations_per_second)


@torch.inference_mode()
def recurrent_figures() -> Iterator[Figure]:
    device = measure_device()
    for model, shape in SHAPES.items():
        for batch, lens in BATCHES.items():
            case = Case(shape, lens)
            what = f"{model}: recurrence, {batch}"
            calls = [functools.partial(recurrent_layer.recur, case.inputs, each, case.step) for each in case.states]
            seconds = graph_seconds(calls)
            share = case.floor(device) / seconds
            yield Figure(f"{what}, Triton", f"{seconds * 1e6:.0f} us, {share:.2f} of the floor")
            yield Figure(f"{what}, torch", _compare(case, seconds))
            yield _convolution_figure(f"{model}: convolution, {batch}", case, device)


def _compare(case: Case, seconds: float) -> str:
    states = case.states[0]
    kept = states.clone()
    expected = recurrence.recur(case.inputs, kept, case.plain_step)
    own = device_seconds(lambda: recurrence.recur(case.inputs, kept, case.plain_step), times=3)
    found = recurrent_layer.recur(case.inputs, states, case.step)
    writes = case.plain_step.writes
    pairs = (found, expected), (states[writes], kept[writes])
    difference = max(float((one - other).norm() / other.norm()) for one, other in pairs)
    verdict = "" if difference < MOST_DIFFERENCE else f"; failed: the results differ by {difference:.1%}"
    return f"{own * 1e6:.0f} us, {own / seconds:.1f} times Triton's{verdict}"


def _convolution_figure(what: str, case: Case, device: Device) -> Figure:
    arguments = case.x, case.kernel, None, case.windows, case.step, True
    seconds = graph_seconds([functools.partial(recurrent_layer.convolve, *arguments)] * 10)
    floor = (2 * case.x.nbytes + case.num_states * case.windows[0].nbytes) / device.bytes_per_second
    windows = case.windows.clone()
    expected = convolution.convolve(case.x, case.kernel, None, windows, case.plain_step, activates=True)
    difference = float((recurrent_layer.convolve(*arguments) - expected).norm() / expected.norm())
    verdict = "" if difference < 1e-5 else f"; failed: the results differ by {difference:.1%}"
    return Figure(what, f"{seconds * 1e6:.1f} us, {floor / seconds:.2f} of the floor{verdict}")

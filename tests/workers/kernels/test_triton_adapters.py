"""Linears with adapters on a GPU give what `TorchAdaptedLinear` gives, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from manta.workers.kernels.adapted_linear import LowRank, LowRankPart, TorchAdaptedLinear, adapt
from manta.workers.kernels.adapter_rows import AdapterRows, RowAdapter
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kernels.triton.adapter_blocks import place_blocks
from manta.workers.kernels.triton.metadata import build_metadata
from manta.workers.kernels.weights import Linear, LinearWeight
from manta.workers.platforms.cuda import CudaPlatform
from tests.workers.kernels.test_float8_linear import float8_weight
from tests.workers.triton_device import DEVICE, THOROUGH

IN, OUT = (1000, 1536) if DEVICE.type == "cuda" else (40, 96)
RANKS = (3, 16, 18, 1)
BRIEF = {("plain", torch.float32), ("gated", torch.bfloat16)}
"""The cases of `make test`: in the interpreter the base model's own products take most of the time."""
FLOAT8 = float8_weight(5, OUT, IN, None)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gated": {"gated": True},
    "int8, gated": {"rounded_to": 8, "gated": True},
    "E4M3": {"quantized": FLOAT8},
    "E4M3, gated": {"quantized": FLOAT8, "gated": True},
}
CASES = [
    pytest.param(kind, dtype, marks=[] if (kind, dtype) in BRIEF or THOROUGH else pytest.mark.prove)
    for kind in KINDS
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]
NUMBERS: list[int | None] = [None, 0, 1, None, 2, 9, 3, 0, *[2] * 17, None, 1]
"""The adapters of rows; that of number 9 does not change the linear."""


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def low_rank(seed: int, rank: int, dtype: torch.dtype) -> LowRank:
    """Changes three parts of the outputs, or the middle one alone if the rank is odd."""
    sizes = OUT // 2, OUT // 4, OUT // 4
    places = (1,) if rank % 2 else (0, 1, 2)
    a = (random(seed, rank * len(places), IN) / IN**0.5).to(dtype)
    parts = tuple(
        LowRankPart((random(seed + place, rank, sizes[place]) / rank).to(dtype), index * rank, sum(sizes[:place]), 0.5)
        for index, place in enumerate(places)
    )
    return LowRank(a, parts)


def on_device(low_rank: LowRank) -> LowRank:
    """Returns the same halves on the device, where `TorchAdaptedLinear` then computes."""
    return LowRank(low_rank.a.to(DEVICE), tuple(part._replace(b=part.b.to(DEVICE)) for part in low_rank.parts))


def step_of(numbers: list[int | None], scales: tuple[float, ...] = (1.0,)) -> AttentionMetadata:
    """A step with one row of each sequence."""
    lens = np.ones(len(numbers), dtype=np.int64)
    of_rows = [None if each is None else RowAdapter(each, scales[i % len(scales)]) for i, each in enumerate(numbers)]
    rows = AdapterRows.of_sequences(of_rows, lens) if any(of_rows) else None
    tables = np.zeros((len(numbers), 1), dtype=np.int32)
    return build_metadata(QueryTokens(np.zeros(len(numbers), np.int64), lens, tables, 16, adapters=rows), DEVICE)


def both(kind: str, dtype: torch.dtype) -> tuple[Linear, Linear, Linear]:
    """The platform's linear alone, and with adapters by its kernels and by torch."""
    platform = CudaPlatform(DEVICE)
    bias = random(6, OUT).to(DEVICE, dtype)
    weight = LinearWeight("linear", (random(5, OUT, IN) / IN**0.5).to(dtype), bias, dtype)
    alone = platform.make_linear(dataclasses.replace(weight, **KINDS[kind]))
    assert platform.adapting is not None
    (linear, holder), (expected, of_torch) = (adapt(alone, each) for each in (platform.adapting(), TorchAdaptedLinear))
    for number, rank in enumerate(RANKS):
        holder.hold(number, low_rank(number, rank, dtype))
        of_torch.hold(number, on_device(low_rank(number, rank, dtype)))
    return alone, linear, expected


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_rows_of_many_adapters_are_those_of_the_reference(kind: str, dtype: torch.dtype) -> None:
    _, linear, expected = both(kind, dtype)
    x, tolerance = random(7, len(NUMBERS), IN).to(DEVICE, dtype), 2e-5 if dtype == torch.float32 else 2e-2
    for step in (step_of(NUMBERS[:9]), step_of(NUMBERS, scales=(1.0, -0.3))):
        rows = x[: step.num_tokens]
        found = linear.forward(rows, step)
        torch.testing.assert_close(found, expected.forward(rows, step), atol=tolerance, rtol=tolerance)
        plain = expected.forward(rows)
        is_adapted = [number in range(len(RANKS)) for number in NUMBERS[: step.num_tokens]]
        assert (found - plain).abs().amax(1).gt(1e-3).tolist() == is_adapted
        others = [row for row, each in enumerate(is_adapted) if not each]
        assert torch.equal(found[others], linear.forward(rows)[others])


def test_adapters_come_and_go() -> None:
    alone, _, _ = both("plain", torch.float32)
    adapting = CudaPlatform(DEVICE).adapting
    assert adapting is not None
    linear, holder = adapt(alone, adapting())
    x, step = random(7, 2, IN).to(DEVICE), step_of([0, 5])
    plain = alone.forward(x)
    assert torch.equal(linear.forward(x, step), plain)
    holder.hold(5, low_rank(1, 4, torch.float32))
    found = linear.forward(x, step)
    assert torch.equal(found[0], plain[0])
    assert not torch.equal(found[1], plain[1])
    holder.hold(0, low_rank(2, 70, torch.float32))
    both_held = linear.forward(x, step)
    assert torch.equal(both_held[1], found[1])
    holder.drop(5)
    assert torch.equal(linear.forward(x, step), torch.stack([both_held[0], plain[1]]))
    holder.drop(0)
    holder.drop(7)
    assert torch.equal(linear.forward(x, step), plain)


@pytest.mark.parametrize("counts", [[1, 1, 1], [16, 3], [17, 64, 65, 1, 200]])
def test_every_row_is_in_one_block_of_its_adapter(counts: list[int]) -> None:
    adapters = [RowAdapter(3 * index, 0.5 + index) for index in range(len(counts))]
    rows = AdapterRows.of_sequences([*adapters, None], np.array([*counts, 7]))
    blocks = place_blocks(rows, DEVICE)
    table, found = blocks.table.cpu(), []
    scales = table[:, 3].contiguous().view(torch.float32).tolist()
    for (number, first, end, _), scale in zip(table.tolist(), scales, strict=True):
        assert 0 < end - first <= blocks.size
        found += [(row, number, scale) for row in blocks.rows[first:end].tolist()]
    expected = [each for each, count in zip(adapters, counts, strict=True) for _ in range(count)]
    assert found == [(row, each.number, each.scale) for row, each in enumerate(expected)]

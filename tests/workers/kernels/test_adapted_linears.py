"""Linears with adapters against float64 products, and rows against the same rows in other batches, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from ctypes import CFUNCTYPE, c_int, c_void_p

import numpy as np
import pytest
import torch

from manta.workers.kernels.adapted_linear import AdaptedLinear, LowRank, LowRankPart, adapt
from manta.workers.kernels.adapter_rows import AdapterRows, RowAdapter
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.cpu_linear import HasNative
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kernels.weights import Linear, LinearWeight
from manta.workers.platforms.cpu_linears import CpuLinearAdapting, make_linear
from tests.workers.cpu_forms import COMPILED, TORCH, in_form

pytestmark = pytest.mark.forms_in_turns

IN, OUT = 96, 192
RANKS = (1, 3, 16, 70, 256)
FORMS = [COMPILED[0], TORCH, *(pytest.param(each, marks=pytest.mark.prove) for each in COMPILED[1:])]
KINDS = {
    "plain": {},
    "gated": {"gated": True},
    "int8": {"rounded_to": 8},
    "int4, gated": {"rounded_to": 4, "gated": True},
    "a gate that is not compiled": {"gated": True, "activation": "gelu"},
    "int4, a gate that is not compiled": {"rounded_to": 4, "gated": True, "activation": "clamped"},
}


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    with in_form(request.param):
        yield request.param


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def low_rank(seed: int, rank: int, dtype: torch.dtype) -> LowRank:
    """Both halves of the outputs have a part, or the second alone if the rank is odd."""
    halves = (1,) if rank % 2 else (0, 1)
    a = (random(seed, rank * len(halves), IN) / IN**0.5).to(dtype)
    parts = [
        LowRankPart((random(seed + 1 + half, rank, OUT // 2) / rank).to(dtype), place * rank, half * (OUT // 2), 0.5)
        for place, half in enumerate(halves)
    ]
    return LowRank(a, tuple(parts))


def step_of(adapters: list[int | None], scale: float = 1.0) -> AttentionMetadata:
    """A step with one row of each sequence."""
    lens = np.ones(len(adapters), dtype=np.int64)
    of_rows = [None if each is None else RowAdapter(each, scale) for each in adapters]
    rows = AdapterRows.of_sequences(of_rows, lens) if any(of_rows) else None
    tables = np.zeros((len(adapters), 1), dtype=np.int32)
    return AttentionMetadata.build(QueryTokens(np.zeros(len(adapters), np.int64), lens, tables, 16, adapters=rows))


def adapted(kind: str, dtype: torch.dtype, exact: bool = False) -> tuple[Linear, Linear, AdaptedLinear]:
    """The linear alone, and the same with adapters of all `RANKS` by number."""
    weight = LinearWeight("linear", random(5, OUT, IN).to(dtype) / IN**0.5, random(6, OUT).to(dtype), dtype)
    weight = dataclasses.replace(weight, **KINDS[kind])
    linear, holder = adapt(make_linear(weight), CpuLinearAdapting(exact))
    for number, rank in enumerate(RANKS):
        holder.hold(number, low_rank(number, rank, dtype))
    return make_linear(weight), linear, holder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_has_its_own_adapter_whatever_the_other_rows_have(form: str, kind: str, dtype: torch.dtype) -> None:
    alone, linear, _ = adapted(kind, dtype)
    numbers: list[int | None] = [None, 0, 1, None, 2, 3, 4, 0, *[4] * 30, None, *[2] * 3]
    x = random(7, len(numbers), IN).to(dtype)
    together = linear.forward(x, step_of(numbers)).clone()
    plain = alone.forward(x)
    for row, number in enumerate(numbers):
        one = linear.forward(x[row : row + 1], step_of([number]))[0]
        if number is None:
            torch.testing.assert_close(together[row], plain[row], atol=1e-5, rtol=1e-2 if dtype.itemsize == 2 else 1e-5)
        else:
            assert (together[row] - plain[row]).abs().max() > 0.01, "the adapter changes something"
        torch.testing.assert_close(together[row], one, atol=1e-4, rtol=2e-2 if dtype.itemsize == 2 else 1e-5)


@pytest.mark.parametrize("kind", ["int8", "int4, gated", "int4, a gate that is not compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_exact_rows_have_the_same_bits_in_every_form_and_batch(form: str, kind: str, dtype: torch.dtype) -> None:
    """Alone, beside rows of other adapters, and in the form that this processor would choose."""
    if form == TORCH:
        pytest.skip("exact needs the compiled kernels")
    numbers: list[int | None] = [None, 0, 1, None, 2, 3, 4, 0, *[4] * 30, None, *[2] * 3]
    x = random(7, len(numbers), IN).to(dtype)
    linear = adapted(kind, dtype, exact=True)[1]
    together = linear.forward(x, step_of(numbers)).clone()
    for row, number in enumerate(numbers):
        assert torch.equal(linear.forward(x[row : row + 1], step_of([number]))[0], together[row])
    with in_form(COMPILED[0]):
        assert torch.equal(adapted(kind, dtype, exact=True)[1].forward(x, step_of(numbers)), together)


def in_lanes(x: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Products of rows in 16 lanes whose sums are added by halves. Terms that are fused are exact in float64 here,
    because the numbers have few bits.
    """
    lanes = np.zeros((len(x), len(a), 16), dtype=np.float32)
    for k in range(x.shape[1]):
        term = x[:, None, k].astype(np.float64) * a[None, :, k]
        lanes[:, :, k % 16] = (lanes[:, :, k % 16] + term).astype(np.float32)
    for half in (8, 4, 2, 1):
        lanes = lanes[:, :, :half] + lanes[:, :, half : 2 * half]
    return lanes[:, :, 0]


def test_exact_sums_have_the_order_of_the_design(form: str) -> None:
    """`docs/design.md` has it: 16 lanes and one tree, then one sum over the ranks in order."""
    if form == TORCH:
        pytest.skip("exact needs the compiled kernels")
    rank = 70
    weight = LinearWeight("zeros", torch.zeros(OUT, IN), None, torch.float32, rounded_to=8)
    linear, holder = adapt(make_linear(weight), CpuLinearAdapting(exact=True))
    sizes = (5, IN), (rank, IN), (rank, OUT)
    x, a, b = (random(seed, *size).bfloat16().float() for seed, size in enumerate(sizes))
    holder.hold(0, LowRank(a, (LowRankPart(b, 0, 0, 0.25),)))
    products, expected = in_lanes(x.numpy(), a.numpy()), np.zeros((5, OUT), dtype=np.float32)
    for place in range(rank):
        term = products[:, place, None].astype(np.float64) * b.numpy()[place]
        expected = (expected + term).astype(np.float32)
    assert torch.equal(linear.forward(x, step_of([0] * 5)), torch.from_numpy(expected * np.float32(0.25)))


@pytest.mark.parametrize(("kind", "scale"), [("plain", 1.0), ("gated", 1.0), ("plain", -0.3)])
def test_what_an_adapter_adds_is_the_product_of_its_halves(form: str, kind: str, scale: float) -> None:
    _, linear, _ = adapted(kind, torch.float32)
    x, weight, bias = random(7, 9, IN), random(5, OUT, IN) / IN**0.5, random(6, OUT)
    for number, rank in enumerate(RANKS):
        held, merged = low_rank(number, rank, torch.float32), weight.double()
        for part in held.parts:
            outputs = slice(part.first_output, part.first_output + part.b.shape[1])
            a = held.a[part.first_rank : part.first_rank + rank].double()
            merged[outputs] += scale * part.scale * part.b.double().T @ a
        expected = x.double() @ merged.T + bias
        if kind == "gated":
            gate, up = expected.chunk(2, dim=-1)
            expected = torch.nn.functional.silu(gate) * up
        y = linear.forward(x, step_of([number] * 9, scale))
        torch.testing.assert_close(y.double(), expected, atol=2e-5, rtol=2e-5)


def test_rows_of_one_adapter_have_their_own_scales(form: str) -> None:
    _, linear, _ = adapted("plain", torch.float32)
    x, scales = random(7, 4, IN), (1.0, 0.5, 1.0, -2.0)
    rows = AdapterRows.of_sequences([RowAdapter(2, scale) for scale in scales], np.ones(4, dtype=np.int64))
    assert len(rows.segments) == 3
    tables = QueryTokens(np.zeros(4, np.int64), np.ones(4, np.int64), np.zeros((4, 1), np.int32), 16, adapters=rows)
    together = linear.forward(x, AttentionMetadata.build(tables)).clone()
    for row, scale in enumerate(scales):
        one = linear.forward(x[row : row + 1], step_of([2], scale))[0]
        torch.testing.assert_close(together[row], one, atol=1e-5, rtol=1e-5)


def test_rows_without_an_adapter_have_the_same_bits_as_without_adapters(form: str) -> None:
    for kind in ("plain", "gated", "int8"):
        alone, linear, holder = adapted(kind, torch.bfloat16)
        x = random(7, 4, IN).to(torch.bfloat16)
        before = alone.forward(x).clone()
        assert torch.equal(linear.forward(x, step_of([None] * 4)), before)
        if form != TORCH:
            assert torch.equal(linear.forward(x, step_of([None, 1, None, None]))[[0, 2, 3]], before[[0, 2, 3]])
        holder.drop(1)
        assert torch.equal(linear.forward(x, step_of([None, 1, None, None])), before)


def test_many_rows_run_in_parts(form: str) -> None:
    """A buffer for what is added to all rows of a long prompt would be as large as the widest activations."""
    weight = LinearWeight("wide", random(5, 40_000, 16), None, torch.float32)
    linear, holder = adapt(make_linear(weight), CpuLinearAdapting())
    holder.hold(0, LowRank(random(1, 2, 16), (LowRankPart(random(2, 2, 40_000), 0, 0, 1.0),)))
    numbers = [0 if row % 3 else None for row in range(150)]
    x = random(7, len(numbers), 16)
    together = linear.forward(x, step_of(numbers)).clone()
    for row in (0, 1, 2, 74, 75, 76, 148, 149):
        one = linear.forward(x[row : row + 1], step_of([numbers[row]]))[0]
        torch.testing.assert_close(together[row], one, atol=1e-4, rtol=1e-5)


def test_a_gate_in_one_call_gets_all_rows_of_its_step(form: str) -> None:
    """Adapters belong to rows by their place in the step. Without adapters the call goes through many rows in parts."""
    _, linear, _ = adapted("int4, a gate that is not compiled", torch.bfloat16)
    if not isinstance(linear, HasNative):
        pytest.skip("torch alone has no such call")
    step = step_of([None, 2, *[None] * 5600, 3, None, 1])
    x = random(8, step.num_tokens, IN).bfloat16()
    call, found = linear.native(), torch.empty(len(x), OUT // 2, dtype=torch.bfloat16)
    assert call.begin is not None
    call.begin(step)
    CFUNCTYPE(None, *[c_void_p] * 3, c_int)(call.run)(call.state, x.data_ptr(), found.data_ptr(), len(x))
    assert torch.equal(found, linear.forward(x, step))

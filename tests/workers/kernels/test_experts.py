"""The experts of a layer in one call give the bits of the experts run one by one, whoever is in the batch."""

from __future__ import annotations

import pytest
import torch

from manta.workers.kernels import cpu_experts
from manta.workers.kernels.looped_experts import LoopedExperts
from manta.workers.kernels.weights import GatedMlpWeights, LinearWeight
from manta.workers.platforms.cpu_linears import make_linear
from tests.workers.cpu_forms import QUANTIZED_CASES, in_form, threads

HIDDEN, INNER, NUM_EXPERTS, NUM_CHOSEN = 96, 48, 7, 3
FORMATS = [
    pytest.param(torch.float32, None, id="float32"),
    pytest.param(torch.bfloat16, None, id="bfloat16"),
    pytest.param(torch.bfloat16, 8, id="int8"),
    pytest.param(torch.float32, 4, id="int4"),
]


def make_experts(dtype: torch.dtype, bits: int | None) -> list[GatedMlpWeights]:
    generator = torch.Generator().manual_seed(1)

    def linear(out_features: int, in_features: int, gated: bool) -> LinearWeight:
        weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
        return LinearWeight("expert", weight.to(dtype), None, dtype, gated, rounded_to=bits)

    return [
        GatedMlpWeights(make_linear(linear(2 * INNER, HIDDEN, True)), make_linear(linear(HIDDEN, INNER, False)))
        for _ in range(NUM_EXPERTS)
    ]


def choices(num_rows: int) -> dict[str, torch.Tensor]:
    """The ways in which rows choose experts, int64 [num_rows, NUM_CHOSEN]."""
    generator = torch.Generator().manual_seed(num_rows)
    drawn = torch.rand(num_rows, NUM_EXPERTS, generator=generator).topk(NUM_CHOSEN).indices
    return {
        "drawn": drawn,
        "all rows the same": drawn[:1].expand(num_rows, -1),
        "some experts never": torch.rand(num_rows, NUM_CHOSEN + 1, generator=generator).topk(NUM_CHOSEN).indices,
    }


@pytest.mark.parametrize(("dtype", "bits"), FORMATS)
@pytest.mark.parametrize("num_rows", [1, 2, 33, 1100])
def test_one_call_gives_the_bits_of_one_by_one(dtype: torch.dtype, bits: int | None, num_rows: int) -> None:
    experts = make_experts(dtype, bits)
    fused, fused_inputs = cpu_experts.fuse(experts), cpu_experts.fuse(experts, scales_inputs=True)
    if fused is None or fused_inputs is None:
        pytest.skip("no kernels on this machine")
    x = torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)
    shares = torch.rand(num_rows, NUM_CHOSEN, generator=torch.Generator().manual_seed(3))
    for kind, chosen in choices(num_rows).items():
        result = fused.forward(x, chosen, shares)
        assert torch.equal(result, LoopedExperts(experts).forward(x, chosen, shares)), kind
        assert result.abs().max() > 0.01, kind
        result = fused_inputs.forward(x, chosen, shares)
        assert torch.equal(result, LoopedExperts(experts, scales_inputs=True).forward(x, chosen, shares)), kind


@pytest.mark.parametrize("form", QUANTIZED_CASES)
def test_every_form_and_number_of_threads_gives_the_bits_of_one_by_one(form: str) -> None:
    """With 1 to 33 rows an expert: each way in which few rows are multiplied, and whole linears."""
    x = torch.randn(33, HIDDEN, generator=torch.Generator().manual_seed(2))
    shares = torch.rand(33, NUM_CHOSEN, generator=torch.Generator().manual_seed(3))
    with in_form(form):
        for dtype, bits in ((torch.float32, None), (torch.bfloat16, None), (torch.float32, 8), (torch.bfloat16, 4)):
            experts = make_experts(dtype, bits)
            fused = cpu_experts.fuse(experts)
            assert fused is not None
            for num_rows in (1, 2, 3, 5, 9, 14, 33):
                chosen = choices(num_rows)["drawn"]
                inputs = x[:num_rows].to(dtype), chosen, shares[:num_rows]
                expected = LoopedExperts(experts).forward(*inputs)
                for num_threads in (1, 3):
                    with threads(num_threads):
                        assert torch.equal(fused.forward(*inputs), expected), (dtype, bits, num_rows, num_threads)


@pytest.mark.parametrize(("dtype", "bits"), FORMATS[:3])
def test_a_number_of_no_expert_adds_nothing(dtype: torch.dtype, bits: int | None) -> None:
    """As of experts that other ranks have: parts of a layer's experts add up to the whole layer."""
    experts, num_rows = make_experts(dtype, bits), 9
    x = torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)
    shares = torch.rand(num_rows, NUM_CHOSEN, generator=torch.Generator().manual_seed(3))
    for kind, chosen in choices(num_rows).items():
        expected = LoopedExperts(experts).forward(x, chosen, shares)
        for join in (LoopedExperts, cpu_experts.fuse):
            first, second = join(experts[:3]), join(experts[3:])
            if first is None or second is None:
                pytest.skip("no kernels on this machine")
            found = first.forward(x, chosen, shares) + second.forward(x, chosen - 3, shares)
            torch.testing.assert_close(found, expected, msg=kind)
            assert first.forward(x[:0], chosen[:0], shares[:0]).shape == (0, HIDDEN)
            nothing = first.forward(x, torch.full_like(chosen, -1), shares)
            assert torch.equal(nothing, torch.zeros_like(nothing))


@pytest.mark.parametrize(("dtype", "bits"), FORMATS[2:])
def test_a_row_of_integers_is_the_same_in_every_batch(dtype: torch.dtype, bits: int | None) -> None:
    fused = cpu_experts.fuse(make_experts(dtype, bits))
    if fused is None:
        pytest.skip("no kernels on this machine")
    x = torch.randn(33, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)
    chosen, shares = choices(33)["drawn"], torch.rand(33, NUM_CHOSEN, generator=torch.Generator().manual_seed(3))
    together = fused.forward(x, chosen, shares)
    for row in range(33):
        alone = fused.forward(x[row : row + 1], chosen[row : row + 1], shares[row : row + 1])
        assert torch.equal(alone[0], together[row])


def test_experts_without_kernels_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make_experts(torch.float32, None)
    monkeypatch.setattr(cpu_experts, "_library", lambda: None)
    assert cpu_experts.fuse(experts) is None

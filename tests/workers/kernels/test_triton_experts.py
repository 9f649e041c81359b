"""The experts of a layer in two products give what the experts give one by one, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch

from manta.workers.checkpoints.formats.compressed_tensors import FP4_CODEBOOK
from manta.workers.kernels import expert_choice
from manta.workers.kernels.linears import GatedLinear, TorchLinear
from manta.workers.kernels.looped_experts import LoopedExperts
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kernels.reference import GATES, activate
from manta.workers.kernels.triton import expert_products, expert_rows, router
from manta.workers.kernels.triton.experts import GroupedExperts, join
from manta.workers.kernels.triton.metadata import Layout, build_metadata
from manta.workers.kernels.triton.rows import silu_and_mul
from manta.workers.kernels.weights import Experts, GatedMlpWeights, LinearWeight
from manta.workers.models.model_config import ExpertsConfig
from manta.workers.parallel.sharded_layers import ExpertsOfRank
from manta.workers.parallel.split import experts_of_rank
from manta.workers.platforms.cuda import CudaPlatform
from tests.workers.triton_device import DEVICE, NEEDS_GPU, THOROUGH

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM_EXPERTS, NUM_CHOSEN = (8, 3) if THOROUGH else (5, 2)
HIDDEN, INNER = (2880, 352) if THOROUGH else (96, 64)
ROWS = (1, 2, 17, 300)
FEWER_ROWS = (1, 17)


def plain(generator: torch.Generator, out_features: int, in_features: int) -> torch.Tensor:
    return torch.randn(out_features, in_features, generator=generator) / in_features**0.5


def quantised(
    generator: torch.Generator, out_features: int, in_features: int, group: int, kind: str, **fields: Any
) -> QuantizedWeight:
    shape, num_groups = (out_features, in_features), in_features // group
    scales = (torch.rand(out_features, num_groups, generator=generator) + 0.5) / in_features**0.5
    if kind == "float8":
        values = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        return QuantizedWeight(values, scales, **fields)
    if kind == "mxfp4":
        codes = torch.randint(16, shape, generator=generator)
        values = torch.tensor(FP4_CODEBOOK, dtype=torch.int8)[codes]
        exponents = torch.randint(-9, -4, scales.shape, generator=generator)
        return QuantizedWeight(values, torch.exp2(exponents.float()), codebook=FP4_CODEBOOK, **fields)
    bits = 4 if kind == "int4" else 8
    most = 2 ** (bits - 1)
    values = torch.randint(-most, most, shape, generator=generator).to(torch.int8)
    return QuantizedWeight(values, scales / most * 4, bits, **fields)


FORMS: dict[str, Any] = {
    "plain": None,
    "int8 in groups": {"kind": "int8", "group": 32},
    "int8 by output and row": {"kind": "int8", "has_int8_activations": True},
    "int4": {"kind": "int4", "group": 32},
    "int4 with offsets": {"kind": "int4", "group": 16, "offsets": True},
    "int4 by output": {"kind": "int4"},
    "int4 in any order": {"kind": "int4", "group": 32, "input_order": True},
    "MXFP4": {"kind": "mxfp4", "group": 32},
    "E4M3 by output": {"kind": "float8"},
    "E4M3 in blocks": {"kind": "float8", "group": 32},
}


def make_weight(
    generator: torch.Generator, form: Any, sizes: tuple[int, int], dtype: torch.dtype, activation: str, gated: bool
) -> LinearWeight:
    out_features, in_features = sizes
    bias = None
    if activation in ("clamped", "relu2"):
        bias = torch.randn(out_features, generator=generator).to(DEVICE, dtype)
    if form is None:
        weight = plain(generator, out_features, in_features).to(dtype)
        return LinearWeight("expert", weight, bias, dtype, gated, activation=activation)
    fields = dict(form)
    group = fields.pop("group", in_features)
    if fields.get("offsets"):
        shape = out_features, in_features // group
        fields["offsets"] = torch.randn(shape, generator=generator) / in_features
    if fields.get("input_order"):
        fields["input_order"] = torch.randperm(in_features, generator=generator)
    weight = quantised(generator, out_features, in_features, group=group, **fields)
    meta = torch.empty(sizes, dtype=dtype, device="meta")
    return LinearWeight("expert", meta, bias, dtype, gated, weight, activation=activation)


@functools.cache
def make_experts(
    form: str, dtype: torch.dtype, activation: str = "silu", num_experts: int = NUM_EXPERTS
) -> list[GatedMlpWeights]:
    """Experts of the CUDA platform's linears; with biases if the activation is one of models that have them."""
    generator, platform = torch.Generator().manual_seed(1), CudaPlatform(DEVICE)
    gated = activation in GATES
    experts = []
    for _ in range(num_experts):
        weight = make_weight(
            generator, FORMS[form], (INNER * (1 + gated), HIDDEN), dtype, activation if gated else "", gated
        )
        if not gated and weight.bias is None:
            weight = dataclasses.replace(weight, bias=torch.randn(INNER, generator=generator).to(DEVICE, dtype))
        first = platform.make_linear(weight)
        if not gated:
            first = GatedLinear(first, functools.partial(activate, activation))
        second = make_weight(generator, FORMS[form], (HIDDEN, INNER), dtype, activation, False)
        experts.append(GatedMlpWeights(first, platform.make_linear(second)))
    return experts


@functools.cache
def both(
    form: str, dtype: torch.dtype, activation: str = "silu", scales_inputs: bool = False
) -> tuple[Experts, LoopedExperts]:
    experts = make_experts(form, dtype, activation)
    grouped = join(experts, NUM_EXPERTS, activation, scales_inputs)
    assert isinstance(grouped, GroupedExperts)
    return grouped, LoopedExperts(experts, scales_inputs)


def step(num_rows: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, drawn choices, and shares."""
    generator = torch.Generator().manual_seed(100 * num_rows + seed)
    x = torch.randn(num_rows, HIDDEN, generator=generator).to(DEVICE, dtype)
    chosen = torch.rand(num_rows, NUM_EXPERTS, generator=generator).topk(NUM_CHOSEN).indices
    return x, chosen.to(DEVICE), torch.rand(num_rows, NUM_CHOSEN, generator=generator).to(DEVICE)


def check(
    pair: tuple[Experts, LoopedExperts], x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, form: str
) -> torch.Tensor:
    """Compares both results: bit for bit where sums are integers, else up to the order of sums in the dtype of x."""
    grouped, looped = pair
    result, expected = grouped.forward(x, chosen, shares), looped.forward(x, chosen, shares)
    assert result.dtype == torch.float32
    is_exact = form.startswith("int") or form == "MXFP4"
    if is_exact:
        assert torch.equal(result, expected)
    else:
        precision = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[x.dtype]
        error = (result - expected).norm() / expected.norm().clamp(min=1e-9)
        assert error < (max(precision, 2e-3) if form.startswith("E4M3") else precision)
    assert expected.abs().max() > 0.01
    return result


@pytest.mark.few(3)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_results_of_one_by_one(form: str) -> None:
    for index, num_rows in enumerate(ROWS if THOROUGH else FEWER_ROWS if form == "plain" else FEWER_ROWS[1:]):
        dtypes = DTYPES[: 3 if form == "plain" else 2] if THOROUGH else (DTYPES[index],)
        for dtype in dtypes:
            check(both(form, dtype), *step(num_rows, dtype), form)


@pytest.mark.few(2)
@pytest.mark.axes_in_turns
@pytest.mark.parametrize("form", ["plain", "int4", "E4M3 by output"] if THOROUGH else ["plain", "int4"])
@pytest.mark.parametrize("activation", ["clamped", "gelu", "gelu_tanh", "relu2"])
def test_every_activation_gives_the_results_of_one_by_one(activation: str, form: str) -> None:
    for dtype in DTYPES[: 2 if THOROUGH else 1]:
        pair = both(form, dtype, activation)
        x, chosen, shares = step(9, dtype)
        result, expected = (each.forward(10 * x, chosen, shares) for each in pair)
        # Rounded to integers or E4M3, an activation's last bit may move a whole number by one
        most = 2e-2 if form != "plain" or dtype == torch.bfloat16 else 1e-5
        assert (result - expected).norm() / expected.norm() < most


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["plain", "int8 in groups", "int4 in any order"])
def test_shares_scale_inputs_instead(form: str) -> None:
    for num_rows in (1, 9) if THOROUGH else (9,):
        check(both(form, torch.float32, scales_inputs=True), *step(num_rows, torch.float32), form)


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["plain", "int4"])
def test_any_choice_is_computed(form: str) -> None:
    """All rows choose the same experts, or one expert has no row, or an order of its own."""
    x, chosen, shares = step(12, torch.float32)
    for choices in (
        chosen[:1].expand(12, -1),
        chosen[:1].flip(1).expand(12, -1),
        torch.tensor([[0, NUM_EXPERTS - 1], [NUM_EXPERTS - 1, 1]], device=DEVICE).repeat(6, 1),
    ):
        check(both(form, torch.float32), x, choices, shares[:, : choices.shape[1]], form)


@pytest.mark.long_when_interpreted
@pytest.mark.parametrize("form", ["plain", "int4 in any order"])
def test_parts_of_ranks_that_divide_experts_add_up(form: str) -> None:
    """Each rank gets the choices of all, and computes those of its own experts."""
    _, looped = both(form, torch.float32)
    experts = make_experts(form, torch.float32)
    shares_of_ranks = [experts_of_rank(NUM_EXPERTS, rank, 2) for rank in range(2)]
    ranks = [
        ExpertsOfRank(join(experts[held.start : held.stop], len(held), "silu", False), held) for held in shares_of_ranks
    ]
    for num_rows in (1, 9):
        x, chosen, shares = step(num_rows, torch.float32)
        found = sum(rank.forward(x, chosen, shares) for rank in ranks)
        torch.testing.assert_close(found, looped.forward(x, chosen, shares), atol=1e-4, rtol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["plain", "MXFP4"])
def test_rows_that_pad_reach_no_other_row(form: str) -> None:
    """Rows of NaN, which all chose one expert, or none."""
    grouped, _ = both(form, torch.float32)
    x, chosen, shares = step(10, torch.float32)
    alone = grouped.forward(x[:7], chosen[:7], shares[:7])
    x[7:] = float("nan")
    for index in (0, NUM_EXPERTS, -1, 2**31 - 1) if THOROUGH else (0, -1):
        chosen[7:] = torch.arange(NUM_CHOSEN, device=DEVICE) if index == 0 else index
        shares[7:] = float("nan")
        padded = grouped.forward(x, chosen, shares)
        torch.testing.assert_close(padded[:7], alone, atol=0 if form == "MXFP4" else 1e-5, rtol=1e-5)
        assert bool(padded[7:].isnan().all()) == (index == 0)
        assert index == 0 or not padded[7:].any()


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["int8 in groups", "int4", "MXFP4"])
def test_a_row_of_integers_is_the_same_in_every_batch(form: str) -> None:
    grouped, _ = both(form, torch.bfloat16)
    num_rows = 33 if THOROUGH else 9
    x, chosen, shares = step(num_rows, torch.bfloat16)
    together = grouped.forward(x, chosen, shares)
    for row in range(num_rows) if THOROUGH else (0, num_rows - 1):
        own = slice(row, row + 1)
        assert torch.equal(grouped.forward(x[own], chosen[own], shares[own])[0], together[row])
    assert torch.equal(grouped.forward(x, chosen, shares), together)


def test_experts_of_different_forms_run_one_by_one() -> None:
    first, second = make_experts("int4", torch.float32), make_experts("plain", torch.float32)
    mixed = [*first[:2], GatedMlpWeights(first[2].gated, second[2].down), *second[3:]]
    joined = join(iter(mixed), NUM_EXPERTS, "silu", scales_inputs=False)
    assert isinstance(joined, LoopedExperts)
    inputs = step(9, torch.float32)
    torch.testing.assert_close(joined.forward(*inputs), LoopedExperts(mixed).forward(*inputs))


def test_the_weights_of_a_layer_take_what_their_experts_take() -> None:
    grouped, _ = both("MXFP4", torch.bfloat16)
    assert isinstance(grouped, GroupedExperts)
    assert sum(each.num_bytes for each in grouped.linears) == NUM_EXPERTS * (
        2 * INNER * row(HIDDEN) + HIDDEN * row(INNER)
    )


def row(inputs: int) -> int:
    """Bytes of a row of a weight in MXFP4, whose groups lie in pairs."""
    return -(-inputs // 64) * 32 + inputs // 32


SIZES = [(1, 5, 2), (2, 5, 2), (17, 8, 3), (40, 160, 6), (300, 7, 2)]
SIZES += [(700, 20, 4), (5000, 128, 8), (3, 4096, 2), (33, 512, 10)] if THOROUGH else []


@pytest.mark.parametrize(("num_rows", "num_experts", "num_chosen"), SIZES)
def test_pairs_are_sorted_by_expert(num_rows: int, num_experts: int, num_chosen: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    chosen = torch.rand(num_rows, num_experts, generator=generator).topk(num_chosen).indices
    if num_rows > 2:
        chosen[1] = -1
        chosen[2] = num_experts
    flat = chosen.flatten()
    kept = ((flat >= 0) & (flat < num_experts)).nonzero()[:, 0]
    expected = kept[flat[kept].sort(stable=True).indices].tolist()
    for size in expert_products.BLOCK_ROWS[:2]:
        blocks = expert_rows.sort_pairs(chosen.to(DEVICE), num_experts, size)
        if blocks.is_single_row:
            assert blocks.table.flatten().tolist() == flat.tolist()
            continue
        order = blocks.order[: len(expected)].tolist()
        assert order == expected
        found: list[int] = []
        for expert, first, end in blocks.table.T.tolist():
            if expert >= 0:
                own = order[first : min(first + size, end)]
                assert own
                assert set(flat[own].tolist()) == {expert}
                found += own
        assert found == expected


ROUTERS = {
    "softmax": ExpertsConfig(num_experts=128, num_chosen=8, intermediate_size=8, normalises=True),
    "softmax over few": ExpertsConfig(num_experts=5, num_chosen=2, intermediate_size=8),
    "sigmoid": ExpertsConfig(num_experts=16, num_chosen=1, intermediate_size=8, scores="sigmoid"),
    "all experts": ExpertsConfig(num_experts=6, num_chosen=6, intermediate_size=8, normalises=True, scale=0.5),
    "groups by two scores": ExpertsConfig(
        num_experts=256, num_chosen=8, intermediate_size=8, scores="sigmoid", normalises=True, scale=2.5,
        num_groups=8, num_chosen_groups=4, ranks_groups_by=2,
    ),
    "groups of 20": ExpertsConfig(
        num_experts=160, num_chosen=6, intermediate_size=8, scale=16.0, num_groups=8, num_chosen_groups=3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_one_kernel_chooses_as_torch_does(name: str, has_bias: bool) -> None:
    config = ROUTERS[name]
    generator = torch.Generator().manual_seed(len(name))
    logits = 3 * torch.randn(64 if THOROUGH else 7, config.num_experts, generator=generator)
    bias = torch.rand(config.num_experts, generator=generator) if has_bias else None
    expected_shares, expected = expert_choice.route(logits, bias, config)
    on_device = None if bias is None else bias.to(DEVICE)
    shares, chosen = (each.cpu() for each in router.route(logits.to(DEVICE), on_device, config))
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(shares, expected_shares, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ROUTERS)
def test_ties_and_nan_choose_different_experts(name: str) -> None:
    config = ROUTERS[name]
    logits = torch.zeros(3, config.num_experts, device=DEVICE)
    logits[1, -1] = float("nan")
    shares, chosen = router.route(logits, torch.zeros(config.num_experts, device=DEVICE), config)
    for row in chosen.tolist():
        assert len({*row}) == config.num_chosen
        assert all(0 <= each < config.num_experts for each in row)
    assert chosen[0].tolist() == list(range(config.num_chosen))
    assert shares[[0, 2]].isfinite().all()
    assert config.scores == "sigmoid" or shares[1].isnan().all()


def test_rows_that_fill_a_step_up_choose_no_expert() -> None:
    """They would have the weights of more experts read."""
    config = ROUTERS["softmax over few"]
    lengths = np.array([3, 1])
    tokens = QueryTokens(np.zeros(2, dtype=np.int64), lengths, np.zeros((2, 1), dtype=np.int32), 16)
    metadata = build_metadata(tokens, DEVICE, Layout(4, 8))
    logits = torch.randn(32, config.num_experts, device=DEVICE)
    _, chosen = router.route(logits, None, config, metadata)
    assert (chosen[:4] >= 0).all()
    assert (chosen[4:] == -1).all()


@NEEDS_GPU
def test_results_of_more_than_two_thousand_million_numbers() -> None:
    """Their places do not fit in 32 bits."""
    num_rows, hidden, inner, dtype = 300_000, 4096, 16, torch.bfloat16
    assert num_rows * 2 * hidden > 2**31
    generator = torch.Generator().manual_seed(1)
    experts = [
        GatedMlpWeights(
            GatedLinear(TorchLinear(plain(generator, 2 * inner, hidden).to(DEVICE, dtype)), silu_and_mul),
            TorchLinear(plain(generator, hidden, inner).to(DEVICE, dtype)),
        )
        for _ in range(4)
    ]
    grouped = join(experts, 4, "silu", scales_inputs=False)
    x = torch.randn(num_rows, hidden, device=DEVICE, dtype=dtype)
    chosen = torch.rand(num_rows, 4, device=DEVICE).topk(2).indices
    shares = torch.rand(num_rows, 2, device=DEVICE)
    whole = grouped.forward(x, chosen, shares)
    for own in (slice(0, 20), slice(262_134, 262_154), slice(num_rows - 20, num_rows)):
        alone = LoopedExperts(experts).forward(x[own], chosen[own], shares[own])
        torch.testing.assert_close(whole[own], alone, atol=0.02, rtol=0.02)


def test_a_torch_linear_is_given_no_second_copy() -> None:
    """An expert is read when the one before it has been copied, so that no more than one is held twice."""
    held: list[int] = []

    def read() -> Any:
        for expert in make_experts("plain", torch.float32):
            held.append(len(held))
            inner = expert.gated.linear  # type: ignore[attr-defined]
            down = expert.down
            assert isinstance(down, TorchLinear)
            gated = GatedLinear(TorchLinear(inner.weight.clone()), functools.partial(activate, "silu"))
            yield GatedMlpWeights(gated, TorchLinear(down.weight.clone()))

    joined = join(read(), NUM_EXPERTS, "silu", scales_inputs=False)
    assert isinstance(joined, GroupedExperts)
    assert held == list(range(NUM_EXPERTS))

"""A whole mixture of experts in one call gives the bits of its parts one after the other, and its router chooses as
torch's functions do.
"""

from __future__ import annotations

import msgspec
import pytest
import torch

from manta.workers.decoders.decoder import Decoder
from manta.workers.decoders.expert_routing import run_experts
from manta.workers.kernels import cpu, cpu_experts, cpu_products, expert_choice
from manta.workers.kernels.cpu_exact import ExactLinear
from manta.workers.kernels.weights import ExpertsWeights, GatedMlpWeights, LinearWeight
from manta.workers.models.model_config import ExpertsConfig
from manta.workers.platforms.cpu_linears import make_linear
from tests.workers.test_layer_kinds import folder_of
from tests.workers.test_models import Cache, random_tokens

HIDDEN, INNER, SHARED_INNER, NUM_EXPERTS, NUM_CHOSEN = 96, 48, 32, 12, 3
PLAIN = ExpertsConfig(num_experts=NUM_EXPERTS, num_chosen=NUM_CHOSEN, intermediate_size=INNER, normalises=True)
ROUTERS = {
    "softmax of the chosen": PLAIN,
    "softmax of all": msgspec.structs.replace(PLAIN, normalises=False, scale=2.5),
    "sigmoid": msgspec.structs.replace(PLAIN, scores="sigmoid", scale=1.5),
    "root of softplus": msgspec.structs.replace(PLAIN, scores="sqrtsoftplus"),
    "groups by two": msgspec.structs.replace(
        PLAIN, scores="sigmoid", num_groups=4, num_chosen_groups=2, ranks_groups_by=2
    ),
    "groups by one": msgspec.structs.replace(PLAIN, num_groups=3, num_chosen_groups=1),
    "shares of inputs": msgspec.structs.replace(PLAIN, scores="sigmoid", normalises=False, scales_inputs=True),
}


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _with_kernels() -> None:
    if cpu_experts.fuse([mlp(1, INNER, torch.float32, None, "silu")]) is None:
        pytest.skip("no kernels on this machine")


def mlp(
    seed: int, inner: int, dtype: torch.dtype, bits: int | None, activation: str, limit: float = 0
) -> GatedMlpWeights:
    def linear(out_features: int, in_features: int, gated: bool) -> LinearWeight:
        weight, bias = numbers(seed, out_features, in_features) / in_features**0.5 * 3, numbers(seed, out_features)
        return LinearWeight(
            "mlp", weight.to(dtype), bias.to(dtype), dtype, gated, None, bits, activation, limit if gated else 0
        )

    return GatedMlpWeights(make_linear(linear(2 * inner, HIDDEN, True)), make_linear(linear(HIDDEN, inner, False)))


def mixture(
    config: ExpertsConfig,
    dtype: torch.dtype,
    bits: int | None,
    activation: str = "silu",
    limit: float = 0,
    is_shared: bool = True,
) -> ExpertsWeights:
    experts = [mlp(seed, INNER, dtype, bits, activation, limit) for seed in range(NUM_EXPERTS)]
    fused = cpu_experts.fuse(experts, config.scales_inputs)
    assert fused is not None
    router = numbers(50, NUM_EXPERTS, HIDDEN) / HIDDEN**0.5
    return ExpertsWeights(
        config,
        ExactLinear(router.to(dtype).float(), numbers(51, NUM_EXPERTS)),
        fused,
        None,
        numbers(52, NUM_EXPERTS) * 0.1 if config.scores != "softmax" else None,
        mlp(53, SHARED_INNER, dtype, bits, activation) if is_shared else None,
        numbers(55, NUM_EXPERTS).exp() if is_shared else None,
        shared_gate=ExactLinear(numbers(54, 1, HIDDEN) / HIDDEN**0.5) if is_shared else None,
    )


def in_one_call(weights: ExpertsWeights, x: torch.Tensor) -> torch.Tensor:
    fused = cpu_experts.fuse_mixture(weights, x.dtype)
    assert fused is not None
    return fused.forward(x)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, 4)],
    ids=["float32", "bfloat16", "int4"],
)
def test_one_call_gives_the_bits_of_its_parts(router: str, dtype: torch.dtype, bits: int | None) -> None:
    weights = mixture(ROUTERS[router], dtype, bits)
    for num_rows in (1, 5, 70):
        x = numbers(num_rows, num_rows, HIDDEN).to(dtype)
        assert torch.equal(in_one_call(weights, x), run_experts(weights, x, cpu)), num_rows


def test_a_router_whose_weight_is_exact_in_bfloat16_is_kept_so() -> None:
    weight, x = numbers(50, NUM_EXPERTS, HIDDEN).bfloat16(), numbers(1, 9, HIDDEN)
    router = ExactLinear(weight.float())
    assert router.weight.dtype == torch.bfloat16
    wide = weight.float().T.contiguous().unsqueeze(0)
    assert torch.equal(router.forward(x), cpu_products.head_products(x.unsqueeze(1), wide).squeeze(1))
    assert ExactLinear(weight.float() + 2**-20).weight.dtype == torch.float32


@pytest.mark.parametrize(("activation", "limit"), [("clamped", 0), ("gelu", 0), ("gelu_tanh", 0), ("silu", 0.5)])
@pytest.mark.parametrize("bits", [None, 4])
def test_other_gates(activation: str, limit: float, bits: int | None) -> None:
    weights = mixture(PLAIN, torch.bfloat16, bits, activation, limit, is_shared=False)
    x = numbers(9, 9, HIDDEN).bfloat16()
    assert torch.equal(in_one_call(weights, x), run_experts(weights, x, cpu))


@pytest.mark.parametrize("router", ROUTERS)
def test_the_choice_is_that_of_torch(router: str) -> None:
    config, bias = ROUTERS[router], numbers(52, NUM_EXPERTS) * 0.1
    logits = numbers(60, 200, NUM_EXPERTS)
    shares, chosen = cpu.route(logits, bias, config)
    expected_shares, expected = expert_choice.route(logits, bias, config)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(shares, expected_shares, rtol=1e-5, atol=1e-6)


def test_experts_of_equal_scores_are_chosen_as_torch_chooses_where_models_have_many() -> None:
    config = msgspec.structs.replace(
        PLAIN, scores="sigmoid", num_groups=4, num_chosen_groups=1, num_chosen=6, scores_others_zero=True
    )
    logits, bias = numbers(61, 50, NUM_EXPERTS), numbers(52, NUM_EXPERTS) * 0.1
    assert torch.equal(cpu.route(logits, bias, config)[1], expert_choice.route(logits, bias, config)[1])


def test_of_equal_scores_the_first_are_chosen_and_experts_of_nan_exist() -> None:
    logits = torch.zeros(3, NUM_EXPERTS)
    logits[1, 7] = 1
    logits[2, 4] = torch.nan
    shares, chosen = cpu.route(logits, None, PLAIN)
    assert chosen[:2].tolist() == [[0, 1, 2], [7, 0, 1]]
    torch.testing.assert_close(shares[0], torch.full((3,), 1 / 3))
    assert len(set(chosen[2].tolist()) & set(range(NUM_EXPERTS))) == NUM_CHOSEN
    assert shares[2].isnan().all()


@pytest.mark.parametrize("name", ["glm4_moe", "mixtral", "gpt_oss"])
def test_all_layers_in_one_call_give_the_bits_of_their_kernels(name: str) -> None:
    """A dense layer first, a shared expert, biases, sinks, windows, and gates of another kind."""
    logits = []
    for is_whole in (True, False):
        cache = Cache(folder_of(name))
        decoder = cache.model
        assert isinstance(decoder, Decoder)
        assert decoder.compiled is not None
        if not is_whole:
            decoder.compiled = None
            for layer in decoder.weights.layers:
                if isinstance(layer.mlp, ExpertsWeights):
                    object.__setattr__(layer.mlp, "in_one_call", None)
        found = cache.run((0, random_tokens(40)), (1, random_tokens(3)))
        found += cache.run((1, [5]), (0, [8]), (2, random_tokens(20, seed=1)))
        logits.append(torch.cat(found))
    assert torch.equal(*logits)
    assert logits[0].isfinite().all()

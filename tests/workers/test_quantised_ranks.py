"""Parts of one linear that are stored unlike each other, and shares of ranks: exact, or refused in a sentence."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from manta.workers.checkpoints.linear_reader import stack
from manta.workers.checkpoints.model_folder import load_model_config, resolve_model_folder
from manta.workers.checkpoints.shard import take_inputs
from manta.workers.decoders.decoder import Decoder
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.models.model_config import ModelError
from manta.workers.platforms.cpu import CpuPlatform
from manta.workers.torch_worker.loader import load_model
from manta.workers.torch_worker.tensor_check import check_tensors
from tests.checkpoints import checkpoint, reference_greedy
from tests.gguf_files import dequantized, write_gguf
from tests.pairs import in_turns
from tests.quantised_checkpoints import (
    AWQ_CONFIG,
    Quantise,
    awq,
    fp8,
    fp8_config,
    gptq,
    gptq_config,
    of_layers,
    quantised_pair,
)
from tests.workers.test_layer_kinds import folder_of
from tests.workers.test_quantised_formats import FORMATS, NUM_TOKENS, PROMPTS, greedy
from tests.workers.test_quantised_linear import logits_of, needs_kernels
from tests.workers.thread_group import ThreadGroup

SPLIT = {
    "W8A8": FORMATS["W8A8"],
    "W4A16, groups that ranks cut": FORMATS["W4A16, asymmetric"],
    "awq": FORMATS["awq"],
    "gptq": FORMATS["gptq, asymmetric"],
    "mxfp4": FORMATS["mxfp4"],
    "fp8 in blocks": FORMATS["fp8, blocks that end inside"],
}


def logits_of_ranks(
    folder: pathlib.Path, num_ranks: int, weights: str = "dense", exact: bool = False, **options: Any
) -> torch.Tensor:
    return logits_of_shares([folder] * num_ranks, weights, exact, **options)


def logits_of_shares(
    folders: Sequence[pathlib.Path], weights: str = "dense", exact: bool = False, **options: Any
) -> torch.Tensor:
    """Of ranks that each read a folder of their own. `options` are those of `load_model`."""

    def run(group: ThreadGroup) -> torch.Tensor:
        try:
            folder, platform = folders[group.rank], CpuPlatform(1, exact)
            options_of_rank = {**options, "group": group, "weights": weights, "exact": exact}
            model = load_model(folder, load_model_config(folder), "float32", platform, **options_of_rank)
            assert isinstance(model, Decoder)
            return logits_of(folder, model)
        except Exception:
            group.abort()
            raise

    with ThreadPoolExecutor(len(folders)) as pool:
        return next(iter(pool.map(run, ThreadGroup.of(len(folders)))))


def logits_alone(folder: pathlib.Path, weights: str = "dense", exact: bool = False) -> torch.Tensor:
    model = load_model(folder, load_model_config(folder), "float32", CpuPlatform(1, exact), weights=weights)
    assert isinstance(model, Decoder)
    return logits_of(folder, model)


@pytest.mark.parametrize(("name", "num_ranks"), in_turns(SPLIT, [2, 4]))
def test_ranks_compute_what_one_does(name: str, num_ranks: int, tmp_path: pathlib.Path) -> None:
    """Four ranks have 16 inputs of the attention's output each, and 48 of the MLP's, so groups of 32 and 64 are cut."""
    sizes = {"attention_bias": True, "mlp_bias": True, "intermediate_size": 192}
    quantised, dense = quantised_pair(checkpoint("llama", **sizes), tmp_path, SPLIT[name].quantise, SPLIT[name].config)
    expected = logits_alone(dense)
    torch.testing.assert_close(logits_alone(quantised), expected, atol=3e-4, rtol=1e-4)
    torch.testing.assert_close(logits_of_ranks(quantised, num_ranks), expected, atol=3e-4, rtol=1e-4)


EXACT = ("W8A8", "W4A16, act-order, asymmetric", "mxfp4")


@needs_kernels
@pytest.mark.parametrize("name", EXACT)
def test_exact_ranks_give_the_bits_of_one(name: str, tmp_path: pathlib.Path) -> None:
    """No rank divides the inputs of a linear, so act-order does not hinder."""
    sizes = {"attention_bias": True, "mlp_bias": True, "intermediate_size": 192}
    quantised, _ = quantised_pair(checkpoint("llama", **sizes), tmp_path, FORMATS[name].quantise, FORMATS[name].config)
    expected = logits_alone(quantised, "int8", exact=True)
    assert torch.equal(logits_of_ranks(quantised, 4, "int8", exact=True), expected)


MIXERS: dict[str, dict[str, int]] = {
    "kimi_linear": {},
    "granite_hybrid without experts": {},
    "jamba": {},
    "minimax": {},
    "qwen3_next": {"shared_expert_intermediate_size": 64},
    "olmo_hybrid": {},
    "gpt_oss": {},
}
"""Families whose ranks gather something of their own, and sizes that two ranks divide."""
OTHER_MIXERS: dict[str, dict[str, int]] = {
    "lfm2": {},
    "lfm2_moe": {},
    "qwen3_5": {},
    "falcon_h1": {},
    "falcon_h1 with norms": {},
    "nemotron_h": {"moe_shared_expert_intermediate_size": 64},
    "bamba": {},
    "mamba": {},
    "falcon_mamba": {},
    "mamba2": {},
    "minicpm3": {},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "mixtral": {},
    "olmo2": {},
    "cohere2": {},
    "gemma2": {},
    "llama4": {"intermediate_size_mlp": 96},
    "xlstm": {},
    "zamba2": {},
    "bailing_hybrid": {},
    "lara_mini": {"shared_expert_intermediate_size": 64},
    "lfm3": {},
    "recurrent_gemma": {"intermediate_size": 128},
    "qwen4_exp": {"shared_expert_intermediate_size": 64},
    "inkling": {},
    "inkling2": {},
    "inkling2_loop": {},
    "dots3_note": {"shared_experts_intermediate_size": 64},
    "glm5_next": {},
    "rwkv": {"intermediate_size": 128},
}


@needs_kernels
@pytest.mark.parametrize("kind", [*MIXERS, *(pytest.param(kind, marks=pytest.mark.prove) for kind in OTHER_MIXERS)])
def test_exact_ranks_split_every_mixer(kind: str) -> None:
    """Ranks gather experts, products of all channels, and rows whose norm is over the heads of all ranks."""
    folder = folder_of(kind, **(MIXERS | OTHER_MIXERS)[kind])
    expected = logits_alone(folder, "int8", exact=True)
    assert torch.equal(logits_of_ranks(folder, 2, "int8", exact=True), expected)


@needs_kernels
def test_exact_ranks_share_key_heads_under_one_norm() -> None:
    """Two ranks hold the same key head, whose squares are counted once."""
    folder = folder_of("olmo2", intermediate_size=128)
    expected = logits_alone(folder, "int8", exact=True)
    assert torch.equal(logits_of_ranks(folder, 4, "int8", exact=True), expected)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_divide_a_quantised_vocabulary_and_pad_it(num_ranks: int, tmp_path: pathlib.Path) -> None:
    original = checkpoint("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=2, vocab_size=321)
    path = write_gguf(original, tmp_path / "model.gguf", lambda name: "Q4_K" if "ffn" in name else "Q6_K")
    expected = logits_alone(dequantized(path, original, tmp_path / "dense"))
    folder = resolve_model_folder(str(path))
    torch.testing.assert_close(logits_of_ranks(folder, num_ranks), expected, atol=3e-4, rtol=1e-4)


def test_act_order_is_not_divided_over_ranks(tmp_path: pathlib.Path) -> None:
    quantised, _ = quantised_pair(
        checkpoint("llama"), tmp_path, of_layers(gptq(4, True, act_order=3)), gptq_config(4, True, act_order=True)
    )
    with pytest.raises(ModelError, match=r"the inputs of .*o_proj are in the order of act-order"):
        load_model(quantised, load_model_config(quantised), "float32", CpuPlatform(1), group=ThreadGroup.of(2)[0])


def _unlike_orders(name: str, weight: torch.Tensor) -> object:
    return None if name == "lm_head" else gptq(4, True, act_order=len(name))(weight)


def _some(*endings: str) -> Quantise:
    return lambda name, weight: awq(weight) if name.endswith(endings) else None


MIXED: dict[str, tuple[Quantise, dict, str | None]] = {
    "keys unquantised": (_some("q_proj", "v_proj", "up_proj"), AWQ_CONFIG, None),
    "layers named in the configuration": (
        lambda name, weight: None if "layers.1." in name or name == "lm_head" else awq(weight),
        AWQ_CONFIG | {"modules_to_not_convert": ["layers.1", "lm_head"]},
        "4 bits in groups of 32",
    ),
    "the head too": (lambda name, weight: awq(weight), AWQ_CONFIG, "4 bits in groups of 32"),
    "act-orders that differ": (_unlike_orders, gptq_config(4, True, act_order=True), "4 bits in groups of 32"),
    "bits that differ": (
        lambda name, weight: None if name == "lm_head" else gptq(8 if "v_proj" in name else 4, True)(weight),
        gptq_config(4, True) | {"dynamic": {r"+:.*\.v_proj": {"bits": 8}, r"-:lm_head": {}}},
        "8 bits in groups of 32",
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_layers_have_formats_of_their_own(name: str, tmp_path: pathlib.Path) -> None:
    quantise, config, kind = MIXED[name]
    quantised, dense = quantised_pair(checkpoint("llama"), tmp_path, quantise, config)
    assert greedy(quantised) == [reference_greedy(dense, prompt, NUM_TOKENS) for prompt in PROMPTS]
    kinds = check_tensors(quantised, load_model_config(quantised)).kinds
    assert kind in kinds if kind else not kinds


def test_groups_are_cut_where_a_share_ends() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(-8, 8, (3, 96), dtype=torch.int8, generator=generator)
    weight = QuantizedWeight(values, torch.rand(3, 3, generator=generator), 4, torch.rand(3, 3, generator=generator))
    whole = weight.dequantized(torch.float32)
    for start, stop in ((0, 48), (48, 96), (24, 72), (32, 64)):
        part = take_inputs("linear", weight, start, stop)
        assert isinstance(part, QuantizedWeight)
        assert torch.equal(part.dequantized(torch.float32), whole[:, start:stop])


def test_parts_with_unlike_groups_and_offsets_stay_integers() -> None:
    generator = torch.Generator().manual_seed(2)
    parts = [
        QuantizedWeight(
            torch.randint(-8, 8, (4, 64), dtype=torch.int8, generator=generator),
            torch.rand(4, 64 // size, generator=generator),
            bits,
            torch.rand(4, 64 // size, generator=generator) if has_offsets else None,
        )
        for size, bits, has_offsets in ((32, 4, True), (16, 8, False), (64, 4, False))
    ]
    stacked = stack(parts, torch.float32)
    assert isinstance(stacked, QuantizedWeight)
    assert (stacked.bits, stacked.group_size) == (8, 16)
    expected = torch.cat([part.dequantized(torch.float32) for part in parts])
    assert torch.equal(stacked.dequantized(torch.float32), expected)


def test_float8_scales_of_parts_are_their_own(tmp_path: pathlib.Path) -> None:
    """One scale for each of queries, keys and values, which are one linear here."""
    quantised, dense = quantised_pair(checkpoint("qwen2"), tmp_path, of_layers(fp8(None)), fp8_config(None))
    torch.testing.assert_close(logits_alone(quantised), logits_alone(dense), atol=1e-5, rtol=1e-5)

"""Each format of quantised checkpoints: greedy tokens are those of transformers with the weights that the numbers stand
for, through the public entry point; what ranks hold is exact, and what is damaged or unknown is refused by name.
"""

from __future__ import annotations

import dataclasses
import pathlib
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch

from manta import LLM, SamplingParams
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.kernels.quantized_reference import TorchQuantizedLinear
from manta.workers.kernels.weights import Linear, LinearWeight, WeightContent
from manta.workers.platforms.cpu import CpuPlatform
from manta.workers.platforms.cpu_linears import make_dense_linear, make_linear
from manta.workers.torch_worker.loader import load_model
from manta.workers.torch_worker.tensor_check import check_tensors
from tests.checkpoints import checkpoint, reference_greedy
from tests.pairs import in_turns
from tests.quantised_checkpoints import (
    AWQ_CONFIG,
    Quantise,
    awq,
    compressed,
    compressed_config,
    fp8,
    fp8_config,
    gptq,
    gptq_config,
    of_layers,
    packed_in_act_order,
    quantised_pair,
    scheme,
)

PROMPTS = ([5, 77, 130, 9, 41, 200, 18, 33, 250, 64], list(range(20, 60)), [300, 7])
NUM_TOKENS = 16


class Format(NamedTuple):
    quantise: Quantise
    config: dict[str, Any]
    kind: str | None
    """Form of the linears by `manta check`; None for floating-point weights."""


def _compressed(name: str, kind: str | None, ignore: tuple[str, ...] = ("lm_head",), **arguments: Any) -> Format:
    made = scheme(**arguments)
    return Format(of_layers(compressed(name, made)), compressed_config(name, made, ignore), kind)


_INT8_ACTIVATIONS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
FORMATS: dict[str, Format] = {
    "W8A8": _compressed(
        "int-quantized", "8 bits by output", num_bits=8, strategy="channel", activations=_INT8_ACTIVATIONS
    ),
    "W8A16, packed": _compressed("pack-quantized", "8 bits by output", num_bits=8, strategy="channel"),
    "W8A16, asymmetric": _compressed(
        "int-quantized", "8 bits by output", num_bits=8, strategy="channel", symmetric=False
    ),
    "W8A16, one scale": _compressed("int-quantized", "8 bits by output", num_bits=8, strategy="tensor"),
    "W4A16": _compressed("pack-quantized", "4 bits in groups of 32", num_bits=4, strategy="group", group_size=32),
    "W4A16, asymmetric": _compressed(
        "pack-quantized", "4 bits in groups of 64", num_bits=4, strategy="group", group_size=64, symmetric=False
    ),
    "W4A16, by output": _compressed(
        "pack-quantized", "4 bits by output", num_bits=4, strategy="channel", symmetric=False
    ),
    "W4A16, act-order, asymmetric": Format(
        of_layers(packed_in_act_order),
        compressed_config("pack-quantized", scheme(num_bits=4, strategy="group", group_size=32, symmetric=False)),
        "4 bits in groups of 32",
    ),
    "float8, by output": _compressed("float-quantized", None, num_bits=8, type="float", strategy="channel"),
    "float8, one scale": _compressed("float-quantized", None, num_bits=8, type="float", strategy="tensor"),
    "float8, blocks": _compressed(
        "float-quantized", None, num_bits=8, type="float", strategy="block", block_structure=[32, 64]
    ),
    "mxfp4": _compressed(
        "mxfp4-pack-quantized",
        "4 bits in groups of 32",
        num_bits=4,
        type="float",
        strategy="group",
        group_size=32,
        scale_dtype=torch.uint8,
    ),
    "fp8": Format(of_layers(fp8(None)), fp8_config(None), None),
    "fp8, blocks that end inside": Format(of_layers(fp8((48, 48))), fp8_config((48, 48)), None),
    "gptq": Format(of_layers(gptq(4, True)), gptq_config(4, True), "4 bits in groups of 32"),
    "gptq, asymmetric": Format(of_layers(gptq(4, False)), gptq_config(4, False), "4 bits in groups of 32"),
    "gptq, act-order": Format(of_layers(gptq(4, True, 3)), gptq_config(4, True, True), "4 bits in groups of 32"),
    "gptq, 8 bits, version 2": Format(
        of_layers(gptq(8, False, 5, version=2)), gptq_config(8, False, True, version=2), "8 bits in groups of 32"
    ),
    "awq": Format(of_layers(awq), AWQ_CONFIG, "4 bits in groups of 32"),
}
FAMILIES = ("llama", "qwen2", "qwen3")
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3}


def greedy(folder: pathlib.Path, weights: str = "dense", **options: Any) -> list[list[int]]:
    """`weights` is the option of this name: by default activations are not rounded, as in transformers."""
    llm = LLM(str(folder), dtype="float32", num_threads=1, kv_cache_bytes="4MiB", weights=weights, **options)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(list(PROMPTS), params, use_tqdm=False)]


def expected_of(dense: pathlib.Path) -> list[list[int]]:
    """transformers' tokens, which vary enough that an error shows."""
    expected = [reference_greedy(dense, prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert len({token for tokens in expected for token in tokens}) > 6
    return expected


@pytest.mark.few(6)
@pytest.mark.parametrize(("name", "family"), in_turns(FORMATS, FAMILIES))
def test_greedy_tokens_are_those_of_the_dequantised_weights(name: str, family: str, tmp_path: pathlib.Path) -> None:
    format_ = FORMATS[name]
    folder = checkpoint(family, **SIZES)
    quantised, dense = quantised_pair(folder, tmp_path, format_.quantise, format_.config)
    assert greedy(quantised) == expected_of(dense)


@pytest.mark.parametrize("name", ["gptq, asymmetric", "awq"])
def test_the_last_group_may_be_smaller(name: str, tmp_path: pathlib.Path) -> None:
    """80 inputs are two groups of 32 and one of 16: five of 16 that share scales are the same."""
    folder = checkpoint("llama", intermediate_size=80)
    quantised, dense = quantised_pair(folder, tmp_path, FORMATS[name].quantise, FORMATS[name].config)
    assert greedy(quantised) == expected_of(dense)
    assert check_tensors(quantised, load_model_config(quantised)).kinds["4 bits in groups of 16"] == 3


OFFSETS = ("W4A16, by output", "gptq, 8 bits, version 2", "awq")


class Recorder(CpuPlatform):
    """Keeps what the loader hands to a platform."""

    def __init__(self) -> None:
        super().__init__(1)
        self.linears: list[LinearWeight] = []

    def make_linear(self, weight: LinearWeight) -> Linear:  # type: ignore[override]
        self.linears.append(dataclasses.replace(weight, weight=weight.weight.clone()))
        return make_dense_linear(weight)

    def shared_linears(self, content: WeightContent) -> nullcontext[None]:  # type: ignore[override]
        return nullcontext()


@pytest.mark.parametrize("name", FORMATS)
def test_kernels_equal_torch_on_the_same_integers(name: str, tmp_path: pathlib.Path) -> None:
    """Bit for bit, with activations that are rounded as the format asks."""
    folder, _ = quantised_pair(checkpoint("qwen2", **SIZES), tmp_path, FORMATS[name].quantise, FORMATS[name].config)
    platform = Recorder()
    load_model(folder, load_model_config(folder), "float32", platform)
    for linear in platform.linears:
        if linear.quantized is None:
            continue
        x = torch.randn(5, linear.weight.shape[1], generator=torch.Generator().manual_seed(1))
        expected = TorchQuantizedLinear(linear.quantized, linear.bias, linear.gated).forward(x)
        assert torch.equal(make_linear(linear).forward(x), expected)


@pytest.mark.few(7)
@pytest.mark.parametrize("name", FORMATS)
def test_a_platform_gets_integers_in_their_range(name: str, tmp_path: pathlib.Path) -> None:
    """And the weight that they stand for is the tool's, to the last bits of float32."""
    format_ = FORMATS[name]
    folder, dense = quantised_pair(checkpoint("llama", **SIZES), tmp_path, format_.quantise, format_.config)
    config, platform, expected = load_model_config(folder), Recorder(), Recorder()
    load_model(folder, config, "float32", platform)
    load_model(dense, load_model_config(dense), "float32", expected)
    kinds = check_tensors(folder, config).kinds
    assert kinds == ({} if format_.kind is None else {format_.kind: 4 * config.num_layers})
    for linear, plain in zip(platform.linears, expected.linears, strict=True):
        weight, shape = linear.quantized, (plain.weight.shape[0], plain.weight.shape[1])
        assert linear.weight.shape == shape
        if weight is None:
            assert format_.kind is None or linear.name == "lm_head"
            continue
        assert linear.weight.is_meta
        assert (weight.values.dtype, weight.scales.dtype) == (torch.int8, torch.float32)
        assert weight.values.shape == shape
        assert weight.values.is_contiguous()
        assert weight.scales.is_contiguous()
        least, most = -(1 << (weight.bits - 1)), (1 << (weight.bits - 1)) - 1
        assert least <= int(weight.values.min())
        assert int(weight.values.max()) <= most
        assert weight.has_int8_activations == (name == "W8A8")
        assert (weight.offsets is not None) == ("asymmetric" in name or name in OFFSETS)
        assert (weight.input_order is not None) == ("act-order" in name or "version 2" in name)
        torch.testing.assert_close(weight.dequantized(torch.float32), plain.weight, atol=1e-6, rtol=1e-5)

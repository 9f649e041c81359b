"""DeepSeek-V4's published files: linears in E4M3 with a scale for each block, and experts in MXFP4. Their scales are
powers of two. The files are written here by a plain encoder in numpy, and transformers computes with the numbers that
they stand for.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.models.model_config import ModelError
from manta.workers.platforms import choose_platform
from manta.workers.torch_worker.loader import load_model
from manta.workers.torch_worker.tensor_check import check_tensors
from tests.checkpoints import reference_logits
from tests.workers.test_layer_kinds import folder_of, rewritten
from tests.workers.test_models import Cache, random_tokens

V4, BLOCK, GROUP = "deepseek_v4", 48, 32
"""`BLOCK` divides no width, so the last blocks are smaller."""
EXPERT = re.compile(r"\.ffn\.experts\.\d+\.w[123]\.weight$")
LINEAR = re.compile(r"\.(attn\.w[qko]\w*|attn\.indexer\.wq_b|shared_experts\.w[123])\.weight$")
QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
BYTES = np.arange(127)
E4M3 = np.where(BYTES < 8, BYTES / 8 * 2.0**-6, (1 + BYTES % 8 / 8) * 2.0 ** (BYTES // 8 - 7))
"""The numbers of the bytes without a sign but the last, which is none."""


def codes(numbers: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The places of the nearest numbers in an ascending table, without their signs."""
    middles = (table[1:] + table[:-1]) / 2
    return np.searchsorted(middles, np.abs(numbers)).astype(np.uint8)


def exponents(most: np.ndarray, largest: float) -> np.ndarray:
    """The least exponents of powers of two by which the numbers `most` are at most `largest`, with a bias of 127."""
    return np.asarray(np.ceil(np.log2(most / largest)) + 127).astype(np.uint8)


Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The tensors of a linear by suffix, and what they stand for."""


def fp8(weight: np.ndarray, block: int = BLOCK) -> Stored:
    rows, columns = (np.arange(size) // block for size in weight.shape)
    most = np.zeros((rows[-1] + 1, columns[-1] + 1))
    np.maximum.at(most, (rows[:, None], columns), np.abs(weight))
    scales = exponents(most, 448)
    powers = 2.0 ** (scales[rows][:, columns].astype(int) - 127)
    found = codes(weight / powers, E4M3)
    signs = np.signbit(weight)
    stored = torch.from_numpy(found | signs.astype(np.uint8) << 7).view(torch.float8_e4m3fn)
    meant = E4M3[found] * np.where(signs, -1, 1) * powers
    return {"weight": stored, "scale": torch.from_numpy(scales).view(torch.float8_e8m0fnu)}, as_floats(meant)


def fp4(weight: np.ndarray) -> Stored:
    grouped = weight.reshape(len(weight), -1, GROUP)
    scales = exponents(np.abs(grouped).max(-1), 6)
    powers = 2.0 ** (scales.astype(int) - 127)[..., None]
    found, signs = codes(grouped / powers, E2M1), np.signbit(grouped)
    pairs = (found | signs.astype(np.uint8) << 3).reshape(len(weight), -1, 2)
    packed = torch.from_numpy(pairs[..., 0] | pairs[..., 1] << 4).view(torch.int8)
    meant = (E2M1[found] * np.where(signs, -1, 1) * powers).reshape(weight.shape)
    return {"weight": packed, "scale": torch.from_numpy(scales).view(torch.float8_e8m0fnu)}, as_floats(meant)


def as_floats(numbers: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(numbers.astype(np.float32))


def published(
    to: pathlib.Path, of_experts: Callable[[np.ndarray], Stored], scale_dtype: torch.dtype | None = None
) -> tuple[pathlib.Path, pathlib.Path]:
    """A checkpoint as it is published, and one of the numbers that it stands for. With a `scale_dtype` its scales are
    numbers and no exponents.
    """
    meant: dict[str, torch.Tensor] = {}

    def quantised(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        quantise = of_experts if EXPERT.search(name) else fp8 if LINEAR.search(name) else None
        if quantise is None:
            return {name: tensor}
        tensors, meant[name] = quantise(tensor.double().numpy())
        if scale_dtype is not None:
            tensors["scale"] = tensors["scale"].to(scale_dtype)
        return {f"{name.removesuffix('weight')}{suffix}": each for suffix, each in tensors.items()}

    stored = rewritten(folder_of(V4), to / "stored", quantised)
    assert len(meant) > 4 * 8 * 3
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))
    return stored, rewritten(folder_of(V4), to / "meant", lambda name, each: {name: meant.get(name, each)})


def logits_of(folder: pathlib.Path, tokens: list[int], weights: str) -> torch.Tensor:
    model: Any = load_model(folder, load_model_config(folder), "float32", choose_platform("cpu", 1), weights=weights)
    return Cache(folder, model=model).run((0, tokens))[0]


@pytest.mark.few(2)
@pytest.mark.parametrize(("of_experts", "scale_dtype"), [(fp4, None), (fp8, None), (fp8, torch.float32)])
def test_logits_are_those_of_the_numbers_that_published_files_stand_for(
    of_experts: Callable[[np.ndarray], Stored], scale_dtype: torch.dtype | None, tmp_path: pathlib.Path
) -> None:
    stored, meant = published(tmp_path, of_experts, scale_dtype)
    tokens = random_tokens(60)
    expected, others = reference_logits(meant, tokens), reference_logits(folder_of(V4), tokens)
    assert not torch.equal(expected.argmax(-1), others.argmax(-1)), "a plain reader would do"
    logits = logits_of(stored, tokens, "dense")
    assert (logits - expected).abs().max() <= 1e-4 * (expected.max() - expected.min())


def test_experts_in_four_bits_stay_in_four_bits(tmp_path: pathlib.Path) -> None:
    """Other linears become plain ones, or integers if the option `weights` says so."""
    stored, _ = published(tmp_path, fp4)
    config = load_model_config(stored)
    tally = check_tensors(stored, config)
    assert tally.kinds == {"4 bits in groups of 32": 4 * 8 * 2}
    assert tally.stored is not None
    words = tally.stored.describe_quantized()
    assert words.startswith("96 matrices of 4-bit floats in groups of 32, ")
    assert f"8-bit floats in blocks of {BLOCK} x {BLOCK}" in words
    tokens = random_tokens(60)
    expected = logits_of(stored, tokens, "dense")
    for weights, most in (("auto", 0.02), ("int8", 0.1)):
        logits = logits_of(stored, tokens, weights)
        assert (logits - expected).abs().max() <= most * (expected.max() - expected.min()), weights


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("suffix", "change", "words"),
    [
        ("w1.scale", None, r"experts\.0\.gate_proj\.weight_scale_inv of shape \[96, 2\] is missing"),
        ("w1.scale", lambda each: each[:, :1], r"gate_proj\.weight_scale_inv has shape \[96, 1\]"),
        ("w1.scale", lambda each: each.float(), r"gate_proj\.weight_scale_inv is F32; only "),
        ("w2.weight", lambda each: each[:, :8], r"down_proj\.weight has shape \[64, 8\]"),
    ],
)
def test_damaged_experts_are_refused_by_their_tensor(
    suffix: str, change: Callable[[torch.Tensor], torch.Tensor] | None, words: str, tmp_path: pathlib.Path
) -> None:
    stored, _ = published(tmp_path, fp4)

    def damaged(name: str, each: torch.Tensor) -> dict[str, torch.Tensor]:
        if not name.endswith(f"layers.1.ffn.experts.0.{suffix}"):
            return {name: each}
        return {} if change is None else {name: change(each).contiguous()}

    folder = rewritten(stored, tmp_path / "damaged", damaged)
    with pytest.raises(ModelError, match=words):
        check_tensors(folder, load_model_config(folder))

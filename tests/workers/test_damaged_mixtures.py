"""What is damaged in a mixture of experts, in any form of its checkpoint, is named before a weight is used."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.models.model_config import ModelError
from manta.workers.torch_worker.tensor_check import check_tensors
from tests.workers import large_mixtures
from tests.workers.large_mixtures import Sizes, Tensors
from tests.workers.test_loading_memory import AWQ, FP8

SIZES = Sizes(layers=1, experts=3, hidden=64, inner=128)
ONE, ALL = "model.layers.0.mlp.experts.1", "model.layers.0.mlp.experts"

Made = tuple[dict[str, Any], Tensors]
MAKERS: dict[str, Callable[[], Made]] = {
    "one by one": lambda: large_mixtures.qwen3_moe(SIZES),
    "FP8": lambda: large_mixtures.qwen3_moe(SIZES, large_mixtures.in_fp8_blocks, FP8),
    "AWQ": lambda: large_mixtures.qwen3_moe(SIZES, large_mixtures.in_awq, AWQ),
    "in one tensor": lambda: large_mixtures.gpt_oss(SIZES, is_mxfp4=False),
    "MXFP4": lambda: large_mixtures.gpt_oss(SIZES, is_mxfp4=True),
}


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


DAMAGES: dict[str, tuple[str, dict[str, torch.Tensor | None], str]] = {
    "an expert's linear is missing": (
        "one by one",
        {f"{ONE}.up_proj.weight": None},
        rf"{ONE}\.up_proj\.weight .*missing",
    ),
    "an expert of another width": (
        "one by one",
        {f"{ONE}.down_proj.weight": zeros(64, 96)},
        rf"{ONE}\.down_proj\.weight has shape \[64, 96\].*\[64, 128\]",
    ),
    "one expert too many": (
        "one by one",
        {f"{ALL}.3.up_proj.weight": zeros(128, 64)},
        rf"holds 1 tensors that its architecture does not have: {ALL}\.3\.up_proj\.weight",
    ),
    "a router of other experts": (
        "one by one",
        {"model.layers.0.mlp.gate.weight": zeros(4, 64)},
        r"mlp\.gate\.weight has shape \[4, 64\].*\[3, 64\]",
    ),
    "integers in place of an expert": (
        "one by one",
        {f"{ONE}.gate_proj.weight": zeros(128, 64, dtype=torch.int8)},
        rf"{ONE}\.gate_proj\.weight is I8",
    ),
    "scales of other blocks": (
        "FP8",
        {f"{ONE}.up_proj.weight_scale_inv": torch.ones(2, 2)},
        rf"{ONE}\.up_proj\.weight_scale_inv has shape \[2, 2\].*\[1, 1\]",
    ),
    "an expert without scales": (
        "FP8",
        {f"{ONE}.up_proj.weight_scale_inv": None},
        rf"{ONE}\.up_proj\.weight_scale.*missing",
    ),
    "an expert without zero points": ("AWQ", {f"{ONE}.up_proj.qzeros": None}, rf"{ONE}\.up_proj\.qzeros .*missing"),
    "an expert of other groups": (
        "AWQ",
        {f"{ONE}.up_proj.scales": zeros(4, 128, dtype=torch.float16)},
        rf"{ONE}\.up_proj\.scales has shape \[4, 128\].*\[2, 128\]",
    ),
    "experts of another number": (
        "in one tensor",
        {f"{ALL}.gate_up_proj": zeros(2, 64, 256)},
        rf"{ALL}\.gate_up_proj has shape \[2, 64, 256\].*\[3, 64, 256\]",
    ),
    "experts without biases": ("in one tensor", {f"{ALL}.down_proj_bias": None}, rf"{ALL}\.down_proj_bias .*missing"),
    "blocks without scales": ("MXFP4", {f"{ALL}.gate_up_proj_scales": None}, rf"{ALL}\.gate_up_proj_scales .*missing"),
    "blocks of other groups": (
        "MXFP4",
        {f"{ALL}.down_proj_blocks": zeros(3, 64, 2, 16, dtype=torch.uint8)},
        rf"{ALL}\.down_proj_blocks has shape \[3, 64, 2, 16\].*\[3, 64, 4, 16\]",
    ),
    "scales of another number of experts": (
        "MXFP4",
        {f"{ALL}.down_proj_scales": zeros(2, 64, 4, dtype=torch.uint8)},
        rf"{ALL}\.down_proj_scales has shape \[2, 64, 4\].*\[3, 64, 4\]",
    ),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_mixture_is_named(name: str, tmp_path: pathlib.Path) -> None:
    kind, changes, words = DAMAGES[name]
    config, tensors = MAKERS[kind]()
    whole = large_mixtures.write(tmp_path / "whole", config, tensors)
    check_tensors(whole, load_model_config(whole))
    changed = {key: each for key, each in (tensors | changes).items() if each is not None}
    damaged = large_mixtures.write(tmp_path / "damaged", config, changed)
    with pytest.raises(ModelError, match=words):
        check_tensors(damaged, load_model_config(damaged))

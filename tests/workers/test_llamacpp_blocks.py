"""Files whose blocks llama.cpp's own quantiser has made give the tokens of what the package `gguf` reads in them."""

from __future__ import annotations

import functools
import pathlib
import tempfile

import gguf
import numpy as np
import pytest
import torch
import transformers

from tests.checkpoints import make_tokenizer, randomise
from tests.converted_gguf import convert
from tests.llamacpp import quantised_by_llamacpp
from tests.workers.test_gguf_architectures import EXPERTS, SIZES
from tests.workers.test_quantised_formats import greedy

pytest.importorskip("xllamacpp", reason="no wheel for this platform")

KINDS = (
    *("Q4_K", "Q6_K", "IQ4_XS", "MXFP4", "NVFP4", "Q2_K", "Q3_K", "Q5_K", "IQ4_NL", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q8_0", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0"),
)
ERRORS = {"Q8_0": 0.01, "Q6_K": 0.03, "Q5_K": 0.05, "Q5_0": 0.06, "Q5_1": 0.06}
"""The largest relative errors of normally distributed weights, of types of more than 4.5 bits."""
WIDE = {"hidden_size": 256, "num_hidden_layers": 2, "moe_intermediate_size": 256, "num_experts": 4}
_root = tempfile.TemporaryDirectory(prefix="manta-blocks-")


@functools.cache
def mixture() -> pathlib.Path:
    """Returns a mixture of experts whose linears have blocks of 256 inputs."""
    config = transformers.Qwen3MoeConfig(**SIZES | EXPERTS | WIDE | {"norm_topk_prob": True}, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, 0)
    folder = pathlib.Path(_root.name)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


@pytest.mark.prove
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_numbers_in_its_blocks(kind: str, tmp_path: pathlib.Path) -> None:
    def kind_of(name: str) -> str:
        is_linear = name.endswith(("_exps.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight"))
        return kind if is_linear or name in ("token_embd.weight", "output.weight") else "F32"

    rounded, dense = (
        convert(mixture(), tmp_path / f"{is_dense}.gguf", kind_of, is_dense=is_dense, quantise=quantised_by_llamacpp)
        for is_dense in (False, True)
    )
    assert {each.tensor_type.name for each in gguf.GGUFReader(rounded).tensors} == {kind, "F32"}
    assert greedy(rounded) == greedy(dense)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ERRORS)
def test_the_quantiser_is_llamacpps(kind: str) -> None:
    """Its blocks stand for numbers near the weights."""
    weight = np.random.default_rng(0).standard_normal((8, 512), np.float32)
    number = getattr(gguf.GGMLQuantizationType, kind)
    found = gguf.dequantize(quantised_by_llamacpp(weight, kind), number)
    assert np.linalg.norm(found - weight) < ERRORS[kind] * np.linalg.norm(weight)

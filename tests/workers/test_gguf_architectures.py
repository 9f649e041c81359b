"""Every architecture of GGUF files that is served gives the tokens of the checkpoint that was converted, by
transformers, and llama.cpp reads the same file and gives the same tokens.
"""

from __future__ import annotations

import functools
import pathlib
import tempfile
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from manta.workers.checkpoints.gguf_architectures import ARCHITECTURES
from manta.workers.checkpoints.gguf_file import gguf_folder
from manta.workers.checkpoints.model_folder import resolve_model_folder
from manta.workers.models.model_config import ModelError
from manta.workers.models.raw_config import ConfigError
from tests import converted_gguf, gguf_files
from tests.checkpoints import make_tokenizer, randomise
from tests.converted_gguf import convert
from tests.llamacpp import greedy_of_llamacpp
from tests.workers.test_layer_kinds import set_buffers
from tests.workers.test_quantised_formats import PROMPTS, expected_of, greedy

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


class Case(NamedTuple):
    config: str
    options: dict[str, Any] = {}


CASES = {
    "cohere2": Case("Cohere2Config", {"sliding_window": 24, "logit_scale": 0.5}),
    "gemma2": Case("Gemma2Config", {"sliding_window": 24, "query_pre_attn_scalar": 16}),
    "gemma3": Case("Gemma3TextConfig", {"sliding_window": 24, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}),
    "glm4": Case("Glm4Config", {"attention_bias": True}),
    "glm4moe": Case(
        "Glm4MoeConfig",
        {
            **EXPERTS,
            "n_routed_experts": 6,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "gpt-oss": Case(
        "GptOssConfig",
        {"sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": YARN},
    ),
    "granite": Case(
        "GraniteConfig",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.5,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
        },
    ),
    "lfm2": Case(
        "Lfm2Config",
        {
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2moe": Case(
        "Lfm2MoeConfig",
        {
            **EXPERTS,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "conv_L_cache": 4,
            "num_dense_layers": 1,
            "num_experts": 6,
        },
    ),
    "mixtral": Case("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": Case("Olmo2Config"),
    "phi3": Case("Phi3Config", {"sliding_window": None}),
    "qwen3moe": Case("Qwen3MoeConfig", {**EXPERTS, "num_experts": 6, "norm_topk_prob": True}),
    "seed_oss": Case("SeedOssConfig"),
    "smollm3": Case("SmolLM3Config"),
}
ENDS = (0, 2)
"""Tokens at which llama.cpp ends."""
NOT_LLAMACPPS = {
    "gpt-oss": "llama.cpp rounds the borders of YaRN",
}
"""Cases whose tokens llama.cpp does not share, and why."""
_root = tempfile.TemporaryDirectory(prefix="manta-gguf-")


@functools.cache
def original(name: str) -> pathlib.Path:
    """Returns a checkpoint of a case, made once a process."""
    case = CASES[name]
    config = getattr(transformers, case.config)(**SIZES | case.options, dtype="float32")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, 0)
    set_buffers(model)
    folder = pathlib.Path(_root.name) / name
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


@functools.cache
def converted(name: str) -> pathlib.Path:
    return convert(original(name), pathlib.Path(_root.name) / f"{name}.gguf")


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_those_of_the_converted_checkpoint(name: str) -> None:
    assert greedy(converted(name)) == expected_of(original(name))


@pytest.mark.parametrize(("name", "kind"), [("qwen3moe", "Q8_0"), ("gpt-oss", "MXFP4"), ("mixtral", "Q4_0")])
def test_rounded_experts_are_the_numbers_that_their_blocks_stand_for(
    name: str, kind: str, tmp_path: pathlib.Path
) -> None:
    def kind_of(tensor: str) -> str:
        return kind if tensor.endswith("_exps.weight") else "F32"

    rounded = convert(original(name), tmp_path / "rounded.gguf", kind_of)
    dense = convert(original(name), tmp_path / "dense.gguf", kind_of, is_dense=True)
    tokens = greedy(rounded)
    assert tokens == greedy(dense)
    assert tokens != greedy(converted(name))


@pytest.mark.parametrize("name", sorted(CASES.keys() - NOT_LLAMACPPS))
def test_llamacpp_gives_the_same_tokens(name: str) -> None:
    pytest.importorskip("xllamacpp", reason="no wheel for this platform")
    for prompt, expected in zip(PROMPTS, expected_of(original(name)), strict=True):
        found = greedy_of_llamacpp(converted(name), list(prompt), len(expected))
        assert found == expected[: len(found)]
        assert len(found) == len(expected) or found[-1] in ENDS


def test_every_architecture_has_a_case() -> None:
    tried = {converted_gguf.ARCHITECTURES[name] for name in converted_gguf.ARCHITECTURES}
    assert tried | set(gguf_files.ARCHITECTURES.values()) | {"mistral"} == set(ARCHITECTURES)
    assert len(CASES) == len(converted_gguf.ARCHITECTURES)


def split(folder: pathlib.Path, name: str = "olmo2") -> list[pathlib.Path]:
    """Writes a model as several files. The first holds metadata alone."""
    folder.mkdir(exist_ok=True)
    convert(original(name), folder / f"{name}.gguf", tensors_each=20)
    return sorted(folder.glob(f"{name}-*.gguf"))


def test_a_split_model_is_served_by_any_of_its_files_or_its_folder(tmp_path: pathlib.Path) -> None:
    parts = split(tmp_path)
    assert len(parts) > 2
    folders = {resolve_model_folder(str(path)) for path in (*parts, tmp_path)}
    assert len(folders) == 1
    assert greedy(parts[1]) == expected_of(original("olmo2"))


def test_parts_that_are_missing_or_foreign_are_named(tmp_path: pathlib.Path) -> None:
    first, second, *_, last = split(tmp_path)
    kept = last.read_bytes()
    last.unlink()
    with pytest.raises(ModelError, match=f"{last.name} is missing"):
        gguf_folder(first)
    last.write_bytes(second.read_bytes())
    with pytest.raises(ModelError, match=r"split\.no"):
        gguf_folder(first)
    last.write_bytes(kept[:-64])
    with pytest.raises(ModelError, match=f"{last.name} is truncated"):
        gguf_folder(first)
    last.write_bytes(kept)
    first.rename(tmp_path / "whole.gguf")
    with pytest.raises(ModelError, match="its name says 1; give it the name that ends in -00001-of-"):
        gguf_folder(tmp_path / "whole.gguf")


def test_an_unknown_architecture_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    damaged = tmp_path / "model.gguf"
    damaged.write_bytes(converted("olmo2").read_bytes().replace(b"olmo2", b"olmo9"))
    with pytest.raises(ConfigError) as raised:
        gguf_folder(damaged)
    assert (raised.value.key, raised.value.value) == ("general.architecture", "olmo9")

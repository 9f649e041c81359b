"""Families whose layers do more than Llama's: logits and tokens against transformers, with and without each feature.

Each is a tiny random model whose windows and original contexts are shorter than the sequence, and whose caps, scales
and factors are far from neutral. Without a feature the same weights give other tokens, so that no test passes by it.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from manta.workers.checkpoints.model_folder import load_model_config
from tests.checkpoints import on_one_thread, randomise, reference_greedy, reference_logits
from tests.workers.cpu_forms import COMPILED, TORCH, in_form
from tests.workers.test_models import Cache, random_tokens

NUM_TOKENS = 120
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = ROPE | {"rope_type": "linear", "factor": 4.0}
LONG_ROPE = ROPE | {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * index for index in range(8)],
    "long_factor": [1.5 + 0.5 * index for index in range(8)],
    "original_max_position_embeddings": 64,
}


class Case(NamedTuple):
    config: str
    """transformers' class of the configuration."""
    options: dict[str, Any] = {}
    without: dict[str, dict[str, Any]] = {}
    """For each feature, the keys of `config.json` that leave it out."""


NO_WINDOW = {"window": {"sliding_window": 4096}}
CASES: dict[str, Case] = {
    "gemma2": Case(
        "Gemma2Config",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 2,
        },
        {
            "attention's cap": {"attn_logit_softcapping": None},
            "query scale": {"query_pre_attn_scalar": 16},
            "layers with windows": {"layer_types": ALTERNATING[1:] + ALTERNATING[:1]},
        }
        | NO_WINDOW,
    ),
    "gemma3": Case(
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 9,
            "layer_types": ALTERNATING,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": ROPE | {"rope_theta": 100.0}},
        },
        {
            "local rope": {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LINEAR}},
            "scaled global rope": {"rope_parameters": {"sliding_attention": ROPE | {"rope_theta": 100.0}}},
            "query scale": {"query_pre_attn_scalar": 256},
        }
        | NO_WINDOW,
    ),
    "olmo2": Case("Olmo2Config"),
    "olmo3": Case(
        "Olmo3Config",
        {"sliding_window": 24, "rope_parameters": {"full_attention": YARN, "sliding_attention": ROPE}},
        {"scaled rope in full layers": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}}}
        | NO_WINDOW,
    ),
    "smollm3": Case(
        "SmolLM3Config",
        {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": True, "sliding_window": 24, "rope_parameters": ROPE},
        {"layers without positions": {"no_rope_layers": [1, 1, 1, 1]}} | NO_WINDOW,
    ),
    "granite": Case(
        "GraniteConfig",
        {
            "logits_scaling": 3.0,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 8.0,
            "attention_multiplier": 0.6,
            "attention_bias": True,
            "mlp_bias": True,
        },
        {
            "residual multiplier": {"residual_multiplier": 1.0},
            "embedding multiplier": {"embedding_multiplier": 1.0},
            "attention multiplier": {"attention_multiplier": 0.25},
        },
    ),
    "glm": Case("GlmConfig", {"head_dim": 16}),
    "glm4": Case(
        "Glm4Config", {"head_dim": 16}, {"partial rotation": {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}}
    ),
    "phi3": Case("Phi3Config", {"sliding_window": 24}, NO_WINDOW),
    "phi3, longrope": Case(
        "Phi3Config",
        {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 64},
        {"long factors": {"rope_parameters": LONG_ROPE | {"long_factor": LONG_ROPE["short_factor"]}}},
    ),
    "phi4, partial rotation": Case(
        "Phi3Config",
        {"rope_parameters": ROPE | {"partial_rotary_factor": 0.75}},
        {"partial rotation": {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}},
    ),
    "cohere2": Case(
        "Cohere2Config",
        {"sliding_window": 24, "layer_types": ALTERNATING, "logit_scale": 0.5},
        {"layers without positions": {"layer_types": ["sliding_attention"] * 4, "sliding_window": 4096}} | NO_WINDOW,
    ),
}
SCALES_OF_LOGITS = {
    "gemma2": {"final_logit_softcapping": None},
    "granite": {"logits_scaling": 1.0},
    "cohere2": {"logit_scale": 1.0},
}
"""Features that change logits and no greedy token."""
FEATURES = [(name, feature) for name, case in CASES.items() for feature in case.without]
_root = tempfile.TemporaryDirectory(prefix="manta-layer-kinds-")
_made: dict[str, pathlib.Path] = {}


def folder_of(name: str) -> pathlib.Path:
    """A checkpoint of a case, made once a process."""
    if name not in _made:
        case = CASES[name]
        config = getattr(transformers, case.config)(**SIZES | case.options, dtype="float32")
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        randomise(model, 0)
        folder = pathlib.Path(_root.name) / name.replace(", ", "-")
        model.save_pretrained(folder)
        _made[name] = folder
    return _made[name]


def changed(folder: pathlib.Path, to: pathlib.Path, keys: dict[str, Any]) -> pathlib.Path:
    """A copy of a checkpoint with other values in its configuration."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | keys))
    return to


def logits_of(folder: pathlib.Path, tokens: list[int]) -> torch.Tensor:
    """Logits of chunks of a prompt and of decodes."""
    cache = Cache(folder)
    pieces = [tokens[:33], tokens[33:40], tokens[40:90], *([token] for token in tokens[90:])]
    with torch.inference_mode(), on_one_thread():
        return torch.cat([cache.run((0, piece))[0] for piece in pieces])


@pytest.fixture(
    scope="module", params=[COMPILED[0], TORCH, *(pytest.param(each, marks=pytest.mark.prove) for each in COMPILED[1:])]
)
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    with in_form(request.param):
        yield request.param


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(form: str, name: str) -> None:
    folder, tokens = folder_of(name), random_tokens(NUM_TOKENS)
    assert load_model_config(folder).native
    expected = reference_logits(folder, tokens)
    logits = logits_of(folder, tokens)
    assert (logits - expected).abs().max() <= 1e-4 * (expected.max() - expected.min())
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(("name", "feature"), FEATURES)
def test_without_a_feature_the_tokens_differ(name: str, feature: str, tmp_path: pathlib.Path) -> None:
    folder, tokens = folder_of(name), random_tokens(NUM_TOKENS)
    without = changed(folder, tmp_path / "without", CASES[name].without[feature])
    assert not torch.equal(logits_of(without, tokens).argmax(-1), reference_logits(folder, tokens).argmax(-1))


@pytest.mark.parametrize("name", SCALES_OF_LOGITS)
def test_without_their_scale_the_logits_differ(name: str, tmp_path: pathlib.Path) -> None:
    folder, tokens = folder_of(name), random_tokens(40)
    without = changed(folder, tmp_path / "without", SCALES_OF_LOGITS[name])
    difference = (Cache(without).run((0, tokens))[0] - reference_logits(folder, tokens)).abs().max()
    assert difference > 0.1 * reference_logits(folder, tokens).abs().max()


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    folder, prompt = folder_of(name), random_tokens(70, seed=1)
    cache, output = Cache(folder), []
    with torch.inference_mode(), on_one_thread():
        logits = cache.run((0, prompt))[0]
        for _ in range(20):
            output.append(int(logits[-1].argmax()))
            logits = cache.run((0, output[-1:]))[0]
    assert output == reference_greedy(folder, prompt, 20)

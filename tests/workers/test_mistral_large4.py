"""Mistral Large 4's text: logits of transformers in chunks and decodes, and without each of its tensors others.

Some layers have no positions, and some read the latent vectors of earlier ones, with and without an indexer.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.models.raw_config import ConfigError
from manta.workers.torch_worker.tensor_check import check_tensors
from tests.checkpoints import on_one_thread
from tests.families.tiny import make_model, tiny_config
from tests.workers.test_layer_kinds import changed, logits_of, rewritten
from tests.workers.test_models import random_tokens

NUM_TOKENS = 120


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, Any]:
    """A checkpoint with the names of published ones, and transformers' model of it."""
    folder = tmp_path_factory.mktemp("mistral_large4")
    return folder, make_model("mistral_large4", tiny_config("mistral_large4"), folder)


def expected_logits(model: Any) -> torch.Tensor:
    with torch.inference_mode(), on_one_thread():
        return model(input_ids=torch.tensor([random_tokens(NUM_TOKENS)]), use_cache=False).logits[0]


def test_logits_are_those_of_transformers(made: tuple[pathlib.Path, Any]) -> None:
    folder, model = made
    config = load_model_config(folder)
    assert config.wrapper == "MistralLarge4ForConditionalGeneration"
    assert config.unused_keys == ()
    check_tensors(folder, config)
    expected = expected_logits(model)
    logits = logits_of(folder, random_tokens(NUM_TOKENS))
    assert (logits - expected).abs().max() <= 1e-4 * (expected.max() - expected.min())
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "tensor",
    [
        "lerope.alpha",
        "attention.ssmax_scaling.s",
        "attention.indexer.ssmax_scaling.s",
        "attention.indexer.q_input_norm.bias",
        "layers.4.attention.indexer.wq_b",
        "layers.5.attention.wkv_b",
    ],
)
def test_with_another_tensor_the_tokens_differ(
    made: tuple[pathlib.Path, Any], tensor: str, tmp_path: pathlib.Path
) -> None:
    folder, model = made

    def other(key: str, stored: torch.Tensor) -> dict[str, torch.Tensor]:
        return {key: stored * 0.5 + 0.1 if tensor in key else stored}

    logits = logits_of(rewritten(folder, tmp_path / "other", other), random_tokens(NUM_TOKENS))
    assert not torch.equal(logits.argmax(-1), expected_logits(model).argmax(-1))


@pytest.mark.parametrize("key", ["index_topk", "routed_scaling_factor", "qk_nope_head_dim", "kv_source_layers"])
def test_values_of_the_text_count(made: tuple[pathlib.Path, Any], key: str, tmp_path: pathlib.Path) -> None:
    """Another choice or scale gives other tokens, and what does not fit is refused by its key."""
    folder, model = made
    others = {
        "index_topk": 512,
        "routed_scaling_factor": 3.0,
        "qk_nope_head_dim": 0,
        "kv_source_layers": [0, 0, 2, 3, 0, 3],  # a layer without positions would read one with them
    }
    text = json.loads((folder / "config.json").read_text())["text_config"]
    other = changed(folder, tmp_path / "other", {"text_config": text | {key: others[key]}})
    if key in ("qk_nope_head_dim", "kv_source_layers"):
        with pytest.raises(ConfigError, match=f"text_config.{key} must be "):
            load_model_config(other)
        return
    logits = logits_of(other, random_tokens(NUM_TOKENS))
    assert not torch.equal(logits.argmax(-1), expected_logits(model).argmax(-1))

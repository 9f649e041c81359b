"""Multimodal models whose text decoder is served: the tables agree with transformers, and published forms are read.

`tests/families/` compares the tokens of each of them with transformers'.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.models.families import FAMILIES
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.text_families import TEXT_FAMILIES
from manta.workers.models.wrappers import DECODERS, WRAPPERS, text_decoder
from manta.workers.torch_worker.tensor_check import check_tensors
from tests.checkpoints import checkpoint
from tests.workers.test_layer_kinds import CASES, changed, folder_of, logits_of, rewritten
from tests.workers.test_models import random_tokens

MODEL_TYPES = {
    architecture: model_type
    for model_type, architecture in (
        *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items(),
        ("qwen2_5_omni", "Qwen2_5OmniForConditionalGeneration"),
        ("qwen2_5_omni", "Qwen2_5OmniModel"),
        ("qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration"),
        ("got_ocr2", "GotOcr2ForConditionalGeneration"),
        *((name, each) for name, each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if each in WRAPPERS),
        *((name, each) for name, each in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.items() if each in WRAPPERS),
    )
}
"""The names of transformers' configurations of wrappers, by architecture."""
NOT_IN_TRANSFORMERS = {"InternVLChatModel", "KimiK25ForConditionalGeneration", "KimiVLForConditionalGeneration"}
"""Architectures whose published checkpoints bring code of their own."""
LEFT_OUT = {
    "Cosmos3OmniForConditionalGeneration": "its checkpoints name tensors as Diffusers does",
    "Dots3NoteForConditionalGeneration": "transformers makes no tiny model of it to compare with",
    "Mistral4ForCausalLM": "a decoder itself",
}
"""Architectures in transformers' table of wrappers that are no wrappers here."""
NO_DEFAULTS = {
    "glm4_moe": "the class's own sizes give heads of an odd width",
    "glm4v_moe_text": "the same",
    "kimi_k2": "a name of published files, of DeepSeek-V3's class",
    "nemotron_h": "the kinds of its layers have two spellings, and published files have one of them",
    "qwen4_exp_text": "the class leaves out the sizes of the indexer, without which transformers makes no model",
    "qwen3_omni_moe_text": "the class's own sizes give heads of an odd width",
    "zamba2": "the kinds of its layers have two spellings, and published files name them all",
}
"""Text decoders whose class's defaults describe no model that is served."""


def test_the_text_decoder_of_each_wrapper_is_the_one_that_transformers_means() -> None:
    known = {name: MODEL_TYPES[name] for name in WRAPPERS if name not in NOT_IN_TRANSFORMERS}
    usual = {name: CONFIG_MAPPING[each]().get_text_config(decoder=True).model_type for name, each in known.items()}
    assert {name: WRAPPERS[name].usual_type for name in known} == usual


def test_no_wrapper_of_a_native_text_decoder_is_left_out() -> None:
    for name, model_type in MODEL_TYPES.items():
        if name in WRAPPERS or name in LEFT_OUT:
            continue
        text = CONFIG_MAPPING[model_type]().get_text_config(decoder=True).model_type
        assert text not in TEXT_FAMILIES, name


def test_every_native_family_is_a_text_decoder() -> None:
    types = {name for name, each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if each in FAMILIES}
    unlike = {"exaone", "sarvam_mla", "sarvam_moe"}  # names of their own for tensors or keys
    wrappers = {"dots3_note", "llama4", "qwen3_5", "qwen3_5_moe", "qwen4_exp"}
    assert types - unlike - wrappers - set(TEXT_FAMILIES) == set()


@pytest.mark.parametrize("model_type", [name for name in TEXT_FAMILIES if name not in NO_DEFAULTS])
def test_a_key_that_is_missing_has_the_value_of_transformers(model_type: str) -> None:
    family = TEXT_FAMILIES[model_type]
    whole = CONFIG_MAPPING[model_type]().to_dict()
    rope = whole.get("rope_parameters") or {}
    whole["rope_parameters"] = {key: value for key, value in rope.items() if key != "mrope_section"}
    whole = family.others | whole | {"num_nextn_predict_layers": 0, "tie_word_embeddings": False}
    assert read(family.architecture, whole) == read(family.architecture, {"tie_word_embeddings": False} | family.usual)


def read(architecture: str, values: dict[str, Any]) -> ModelConfig:
    raw = RawConfig(values | {"architectures": [architecture]}, "config.json")
    return FAMILIES[architecture].read_config(raw)


@pytest.mark.parametrize("architecture", DECODERS)
def test_a_decoder_under_another_name_is_of_its_native_family(architecture: str, tmp_path: pathlib.Path) -> None:
    CONFIG_MAPPING[DECODERS[architecture]](architectures=[architecture]).save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    assert config.native
    assert config.architecture == TEXT_FAMILIES[DECODERS[architecture]].architecture


class Form(NamedTuple):
    """A way in which published checkpoints hold a text decoder."""

    case: str
    """The text decoder, a case of `test_layer_kinds.py` or a family of `tests/checkpoints.py`."""
    config: dict[str, Any]
    """The whole model's configuration without the text decoder's."""
    path: tuple[str, ...]
    """The keys that lead to the text decoder's configuration; none if its keys stand beside the others."""
    names: dict[str, str]
    """Beginnings of the names of the decoder's tensors in its own checkpoint, and in the whole model's."""
    other: str
    """A tensor that sees or hears."""


OF_PICTURES = {
    "vision_config": {"depth": 32, "model_type": "qwen2_vl"},
    "image_token_id": 5,
    "vision_start_token_id": 6,
}
FORMS = {
    "Qwen2-VL": Form(
        "qwen2",
        {
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            "rope_theta": 10000.0,
            "rope_parameters": None,
            "vision_token_id": 7,
            "video_token_id": 8,
            **OF_PICTURES,
        },
        (),
        {},
        "visual.blocks.0.attn.proj.weight",
    ),
    "Qwen2.5-Omni": Form(
        "qwen2",
        {"architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "talker_config": {"a": 1}},
        ("thinker_config", "text_config"),
        {"model.": "thinker.model.", "lm_head.": "thinker.lm_head."},
        "talker.model.embed_tokens.weight",
    ),
    "InternVL": Form(
        "qwen3",
        {"architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "vision_config": {"depth": 1}},
        ("llm_config",),
        {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
        "mlp1.0.weight",
    ),
    "Kimi-VL": Form(
        "deepseek_v3",
        {
            "architectures": ["KimiVLForConditionalGeneration"],
            "model_type": "kimi_vl",
            "vision_config": {"depth": 1},
            "tie_word_embeddings": True,  # says the whole model, and the files have a head unlike the embedding
        },
        ("text_config",),
        {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
        "multi_modal_projector.linear_1.weight",
    ),
    "GLM-5.3 Flash": Form(
        "glm5_next",
        {
            "architectures": ["Glm5NextForConditionalGeneration"],
            "model_type": "glm5_next",
            "vision_config": {"depth": 1},
            "tie_word_embeddings": False,
        },
        ("text_config",),
        {"model.": "model.language_model."},
        "model.visual.blocks.0.attn.qkv.weight",
    ),
    "SmolVLM": Form(
        "llama",
        {"architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm", "image_token_id": 5},
        ("text_config",),
        {"model.": "model.text_model."},
        "model.connector.modality_projection.proj.weight",
    ),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_the_text_decoder_is_found_in_each_published_form(form: Form, tmp_path: pathlib.Path) -> None:
    plain = folder_of(form.case) if form.case in CASES else checkpoint(form.case)
    tokens = random_tokens(100)

    def rename(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        begins = next((each for each in form.names if name.startswith(each)), "")
        return {form.names.get(begins, "") + name.removeprefix(begins): tensor}

    folder = rewritten(plain, tmp_path / "whole", rename)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {form.other: torch.ones(3, 3)}, path, {"format": "pt"})
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    for key in reversed(form.path):
        values = {key: values}
    (folder / "config.json").write_text(json.dumps(values | form.config))
    served = load_model_config(folder)
    assert served.native
    assert served.wrapper == form.config["architectures"][0]
    assert served.unused_keys == ()
    check_tensors(folder, served)
    assert torch.equal(logits_of(folder, tokens), logits_of(plain, tokens))


def test_a_text_decoder_of_no_native_family_is_left_to_transformers() -> None:
    text = {"text_config": transformers.GPTNeoXConfig().to_dict()}
    assert text_decoder(RawConfig({"architectures": ["LlavaForConditionalGeneration"]} | text, "config.json")) is None


def test_a_head_of_its_own_is_used_whatever_the_embedding_is_called(tmp_path: pathlib.Path) -> None:
    """A configuration that ties them does not win, as in transformers."""
    plain, tokens = folder_of("nemotron_h"), random_tokens(100)
    tied = changed(plain, tmp_path / "tied", {"tie_word_embeddings": True})
    assert torch.equal(logits_of(tied, tokens), logits_of(plain, tokens))


DRAFTING = {
    "Qwen3-Next": "mtp.layers.0.self_attn.q_proj.weight",
    "MiMo-V2": "model.mtp.layers.0.self_attn.q_proj.weight",
    "MiMo": "model.mtp_layers.0.self_attn.q_proj.weight",
    "ERNIE 4.5": "model.mtp_block.0.self_attn.q_proj.weight",
}
"""A tensor of the layers that draft tokens in published checkpoints."""


@pytest.mark.parametrize("name", DRAFTING.values(), ids=list(DRAFTING))
def test_layers_that_draft_tokens_are_left_out(name: str, tmp_path: pathlib.Path) -> None:
    def with_drafts(tensor_name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {tensor_name: tensor, name: torch.ones(3, 3)}

    folder = rewritten(checkpoint("qwen3"), tmp_path / "drafting", with_drafts)
    check_tensors(folder, load_model_config(folder))

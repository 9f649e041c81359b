"""Tiny models of every decoder of transformers, made of each class's own configuration by rules about names of keys.

Windows, chunks, indexers and original contexts are shorter than the prompts, so that each of them matters. Native
families take the configurations of `tests/workers/test_layer_kinds.py`, in which further features are on.
"""

from __future__ import annotations

import copy
import pathlib
import re
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from manta.workers.models.wrappers import WRAPPERS
from tests.checkpoints import make_tokenizer, on_one_thread, randomise, set_buffers
from tests.workers.recurrent_cases import ROPE
from tests.workers.test_layer_kinds import CASES, SIZES

WINDOW = 20
"""Positions of windows and chunks, which prompts exceed."""
NUM_LAYERS = 4
MOST_PARAMETERS = 20_000_000
"""Parameters of the largest model that is made."""
RULES: dict[str, int] = {
    "vocab_size.*|.*_vocab_size": 320,
    "hidden_size|d_model|n_embd|dim|hidden_dim|embedding_(size|dim)|word_embed_proj_dim|embed_dim|emb_dim": 64,
    "text_hidden_size|out_hidden_size|lru_width|d_inner|attention_hidden_size|vision_output_dim": 64,
    "intermediate_size.*|(.*_)?ffn_dim|n_inner|d_ff|dff|dim_ff|ffn_hidden_size|mlp_dim|feed_forward_size": 96,
    "dense_intermediate_size|shared_.*intermediate_size": 96,
    "num_hidden_layers|num_layers|n_layers?|(en|de)coder_layers|depth|layers": NUM_LAYERS,
    "num_attention_heads|num_heads|n_heads?|((en|de)coder_)?attention_heads|swa_num_attention_heads": 4,
    "num_sliding_attention_heads": 4,
    "(swa_)?num_key_value_heads|num_kv_heads|num_query_groups": 2,
    "(swa_|attention_)?head_dim|dim_head|kv_channels|attention_head_size|d_kv|d_head": 16,
    "max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length|model_max_length|context_length": 512,
    "moe_(.*_)?intermediate_size|expert_ffn_hidden_size": 32,
    "(n|num|num_local|n_routed|moe_num)_experts": 4,
    "num_experts_per_tok(en)?|moe_k|moe_top_?k|top_k_experts": 2,
    "(.*_)?sliding_window(_size)?|attention_window_size|attention_chunk_size|keep_window_size|window_size": WINDOW,
    "local_attention_window_len|log_scaling_n_floor|floor_scale": WINDOW,
    "local_attention": 2 * WINDOW,
    "original_max_position_embeddings": 32,
    "(kv|q|o|query|key)_lora_rank|.*_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "qk_head_dim|v_head_dim": 20,
    "index_topk|index_block_size": 4,
    "index_topk_blocks|index_n_heads": 2,
    "index_head_dim": 16,
    "(linear_|ssm_)?state_size|mamba_d_state": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads|linear_num_heads": 4,
    "linear_(key_|value_)?head_dim": 12,
    "mamba_n_heads|mamba_num_heads|n_mamba_heads": 8,
    "mamba_d_head|mamba_head_dim": 16,
    "rotary_dim|hidden_size_per_layer_input": 8,
    "image_size": 28,
    "patch_size": 14,
    "moe_num_shared_experts|n_shared_experts|num_shared_experts|n_group|topk_group|num_expert_group": 1,
    "first_k_dense_replace": 1,
}
"""Values of keys by patterns that fit their whole names. The last pattern that fits counts. Keys that the class leaves
null, zero or false stay so.
"""
ALWAYS = {
    "sliding_window": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
"""Values of keys whatever the class has."""
_BERT = {"is_decoder": True}
"""Without it these attend to later tokens, as encoders."""
_ALONE = {
    "is_encoder_decoder": False,
    "encoder_layers": NUM_LAYERS + 1,
    "encoder_attention_heads": 2,
    "forced_eos_token_id": None,
}
"""A decoder without its encoder, whose shape differs. transformers generates with a cache of as many layers as the
encoder has, and ends with a forced token unless told otherwise.
"""
OWN: dict[str, dict[str, Any]] = {
    "bart": _ALONE,
    "bigbird_pegasus": _ALONE,
    "blenderbot": _ALONE,
    "blenderbot-small": _ALONE,
    "marian": _ALONE,
    "mbart": _ALONE,
    "mvp": _ALONE,
    "pegasus": _ALONE,
    "plbart": _ALONE,
    "whisper": _ALONE,
    "prophetnet": {"is_encoder_decoder": False},
    "doge": {"keep_window_size": 512},
    "dory": {
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "initializer_range": 0.5,  # a smaller one makes attention choose single keys
        "num_hidden_layers": 6,
        "n_input_layers": 1,
        "n_recurrent_layers": 3,
        "n_output_layers": 2,
    },
    "hrm_text": {"num_hidden_layers": 2, "H_cycles": 2, "L_cycles": 1},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "moshi": {"sliding_window": 512},
    "xlm": {"causal": True},
    "bert": _BERT,
    "bert-generation": _BERT,
    "camembert": _BERT,
    "data2vec-text": _BERT,
    "electra": _BERT,
    "ernie": _BERT,
    "megatron-bert": _BERT,
    "rembert": _BERT,
    "roberta": _BERT,
    "roberta-prelayernorm": _BERT,
    "roc_bert": _BERT,
    "roformer": _BERT,
    "xlm-roberta": _BERT,
    "xlm-roberta-xl": _BERT,
    "xmod": _BERT | {"default_language": "en_XX"},
    "big_bird": _BERT,
    "chameleon": {"vocabulary_map": {"<image>": 5, "IMGIMGAZ": 6, "IMGIMGBZ": 7}},
    "chameleon_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1], "latent_channels": 32, "num_embeddings": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 4.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "glm4v_moe_text": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
    "glm4v_text": {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}},
    "glm_ocr_text": {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}},
    "ernie4_5_vl_moe_text": {"rope_parameters": ROPE | {"mrope_section": [3, 3, 2]}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "spatial_target_layers": [1], "downsample_rate": "1/2"},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "hunyuan_vl_text": {"head_dim": 16, "rope_parameters": ROPE | {"xdrope_section": [2, 2, 2, 2]}},
    "janus_vision_model": {"projection_dim": 64},
    "janus_vqgan": {
        "base_channels": 32,
        "channel_multiplier": [1, 1],
        "image_token_embed_dim": 64,
        "latent_channels": 32,
        "num_embeddings": 64,
        "projection_dim": 64,
    },
    "ministral": {"head_dim": 16},
    "mistral_large4_text": {
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
        "layer_types": ["indexed_attention"] * 6,
        "no_rope_layers": [1, 1, 0, 1, 0, 1],
        "kv_source_layers": [0, 0, 2, 3, 2, 3],
        "indexer_types": ["full", "full", "full", "shared", "full", "shared"],
        "index_n_heads": 16,  # with fewer many scores are zero, and of equal ones torch chooses
        "n_group": 2,
        "rope_parameters": ROPE
        | {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "attention_factor": 1.0},
    },
    "nemotron": {"num_key_value_heads": 2},
    "paddleocr_vl_text": {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}},
    "qwen2_5_omni_text": {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}},
    "qwen2_5_vl_text": {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}},
    "qwen2_vl_text": {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}},
    "qwen3_vl_text": {"rope_parameters": ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}},
    "nemotron_h_omni": {"projector_hidden_size": 64, "vision_hidden_size": 64},
    "radio": {"max_img_size": 56, "video_temporal_patch_size": 2},
    "reformer": _BERT | {"axial_pos_embds": False},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_headdim": 16},
}
"""Further values of families for which the rules make no model, or one without its features."""
MISNAMED = {
    "kimi_k25": ("language_model.model.blocks.", "language_model.model.layers."),
    "qianfan_ocr": ("language_model.model.encoder.layers.", "language_model.model.layers."),
}
"""Beginnings of names that transformers writes and no published checkpoint has, and those that these have."""
_WITH_SOUNDS = {name: each for name, each in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.items() if each in WRAPPERS}
_ARCHITECTURES = _WITH_SOUNDS | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
MODEL_TYPES = tuple(
    dict.fromkeys([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *_WITH_SOUNDS])
)
"""The names of transformers' configurations that have a causal language model, or text beside pictures or sounds. Of
those with sounds these are the ones that are served.
"""
MODELS_WITH_PICTURES = tuple(name for name in MODEL_TYPES if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Those with pictures or sounds."""


def architecture_of(model_type: str) -> str:
    """Returns the class of a model type's causal language model; for one with pictures only, that of the whole."""
    own = {"emu3_text_model": "Emu3ForCausalLM", "mllama_text_model": "MllamaForCausalLM"}
    return own.get(model_type) or _ARCHITECTURES[model_type]


def tiny_config(model_type: str) -> Any:
    """Makes the configuration of a tiny model. Whatever transformers raises for it passes through."""
    config_class: Any = CONFIG_MAPPING[model_type]
    if case := _case(config_class):
        return config_class(**case, dtype="float32")
    config = config_class(**_shrunk(config_class().to_dict()) | OWN.get(model_type, {}), dtype="float32")
    text = config if config.is_encoder_decoder else config.get_text_config()
    is_of_text_alone = isinstance(text, getattr(transformers, architecture_of(model_type)).config_class)
    return tiny_config(text.model_type) if text is not config and is_of_text_alone else config


def _case(config_class: Any) -> dict[str, Any]:
    """Returns the values of a native family's configuration in which many features are on; none for another class."""
    found = (each for each in CASES.values() if each.config == config_class.__name__)
    return next((SIZES | case.options for case in found), {})


def _shrunk(usual: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of a configuration that differ in a tiny model."""
    found: dict[str, Any] = {}
    for key, value in usual.items():
        if isinstance(value, dict) and "model_type" in value:
            is_named = value["model_type"] in CONFIG_MAPPING
            small = (_case(CONFIG_MAPPING[value["model_type"]]) if is_named else {}) or _shrunk(value)
            found[key] = {"model_type": value["model_type"]} | small | OWN.get(value["model_type"], {})
        elif type(value) in (int, float) and value > 0:
            fitting = [small for pattern, small in RULES.items() if re.fullmatch(pattern, key)]
            found |= {key: fitting[-1]} if fitting else {}
    kinds = list(dict.fromkeys(usual.get("layer_types") or []))
    if kinds == ["full_attention"] and "sliding_window" in usual:
        kinds = ["sliding_attention", *kinds]
        found |= {"use_sliding_window": True} if "use_sliding_window" in usual else {}
    if kinds:
        num_layers = max(NUM_LAYERS, len(kinds))
        found |= {"layer_types": (kinds * NUM_LAYERS)[:num_layers], "num_hidden_layers": num_layers}
    return found | {key: value for key, value in ALWAYS.items() if key in usual}


def make_model(model_type: str, config: Any, folder: pathlib.Path) -> Any:
    """Makes a model with random weights, and writes its checkpoint and a tokenizer. Returns what computes its text: of
    a model with pictures the causal language model of its decoder, with the same weights.
    """
    model_class: Any = getattr(transformers, architecture_of(model_type))
    with torch.device("meta"):
        num_parameters = sum(each.numel() for each in model_class(config).parameters())
    if num_parameters > MOST_PARAMETERS:
        raise ValueError(f"its smallest model has {num_parameters:,} parameters")
    with on_one_thread():
        model = model_class(config).float().eval()
        if model_type != "falcon":  # its eager attention adds ALiBi twice
            model.set_attn_implementation("eager")
        randomise(model, 0)
        set_buffers(model)
        head = model.get_output_embeddings()
        if head is not None and getattr(head, "bias", None) is not None:
            head.bias.data[0] = -100.0  # some families give tokens after padding other positions
    model.save_pretrained(folder)
    if model_type in MISNAMED:
        rename_tensors(folder, *MISNAMED[model_type])
    make_tokenizer(folder)
    return model if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else _decoder_of(model)


def rename_tensors(folder: pathlib.Path, written: str, published: str) -> None:
    """Renames the tensors of a checkpoint in one file whose names begin as `written`."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        published + name.removeprefix(written) if name.startswith(written) else name: tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, folder / "model.safetensors")


def _decoder_of(model: Any) -> Any:
    """transformers' wrappers leave out what the decoder's own class does to logits, such as Cohere 2's scale."""
    text = model.config.get_text_config()
    if text is model.config or text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return model
    causal_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    if (own := next((each for each in model.modules() if isinstance(each, causal_class)), None)) is not None:
        return own
    text = copy.deepcopy(text)
    text.tie_word_embeddings = getattr(model.config, "tie_word_embeddings", False)
    decoder: Any = causal_class._from_config(text, attn_implementation="eager").float().eval()
    decoder.base_model.load_state_dict(model.get_decoder().state_dict())
    decoder.get_output_embeddings().load_state_dict(model.get_output_embeddings().state_dict())
    return decoder

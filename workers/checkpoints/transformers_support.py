"""Decides whether an architecture without a native form can run over a paged cache, by transformers' configuration.

Reads no weights. Imported only for such a model, because importing transformers takes seconds.
"""

from __future__ import annotations

import inspect
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)

from manta.workers.models.dense import MOST_LAYERS, read_dtype
from manta.workers.models.model_config import ModelConfig, RopeConfig
from manta.workers.models.raw_config import MOST_VOCABULARY, RawConfig

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_STATIC_ROPE_TYPES = {"default", "linear", "llama3", "yarn", "proportional", None}
"""Rope types whose angles depend on the position alone. `dynamic` and `longrope` also depend on the longest sequence of
the batch.
"""
OWN_ATTENTION = {
    "big_bird",
    "bloom",
    "doge",
    "falcon",
    "git",
    "gpt_neo",
    "gpt_neox_japanese",
    "megatron-bert",
    "mpt",
    "mvp",
    "openai-gpt",
    "rembert",
    "roformer",
    "trocr",
    "xglm",
    "xlm",
}
"""Model types with attention code of their own, which `workers/decoders/own_attention.py` replaces."""
BIAS_COLUMNS = 3
"""Number of columns that a bias adds to a cached key: three parts that bfloat16 holds exactly."""
_HEAD_DIM_MULTIPLE = 16
"""A key with added columns is padded to a multiple of this width, which the attention kernels need."""
_BLOOM_POSITIONS = 2048
"""Number of positions that Bloom was trained on. Its configuration may name another in `seq_length`."""
_MPT_COMPUTED = {"alibi": True, "alibi_bias_max": 8, "prefix_lm": False, "qk_ln": False}
"""The options of MPT's attention with the only values that transformers implements."""
_POSITIONS_AFTER_PADDING = {
    "camembert",
    "data2vec-text",
    "kosmos_2_5_text_model",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}
"""Model types whose first token has the position after the id of the padding token, as in fairseq."""
_CALLS: dict[str, Callable[[Any], int]] = {
    "diffllama": lambda config: 2 * config.num_hidden_layers,
    "dory": lambda config: config.num_hidden_layers + (config.n_recurrent_loops - 1) * config.n_recurrent_layers,
    "hrm_text": lambda config: config.num_hidden_layers,  # which counts a layer once for each time that it runs
    "mllama_text_model": lambda config: len({*range(config.num_hidden_layers)} - {*config.cross_attention_layers}),
}
"""How often a token attends in families in which this is not once in each layer, by their configurations: DiffLlama's
layers attend twice, those of Dory and HRM run several times, and Mllama leaves those out that attend to pictures.
"""
_ENCODERS_UNLESS_TOLD = {"big_bird", "megatron-bert", "rembert", "roformer"}
"""Model types whose tokens attend to later ones unless `is_decoder` is true. The mask shows it of further ones, which
are refused when they are loaded.
"""
_RECURRENT = "it keeps a recurrent state, and only attention keys and values are cached"
_OTHER_ATTENTION = {
    "blt": "it computes bytes in patches, whose ends a model of its own chooses (byte-latent patches)",
    "cpmant": "the tokens of its prompts attend to later ones",
    "prophetnet": "it predicts several tokens at a time, each by a stream of attention of its own",
    "reformer": "it attends to tokens that hashes of their keys choose",
    "rwkv": _RECURRENT,
    "xlnet": "its tokens attend to later ones, and a second stream of attention predicts",
}
"""Reasons why model types cannot run over the paged cache that their configurations do not show. The probe after
loading finds others.
"""
NO_WRAPPER = "multimodal models are not served; use the text-only checkpoint if there is one"
"""The reason why a model of text beside pictures or sounds is refused that has no causal text decoder."""
_DRAFTS_FOR_GEMMA = "it drafts tokens for a Gemma 4, whose cached keys and values it reads"
_OTHER_WRAPPERS = {
    "diffusion_gemma": "it writes blocks of tokens by diffusion",
    "gemma4_assistant": _DRAFTS_FOR_GEMMA,
    "gemma4_unified_assistant": _DRAFTS_FOR_GEMMA,
    "kosmos-2": "its text decoder makes attention masks of its own",
    "paligemma": "its text attends to later tokens of the prompt",
    "unlimited_ocr": "its tokens see the prompt and a window of the answer, so they depend on where the prompt ends",
    "shieldgemma2": "it classifies pictures, and writes no text",
}
"""Reasons why wrappers are refused, by their model types, although transformers has a text decoder of theirs."""
_OLDER_KEYS = ("architectures", "dtype", "torch_dtype", "rope_scaling", "rope_theta", "partial_rotary_factor")
"""Keys that transformers reads although no class of configurations declares them."""
_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
)
"""Attributes of a configuration that all layers must share, because the cache has one shape for all of them."""
_OF_DECODERS = {
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "intermediate_size": "decoder_ffn_dim",
}
"""Names of attributes in configurations that also have an encoder's, such as Bart's: there the usual name is that of
the encoder.
"""
_MOST_POSITIONS = {"doge": "keep_window_size", "moshi": "sliding_window"}
"""Attributes with a number of positions beyond which attention differs from what is computed here. Doge then leaves out
keys, and transformers' cache forgets some of those that Moshi's mask shows.
"""


def read_config(folder: pathlib.Path, model_type: str) -> Any:
    """Returns transformers' configuration. Raises `ValueError` naming transformers' version if it cannot read it."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the code of each configuration raises what it likes
        version = transformers.__version__
        if model_type not in CONFIG_MAPPING:
            message = f"transformers {version} does not know it; a newer one may (pip install --upgrade transformers)"
            raise ValueError(message) from error
        raise ValueError(f"transformers {version} cannot read its config.json ({first_sentence(error)})") from error
    register_model(config)
    return config


def register_model(config: Any) -> None:
    """Tells transformers which class makes a model, where it does not know. It maps Mllama's whole configuration to a
    class that takes the one of its text, has Chameleon, whose decoder has no configuration of its own, among models
    with pictures only, and does not say which class is the text of Kosmos 2.5. Called for such a model only, because
    the import takes seconds.
    """
    models = transformers.AutoModelForCausalLM
    if config.model_type in ("mllama", "mllama_text_model"):
        models.register(transformers.MllamaTextConfig, transformers.MllamaForCausalLM, exist_ok=True)
    if config.model_type == "chameleon":
        models.register(type(config), transformers.ChameleonForConditionalGeneration, exist_ok=True)
    if config.model_type == "kosmos-2.5":
        from transformers.models.kosmos2_5.modeling_kosmos2_5 import Kosmos2_5TextForCausalLM

        models.register(type(config.text_config), Kosmos2_5TextForCausalLM, exist_ok=True)


def first_sentence(error: Exception) -> str:
    """Returns the first sentence of an error's message, on one line."""
    sentence = " ".join(str(error).split()).partition(". ")[0].rstrip(".:")
    return sentence or type(error).__name__


def why_unsupported(config: Any, architecture: str) -> str | None:
    """Returns why a model cannot run over the paged cache; None if its configuration shows no reason."""
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder models have no single token stream to batch"
    if config.model_type in _OTHER_WRAPPERS:
        return _OTHER_WRAPPERS[config.model_type]
    text = text_config(config)
    model_classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING if text is config else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    model_class = model_classes.get(type(config), None)
    # MPT's own checkpoints spell it MPTForCausalLM.
    if model_class is None or model_class.__name__.lower() != architecture.lower():
        return "it is no causal language model of transformers" if text is config else NO_WRAPPER
    if text is config:
        return _why_no_decoder(config, model_class)
    return _why_no_decoder(text, MODEL_MAPPING.get(type(text), model_class))


def text_config(config: Any) -> Any:
    """Returns the configuration of the text decoder: of a model of text alone its own."""
    return config.get_text_config(decoder=True)


def _why_no_decoder(config: Any, model_class: Any) -> str | None:
    """Returns why the decoder of a configuration cannot run over the paged cache, as `why_unsupported` does."""
    differing = set(getattr(config, "per_layer_attributes", None) or ()) & set(_SHAPE)
    if differing:
        return f"layers that differ in their {' and '.join(sorted(differing))} are not implemented"
    if reason := _OTHER_ATTENTION.get(config.model_type) or _unsupported_option(config):
        return reason
    if config.model_type not in OWN_ATTENTION and not _has_replaceable_attention(model_class):
        return "transformers computes its attention in code of its own, which cannot be replaced by a paged one"
    if getattr(model_class, "_is_stateful", False):
        return _RECURRENT
    if getattr(config, "index_topk", None):
        return "attention over the tokens that an indexer chooses (sparse attention) is not implemented"
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention needs a cache layout of its own"
    others = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        return f"layers of type {', '.join(sorted(others))} are not implemented"
    return _unsupported_alibi(config) or _unsupported_rope(getattr(config, "rope_parameters", None) or {})


def _unsupported_option(config: Any) -> str | None:
    """Returns why a family's attention cannot be replaced with the options of this configuration."""
    if config.model_type in _ENCODERS_UNLESS_TOLD and not config.is_decoder:
        return "its tokens attend to later ones unless is_decoder is true"
    if config.model_type == "xlm" and not config.causal:
        return "its tokens attend to later ones unless causal is true"
    if config.model_type == "xlm" and config.asm:
        return "asm, an adaptive softmax, is not implemented"
    if config.model_type == "mvp" and config.use_prompt:
        return "use_prompt, learned keys and values before those of the prompt, is not implemented"
    if config.model_type == "trocr" and not config.use_learned_position_embeddings:
        return "positions that padding shifts (use_learned_position_embeddings: false) are not implemented"
    if config.model_type == "dory" and config.n_recurrent_loops > 1 and config.recurrent_kv_cache_mode == "last_loop":
        return "with recurrent_kv_cache_mode 'last_loop' its tokens depend on how a prompt is cut into steps"
    return None


def model_config(config: Any, architecture: str, file: str) -> ModelConfig:
    """Returns the shape of a model. Fields that only native families use are neutral. Raises `ConfigError` naming the
    attribute that cannot be served, for which transformers' configuration has a name of its own in some families.
    """
    values = {name: getattr(config, _OF_DECODERS.get(name, name), getattr(config, name, None)) for name in _SHAPE}
    raw = RawConfig(values | {"dtype": _dtype(config)}, file)
    hidden_size = raw["hidden_size"].whole()
    num_heads = raw["num_attention_heads"].whole(most=hidden_size)
    raw["num_hidden_layers"].whole(most=MOST_LAYERS)
    calls = RawConfig({"num_hidden_layers": num_attention_calls(config)}, file)
    num_layers = calls["num_hidden_layers"].whole(most=MOST_LAYERS)
    cached = RawConfig({"num_key_value_heads": num_kv_heads(config), "head_dim": cached_head_dim(config)}, file)
    positions = RawConfig({"max_position_embeddings": longest_context(config)}, file)
    return ModelConfig(
        architecture=architecture,
        native=False,
        vocab_size=raw["vocab_size"].whole(most=MOST_VOCABULARY),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=cached["num_key_value_heads"].whole(),
        head_dim=cached["head_dim"].whole(),
        has_key_bias=_has_key_bias(config),
        intermediate_size=raw["intermediate_size"].whole(4 * hidden_size),
        rms_norm_eps=0.0,
        rope=RopeConfig(),
        max_position_embeddings=positions["max_position_embeddings"].whole(),
        tie_word_embeddings=raw["tie_word_embeddings"].flag(False),
        sliding_windows=(None,) * num_layers,
        dtype=read_dtype(raw),
        num_trial_layers=_num_trial_layers(config),
    )


def num_attention_calls(config: Any) -> int:
    """Returns how often a token attends in a model: once in each layer, but for some families (`_CALLS`)."""
    calls = _CALLS.get(config.model_type)
    return getattr(config, layers_key(config)) if calls is None else calls(config)


def layers_key(config: Any) -> str:
    """Returns the name of the attribute that has the number of layers."""
    name = _OF_DECODERS["num_hidden_layers"]
    return name if hasattr(config, name) else "num_hidden_layers"


def _num_trial_layers(config: Any) -> int:
    """Returns the number of first layers among which is one of every type: all of them if they are run more or less
    often than once.
    """
    if config.model_type in _CALLS:
        return num_attention_calls(config)
    layer_types = getattr(config, "layer_types", None) or [None]
    return 1 + max(layer_types.index(each) for each in set(layer_types))


def known_keys(config: Any) -> set[str]:
    """Returns the keys of `config.json` that transformers' class of this configuration has, in all spellings."""
    fields = getattr(type(config), "__dataclass_fields__", {})
    return {*fields, *config.attribute_map, *_OLDER_KEYS}


def _dtype(config: Any) -> str | None:
    return None if config.dtype is None else str(config.dtype)


def num_kv_heads(config: Any) -> int:
    """Returns the number of KV heads of a layer: one with `multi_query`, which Falcon's newer form overrides."""
    if hasattr(config, _OF_DECODERS["num_attention_heads"]):
        return _num_heads(config)
    if getattr(config, "new_decoder_architecture", False):
        return config.num_kv_heads
    if getattr(config, "multi_query", False):
        return 1
    if config.model_type == "jetmoe":  # repeats them for each expert of a token
        return config.num_attention_heads
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _num_heads(config: Any) -> int:
    name = "num_attention_heads"
    return getattr(config, _OF_DECODERS[name], None) or getattr(config, name)


def _has_key_bias(config: Any) -> bool:
    """Returns whether a bias of each key enters the attention: of its position, or one that Doge computes."""
    return uses_alibi(config) or config.model_type == "doge"


def uses_alibi(config: Any) -> bool:
    """Returns whether positions enter as a bias of the attention (ALiBi; Press et al., 2022)."""
    return config.model_type in ("bloom", "mpt") or (config.model_type == "falcon" and config.alibi)


def cached_head_dim(config: Any) -> int:
    """Returns the width of a cached key and value: a head, and with a bias of each key also its columns."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // _num_heads(config)
    if not _has_key_bias(config):
        return head_dim
    return -(-(head_dim + BIAS_COLUMNS) // _HEAD_DIM_MULTIPLE) * _HEAD_DIM_MULTIPLE


def longest_context(config: Any) -> int | None:
    """Returns the number of positions of the model; None if it names none."""
    if config.model_type == "bloom":
        return getattr(config, "seq_length", None) or _BLOOM_POSITIONS
    if config.model_type == "mpt":
        return config.max_seq_len
    if config.model_type == "whisper":
        return config.max_target_positions
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and config.model_type in _MOST_POSITIONS:
        longest = min(longest, getattr(config, _MOST_POSITIONS[config.model_type]))
    return longest if longest is None else longest - first_position(config)


def first_position(config: Any) -> int:
    """Returns the position of a sequence's first token."""
    return config.pad_token_id + 1 if config.model_type in _POSITIONS_AFTER_PADDING else 0


def _has_replaceable_attention(model_class: Any) -> bool:
    """Returns whether a model's attention goes through transformers' attention interface. Some models use it without
    setting `_supports_attention_backend`; the probe after loading checks that the results agree.
    """
    return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(sys.modules[model_class.__module__])


def _unsupported_alibi(config: Any) -> str | None:
    if config.model_type == "mpt":
        for name, value in _MPT_COMPUTED.items():
            if (given := getattr(config.attn_config, name)) != value:
                return f"transformers does not compute its attn_config.{name}: {given}"
        if config.logit_scale is not None:
            return f"transformers does not compute its logit_scale: {config.logit_scale}"
    if uses_alibi(config) and num_kv_heads(config) != config.num_attention_heads:
        return "ALiBi over key heads that queries share is not implemented"
    return None


def _unsupported_rope(parameters: dict[str, Any]) -> str | None:
    per_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    for values in per_layer_type or [parameters]:
        if values.get("rope_type") not in _STATIC_ROPE_TYPES:
            return f"rope type {values['rope_type']!r} depends on the longest sequence of a batch"
    return None

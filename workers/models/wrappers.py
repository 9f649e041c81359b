"""Multimodal models whose text decoder is of a native family: it is served alone, without what sees or hears.

Plain data; imports no framework. `workers/checkpoints/` finds the decoder's tensors by their names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from manta.workers.models.raw_config import RawConfig

WRAPPERS = frozenset(
    {
        "Gemma3ForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "AyaVisionForConditionalGeneration",
        "Cohere2VisionForConditionalGeneration",
        "InternVLForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    }
)
"""Architectures that compute text alone as their decoder does."""


class TextFamily(NamedTuple):
    architecture: str
    usual: dict[str, Any] = {}
    """Values of keys that published configurations leave out, because transformers' class has them as defaults."""


TEXT_FAMILIES = {
    "gemma3_text": TextFamily(
        "Gemma3ForCausalLM",
        {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
        },
    ),
    "llama": TextFamily(
        "LlamaForCausalLM",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
        },
    ),
    "mistral": TextFamily(
        "MistralForCausalLM",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
    ),
    "gemma4_text": TextFamily(
        "Gemma4ForCausalLM",
        {
            "vocab_size": 262144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
        },
    ),
    "llama4_text": TextFamily(
        "Llama4ForCausalLM",
        {
            "vocab_size": 202048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
    ),
    "mistral4": TextFamily(
        "Mistral4ForCausalLM",
        {
            "vocab_size": 131072,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "max_position_embeddings": 1048576,
        },
    ),
    "cohere2": TextFamily("Cohere2ForCausalLM"),
    "qwen2": TextFamily("Qwen2ForCausalLM"),
    "qwen3_5_text": TextFamily(
        "Qwen3_5ForCausalLM",
        {
            "vocab_size": 248320,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
        },
    ),
    "qwen3_5_moe_text": TextFamily(
        "Qwen3_5MoeForCausalLM",
        {
            "vocab_size": 248320,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
        },
    ),
    "qwen3": TextFamily("Qwen3ForCausalLM"),
}
"""The native family of a text decoder, by the `model_type` of its configuration."""
_DTYPES = ("dtype", "torch_dtype")
"""Keys of the dtype, which may stand beside `text_config` instead of in it."""


def text_decoder(raw: RawConfig) -> tuple[str, RawConfig] | None:
    """Returns the native architecture of a wrapper's text decoder and its configuration; None if the model is no
    wrapper, or if its decoder has no native form.
    """
    if raw.architecture not in WRAPPERS:
        return None
    text = raw["text_config"].object()
    family = TEXT_FAMILIES.get(text["model_type"].text(""))
    if family is None:
        return None
    raw.ignore(*(key for key in raw if key != "text_config"))
    dtype = {key: raw[key].value for key in _DTYPES if raw[key].value is not None}
    # transformers ties the head by the whole model's key. A file with a head of its own has the last word.
    is_tied = raw["tie_word_embeddings"].flag(True)
    return family.architecture, text.completed(family.usual | dtype, {"tie_word_embeddings": is_tied})

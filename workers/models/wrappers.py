"""Multimodal models whose text decoder is of a native family: it is served alone, without what sees or hears.

Plain data; imports no framework. `workers/checkpoints/` finds the decoder's tensors by their names.
"""

from __future__ import annotations

from typing import NamedTuple

from manta.workers.models.raw_config import RawConfig
from manta.workers.models.text_families import TEXT_FAMILIES


class Wrapper(NamedTuple):
    """Where the configuration of a wrapper's text decoder lies."""

    usual_type: str
    """The `model_type` of a text decoder whose configuration names none."""
    path: tuple[str, ...] = ("text_config",)
    """The keys that lead to the text decoder's configuration."""
    may_be_flat: bool = False
    """Whether published configurations have the text decoder's keys beside those of the whole model instead."""


WRAPPERS = {
    "AyaVisionForConditionalGeneration": Wrapper("cohere2"),
    "Cohere2VisionForConditionalGeneration": Wrapper("cohere2"),
    "DeepseekVLForConditionalGeneration": Wrapper("llama"),
    "DeepseekVLHybridForConditionalGeneration": Wrapper("llama"),
    "Emu3ForConditionalGeneration": Wrapper("emu3_text_model"),
    "FastVlmForConditionalGeneration": Wrapper("qwen2"),
    "Gemma3ForConditionalGeneration": Wrapper("gemma3_text"),
    "Gemma3nForConditionalGeneration": Wrapper("gemma3n_text"),
    "Gemma4ForConditionalGeneration": Wrapper("gemma4_text"),
    "Gemma4UnifiedForConditionalGeneration": Wrapper("gemma4_unified_text"),
    "Glm46VForConditionalGeneration": Wrapper("glm4v_text"),
    "Glm4vForConditionalGeneration": Wrapper("glm4v_text"),
    "Glm4vMoeForConditionalGeneration": Wrapper("glm4v_moe_text"),
    "Glm5NextForConditionalGeneration": Wrapper("glm5_next_text", may_be_flat=True),
    "GlmAsrForConditionalGeneration": Wrapper("llama"),
    "GlmOcrForConditionalGeneration": Wrapper("glm_ocr_text"),
    "GotOcr2ForConditionalGeneration": Wrapper("qwen2"),
    "Granite4VisionForConditionalGeneration": Wrapper("granite4_vision_text"),
    "GraniteDoclingForConditionalGeneration": Wrapper("granite_docling_text"),
    "GraniteSpeechForConditionalGeneration": Wrapper("granite"),
    "GraniteSpeechPlusForConditionalGeneration": Wrapper("granite"),
    "Idefics2ForConditionalGeneration": Wrapper("mistral"),
    "Idefics3ForConditionalGeneration": Wrapper("llama"),
    "Inkling2ForConditionalGeneration": Wrapper("inkling2_text"),
    "Inkling2LoopForConditionalGeneration": Wrapper("inkling2_loop_text"),
    "InklingForConditionalGeneration": Wrapper("inkling_text"),
    "InternVLChatModel": Wrapper("llama", ("llm_config",)),
    "InternVLForConditionalGeneration": Wrapper("qwen2"),
    "JanusForConditionalGeneration": Wrapper("llama"),
    "Kimi_K25ForConditionalGeneration": Wrapper("deepseek_v3"),
    "KimiK25ForConditionalGeneration": Wrapper("deepseek_v3"),
    "KimiVLForConditionalGeneration": Wrapper("deepseek_v3"),
    "Lfm2VlForConditionalGeneration": Wrapper("lfm2"),
    "Lfm3VlForConditionalGeneration": Wrapper("lfm3"),
    "LightOnOcrForConditionalGeneration": Wrapper("qwen3"),
    "Llama4ForConditionalGeneration": Wrapper("llama4_text"),
    "LlavaForConditionalGeneration": Wrapper("llama"),
    "LlavaNextForConditionalGeneration": Wrapper("llama"),
    "LlavaNextVideoForConditionalGeneration": Wrapper("llama"),
    "LlavaOnevisionForConditionalGeneration": Wrapper("qwen2"),
    "MiniCPMOcrForConditionalGeneration": Wrapper("qwen3_5_text"),
    "MiniCPMV4_6ForConditionalGeneration": Wrapper("qwen3_5_text"),
    "MiniCPMV4_7ForConditionalGeneration": Wrapper("qwen3_5_text"),
    "Mistral3ForConditionalGeneration": Wrapper("mistral"),
    "MistralLarge4ForConditionalGeneration": Wrapper("mistral_large4_text"),
    "MossTranscribeDiarizeForConditionalGeneration": Wrapper("qwen3"),
    "NemotronH_Omni_Reasoning_V3": Wrapper("nemotron_h"),
    "OmniASRForConditionalGeneration": Wrapper("llama"),
    "Ovis2ForConditionalGeneration": Wrapper("qwen2"),
    "PerceptionLMForConditionalGeneration": Wrapper("llama"),
    "QianfanOCRForConditionalGeneration": Wrapper("qwen3"),
    "Qwen2_5_VLForConditionalGeneration": Wrapper("qwen2_5_vl_text", may_be_flat=True),
    "Qwen2_5OmniForConditionalGeneration": Wrapper("qwen2_5_omni_text", ("thinker_config", "text_config")),
    "Qwen2_5OmniModel": Wrapper("qwen2_5_omni_text", ("thinker_config", "text_config")),
    "Qwen2_5OmniThinkerForConditionalGeneration": Wrapper("qwen2_5_omni_text"),
    "Qwen2AudioForConditionalGeneration": Wrapper("qwen2"),
    "Qwen2VLForConditionalGeneration": Wrapper("qwen2_vl_text", may_be_flat=True),
    "Qwen3_5ForConditionalGeneration": Wrapper("qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": Wrapper("qwen3_5_moe_text"),
    "Qwen3ASRForConditionalGeneration": Wrapper("qwen3"),
    "Qwen3OmniMoeForConditionalGeneration": Wrapper("qwen3_omni_moe_text", ("thinker_config", "text_config")),
    "Qwen3OmniMoeThinkerForConditionalGeneration": Wrapper("qwen3_omni_moe_text"),
    "Qwen3VLForConditionalGeneration": Wrapper("qwen3_vl_text"),
    "Qwen3VLMoeForConditionalGeneration": Wrapper("qwen3_vl_moe_text"),
    "Qwen4ExpForConditionalGeneration": Wrapper("qwen4_exp_text"),
    "SmolVLMForConditionalGeneration": Wrapper("llama"),
    "VideoLlama3ForConditionalGeneration": Wrapper("qwen2"),
    "VideoLlavaForConditionalGeneration": Wrapper("llama"),
    "VipLlavaForConditionalGeneration": Wrapper("llama"),
    "VoxtralForConditionalGeneration": Wrapper("llama"),
}
"""Architectures that compute text alone as their decoder does."""
TEXT_PATHS = tuple(sorted({".".join((*each.path, "")) for each in WRAPPERS.values()}))
"""Beginnings of the names of keys in text decoders' configurations."""
DECODERS = {"Emu3ForCausalLM": "emu3_text_model", "Gemma4UnifiedForCausalLM": "gemma4_unified_text"}
"""Architectures of text decoders alone that compute as a native family under another name, and the `model_type` of
their configurations.
"""
_CLASSIFIERS = ("shieldgemma2",)
"""Values of `model_type` of classifiers that may name the architecture of a wrapper."""
_DTYPES = ("dtype", "torch_dtype")
"""Keys of the dtype, which may stand beside the text decoder's configuration instead of in it."""
_ROPES = ("rope_parameters", "rope_scaling")
_OF_THREE_POSITIONS = ("mrope_section", "mrope_interleaved")
"""Keys of a rope that rotates parts of a head by a token's time, height and width, which are equal in text."""
_OF_PICTURES = (
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_end_token_id",
    "vision_start_token_id",
    "vision_token_id",
)
"""Keys beside those of a flat configuration's text decoder."""


def bare_decoder(raw: RawConfig) -> tuple[str, RawConfig] | None:
    """Returns the native architecture of an architecture in `DECODERS` and its configuration; None for another one."""
    model_type = DECODERS.get(raw.architecture or "")
    if model_type is None:
        return None
    family = TEXT_FAMILIES[model_type]
    return family.architecture, raw.completed(family.usual, {})


def text_decoder(raw: RawConfig) -> tuple[str, RawConfig] | None:
    """Returns the native architecture of a wrapper's text decoder and its configuration; None if the model is no
    wrapper, or if its decoder has no native form.
    """
    wrapper = WRAPPERS.get(raw.architecture or "")
    if wrapper is None or raw["model_type"].value in _CLASSIFIERS:
        return None
    text = raw
    if not (wrapper.may_be_flat and raw[wrapper.path[0]].value is None):
        for key in wrapper.path:
            text = text[key].object()
    is_flat = text is raw
    family = TEXT_FAMILIES.get(wrapper.usual_type if is_flat else text["model_type"].text(wrapper.usual_type))
    if family is None:
        return None
    raw.ignore(*(_OF_PICTURES if is_flat else (key for key in raw if key != wrapper.path[0])))
    dtype = {key: raw[key].value for key in _DTYPES if raw[key].value is not None}
    # transformers ties the head by the whole model's key. A file with a head of its own has the last word.
    is_tied = raw["tie_word_embeddings"].flag(text["tie_word_embeddings"].flag(True))
    fixed = {"tie_word_embeddings": is_tied} | _plain_ropes(text)
    return family.architecture, text.completed(family.usual | dtype, fixed)


def _plain_ropes(text: RawConfig) -> dict[str, dict[str, object]]:
    """Returns the ropes of a configuration as those of one position for each token."""
    found = {}
    for key in _ROPES:
        values = text[key].object().values
        if any(each in values for each in _OF_THREE_POSITIONS):
            text[key].object().ignore(*_OF_THREE_POSITIONS)
            rope = {name: value for name, value in values.items() if name not in _OF_THREE_POSITIONS}
            for kind in ("type", "rope_type"):
                if rope.get(kind) == "mrope":
                    rope[kind] = "default"
            found[key] = rope
    return found

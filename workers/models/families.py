"""The native families by the names of their architectures. transformers runs every other model."""

from __future__ import annotations

from typing import Protocol

from manta.workers.models import (
    axk1,
    axk2,
    bailing_hybrid,
    bamba,
    cohere2,
    deepseek_v2,
    deepseek_v3,
    deepseek_v4,
    deepseek_v32,
    dots3_note,
    eagle3,
    falcon_h1,
    falcon_mamba,
    gemma2,
    gemma3,
    gemma3n,
    gemma4,
    glm,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    glm4v,
    glm5_next,
    glm_moe_dsa,
    gpt_oss,
    granite,
    granite_hybrid,
    hy_v4,
    inkling,
    inkling2,
    inkling2_loop,
    jamba,
    kimi_linear,
    lara_mini,
    lfm2,
    lfm2_moe,
    lfm3,
    llama,
    llama4,
    longcat_flash,
    mamba,
    mamba2,
    mimo_v2,
    minicpm3,
    minimax,
    mistral,
    mistral4,
    mistral_large4,
    mixtral,
    nemotron_h,
    olmo2,
    olmo3,
    olmo_hybrid,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen3_vl_moe,
    qwen4_exp,
    recurrent_gemma,
    rwkv,
    seed_oss,
    smollm3,
    vaultgemma,
    xlstm,
    youtu,
    zamba,
    zamba2,
    zaya,
)
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec


class Family(Protocol):
    """The interface of a family's module in `workers/models/`, such as `llama.py`."""

    ARCHITECTURE: str
    """The name of the model's class in Hugging Face transformers."""

    def read_config(self, raw: RawConfig) -> ModelConfig:
        """Returns the shape of a model of this family, without its EOS tokens. Raises `ConfigError` naming the key
        whose value is unsupported.
        """
        ...

    def describe(self, config: ModelConfig) -> DecoderSpec:
        """Returns the weights of a model. With a rank's configuration, returns those of its share."""
        ...


_MODULES: tuple[Family, ...] = (
    llama,
    mistral,
    qwen2,
    qwen3,
    seed_oss,
    gemma2,
    vaultgemma,
    gemma3,
    olmo2,
    olmo3,
    olmo_hybrid,
    smollm3,
    granite,
    glm,
    glm4,
    glm4v,
    phi3,
    cohere2,
    qwen3_moe,
    qwen3_vl_moe,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
    qwen4_exp,
    lara_mini,
    gpt_oss,
    lfm2,
    lfm2_moe,
    lfm3,
    bamba,
    granite_hybrid,
    falcon_h1,
    nemotron_h,
    jamba,
    mamba2,
    mamba,
    falcon_mamba,
    kimi_linear,
    bailing_hybrid,
    minimax,
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    deepseek_v4,
    glm_moe_dsa,
    glm5_next,
    hy_v4,
    axk1,
    axk2,
    longcat_flash,
    glm4_moe_lite,
    minicpm3,
    youtu,
    mistral4,
    mistral_large4,
    glm4_moe,
    mimo_v2,
    mixtral,
    llama4,
    gemma3n,
    gemma4,
    recurrent_gemma,
    zamba,
    zamba2,
    zaya,
    xlstm,
    inkling,
    inkling2,
    inkling2_loop,
    dots3_note,
    rwkv,
)
FAMILIES = {family.ARCHITECTURE: family for family in _MODULES}
"""The native families by architecture. To add a dense family, write its module and add it to `_MODULES`."""

OTHER_MODEL_TYPES = ("exaone", "sarvam_moe")
"""Values of `model_type` whose checkpoints name the architecture of a native family, and name its tensors otherwise."""

OTHER_NAMES = {"Glm5NextForCausalLM": "Glm5NextTextModel", "SarvamMLAForCausalLM": "DeepseekV3ForCausalLM"}
"""Architectures that published configurations name, and those of the native families that they are."""


def describe(config: ModelConfig) -> DecoderSpec:
    """Returns the weights of a native model, or of an EAGLE-3 head."""
    if config.eagle3 is not None:
        return eagle3.describe(config, config.eagle3)
    return FAMILIES[config.architecture].describe(config)

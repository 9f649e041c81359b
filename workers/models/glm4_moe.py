"""GLM-4.5 to GLM-4.7 (Z.ai, 2025): grouped-query attention of which half of each head rotates, perhaps with norms of
heads, and DeepSeek-V3's experts.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import deepseek_v3, llama, qwen3
from manta.workers.models.dense import read_dense, read_head_dim, read_rope
from manta.workers.models.model_config import ExpertsConfig, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, LayerSpec

ARCHITECTURE = "Glm4MoeForCausalLM"


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` and `read_sigmoid_experts` do."""
    rope = read_rope(raw, read_head_dim(raw), usual_part=0.5)
    config = read_dense(raw, norm_eps=("rms_norm_eps", 1e-5), rope=rope)
    config = msgspec.structs.replace(
        config, qkv_bias=raw["attention_bias"].flag(False), has_head_norms=raw["use_qk_norm"].flag(False)
    )
    usual = ExpertsConfig(num_experts=128, num_chosen=8, intermediate_size=1408, dense_layers=(0,))
    return deepseek_v3.read_sigmoid_experts(raw, config, usual)


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    layer = qwen3.layer(config, index) if config.has_head_norms else llama.layer(config, index)
    return deepseek_v3.with_sigmoid_experts(config, layer, index)

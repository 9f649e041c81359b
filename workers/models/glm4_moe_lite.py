"""GLM-4.7 Flash (Z.ai, 2026): DeepSeek-V3's layers in another size."""

from __future__ import annotations

from manta.workers.models import deepseek_v3, latent
from manta.workers.models.model_config import ExpertsConfig, LatentShape, ModelConfig
from manta.workers.models.raw_config import RawConfig

ARCHITECTURE = "Glm4MoeLiteForCausalLM"

_USUAL = LatentShape(query_rank=768, kv_rank=512, plain_dim=192, rope_dim=64, value_dim=256)

describe = deepseek_v3.describe


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_latent` and `read_sigmoid_experts` do."""
    is_interleaved = raw["rope_interleave"].flag(True)
    config = latent.read_latent(raw, _USUAL, norm_eps=("rms_norm_eps", 1e-5), is_interleaved=is_interleaved)
    usual = ExpertsConfig(num_experts=64, num_chosen=4, intermediate_size=1536, scale=1.8, dense_layers=(0,))
    return deepseek_v3.read_sigmoid_experts(raw, config, usual)

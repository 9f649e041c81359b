"""DeepSeek-V3.2 (DeepSeek-AI, 2025): DeepSeek-V3's layers, whose attention reads the tokens that an indexer chooses."""

from __future__ import annotations

from manta.workers.models import deepseek_v3, latent
from manta.workers.models.indexer import read_indexer
from manta.workers.models.model_config import IndexerShape, ModelConfig
from manta.workers.models.raw_config import RawConfig

ARCHITECTURE = "DeepseekV32ForCausalLM"

_INDEXER = IndexerShape(num_heads=64, head_dim=128, num_chosen=2048)

describe = deepseek_v3.describe


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_latent`, `read_indexer` and `read_sigmoid_experts` do,
    and for a rope whose pairs are not neighbours.
    """
    raw["rope_interleave"].only(True)
    indexer = read_indexer(raw, _INDEXER, deepseek_v3.USUAL.rope_dim)
    config = latent.read_latent(raw, deepseek_v3.USUAL, indexer=indexer)
    return deepseek_v3.read_sigmoid_experts(raw, config, deepseek_v3.USUAL_EXPERTS)

"""Youtu-LLM (Tencent, 2026): Llama's layers with latent attention."""

from __future__ import annotations

from manta.workers.models import latent, llama
from manta.workers.models.model_config import LatentShape, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec

ARCHITECTURE = "YoutuForCausalLM"

_USUAL = LatentShape(query_rank=1536, kv_rank=512, plain_dim=128, rope_dim=64, value_dim=128)


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_latent` does."""
    raw["mlp_bias"].only(False)
    return latent.read_latent(raw, _USUAL, is_interleaved=raw["rope_interleave"].flag(True), is_tied=True)


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [latent.layer(config, index) for index in range(config.num_layers)])

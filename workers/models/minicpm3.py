"""MiniCPM3 (OpenBMB, 2024): latent attention with a scaled embedding, scaled residuals and scaled logits."""

from __future__ import annotations

import math

import msgspec

from manta.workers.models import latent, llama
from manta.workers.models.model_config import LatentShape, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec

ARCHITECTURE = "MiniCPM3ForCausalLM"


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_latent` does."""
    num_heads = raw["num_attention_heads"].whole()
    value_dim = raw["hidden_size"].whole() // num_heads
    usual = LatentShape(query_rank=768, kv_rank=256, plain_dim=64, rope_dim=32, value_dim=value_dim)
    config = latent.read_latent(raw, usual, norm_eps=("rms_norm_eps", 1e-5), is_interleaved=False, is_tied=True)
    raw["mlp_bias"].only(False)
    depth, base = raw["scale_depth"], raw["dim_model_base"]
    has_no_depth = depth.is_given and depth.value is None
    has_no_base = base.is_given and base.value is None
    return msgspec.structs.replace(
        config,
        embedding_scale=raw["scale_emb"].number(12),
        residual_scale=1.0 if has_no_depth else depth.number(1.4) / math.sqrt(config.num_layers),
        logits_scale=1.0 if has_no_base else base.whole(256) / config.hidden_size,
    )


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [latent.layer(config, index) for index in range(config.num_layers)])

"""Seed-OSS (ByteDance Seed Team, 2025): Llama's layers with biases on queries, keys and values."""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig, read_dense

ARCHITECTURE = "SeedOssForCausalLM"

describe = llama.describe


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ModelError` as `read_dense` does."""
    return msgspec.structs.replace(
        read_dense(raw, usual_head_dim=128),
        qkv_bias=raw.get("attention_bias", True),
        output_bias=raw.get("attention_out_bias", False),
        mlp_bias=raw.get("mlp_bias", False),
    )

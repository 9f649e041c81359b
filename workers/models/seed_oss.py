"""Seed-OSS (ByteDance Seed Team, 2025): Llama's layers with biases on queries, keys and values."""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.dense import read_dense
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig

ARCHITECTURE = "SeedOssForCausalLM"

describe = llama.describe


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` does."""
    return msgspec.structs.replace(
        read_dense(raw, usual_head_dim=128),
        qkv_bias=raw["attention_bias"].flag(True),
        output_bias=raw["attention_out_bias"].flag(False),
        mlp_bias=raw["mlp_bias"].flag(False),
    )

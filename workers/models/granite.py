"""Granite 3 (IBM, 2024): Llama's layers with factors on embeddings, attention's products, residuals and logits."""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig

ARCHITECTURE = "GraniteForCausalLM"

describe = llama.describe


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` does."""
    return msgspec.structs.replace(
        llama.read_config(raw),
        attention_scale=raw["attention_multiplier"].number(1.0),
        embedding_scale=raw["embedding_multiplier"].number(1.0),
        residual_scale=raw["residual_multiplier"].number(1.0),
        logits_scale=1 / raw["logits_scaling"].number(1.0),
    )

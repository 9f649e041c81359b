"""Mistral (Jiang et al., 2023): Llama's layers, in which a token sees a sliding window of those before it."""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig, read_dense

ARCHITECTURE = "MistralForCausalLM"

describe = llama.describe


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. A missing window means 4096 positions, as in transformers; null means none.

    Raises `ModelError` as `read_dense` does.
    """
    config = read_dense(raw)
    return msgspec.structs.replace(config, sliding_windows=(raw.get("sliding_window", 4096),) * config.num_layers)

"""Mistral (Jiang et al., 2023): Llama's layers, in which a token sees a sliding window of those before it."""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.dense import read_dense, read_window
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig

ARCHITECTURE = "MistralForCausalLM"

describe = llama.describe


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` does."""
    config = read_dense(raw)
    return msgspec.structs.replace(config, sliding_windows=(read_window(raw),) * config.num_layers)

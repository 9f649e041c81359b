"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama's layers with biases on queries, keys and values. A few of the models
have sliding windows in their later layers.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.dense import read_dense, read_windows
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig

ARCHITECTURE = "Qwen2ForCausalLM"

describe = llama.describe


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` and `read_windows` do."""
    config = read_dense(raw)
    return msgspec.structs.replace(config, qkv_bias=True, sliding_windows=read_windows(raw, config.num_layers))

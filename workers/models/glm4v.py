"""The text decoder of GLM-4.1V and GLM-OCR (Z.ai, 2025): GLM-4-0414's layers, whose heads rotate as a whole unless the
configuration says otherwise.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import glm4
from manta.workers.models.dense import read_dense, read_head_dim, read_rope
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig

ARCHITECTURE = "Glm4vTextModel"

describe = glm4.describe


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` does."""
    rope = read_rope(raw, read_head_dim(raw), usual_part=1.0, is_interleaved=True)
    config = read_dense(raw, norm_eps=("rms_norm_eps", 1e-5), rope=rope)
    return msgspec.structs.replace(config, qkv_bias=raw["attention_bias"].flag(True))

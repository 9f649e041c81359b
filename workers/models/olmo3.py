"""OLMo 3 (OLMo Team, 2025): OLMo 2's layers, of which three in four have a window and an unscaled rope."""

from __future__ import annotations

from manta.workers.models import olmo2
from manta.workers.models.dense import (
    FULL,
    SLIDING,
    read_dense,
    read_head_dim,
    read_kinds,
    read_ropes_of_kinds,
    with_kinds,
)
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig

ARCHITECTURE = "Olmo3ForCausalLM"

_THETA = 500000.0
_WINDOW = 4096

describe = olmo2.describe


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` and `read_kinds` do."""
    ropes = read_ropes_of_kinds(raw, read_head_dim(raw), {FULL: _THETA, SLIDING: _THETA})
    config = olmo2.with_biases(raw, read_dense(raw, norm_eps=olmo2.NORM_EPS, rope=ropes[FULL]))
    kinds = read_kinds(raw, config.num_layers, period=4)
    return with_kinds(config, kinds, raw["sliding_window"].whole(_WINDOW), ropes)

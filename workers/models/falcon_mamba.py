"""Falcon Mamba (Zuo et al., 2024): Mamba with norms without weights of time steps, B and C."""

from __future__ import annotations

import msgspec

from manta.workers.models import mamba
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent_shapes import SelectiveShape

ARCHITECTURE = "FalconMambaForCausalLM"

describe = mamba.describe


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `mamba.read_config` does."""
    raw.ignore("use_falcon_mambapy")
    config = mamba.read_config(raw)
    assert isinstance(config.recurrent, SelectiveShape)
    norm_eps = raw["mixer_rms_eps"].number(1e-6, least=0, most=1)
    return msgspec.structs.replace(config, recurrent=msgspec.structs.replace(config.recurrent, norm_eps=norm_eps))

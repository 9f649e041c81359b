"""Mamba (Gu and Dao, 2023): layers of a selective scan alone, without attention or MLPs."""

from __future__ import annotations

import msgspec

from manta.workers.models.mamba2 import OF_TRAINING
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent import (
    LINEAR,
    decoder_of_mixers,
    mixer_alone,
    read_selective_scan,
    read_without_attention,
    selective_scan,
    with_states,
)
from manta.workers.models.specs import DecoderSpec

ARCHITECTURE = "MambaForCausalLM"


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_without_attention` does."""
    raw.ignore(*OF_TRAINING, "residual_in_fp32", "use_mambapy", "use_associative_scan", "d_inner", "d_model", "ssm_cfg")
    shape = read_selective_scan(raw, raw["hidden_size"].whole(), None, prefix="")
    if raw["intermediate_size"].value is not None:
        shape = msgspec.structs.replace(shape, channels=raw["intermediate_size"].whole())
    tied = raw["tie_word_embeddings"].flag(True)
    config = read_without_attention(raw.completed({}, {"tie_word_embeddings": tied}), shape.channels, shape.channels)
    return with_states(config, (LINEAR,) * config.num_layers, shape)


def describe(config: ModelConfig) -> DecoderSpec:
    layers = [
        mixer_alone(config, index, selective_scan(config, f"backbone.layers.{index}.mixer"))
        for index in range(config.num_layers)
    ]
    return decoder_of_mixers(config, layers)

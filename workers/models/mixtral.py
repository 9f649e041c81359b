"""Mixtral (Jiang et al., 2024): Mistral's layers with experts instead of one MLP."""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.dense import read_dense
from manta.workers.models.experts import experts, read_num_experts
from manta.workers.models.model_config import ExpertsConfig, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, LayerSpec

ARCHITECTURE = "MixtralForCausalLM"

_NAMES = ("w1", "w3", "w2")


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` does."""
    config = read_dense(raw, norm_eps=("rms_norm_eps", 1e-5))
    window = raw["sliding_window"]
    num_experts = read_num_experts(raw, 8, "num_local_experts", "num_experts")
    return msgspec.structs.replace(
        config,
        sliding_windows=(None if window.value is None else window.whole(),) * config.num_layers,
        experts=ExpertsConfig(
            num_experts=num_experts,
            num_chosen=raw["num_experts_per_tok"].whole(2, most=num_experts),
            intermediate_size=config.intermediate_size,
            normalises=True,
        ),
    )


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [layer(config, index) for index in range(config.num_layers)])


def layer(config: ModelConfig, index: int) -> LayerSpec:
    mixture = experts(config, f"model.layers.{index}.block_sparse_moe", names=_NAMES)
    return llama.layer(config, index)._replace(mlp=mixture)

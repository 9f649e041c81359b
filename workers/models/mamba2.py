"""Mamba 2 (Dao and Gu, 2024): layers of a state space alone, without attention or MLPs."""

from __future__ import annotations

from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent import (
    LINEAR,
    StateSpaceKeys,
    StateSpaceSizes,
    decoder_of_mixers,
    mixer_alone,
    read_state_space,
    read_without_attention,
    state_space,
    with_states,
)
from manta.workers.models.specs import DecoderSpec

ARCHITECTURE = "Mamba2ForCausalLM"

KEYS = StateSpaceKeys(
    heads="num_heads",
    head_dim="head_dim",
    groups="n_groups",
    state_size="state_size",
    width="conv_kernel",
    expand="expand",
    kernel_bias="use_conv_bias",
    bias="use_bias",
)
OF_TRAINING = (
    "rescale_prenorm_residual",
    "time_step_floor",
    "time_step_init_scheme",
    "time_step_max",
    "time_step_min",
    "time_step_rank",
    "time_step_scale",
)
"""Keys of how weights were initialised."""


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_state_space` does."""
    raw.ignore(*OF_TRAINING, "residual_in_fp32")
    norm_eps = raw["layer_norm_epsilon"].number(1e-5, least=0, most=1)
    shape = read_state_space(raw, raw["hidden_size"].whole(), norm_eps, KEYS, StateSpaceSizes(128, 8, 128))
    config = read_without_attention(raw, shape.num_heads, shape.inner)
    return with_states(config, (LINEAR,) * config.num_layers, shape)


def describe(config: ModelConfig) -> DecoderSpec:
    layers = [
        mixer_alone(config, index, state_space(config, f"backbone.layers.{index}.mixer"))
        for index in range(config.num_layers)
    ]
    return decoder_of_mixers(config, layers)

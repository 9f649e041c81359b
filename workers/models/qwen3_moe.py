"""Qwen3's mixtures of experts (Yang et al., 2025): Qwen3's layers with experts instead of one MLP."""

from __future__ import annotations

import msgspec

from manta.workers.models import llama, qwen3
from manta.workers.models.dense import read_dense, trial_layers
from manta.workers.models.experts import experts, read_num_experts
from manta.workers.models.model_config import ExpertsConfig, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, LayerSpec

ARCHITECTURE = "Qwen3MoeForCausalLM"


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` does."""
    config = read_dense(raw)
    has_biases = raw["attention_bias"].flag(False)
    window = raw["sliding_window"].whole(4096) if raw["use_sliding_window"].flag(False) else None
    raw.ignore("sliding_window")
    num_experts = read_num_experts(raw, 128, "num_local_experts", "num_experts")
    dense_layers = read_dense_layers(raw, config.num_layers)
    return msgspec.structs.replace(
        config,
        qkv_bias=has_biases,
        output_bias=has_biases,
        sliding_windows=(window,) * config.num_layers,
        experts=ExpertsConfig(
            num_experts=num_experts,
            num_chosen=raw["num_experts_per_tok"].whole(8, most=num_experts),
            intermediate_size=raw["moe_intermediate_size"].whole(768),
            normalises=raw["norm_topk_prob"].flag(False),
            dense_layers=dense_layers,
        ),
        num_trial_layers=trial_layers([layer in dense_layers for layer in range(config.num_layers)]),
    )


def read_dense_layers(raw: RawConfig, num_layers: int) -> tuple[int, ...]:
    """Returns the layers of `mlp_only_layers`, and all but each `decoder_sparse_step`-th."""
    step = raw["decoder_sparse_step"].whole(1)
    value = raw["mlp_only_layers"]
    named = set() if value.value is None else {*value.wholes(least=0)}
    return tuple(index for index in range(num_layers) if index in named or (index + 1) % step)


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [layer(config, index) for index in range(config.num_layers)])


def layer(config: ModelConfig, index: int) -> LayerSpec:
    assert config.experts is not None
    usual = qwen3.layer(config, index)
    if index in config.experts.dense_layers:
        return usual
    return usual._replace(mlp=experts(config, f"model.layers.{index}.mlp"))

"""Qwen3's mixtures of experts (Yang et al., 2025): Qwen3's layers with experts instead of one MLP."""

from __future__ import annotations

import msgspec

from manta.workers.models import llama, qwen3
from manta.workers.models.dense import read_dense
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, ExpertsSpec, LayerSpec, LinearSpec, WeightPart

ARCHITECTURE = "Qwen3MoeForCausalLM"


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` does, and for layers without experts."""
    config = read_dense(raw)
    raw["decoder_sparse_step"].whole(1, most=1)
    if raw["mlp_only_layers"].value:
        raise raw["mlp_only_layers"].refused("empty, so that all layers have experts")
    has_biases = raw["attention_bias"].flag(False)
    window = raw["sliding_window"].whole(4096) if raw["use_sliding_window"].flag(False) else None
    raw.ignore("sliding_window")
    return msgspec.structs.replace(
        config,
        qkv_bias=has_biases,
        output_bias=has_biases,
        sliding_windows=(window,) * config.num_layers,
        intermediate_size=raw["moe_intermediate_size"].whole(768),
        num_experts=(num_experts := raw.first_of("num_local_experts", "num_experts").whole(128)),
        num_chosen_experts=raw["num_experts_per_tok"].whole(8, most=num_experts),
        normalises_choice=raw["norm_topk_prob"].flag(False),
    )


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    prefix = f"model.layers.{index}.mlp"
    router = LinearSpec((WeightPart(f"{prefix}.gate", config.num_experts),), config.hidden_size)
    experts = tuple(llama.mlp(config, f"{prefix}.experts.{expert}") for expert in range(config.num_experts))
    return qwen3.layer(config, index)._replace(mlp=ExpertsSpec(router, experts))

"""LFM2's mixtures of experts (Liquid AI, 2025): LFM2's layers, all but the first ones with experts."""

from __future__ import annotations

import msgspec

from manta.workers.models import lfm2
from manta.workers.models.experts import read_num_experts
from manta.workers.models.model_config import ExpertsConfig, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, ExpertsSpec, LayerSpec
from manta.workers.models.weight_specs import LinearSpec, WeightPart

ARCHITECTURE = "Lfm2MoeForCausalLM"


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `lfm2.read_config` does."""
    config = lfm2.read_config(raw.completed({}, {"block_auto_adjust_ff_dim": False}))
    num_experts = read_num_experts(raw, 32, "num_local_experts", "num_experts")
    num_dense = raw["num_dense_layers"].whole(2, least=0)
    has_bias = raw["use_expert_bias"].flag(True)
    return msgspec.structs.replace(
        config,
        experts=ExpertsConfig(
            num_experts=num_experts,
            num_chosen=raw["num_experts_per_tok"].whole(4, most=num_experts),
            intermediate_size=raw["moe_intermediate_size"].whole(1792),
            scores="sigmoid",
            normalises=raw["norm_topk_prob"].flag(True),
            scale=raw["routed_scaling_factor"].number(1.0),
            has_choice_bias=has_bias,
            dense_layers=tuple(range(min(num_dense, config.num_layers))),
        ),
        num_trial_layers=min(config.num_layers, max(config.num_trial_layers, num_dense + 1)),
    )


def describe(config: ModelConfig) -> DecoderSpec:
    spec = lfm2.describe(config)
    return spec._replace(layers=[_with_experts(config, layer, index) for index, layer in enumerate(spec.layers)])


def _with_experts(config: ModelConfig, layer: LayerSpec, index: int) -> LayerSpec:
    sizes = config.experts
    assert sizes is not None
    if index in sizes.dense_layers:
        return layer
    prefix = f"model.layers.{index}.feed_forward"
    router = LinearSpec((WeightPart(f"{prefix}.gate", sizes.num_experts),), config.hidden_size)
    mlps = [lfm2.mlp(config, f"{prefix}.experts.{each}", sizes.intermediate_size) for each in range(sizes.num_experts)]
    bias = f"{prefix}.expert_bias" if sizes.has_choice_bias else None
    return layer._replace(mlp=ExpertsSpec(router, tuple(mlps), choice_bias=bias))

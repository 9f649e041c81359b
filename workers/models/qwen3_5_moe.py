"""Qwen3.5's mixtures of experts (Qwen Team, 2026), their text decoder: Qwen3.5's layers with experts, one of which
computes every token behind a gate. Published checkpoints hold the experts of a layer in one tensor.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import qwen3_5
from manta.workers.models.experts import experts, read_num_experts, stored_either_way
from manta.workers.models.model_config import ExpertsConfig, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, ExpertsSpec, LayerSpec

ARCHITECTURE = "Qwen3_5MoeForCausalLM"

_INNER = 512
"""The usual width of an expert."""


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `qwen3_5.read_config` does."""
    config = qwen3_5.read_config(with_inner_size(raw))
    return with_experts(raw, config, num_experts=256, num_chosen=8)


def with_inner_size(raw: RawConfig) -> RawConfig:
    """Returns the configuration with the width of an MLP, which models without one leave out."""
    return raw.completed({"intermediate_size": raw["moe_intermediate_size"].whole(_INNER)}, {})


def with_experts(
    raw: RawConfig, config: ModelConfig, num_experts: int, num_chosen: int, dense_layers: tuple[int, ...] = ()
) -> ModelConfig:
    """Returns the same model with experts, whose usual numbers are given."""
    num_experts = read_num_experts(raw, num_experts, "num_experts")
    sizes = ExpertsConfig(
        num_experts=num_experts,
        num_chosen=raw["num_experts_per_tok"].whole(num_chosen, most=num_experts),
        intermediate_size=raw["moe_intermediate_size"].whole(_INNER),
        shared_intermediate_size=raw["shared_expert_intermediate_size"].whole(_INNER),
        normalises=raw["norm_topk_prob"].flag(True),
        dense_layers=dense_layers,
    )
    return msgspec.structs.replace(config, experts=sizes)


def describe(config: ModelConfig) -> DecoderSpec:
    return qwen3_5.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    mixture = mixture_of_experts(config, f"model.layers.{index}.mlp")
    return qwen3_5.layer(config, index)._replace(mlp=mixture)


def mixture_of_experts(config: ModelConfig, prefix: str) -> ExpertsSpec:
    """Returns experts that a checkpoint stores one by one, or those of a layer together."""
    apart, together = (
        experts(config, prefix, shared="shared_expert", shared_gate="shared_expert_gate", are_stacked=are_stacked)
        for are_stacked in (False, True)
    )
    return stored_either_way(apart, together)

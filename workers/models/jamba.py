"""Jamba (AI21, 2024): most layers have Mamba with norms of time steps, B and C. The others have attention without
positions. Some layers have experts.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import bamba
from manta.workers.models.dense import FULL, read_dense
from manta.workers.models.experts import experts, read_num_experts
from manta.workers.models.model_config import ExpertsConfig, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent import LINEAR, read_selective_scan, selective_scan, with_states
from manta.workers.models.specs import DecoderSpec, LayerSpec

ARCHITECTURE = "JambaForCausalLM"

_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` does."""
    raw.ignore(
        "num_logits_to_keep", "use_mamba_kernels", "use_mambapy", "use_associative_scan", "mamba_inner_layernorms"
    )
    config = read_dense(raw)
    layers = range(config.num_layers)
    period, offset = raw["attn_layer_period"].whole(8), raw["attn_layer_offset"].whole(4, least=0)
    kinds = [FULL if layer % period == offset else LINEAR for layer in layers]
    num_experts = read_num_experts(raw, 16, "num_local_experts", "num_experts")
    period, offset = raw["expert_layer_period"].whole(2), raw["expert_layer_offset"].whole(1, least=0)
    dense = tuple(layer for layer in layers if num_experts == 1 or layer % period != offset)
    config = msgspec.structs.replace(
        config,
        layer_ropes=(None,) * config.num_layers,
        experts=ExpertsConfig(
            num_experts=num_experts,
            num_chosen=raw["num_experts_per_tok"].whole(2, most=max(2, num_experts)),
            intermediate_size=config.intermediate_size,
            dense_layers=dense,
        )
        if len(dense) < config.num_layers
        else None,
    )
    config = with_states(config, kinds, read_selective_scan(raw, config.hidden_size, config.rms_norm_eps))
    return msgspec.structs.replace(config, num_trial_layers=min(config.num_layers, 2 * config.num_trial_layers))


def describe(config: ModelConfig) -> DecoderSpec:
    return bamba.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    layer, prefix = bamba.layer(config, index), f"model.layers.{index}"
    if config.states[index] is not None:
        layer = layer._replace(mixer=selective_scan(config, f"{prefix}.mamba", _NORMS))
    if config.experts is not None and index not in config.experts.dense_layers:
        layer = layer._replace(mlp=experts(config, f"{prefix}.feed_forward", router="router"))
    return layer

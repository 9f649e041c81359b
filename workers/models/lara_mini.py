"""Lara Mini (Translated, 2026): two of five layers are Qwen3.5's gated delta nets. The others have Qwen3's attention,
with positions where they have a window, and without where they see everything. Each layer has experts, one of which
computes every token.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import llama, qwen3
from manta.workers.models.dense import FULL, SLIDING, read_dense, read_kinds, with_kinds
from manta.workers.models.experts import experts, stored_either_way
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.qwen3_5 import delta_net
from manta.workers.models.qwen3_5_moe import with_experts
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent import LINEAR, read_delta_shape, with_states
from manta.workers.models.recurrent_shapes import DeltaShape
from manta.workers.models.specs import DecoderSpec, ExpertsSpec, LayerSpec, RecurrentSpec
from manta.workers.models.weight_specs import LinearSpec, Split, WeightPart

ARCHITECTURE = "LaraMiniForCausalLM"

_PATTERN = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)
"""The usual kinds of layers, which repeat."""


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense`, `read_kinds` and `read_delta_shape` do."""
    inner = raw["moe_intermediate_size"].whole(512)
    usual_sizes = {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "intermediate_size": inner}
    raw = raw.completed(usual_sizes, {})
    config = read_dense(raw, 128, is_tied=True)
    has_biases = raw["attention_bias"].flag(False)
    config = msgspec.structs.replace(config, qkv_bias=has_biases, output_bias=has_biases)
    usual = [_PATTERN[layer % len(_PATTERN)] for layer in range(config.num_layers)]
    kinds = read_kinds(raw, config.num_layers, allowed=(LINEAR, SLIDING, FULL), usual=usual)
    config = with_states(config, kinds, read_delta_shape(raw, config.rms_norm_eps))
    ropes = {LINEAR: None, SLIDING: config.rope, FULL: None}
    config = with_kinds(config, kinds, raw["sliding_window"].whole(512), ropes)
    return with_experts(raw, config, num_experts=128, num_chosen=4)


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    layer, prefix = qwen3.layer(config, index), f"model.layers.{index}"
    if config.states[index] is not None:
        layer = layer._replace(mixer=_delta_net(config, f"{prefix}.linear_attn"))
    return layer._replace(mlp=_experts(config, f"{prefix}.mlp"))


def _delta_net(config: ModelConfig, prefix: str) -> RecurrentSpec:
    """Returns a gated delta net whose inputs are one tensor: queries, keys, values, gates, betas and time steps."""
    shape = config.recurrent
    assert isinstance(shape, DeltaShape)
    sizes = (*shape.sizes, shape.sizes[2], shape.num_value_heads, shape.num_value_heads)
    inputs = LinearSpec(tuple(WeightPart("", size, Split.CHANNELS) for size in sizes), config.hidden_size)
    return delta_net(config, prefix, shape, inputs.stored_as(f"{prefix}.in_proj").parts, norm="out_norm")


def _experts(config: ModelConfig, prefix: str) -> ExpertsSpec:
    """Returns experts that a checkpoint stores together, as transformers does, or one by one."""
    together, apart = (
        experts(config, prefix, shared="shared_expert", are_stacked=are_stacked) for are_stacked in (True, False)
    )
    return stored_either_way(together, apart)

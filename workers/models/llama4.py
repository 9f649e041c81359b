"""Llama 4 (Meta, 2025), its text decoder: layers that see the tokens of their chunk, and layers without positions that
see everything and whose queries grow with their position. An expert's score multiplies its input, and one expert
computes every token.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.dense import CHUNKED, FULL, read_dense, read_head_dim, read_kinds, read_rope, trial_layers
from manta.workers.models.experts import experts, read_num_experts
from manta.workers.models.model_config import ExpertsConfig, ModelConfig, QueryGrowth
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.smollm3 import read_rotations
from manta.workers.models.specs import DecoderSpec, LayerSpec
from manta.workers.models.weight_specs import NormSpec

ARCHITECTURE = "Llama4ForCausalLM"

_THETA, _CHUNK = 500000.0, 8192


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` and `read_kinds` do."""
    rope = read_rope(raw, read_head_dim(raw, 128), _THETA, is_interleaved=True)
    config = read_dense(raw, 128, norm_eps=("rms_norm_eps", 1e-5), rope=rope)
    has_biases = raw["attention_bias"].flag(False)
    rotates, chunk = read_rotations(raw, config.num_layers), raw["attention_chunk_size"]
    chunk_size = None if chunk.is_given and chunk.value is None else chunk.whole(_CHUNK)
    kinds = (
        tuple(CHUNKED if each and chunk_size is not None else FULL for each in rotates)
        if raw["layer_types"].value is None
        else read_kinds(raw, config.num_layers, allowed=(FULL, CHUNKED))
    )
    if CHUNKED in kinds and chunk_size is None:
        raise chunk.refused("an integer, which layers of type chunked_attention need")
    sizes = _read_experts(raw, config)
    growth = QueryGrowth(
        rate=raw["attn_scale"].number(0.1, least=0),
        period=raw["floor_scale"].whole(8192),
        first=1,
        only_without_positions=True,
    )
    ropes = tuple(rope if each else None for each in rotates)
    windows = tuple(chunk_size if kind == CHUNKED else None for kind in kinds)
    places = zip(ropes, windows, (layer in sizes.dense_layers for layer in range(config.num_layers)), strict=True)
    return msgspec.structs.replace(
        config,
        qkv_bias=has_biases,
        output_bias=has_biases,
        intermediate_size=raw["intermediate_size_mlp"].whole(16384),
        experts=sizes,
        layer_ropes=ropes,
        sliding_windows=windows,
        windows_are_chunks=CHUNKED in kinds,
        query_growth=growth if raw["attn_temperature_tuning"].flag(True) and growth.rate else None,
        has_head_norms=raw["use_qk_norm"].flag(True),
        num_trial_layers=trial_layers(list(places)),
    )


def _read_experts(raw: RawConfig, config: ModelConfig) -> ExpertsConfig:
    num_experts = read_num_experts(raw, 16, "num_local_experts", "num_experts")
    step, listed = raw["interleave_moe_layer_step"].whole(1), raw["moe_layers"]
    sparse = range(step - 1, config.num_layers, step) if listed.value is None else listed.wholes(least=0)
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=raw["num_experts_per_tok"].whole(1, most=num_experts),
        intermediate_size=config.intermediate_size,
        scores="sigmoid",
        scales_inputs=True,
        shared_intermediate_size=config.intermediate_size,
        dense_layers=tuple(layer for layer in range(config.num_layers) if layer not in sparse),
    )


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    assert config.experts is not None
    layer, prefix = llama.layer(config, index), f"model.layers.{index}.feed_forward"
    if config.has_head_norms and config.ropes[index] is not None:
        norm = NormSpec("", config.head_dim, is_stored=False)  # it commutes with the rotation
        layer = layer._replace(mixer=layer.attention._replace(q_norm=norm, k_norm=norm))
    if index in config.experts.dense_layers:
        return layer._replace(mlp=llama.mlp(config, prefix))
    mixture = experts(config, prefix, router="router", shared="shared_expert", are_stacked=True, are_rows=False)
    return layer._replace(mlp=mixture)

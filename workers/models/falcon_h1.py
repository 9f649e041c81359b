"""Falcon-H1 (Zuo et al., 2025): attention and Mamba 2 side by side in every layer, with factors on many linears."""

from __future__ import annotations

import msgspec

from manta.workers.models import bamba
from manta.workers.models.dense import read_dense, read_head_dim, read_rope
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.part_shapes import PartScales
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent import read_factors, read_state_space, state_space
from manta.workers.models.specs import DecoderSpec, GatedMlpSpec, LayerSpec, SideBySideSpec
from manta.workers.models.weight_specs import LinearSpec

ARCHITECTURE = "FalconH1ForCausalLM"


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` and `read_state_space` do."""
    raw.ignore(
        "num_logits_to_keep",
        "mamba_use_mlp",
        "mlp_expansion_factor",
        "time_step_floor",
        "time_step_max",
        "time_step_min",
    )
    config = read_dense(raw, norm_eps=("rms_norm_eps", 1e-5), rope=read_rope(raw, read_head_dim(raw)))
    inner = raw["mamba_d_ssm"]
    shape = read_state_space(
        raw,
        config.hidden_size,
        config.rms_norm_eps if raw["mamba_rms_norm"].flag(False) else None,
        inner=None if inner.is_given and inner.value is None else inner.whole(1024),
    )
    shape = msgspec.structs.replace(
        shape,
        norms_before_gate=raw["mamba_norm_before_gate"].flag(True),
        has_output_bias=raw["projectors_bias"].flag(False),
    )
    has_biases, scales = raw["attention_bias"].flag(False), _read_scales(raw)
    if scales.attention_input != 1 and has_biases:
        raise raw["attention_bias"].refused("false where attention_in_multiplier is not 1")
    if scales.recurrent_input != 1 and shape.has_input_bias:
        raise raw["mamba_proj_bias"].refused("false where ssm_in_multiplier is not 1")
    return msgspec.structs.replace(
        config,
        qkv_bias=has_biases,
        output_bias=has_biases,
        mlp_bias=raw["mlp_bias"].flag(False),
        embedding_scale=raw["embedding_multiplier"].number(1.0),
        logits_scale=raw["lm_head_multiplier"].number(1.0),
        recurrent=shape,
        layer_states=(shape.state,) * config.num_layers,
        part_scales=scales,
    )


def _read_scales(raw: RawConfig) -> PartScales:
    mlp, parts = raw["mlp_multipliers"], raw["ssm_multipliers"]
    return PartScales(
        attention_input=raw["attention_in_multiplier"].number(1.0),
        attention_output=raw["attention_out_multiplier"].number(1.0),
        keys=raw["key_multiplier"].number(1.0),
        recurrent_input=raw["ssm_in_multiplier"].number(1.0),
        recurrent_output=raw["ssm_out_multiplier"].number(1.0),
        recurrent_parts=read_factors(parts, 5),
        mlp=read_factors(mlp, 2),
    )


def describe(config: ModelConfig) -> DecoderSpec:
    return bamba.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    scales = config.part_scales
    assert scales is not None
    usual = bamba.layer(config, index)
    attention, mlp = usual.attention, usual.mlp
    assert isinstance(mlp, GatedMlpSpec)
    into = scales.attention_input
    recurrent = state_space(
        config,
        f"model.layers.{index}.mamba",
        tuple(scales.recurrent_input * each for each in scales.recurrent_parts),
        scales.recurrent_output,
    )
    attention = attention._replace(
        qkv=_scaled(attention.qkv, into, into * scales.keys, into),
        output=_scaled(attention.output, scales.attention_output),
    )
    gate, down = scales.mlp
    return usual._replace(
        mixer=SideBySideSpec(attention, recurrent),
        mlp=GatedMlpSpec(_scaled(mlp.gated, gate, 1.0), _scaled(mlp.down, down)),
    )


def _scaled(linear: LinearSpec, *factors: float) -> LinearSpec:
    parts = [part._replace(scale=factor) for part, factor in zip(linear.parts, factors, strict=True)]
    return linear._replace(parts=tuple(parts))

"""ZAYA (Zyphra, 2025): attention whose queries and keys go through convolutions, and one expert for each token, which a
router behind an MLP chooses. The router reads that of the layer before too. Results and residual stream have factors.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.dense import SLIDING, read_dense, read_head_dim, read_kinds, with_kinds
from manta.workers.models.experts import experts, read_num_experts, stored_either_way
from manta.workers.models.model_config import ExpertsConfig, ModelConfig, RopeConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent import output
from manta.workers.models.recurrent_shapes import ConvolvedShape, RecurrentKind
from manta.workers.models.specs import DecoderSpec, DeepRouterSpec, ExpertsSpec, LayerSpec, RecurrentSpec, ScalingSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, TensorSpec, WeightPart

ARCHITECTURE = "ZayaForCausalLM"

_FULL, _WINDOW = "hybrid", "hybrid_sliding"
"""Kinds of layers in `layer_types`."""
_THETAS = {_FULL: 5e6, _WINDOW: 1e4}


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` and `read_kinds` do."""
    for key in ("attention_bias", "lm_head_bias"):
        raw[key].only(False)
    raw["num_experts_per_tok"].whole(1, most=1)
    inner, head_dim = raw["moe_intermediate_size"].whole(2048), read_head_dim(raw, 128)
    ropes = _read_ropes(raw, head_dim)
    raw = raw.completed({"intermediate_size": inner}, {})
    config = read_dense(raw, 128, norm_eps=("rms_norm_eps", 1e-5), rope=ropes[_FULL], is_tied=True)
    kinds = read_kinds(raw, config.num_layers, allowed=(_FULL, _WINDOW), usual=(_FULL,) * config.num_layers)
    window = raw["sliding_window"].whole() if _WINDOW in kinds else 0
    raw.ignore("sliding_window")
    shape = ConvolvedShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=head_dim,
        rotary_dim=ropes[_FULL].rotary_dim or head_dim,
        first_width=raw["cca_time0"].whole(2, least=2),
        second_width=raw["cca_time1"].whole(2),
    )
    config = msgspec.structs.replace(
        config,
        recurrent=shape,
        layer_states=(shape.state,) * config.num_layers,
        router_size=raw["router_hidden_size"].whole(256),
        experts=ExpertsConfig(
            num_experts=read_num_experts(raw, 16, "num_experts"),
            num_chosen=1,
            intermediate_size=inner,
            may_skip=True,
        ),
    )
    names = {_FULL: _FULL, _WINDOW: SLIDING}
    return with_kinds(
        config,
        tuple(names[kind] for kind in kinds),
        window,
        {names[kind]: rope for kind, rope in ropes.items()},
    )


def _read_ropes(raw: RawConfig, head_dim: int) -> dict[str, RopeConfig]:
    """Returns the rope of each kind of layer. All rotate the same part of a head."""
    by_kind = raw["rope_parameters"].object()
    ropes: dict[str, RopeConfig] = {}
    for kind, usual_theta in _THETAS.items():
        values = by_kind[kind].object()
        values["rope_type"].one_of("default", default="default")
        part = values["partial_rotary_factor"]
        rotary_dim = int(head_dim * part.number(1.0 if len(values) else 0.5, most=1))
        rope = RopeConfig(
            theta=values["rope_theta"].number(usual_theta, least=1.001),
            rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        )
        if rotary_dim % 2 or not rotary_dim or (ropes and ropes[_FULL].rotary_dim != rope.rotary_dim):
            raise part.refused("a number that leaves the same even part of a head in all layers")
        ropes[kind] = rope
    return ropes


def describe(config: ModelConfig) -> DecoderSpec:
    spec = llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])
    return spec._replace(embedding_scaling=("model.input_hidden_states_bias", "model.input_hidden_states_scale"))


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    prefix = f"model.layers.{index}"
    return llama.layer(config, index)._replace(
        mixer=_attention(config, f"{prefix}.self_attn"),
        mlp=_experts(config, f"{prefix}.mlp", index),
        mixer_scaling=_scaling(f"{prefix}.post_attention_residual_scale"),
        mlp_scaling=_scaling(f"{prefix}.post_mlp_residual_scale"),
    )


def _scaling(prefix: str) -> ScalingSpec:
    update, stream = ((f"{prefix}.{name}_bias", f"{prefix}.{name}_scale") for name in ("hidden_states", "residual"))
    return ScalingSpec(update, stream)


def _attention(config: ModelConfig, prefix: str) -> RecurrentSpec:
    shape = config.recurrent
    assert isinstance(shape, ConvolvedShape)
    names = ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")
    parts = tuple(WeightPart(f"{prefix}.qkv_proj.{name}", size) for name, size in zip(names, shape.sizes, strict=True))
    queries, channels = shape.sizes[0], sum(shape.sizes[:2])
    first, second = (f"{prefix}.qkv_proj.conv_qk_{name}" for name in ("depthwise", "grouped"))
    return RecurrentSpec(
        RecurrentKind.CONVOLVED_ATTENTION,
        shape,
        {"input": LinearSpec(parts, config.hidden_size)},
        output(f"{prefix}.o_proj", queries, config.hidden_size),
        {
            "kernel": (TensorSpec(f"{first}.weight", (channels, 1, shape.first_width)),),
            "kernel_bias": (TensorSpec(f"{first}.bias", (channels,)),),
            "mixing": (TensorSpec(f"{second}.weight", (channels, shape.head_dim, shape.second_width)),),
            "mixing_bias": (TensorSpec(f"{second}.bias", (channels,)),),
            "key_scales": (TensorSpec(f"{prefix}.qk_norm.temp", (shape.num_kv_heads,)),),
        },
    )


def _experts(config: ModelConfig, prefix: str, index: int) -> ExpertsSpec:
    together, apart = (experts(config, prefix, are_stacked=are_stacked) for are_stacked in (True, False))
    assert config.experts is not None
    gate, width, hidden = f"{prefix}.gate", config.router_size, config.hidden_size
    first, second = (
        LinearSpec((WeightPart(f"{gate}.router_mlp.{name}", width),), width, True) for name in ("fc1", "fc2")
    )
    return stored_either_way(together, apart)._replace(
        router=LinearSpec((WeightPart(f"{gate}.router_mlp.out_proj", config.experts.num_scores),), width),
        choice_bias=f"{gate}.balancing_biases",
        deep_router=DeepRouterSpec(
            down=LinearSpec((WeightPart(f"{gate}.down_proj", width),), hidden, has_bias=True),
            previous_scale=f"{gate}.router_states_scale" if index else None,
            norm=NormSpec(f"{gate}.router_mlp.norm", width),
            hidden=(first, second),
        ),
    )

"""MiMo-V2-Flash (Xiaomi, 2026): layers with windows, which have attention sinks and twice the KV heads, between layers
that see everything. Values are narrower than keys, and all but the first layers have DeepSeek-V3's experts.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import deepseek_v3, llama
from manta.workers.models.dense import FULL, SLIDING, read_dense, read_head_dim, read_kinds, trial_layers, with_kinds
from manta.workers.models.experts import DENSE, SPARSE
from manta.workers.models.model_config import ExpertsConfig, ModelConfig, RopeConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import AttentionSpec, DecoderSpec, LayerSpec
from manta.workers.models.weight_specs import LinearSpec, Split, WeightPart

ARCHITECTURE = "MiMoV2FlashForCausalLM"

_HEAD_DIM, _VALUE_DIM, _VALUE_SCALE, _WINDOW, _ROTATED = 192, 128, 0.707, 129, 0.334
_THETAS = {FULL: (5e6, "rope_theta"), SLIDING: (1e4, "swa_rope_theta")}
"""The usual theta of each kind of layer, and its key in published configurations."""
_PERIOD = 6
_EXPERTS = ExpertsConfig(num_experts=256, num_chosen=8, intermediate_size=2048, dense_layers=(0,))


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` and `read_sigmoid_experts` do."""
    raw = _with_kinds_of_mlps(raw).completed({"n_shared_experts": 0, "routed_scaling_factor": 1.0}, {})
    head_dim = read_head_dim(raw, _HEAD_DIM)
    ropes = {kind: _read_rope(raw, kind, head_dim) for kind in _THETAS}
    eps = ("layernorm_epsilon" if "layernorm_epsilon" in raw else "rms_norm_eps", 1e-5)
    config = read_dense(raw, _HEAD_DIM, norm_eps=eps, rope=ropes[FULL])
    kinds = _read_kinds(raw, config.num_layers)
    num_previous = raw["sliding_window_size"]
    window = raw["sliding_window"].whole(_WINDOW) if num_previous.value is None else num_previous.whole() + 1
    scale = raw["attention_value_scale"]
    heads = {FULL: config.num_kv_heads, SLIDING: 2 * config.num_kv_heads}
    if config.num_heads % heads[SLIDING]:
        raise raw["num_attention_heads"].refused(f"a multiple of the {heads[SLIDING]} KV heads of layers with windows")
    config = msgspec.structs.replace(
        config,
        qkv_bias=raw["attention_bias"].flag(False),
        layer_kv_heads=tuple((heads[kind], head_dim) for kind in kinds),
        value_dim=raw["v_head_dim"].whole(_VALUE_DIM, most=head_dim),
        value_scale=1.0 if scale.is_given and scale.value is None else scale.number(_VALUE_SCALE),
    )
    config = deepseek_v3.read_sigmoid_experts(raw, with_kinds(config, kinds, window, ropes), _EXPERTS)
    num_trial_layers = max(config.num_trial_layers, trial_layers(kinds))
    return msgspec.structs.replace(config, num_trial_layers=num_trial_layers)


def _with_kinds_of_mlps(raw: RawConfig) -> RawConfig:
    """Published configurations list in `moe_layer_freq` whether each layer has experts."""
    listed = raw["moe_layer_freq"]
    if not isinstance(listed.value, list):
        return raw
    kinds = [SPARSE if item.whole(least=0, most=1) else DENSE for item in listed.items()]
    return raw.completed({"mlp_layer_types": kinds}, {"moe_layer_freq": None})


def _read_rope(raw: RawConfig, kind: str, head_dim: int) -> RopeConfig:
    usual, key = _THETAS[kind]
    values = raw["rope_parameters"].object()[kind].object()
    values["rope_type"].one_of("default", default="default")
    theta = values["rope_theta"] if "rope_theta" in values else raw[key]
    part = values["partial_rotary_factor"] if "partial_rotary_factor" in values else raw["partial_rotary_factor"]
    rotary_dim = int(head_dim * part.number(_ROTATED, most=1))
    if rotary_dim % 2 or not rotary_dim:
        raise part.refused(f"a number that leaves an even part of the {head_dim} dimensions of a head")
    return RopeConfig(theta=theta.number(usual, least=1.001), rotary_dim=rotary_dim)


def _read_kinds(raw: RawConfig, num_layers: int) -> tuple[str, ...]:
    """Returns the kind of each layer: by `layer_types`, or 1 in `hybrid_layer_pattern` for a window. Otherwise the
    first one and each sixth see everything.
    """
    pattern = raw["hybrid_layer_pattern"]
    if raw["layer_types"].value is not None:
        return read_kinds(raw, num_layers)
    if pattern.value is None:
        return tuple(SLIDING if layer and (layer + 1) % _PERIOD else FULL for layer in range(num_layers))
    kinds = tuple(SLIDING if item.whole(least=0, most=1) else FULL for item in pattern.items())
    if len(kinds) != num_layers:
        raise pattern.refused(f"a list of {num_layers} numbers, one for each layer")
    return kinds


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    layer = llama.layer(config, index)._replace(mixer=_attention(config, index))
    return deepseek_v3.with_sigmoid_experts(config, layer, index)


def _attention(config: ModelConfig, index: int) -> AttentionSpec:
    prefix, heads, value_dim = f"model.layers.{index}.self_attn", config.heads_of(index), config.value_dim
    assert value_dim is not None
    order = llama.head_order(config)
    qkv = (
        WeightPart(f"{prefix}.q_proj", heads.num_heads * heads.head_dim, Split.QUERY_HEADS, order),
        WeightPart(f"{prefix}.k_proj", heads.num_kv_heads * heads.head_dim, Split.KV_HEADS, order),
        WeightPart(f"{prefix}.v_proj", heads.num_kv_heads * value_dim, Split.KV_HEADS, scale=config.value_scale),
    )
    output = WeightPart(f"{prefix}.o_proj", config.hidden_size)
    return AttentionSpec(
        qkv=LinearSpec(qkv, config.hidden_size, config.qkv_bias),
        output=LinearSpec((output,), heads.num_heads * value_dim, splits_inputs=True),
        sinks=None if config.sliding_windows[index] is None else f"{prefix}.attention_sink_bias",
        value_dim=value_dim,
    )

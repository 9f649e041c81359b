"""Kimi Linear (Kimi Team, 2025): three of four layers have Kimi's delta attention, the others latent attention without
positions. All but the first layers have DeepSeek-V3's experts.
"""

from __future__ import annotations

from typing import Any

import msgspec

from manta.workers.models import latent, llama
from manta.workers.models.deepseek_v3 import read_sigmoid_experts
from manta.workers.models.dense import FULL
from manta.workers.models.experts import experts
from manta.workers.models.model_config import ExpertsConfig, LatentShape, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent import LINEAR, output, read_kinds, with_states
from manta.workers.models.recurrent_shapes import DeltaShape, RecurrentKind
from manta.workers.models.specs import DecoderSpec, LayerSpec, RecurrentSpec
from manta.workers.models.weight_specs import LinearSpec, Split, TensorSpec, WeightPart

ARCHITECTURE = "KimiLinearForCausalLM"

_LATENT = LatentShape(query_rank=None, kv_rank=512, plain_dim=128, rope_dim=64, value_dim=128)
_EXPERTS = ExpertsConfig(num_experts=256, num_chosen=8, intermediate_size=1024, scale=2.446, dense_layers=(0,))
SPELLINGS: dict[str, tuple[str, Any]] = {
    "max_position_embeddings": ("model_max_length", 1048576),
    "n_group": ("num_expert_group", 1),
    "n_shared_experts": ("num_shared_experts", 1),
    "norm_topk_prob": ("moe_renormalize", True),
    "num_experts_per_tok": ("num_experts_per_token", 8),
    "num_local_experts": ("num_experts", 256),
    "topk_group": ("topk_group", 1),
}
"""Keys of DeepSeek-V3 with their other names and usual values in configurations of Kimi Linear."""
_NAMES = ("w1", "w3", "w2")


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_latent`, `read_kinds` and `read_sigmoid_experts` do."""
    raw["moe_router_activation_func"].one_of("sigmoid", default="sigmoid")
    raw["mla_use_nope"].flag(True)
    raw.ignore("use_grouped_topk", "num_nextn_predict_layers")
    raw = raw.respelled(SPELLINGS)
    config = latent.read_latent(raw, _LATENT, norm_eps=("rms_norm_eps", 1e-5), is_interleaved=False)
    config = msgspec.structs.replace(config, layer_ropes=(None,) * config.num_layers)
    own = raw["linear_attn_config"].object()
    full = own["full_attn_layers"]
    own.ignore("kda_layers")

    def usual_kinds() -> list[str]:
        numbers = full.wholes() if full.value is not None else range(5, config.num_layers + 1, 4)
        return [FULL if layer + 1 in numbers else LINEAR for layer in range(config.num_layers)]

    kinds = read_kinds(raw, config.num_layers, usual_kinds)
    num_heads = own["num_heads"].whole(raw["linear_num_heads"].whole(32))
    head_dim = own["head_dim"].whole(raw["linear_head_dim"].whole(128))
    shape = DeltaShape(
        num_key_heads=num_heads,
        num_value_heads=num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        width=own["short_conv_kernel_size"].whole(raw["linear_conv_kernel_dim"].whole(4, least=2), least=2),
        norm_eps=config.rms_norm_eps,
    )
    config = read_sigmoid_experts(raw, config, _EXPERTS)
    return with_states(config, kinds, shape)


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    layer, prefix = latent.layer(config, index), f"model.layers.{index}"
    if config.states[index] is not None:
        layer = layer._replace(mixer=delta_attention(config, f"{prefix}.self_attn", has_wide_rates=True))
    assert config.experts is not None
    if index in config.experts.dense_layers:  # transformers writes other names than those of published files
        mlp, other = (llama.mlp(config, f"{prefix}.{name}") for name in ("mlp", "block_sparse_moe"))
        return layer._replace(mlp=mlp.or_as(other))
    bias = "gate.e_score_correction_bias"
    return layer._replace(mlp=experts(config, f"{prefix}.block_sparse_moe", choice_bias=bias, names=_NAMES))


def delta_attention(config: ModelConfig, prefix: str, *, has_wide_rates: bool = False) -> RecurrentSpec:
    """Returns Kimi's delta attention below `prefix`, whose decays and gates are products of narrow vectors. With
    `has_wide_rates` the rates of decay are stored as [1, 1, num_heads, 1].
    """
    shape = config.recurrent
    assert isinstance(shape, DeltaShape)
    hidden, heads, size = config.hidden_size, shape.num_value_heads, shape.sizes[0]
    mixed = [WeightPart(f"{prefix}.{name}_proj", size, Split.CHANNELS) for name in ("q", "k", "v")]
    beta = WeightPart(f"{prefix}.b_proj", heads, Split.CHANNELS)
    narrow, rates_shape = shape.key_dim, (1, 1, heads, 1) if has_wide_rates else None
    return RecurrentSpec(
        RecurrentKind.KIMI_DELTA,
        shape,
        {
            "input": LinearSpec((*mixed, beta), hidden),
            "decay_input": LinearSpec((WeightPart(f"{prefix}.f_a_proj", narrow),), hidden),
            "decay": LinearSpec((WeightPart(f"{prefix}.f_b_proj", size, Split.CHANNELS),), narrow),
            "gate_input": LinearSpec((WeightPart(f"{prefix}.g_a_proj", narrow),), hidden),
            "gate": LinearSpec((WeightPart(f"{prefix}.g_b_proj", size, Split.CHANNELS),), narrow),
        },
        output(f"{prefix}.o_proj", size, hidden),
        {
            "kernel": tuple(
                TensorSpec(f"{prefix}.{name}_conv1d.weight", (size, 1, shape.width)) for name in ("q", "k", "v")
            ),
            "rates": (TensorSpec(f"{prefix}.A_log", (heads,), is_log_rate=True, stored_shape=rates_shape),),
            "time_bias": (TensorSpec(f"{prefix}.dt_bias", (size,)),),
            "norm": (TensorSpec(f"{prefix}.o_norm.weight", (shape.value_dim,), Split.NOTHING),),
        },
    )

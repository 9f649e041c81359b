"""Ling 3 (inclusionAI, 2026): five of six layers have Kimi's delta attention, the others latent attention with a gate
on each head. All but the first layers have DeepSeek-V3's experts.
"""

from __future__ import annotations

from typing import Any

from manta.workers.models import latent, llama
from manta.workers.models.deepseek_v3 import read_sigmoid_experts, with_sigmoid_experts
from manta.workers.models.dense import FULL
from manta.workers.models.kimi_linear import SPELLINGS
from manta.workers.models.model_config import ExpertsConfig, LatentShape, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent import LINEAR, output, read_kinds, with_states
from manta.workers.models.recurrent_shapes import DeltaShape, RecurrentKind
from manta.workers.models.specs import DecoderSpec, LayerSpec, RecurrentSpec
from manta.workers.models.weight_specs import LinearSpec, Split, TensorSpec, WeightPart

ARCHITECTURE = "BailingHybridForCausalLM"

_LATENT = LatentShape(query_rank=None, kv_rank=512, plain_dim=128, rope_dim=64, value_dim=128)
_EXPERTS = ExpertsConfig(num_experts=512, num_chosen=8, intermediate_size=768, scale=2.5, dense_layers=(0, 1))
_SPELLINGS: dict[str, tuple[str, Any]] = SPELLINGS | {
    "max_position_embeddings": ("model_max_length", 262144),
    "n_group": ("num_expert_group", 8),
    "num_local_experts": ("num_experts", 512),
    "topk_group": ("topk_group", 4),
    "num_nextn_predict_layers": ("num_mtp_layers", 0),
}
"""Keys of DeepSeek-V3 with their other names and usual values."""


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_latent`, `read_kinds` and `read_sigmoid_experts` do."""
    raw.ignore("mtp_loss_scaling_factor")
    raw = raw.respelled(_SPELLINGS).completed({"rope_theta": 6e6}, {})
    config = latent.read_latent(raw, _LATENT)
    period = raw["layer_group_size"].whole(6)
    usual = [LINEAR if (layer + 1) % period else FULL for layer in range(config.num_layers)]
    kinds = read_kinds(raw, config.num_layers, lambda: usual)
    # transformers writes the heads of delta attention under names of their own
    num_heads = raw["linear_num_heads"].whole(config.num_heads)
    head_dim = raw["linear_head_dim"].whole(raw["head_dim"].whole(128))
    least = raw["kda_lower_bound"].number(-5.0, least=-1e6, most=-1e-6)
    shape = DeltaShape(
        num_key_heads=num_heads,
        num_value_heads=num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        width=raw["linear_conv_kernel_dim"].whole(raw["short_conv_kernel_size"].whole(4, least=2), least=2),
        norm_eps=config.rms_norm_eps,
        least_log_decay=least if raw["kda_safe_gate"].flag(True) else 0.0,
    )
    config = read_sigmoid_experts(raw, config, _EXPERTS)
    return with_states(config, kinds, shape)


def describe(config: ModelConfig) -> DecoderSpec:
    spec = llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])
    embedding = spec.embedding._replace(name="model.word_embeddings")
    head = spec.head._replace(parts=(embedding,)) if config.tie_word_embeddings else spec.head
    return spec._replace(embedding=embedding, head=head)


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    prefix = f"model.layers.{index}.attention"
    layer = with_sigmoid_experts(config, latent.layer(config, index), index, choice_bias="gate.expert_bias")
    if config.states[index] is not None:
        return layer._replace(mixer=_delta_attention(config, prefix))
    mixer = latent.attention(config, index, prefix, output="dense")
    gate = LinearSpec((WeightPart(f"{prefix}.g_proj", config.num_heads, Split.QUERY_HEADS),), config.hidden_size)
    return layer._replace(mixer=mixer._replace(gate=gate))


def _delta_attention(config: ModelConfig, prefix: str) -> RecurrentSpec:
    shape = config.recurrent
    assert isinstance(shape, DeltaShape)
    hidden, heads, size = config.hidden_size, shape.num_value_heads, shape.sizes[0]
    mixed = [WeightPart(f"{prefix}.{name}_proj", size, Split.CHANNELS) for name in ("q", "k", "v")]
    beta = WeightPart(f"{prefix}.b_proj", heads, Split.CHANNELS)
    return RecurrentSpec(
        RecurrentKind.KIMI_DELTA,
        shape,
        {
            "input": LinearSpec((*mixed, beta), hidden),
            "decay": LinearSpec((WeightPart(f"{prefix}.f_proj", size, Split.CHANNELS),), hidden),
            "gate": LinearSpec((WeightPart(f"{prefix}.g_proj", size, Split.CHANNELS),), hidden),
        },
        output(f"{prefix}.dense", size, hidden),
        {
            "kernel": tuple(
                TensorSpec(f"{prefix}.{name}_conv1d.weight", (size, 1, shape.width)) for name in ("q", "k", "v")
            ),
            "rates": (TensorSpec(f"{prefix}.A_log", (heads,), is_log_rate=True),),
            "time_bias": (TensorSpec(f"{prefix}.dt_bias", (size,)),),
            "norm": (TensorSpec(f"{prefix}.o_norm.weight", (shape.value_dim,), Split.NOTHING),),
        },
    )

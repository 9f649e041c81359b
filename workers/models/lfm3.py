"""LFM3 (Liquid AI, 2026): LFM2's short convolutions, and attention with a gate on each head, of which some layers have
a window. The ropes of layers with and without a window differ. Mixers and MLPs may have a norm after them too.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import lfm2, llama
from manta.workers.models.dense import (
    FULL,
    SLIDING,
    read_dense,
    read_head_dim,
    read_kinds,
    read_proportional_rope,
    with_kinds,
)
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent_shapes import StateShape
from manta.workers.models.specs import AttentionSpec, DecoderSpec, LayerSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, Split, WeightPart

ARCHITECTURE = "Lfm3ForCausalLM"

_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
_HEAD_DIM, _WIDTH, _WINDOW = 128, 7, 256
"""The usual widths of a head, of a convolution and of a window."""


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` and `read_proportional_rope` do."""
    by_kind = raw.completed({"rope_parameters": _ROPES}, {})["rope_parameters"].object()
    head_dim = read_head_dim(raw, _HEAD_DIM)
    ropes = {kind: read_proportional_rope(by_kind[kind].object(), head_dim, 1e6, "default") for kind in _ROPES}
    config = read_dense(raw, _HEAD_DIM, norm_eps=("norm_eps", 1e-5), rope=ropes[SLIDING], is_tied=True)
    kinds = read_kinds(
        raw,
        config.num_layers,
        allowed=(FULL, SLIDING, lfm2.CONVOLUTION),
        usual=[_usual_kind(layer) for layer in range(config.num_layers)],
    )
    has_biases = raw["attention_bias"].flag(False)
    state = StateShape(((config.hidden_size, raw["conv_L_cache"].whole(_WIDTH, least=2) - 1),))
    config = msgspec.structs.replace(
        config,
        qkv_bias=has_biases,
        output_bias=has_biases,
        conv_bias=raw["conv_bias"].flag(False),
        has_head_gates=raw["use_attention_gate"].flag(True),
        has_output_norms=raw["use_sandwich_norm"].flag(True),
        layer_states=tuple(state if kind == lfm2.CONVOLUTION else None for kind in kinds),
        layer_attends=tuple(kind != lfm2.CONVOLUTION for kind in kinds),
    )
    return with_kinds(config, kinds, raw["sliding_window"].whole(_WINDOW), {**ropes, lfm2.CONVOLUTION: None})


def _usual_kind(layer: int) -> str:
    if layer % 4 == 2:
        return FULL
    return lfm2.CONVOLUTION if layer % 4 or not layer else SLIDING


def describe(config: ModelConfig) -> DecoderSpec:
    spec = llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])
    return spec._replace(final_norm=NormSpec("model.embedding_norm", config.hidden_size))


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    prefix = f"model.layers.{index}"
    before, after, before_mlp, after_mlp = (
        NormSpec(f"{prefix}.{name}_norm", config.hidden_size)
        for name in ("operator", "post_operator", "ffn", "post_ffn")
    )
    attends = config.attends[index]
    return LayerSpec(
        input_norm=before,
        mixer=_attention(config, f"{prefix}.self_attn") if attends else lfm2.short_conv(config, f"{prefix}.conv"),
        mlp_norm=before_mlp,
        mlp=lfm2.mlp(config, f"{prefix}.feed_forward", config.intermediate_size),
        mixer_output_norm=after if config.has_output_norms else None,
        mlp_output_norm=after_mlp if config.has_output_norms else None,
    )


def _attention(config: ModelConfig, prefix: str) -> AttentionSpec:
    q_norm, k_norm = (NormSpec(f"{prefix}.{name}_norm", config.head_dim) for name in ("q", "k"))
    # transformers renames the gate of published files.
    gate, other = (
        LinearSpec((WeightPart(f"{prefix}.{name}", config.num_heads, Split.QUERY_HEADS),), config.hidden_size)
        for name in ("gate_proj", "g_proj")
    )
    gates = gate.or_as(other) if config.has_head_gates else None
    return llama.attention(config, prefix)._replace(q_norm=q_norm, k_norm=k_norm, gate=gates)

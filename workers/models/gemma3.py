"""Gemma 3 (Gemma Team, 2025), its text decoder: Gemma 2's layers with norms over query and key heads instead of caps,
windows in five of six layers, and another rope in layers with a window.
"""

from __future__ import annotations

from manta.workers.models import gemma2
from manta.workers.models.dense import (
    FULL,
    SLIDING,
    read_dense,
    read_head_dim,
    read_kinds,
    read_ropes_of_kinds,
    with_kinds,
)
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, LayerSpec
from manta.workers.models.weight_specs import NormSpec

ARCHITECTURE = "Gemma3ForCausalLM"

_USUAL_HEAD_DIM = 256


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` and `read_kinds` do."""
    head_dim = read_head_dim(raw, _USUAL_HEAD_DIM)
    ropes = read_ropes_of_kinds(raw, head_dim, {FULL: 1e6, SLIDING: 1e4})
    activation = ("hidden_activation", "gelu_pytorch_tanh")
    config = read_dense(raw, _USUAL_HEAD_DIM, activation=activation, rope=ropes[FULL], is_tied=True)
    config = gemma2.read_gemma(raw, config, usual_caps=(0.0, 0.0))
    period = raw.first_of("_sliding_window_pattern", "sliding_window_pattern").whole(6)
    kinds = read_kinds(raw, config.num_layers, period)
    return with_kinds(config, kinds, raw["sliding_window"].whole(4096), ropes)


def describe(config: ModelConfig) -> DecoderSpec:
    return gemma2.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    layer = gemma2.layer(config, index)
    prefix = f"model.layers.{index}.self_attn"
    q_norm, k_norm = (NormSpec(f"{prefix}.{name}_norm", config.head_dim, adds_one=True) for name in ("q", "k"))
    return layer._replace(mixer=layer.attention._replace(q_norm=q_norm, k_norm=k_norm))

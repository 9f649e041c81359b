"""Qwen3 (Yang et al., 2025), dense models: Llama's layers with RMS norms over each query and key head."""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.dense import read_dense, read_windows
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, LayerSpec
from manta.workers.models.weight_specs import NormSpec

ARCHITECTURE = "Qwen3ForCausalLM"


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` and `read_windows` do."""
    config = read_dense(raw, usual_head_dim=128)
    has_biases = raw["attention_bias"].flag(False)
    windows = read_windows(raw, config.num_layers)
    return msgspec.structs.replace(config, qkv_bias=has_biases, output_bias=has_biases, sliding_windows=windows)


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [layer(config, index) for index in range(config.num_layers)])


def layer(config: ModelConfig, index: int) -> LayerSpec:
    usual = llama.layer(config, index)
    prefix = f"model.layers.{index}.self_attn"
    order = llama.head_order(config)
    q_norm, k_norm = (NormSpec(f"{prefix}.{name}_norm", config.head_dim, order=order) for name in ("q", "k"))
    return usual._replace(mixer=usual.attention._replace(q_norm=q_norm, k_norm=k_norm))

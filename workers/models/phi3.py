"""Phi-3 (Abdin et al., 2024) and Phi-4: Llama's layers, with longrope for long contexts. Checkpoints hold queries, keys
and values as one tensor, and the gate and what it lets through as another.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.dense import read_dense, read_head_dim, read_rope
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, LayerSpec

ARCHITECTURE = "Phi3ForCausalLM"


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` does."""
    rope = read_rope(raw, read_head_dim(raw), usual_part=1.0)
    config = read_dense(raw, norm_eps=("rms_norm_eps", 1e-5), rope=rope)
    raw["original_max_position_embeddings"].whole(config.max_position_embeddings)  # also where no rope is scaled by it
    window = raw["sliding_window"]
    sliding_window = None if window.value is None else window.whole()
    return msgspec.structs.replace(config, sliding_windows=(sliding_window,) * config.num_layers)


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    prefix = f"model.layers.{index}"
    layer, mlp = llama.layer(config, index), llama.mlp(config, f"{prefix}.mlp")
    qkv = layer.attention.qkv.stored_as(f"{prefix}.self_attn.qkv_proj")
    gated = mlp.gated.stored_as(f"{prefix}.mlp.gate_up_proj")
    return layer._replace(mixer=layer.attention._replace(qkv=qkv), mlp=mlp._replace(gated=gated))

"""GLM-4 as first published (GLM Team, 2024): Llama's layers in which half of each head rotates, in neighbouring pairs.
Checkpoints hold the gate and what it lets through as one tensor.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.dense import read_dense, read_head_dim, read_rope
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, LayerSpec

ARCHITECTURE = "GlmForCausalLM"

_HEAD_DIM, _ROTARY_PART = 128, 0.5


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` does."""
    head_dim = read_head_dim(raw, _HEAD_DIM)
    rope = read_rope(raw, head_dim, usual_part=_ROTARY_PART, is_interleaved=True)
    config = read_dense(raw, _HEAD_DIM, norm_eps=("rms_norm_eps", 1.5625e-7), rope=rope)
    return msgspec.structs.replace(config, qkv_bias=raw["attention_bias"].flag(True))


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [layer(config, index) for index in range(config.num_layers)])


def layer(config: ModelConfig, index: int) -> LayerSpec:
    prefix = f"model.layers.{index}.mlp"
    mlp = llama.mlp(config, prefix)
    return llama.layer(config, index)._replace(mlp=mlp._replace(gated=mlp.gated.stored_as(f"{prefix}.gate_up_proj")))

"""Command R7B and Command A (Cohere, 2024): attention and MLP side by side after one norm, which subtracts the mean.
Three in four layers have a window and positions, the others neither.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.dense import FULL, SLIDING, read_dense, read_head_dim, read_kinds, read_rope, with_kinds
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, LayerSpec

ARCHITECTURE = "Cohere2ForCausalLM"

_WINDOW = 4096
_LOGIT_SCALE = 0.0625


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` and `read_kinds` do."""
    rope = read_rope(raw, read_head_dim(raw), is_interleaved=True)
    config = read_dense(raw, norm_eps=("layer_norm_eps", 1e-5), rope=rope, is_tied=True)
    has_biases = raw["attention_bias"].flag(False)
    config = msgspec.structs.replace(
        config,
        qkv_bias=has_biases,
        output_bias=has_biases,
        has_layer_norms=True,
        logits_scale=raw["logit_scale"].number(_LOGIT_SCALE),
    )
    kinds = read_kinds(raw, config.num_layers, raw["sliding_window_pattern"].whole(4))
    return with_kinds(config, kinds, raw["sliding_window"].whole(_WINDOW), {SLIDING: rope, FULL: None})


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    return llama.layer(config, index)._replace(mlp_norm=None, is_parallel=True)

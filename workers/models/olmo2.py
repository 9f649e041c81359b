"""OLMo 2 (OLMo Team, 2025): Llama's layers with norms after attention and MLP instead of before them, and norms over
all query heads and over all key heads together.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.dense import read_dense
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, LayerSpec
from manta.workers.models.weight_specs import NormSpec, Split

ARCHITECTURE = "Olmo2ForCausalLM"
NORM_EPS = ("rms_norm_eps", 1e-5)


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` does."""
    return with_biases(raw, read_dense(raw, norm_eps=NORM_EPS))


def with_biases(raw: RawConfig, config: ModelConfig) -> ModelConfig:
    has_biases = raw["attention_bias"].flag(False)
    return msgspec.structs.replace(config, qkv_bias=has_biases, output_bias=has_biases)


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [layer(config, index) for index in range(config.num_layers)])


def layer(config: ModelConfig, index: int) -> LayerSpec:
    usual = llama.layer(config, index)
    prefix, hidden = f"model.layers.{index}", config.hidden_size
    query_size, key_size = (count * config.head_dim for count in (config.num_heads, config.num_kv_heads))
    attention = usual.attention._replace(
        q_norm=NormSpec(f"{prefix}.self_attn.q_norm", query_size, split=Split.QUERY_HEADS),
        k_norm=NormSpec(f"{prefix}.self_attn.k_norm", key_size, split=Split.KV_HEADS),
    )
    return usual._replace(
        input_norm=None,
        mixer=attention,
        mixer_output_norm=NormSpec(f"{prefix}.post_attention_layernorm", hidden),
        mlp_norm=None,
        mlp_output_norm=NormSpec(f"{prefix}.post_feedforward_layernorm", hidden),
    )

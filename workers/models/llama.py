"""Llama 1 to 3 (Touvron et al., 2023; Llama Team, 2024): pre-norm layers with RMS norms, rotary positions,
grouped-query attention and SwiGLU. The other native families are described by their differences from it.
"""

from __future__ import annotations

import msgspec

from manta.workers.models.dense import read_dense
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.row_places import HeadOrder
from manta.workers.models.specs import AttentionSpec, DecoderSpec, GatedMlpSpec, LayerSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, Split, WeightPart

ARCHITECTURE = "LlamaForCausalLM"


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` does."""
    has_biases, mlp_bias = raw["attention_bias"].flag(False), raw["mlp_bias"].flag(False)
    return msgspec.structs.replace(read_dense(raw), qkv_bias=has_biases, output_bias=has_biases, mlp_bias=mlp_bias)


def describe(config: ModelConfig) -> DecoderSpec:
    return decoder(config, [layer(config, index) for index in range(config.num_layers)])


def decoder(config: ModelConfig, layers: list[LayerSpec]) -> DecoderSpec:
    """Returns a whole model with these layers, between an embedding and a head that may share their weights."""
    embedding = WeightPart("model.embed_tokens", config.vocab_size, Split.VOCABULARY)
    head = embedding if config.tie_word_embeddings else WeightPart("lm_head", config.vocab_size, Split.VOCABULARY)
    final_norm = NormSpec("model.norm", config.hidden_size)
    return DecoderSpec(embedding, layers, final_norm, LinearSpec((head,), config.hidden_size))


def layer(config: ModelConfig, index: int) -> LayerSpec:
    prefix = f"model.layers.{index}"
    hidden = config.hidden_size
    return LayerSpec(
        input_norm=NormSpec(f"{prefix}.input_layernorm", hidden),
        mixer=attention(config, f"{prefix}.self_attn"),
        mlp_norm=NormSpec(f"{prefix}.post_attention_layernorm", hidden),
        mlp=mlp(config, f"{prefix}.mlp"),
    )


def attention(config: ModelConfig, prefix: str) -> AttentionSpec:
    hidden = config.hidden_size
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    order = head_order(config)
    qkv = (
        WeightPart(f"{prefix}.q_proj", query_size, Split.QUERY_HEADS, order),
        WeightPart(f"{prefix}.k_proj", kv_size, Split.KV_HEADS, order),
        WeightPart(f"{prefix}.v_proj", kv_size, Split.KV_HEADS),
    )
    output = WeightPart(f"{prefix}.o_proj", hidden)
    return AttentionSpec(
        qkv=LinearSpec(qkv, hidden, config.qkv_bias),
        output=LinearSpec((output,), query_size, config.output_bias, splits_inputs=True),
    )


def head_order(config: ModelConfig) -> HeadOrder | None:
    """Returns the order in which the rows of heads are read; None if their two halves rotate, as the kernels need."""
    rotary_dim, is_interleaved = config.rope.rotary_dim or config.head_dim, config.rope.is_interleaved
    if rotary_dim == config.head_dim and not is_interleaved:
        return None
    return HeadOrder(config.head_dim, rotary_dim, is_interleaved)


def mlp(config: ModelConfig, prefix: str, inner: int | None = None) -> GatedMlpSpec:
    """Returns an MLP of the inner width `inner`, by default the model's."""
    hidden, inner, has_bias = config.hidden_size, inner or config.intermediate_size, config.mlp_bias
    gate, up = (WeightPart(f"{prefix}.{name}_proj", inner, Split.INNER) for name in ("gate", "up"))
    down = WeightPart(f"{prefix}.down_proj", hidden)
    return GatedMlpSpec(
        gated=LinearSpec((gate, up), hidden, has_bias, is_gated=True),
        down=LinearSpec((down,), inner, has_bias, splits_inputs=True),
    )

"""Gemma 2 (Gemma Team, 2024): Llama's layers with norms before and after attention and MLP, windows in every second
layer, soft caps on attention's products and on logits, and gates of GELU. Its checkpoints hold norms less one.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.dense import read_dense, read_kinds, with_kinds
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, LayerSpec
from manta.workers.models.weight_specs import NormSpec

ARCHITECTURE = "Gemma2ForCausalLM"

_QUERY_SCALAR = 256
"""Usual `query_pre_attn_scalar`, whose root divides the products of queries and keys."""


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` and `read_kinds` do."""
    config = read_gemma(raw, read_dense(raw, 256, activation=("hidden_activation", "gelu_pytorch_tanh"), is_tied=True))
    return with_kinds(config, read_kinds(raw, config.num_layers, period=2), raw["sliding_window"].whole(4096))


def read_gemma(raw: RawConfig, config: ModelConfig, usual_caps: tuple[float, float] = (50.0, 30.0)) -> ModelConfig:
    """Returns the configuration with biases, scales and caps. `usual_caps` are those of attention and of logits in a
    configuration that does not name them; null means none.
    """
    raw["use_bidirectional_attention"].only(False)
    raw.ignore("hidden_act")  # transformers reads `hidden_activation`
    has_biases = raw["attention_bias"].flag(False)
    caps = [
        usual if not raw[key].is_given else raw[key].number(0.0, least=0)
        for key, usual in zip(("attn_logit_softcapping", "final_logit_softcapping"), usual_caps, strict=True)
    ]
    return msgspec.structs.replace(
        config,
        qkv_bias=has_biases,
        output_bias=has_biases,
        attention_scale=raw["query_pre_attn_scalar"].number(_QUERY_SCALAR) ** -0.5,
        attention_cap=caps[0],
        final_cap=caps[1],
        embedding_scale=config.hidden_size**0.5,
    )


def describe(config: ModelConfig) -> DecoderSpec:
    return decoder(config, [layer(config, index) for index in range(config.num_layers)])


def decoder(config: ModelConfig, layers: list[LayerSpec]) -> DecoderSpec:
    """Returns a whole model with these layers."""
    spec = llama.decoder(config, layers)
    return spec._replace(final_norm=spec.final_norm._replace(adds_one=True))


def layer(config: ModelConfig, index: int) -> LayerSpec:
    prefix = f"model.layers.{index}"
    before, after, before_mlp, after_mlp = (
        NormSpec(f"{prefix}.{name}_layernorm", config.hidden_size, adds_one=True)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
    )
    return llama.layer(config, index)._replace(
        input_norm=before, mixer_output_norm=after, mlp_norm=before_mlp, mlp_output_norm=after_mlp
    )

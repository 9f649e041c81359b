"""Bamba (IBM et al., 2024): most layers have Mamba 2 instead of attention. The others are Llama's, with positions in
half of each head.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.dense import FULL, read_dense, read_head_dim, read_rope
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent import LINEAR, read_state_space, state_space, with_states
from manta.workers.models.specs import DecoderSpec, LayerSpec
from manta.workers.models.weight_specs import NormSpec

ARCHITECTURE = "BambaForCausalLM"


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` and `read_state_space` do."""
    raw.ignore("num_logits_to_keep", "z_loss_coefficient", "attn_rotary_emb")
    half = raw.completed({}, {"partial_rotary_factor": 0.5})
    config = read_dense(raw, norm_eps=("rms_norm_eps", 1e-5), rope=read_rope(half, read_head_dim(raw), usual_part=0.5))
    has_biases = raw["attention_bias"].flag(False)
    config = msgspec.structs.replace(
        config, qkv_bias=has_biases, output_bias=has_biases, mlp_bias=raw["mlp_bias"].flag(False)
    )
    attention_layers = raw["attn_layer_indices"]
    full = () if attention_layers.value is None else attention_layers.wholes(least=0)
    kinds = [FULL if layer in full else LINEAR for layer in range(config.num_layers)]
    return with_states(config, kinds, read_state_space(raw, config.hidden_size, config.rms_norm_eps))


def describe(config: ModelConfig) -> DecoderSpec:
    return decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def decoder(config: ModelConfig, layers: list[LayerSpec]) -> DecoderSpec:
    """Returns a whole model with these layers."""
    spec = llama.decoder(config, layers)
    return spec._replace(final_norm=NormSpec("model.final_layernorm", config.hidden_size))


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    usual = layer(config, index)
    is_recurrent = config.states[index] is not None
    return usual._replace(mixer=state_space(config, f"model.layers.{index}.mamba")) if is_recurrent else usual


def layer(config: ModelConfig, index: int) -> LayerSpec:
    """Returns a layer with attention."""
    usual, prefix = llama.layer(config, index), f"model.layers.{index}"
    norm = NormSpec(f"{prefix}.pre_ff_layernorm", config.hidden_size)
    return usual._replace(mlp_norm=norm, mlp=llama.mlp(config, f"{prefix}.feed_forward"))

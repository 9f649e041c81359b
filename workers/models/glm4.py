"""GLM-4-0414 (Z.ai, 2025), dense models: the first GLM-4's layers with norms after attention and MLP too."""

from __future__ import annotations

from manta.workers.models import glm, llama
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.specs import DecoderSpec, LayerSpec
from manta.workers.models.weight_specs import NormSpec

ARCHITECTURE = "Glm4ForCausalLM"

read_config = glm.read_config


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    after_attention, after_mlp = (
        NormSpec(f"model.layers.{index}.post_{name}_layernorm", config.hidden_size) for name in ("self_attn", "mlp")
    )
    return glm.layer(config, index)._replace(mixer_output_norm=after_attention, mlp_output_norm=after_mlp)

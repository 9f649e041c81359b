"""A.X K1 (SK Telecom, 2026): DeepSeek-V3's layers, with a norm after the experts."""

from __future__ import annotations

from manta.workers.models import deepseek_v3, latent, llama
from manta.workers.models.model_config import ExpertsConfig, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, ExpertsSpec, LayerSpec
from manta.workers.models.weight_specs import NormSpec

ARCHITECTURE = "AXK1ForCausalLM"

_EXPERTS = ExpertsConfig(
    num_experts=192,
    num_chosen=8,
    intermediate_size=2048,
    scale=2.5,
    num_groups=8,
    num_chosen_groups=4,
    dense_layers=(0,),
)


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_latent` and `read_sigmoid_experts` do, and for queries
    without a latent vector.
    """
    if raw["q_lora_rank"].is_given and raw["q_lora_rank"].value is None:
        raise raw["q_lora_rank"].refused("a number")
    config = latent.read_latent(raw, deepseek_v3.USUAL, is_interleaved=raw["rope_interleave"].flag(True))
    return deepseek_v3.read_sigmoid_experts(raw, config, _EXPERTS)


def describe(config: ModelConfig) -> DecoderSpec:
    assert config.experts is not None
    decoder = llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])
    # Published files have this norm for layers with one MLP too, which do not use it
    unread = tuple(f"model.layers.{layer}.post_mlp_layernorm." for layer in config.experts.dense_layers)
    return decoder._replace(unread=unread)


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    layer = deepseek_v3.with_sigmoid_experts(config, latent.layer(config, index), index)
    if not isinstance(layer.mlp, ExpertsSpec):
        return layer
    norm = NormSpec(f"model.layers.{index}.post_mlp_layernorm", config.hidden_size)
    # Published files have no bias of the choice, and transformers adds zeros
    return layer._replace(mlp=layer.mlp._replace(may_lack_choice_bias=True), mlp_output_norm=norm)

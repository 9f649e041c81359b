"""A.X K2 (SK Telecom, 2026): DeepSeek-V3.2's layers, with gates on norms and on the results of attention."""

from __future__ import annotations

import msgspec

from manta.workers.models import deepseek_v3, latent, llama
from manta.workers.models.indexer import read_indexer
from manta.workers.models.model_config import ExpertsConfig, IndexerShape, LatentShape, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, ExpertsSpec, LayerSpec, NormGateSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, WeightPart

ARCHITECTURE = "AXK2ForCausalLM"

_USUAL = LatentShape(query_rank=384, kv_rank=128, plain_dim=64, rope_dim=32, value_dim=64)
_INDEXER = IndexerShape(num_heads=16, head_dim=128, num_chosen=2048)
_EXPERTS = ExpertsConfig(num_experts=128, num_chosen=8, intermediate_size=512, scale=2.5, dense_layers=(0,))


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_latent`, `read_indexer` and `read_sigmoid_experts` do,
    and for a rope whose pairs are not neighbours.
    """
    raw["rope_interleave"].only(True)
    indexer = read_indexer(raw, _INDEXER, _USUAL.rope_dim)
    config = latent.read_latent(raw, _USUAL, indexer=indexer)
    config = deepseek_v3.read_sigmoid_experts(raw, config, _EXPERTS)
    assert config.latent is not None
    assert config.experts is not None
    return msgspec.structs.replace(
        config,
        latent=msgspec.structs.replace(config.latent, has_gates=True),
        experts=msgspec.structs.replace(config.experts, scores_others_zero=True),
        norm_gate_rank=raw["gated_norm_rank"].whole(16),
    )


def describe(config: ModelConfig) -> DecoderSpec:
    return llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    layer, prefix = latent.layer(config, index), f"model.layers.{index}"
    layer = deepseek_v3.with_sigmoid_experts(config, layer, index)
    before, after = f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"
    layer = layer._replace(input_norm=NormSpec(f"{before}.norm", config.hidden_size), input_gate=_gate(config, before))
    if not isinstance(layer.mlp, ExpertsSpec):
        return layer
    return layer._replace(mlp_norm=NormSpec(f"{after}.norm", config.hidden_size), mlp_gate=_gate(config, after))


def _gate(config: ModelConfig, prefix: str) -> NormGateSpec:
    rank, hidden = config.norm_gate_rank, config.hidden_size
    return NormGateSpec(
        LinearSpec((WeightPart(f"{prefix}.W_down", rank),), hidden),
        LinearSpec((WeightPart(f"{prefix}.W_up", hidden),), rank),
    )

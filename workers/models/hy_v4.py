"""HY 4 (Tencent, 2026): GLM-5's layers with attention sinks, a gate on each attended value, experts whose gates are
bounded, and several residual streams (hyper-connections).
"""

from __future__ import annotations

import msgspec

from manta.workers.models import deepseek_v3, latent, llama
from manta.workers.models.experts import experts, stored_either_way, with_limited_gates
from manta.workers.models.hyper_connection_specs import with_connections
from manta.workers.models.indexer import OWN, SHARED, read_indexer, read_shared_layers, with_shared_layers
from manta.workers.models.model_config import ExpertsConfig, IndexerShape, LatentShape, ModelConfig
from manta.workers.models.part_shapes import HyperConnections
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, LayerSpec
from manta.workers.models.weight_specs import LinearSpec, Split, WeightPart

ARCHITECTURE = "HYV4ForCausalLM"

_USUAL = LatentShape(query_rank=1536, kv_rank=512, plain_dim=192, rope_dim=64, value_dim=256)
_INDEXER = IndexerShape(num_heads=16, head_dim=128, num_chosen=2048, rotates_last=True)
_EXPERTS = ExpertsConfig(num_experts=256, num_chosen=8, intermediate_size=768, scale=2.827, dense_layers=(0,))
_NORM_EPS = 1e-5


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_latent`, `read_indexer`, `read_shared_layers` and
    `read_sigmoid_experts` do.
    """
    raw["hidden_act"].one_of("silu", default="silu")  # that of experts, whatever the key says
    raw.ignore("learnable_sink_init")  # the checkpoint has the sinks
    norm_eps = raw["rms_norm_eps"].number(_NORM_EPS, least=0, most=1)
    indexer = msgspec.structs.replace(read_indexer(raw, _INDEXER, _USUAL.rope_dim), norm_eps=norm_eps)
    config = latent.read_latent(
        raw, _USUAL, norm_eps=("rms_norm_eps", _NORM_EPS), is_interleaved=False, indexer=indexer
    )
    config = deepseek_v3.read_sigmoid_experts(raw, config, _EXPERTS)
    assert config.experts is not None
    eps = raw["hc_eps"].number(1e-6, least=0, most=1)
    config = msgspec.structs.replace(
        config,
        experts=msgspec.structs.replace(config.experts, gate_limit=raw["swiglu_limit"].number(10.0)),
        connections=HyperConnections(
            num_streams=raw["hc_mult"].whole(4, most=64),
            eps=eps,
            write_eps=eps,
            magnitude=raw["hc_magnitude"].number(2.0),
        ),
    )
    usual = [SHARED if layer and (layer - 1) % 4 else OWN for layer in range(config.num_layers)]
    return with_shared_layers(config, read_shared_layers(raw, config.num_layers, usual))


def describe(config: ModelConfig) -> DecoderSpec:
    spec = llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])
    return with_connections(config, spec)


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    shape, prefix = config.latent, f"model.layers.{index}.self_attn"
    assert shape is not None
    assert config.experts is not None
    gate = WeightPart(f"{prefix}.gate_proj", config.num_heads * shape.value_dim, Split.QUERY_HEADS)
    mixer = latent.attention(config, index, prefix)._replace(
        gate=LinearSpec((gate,), config.hidden_size), sinks=f"{prefix}.sinks"
    )
    layer = latent.layer(config, index)._replace(mixer=mixer)
    if index in config.experts.dense_layers:
        return layer
    together, apart = (
        experts(
            config, f"model.layers.{index}.mlp", choice_bias="gate.e_score_correction_bias", are_stacked=are_stacked
        )
        for are_stacked in (True, False)
    )
    return layer._replace(mlp=with_limited_gates(stored_either_way(together, apart), config.experts.gate_limit))

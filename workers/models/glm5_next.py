"""GLM-5.3 Flash (Z.ai, 2026), its text decoder: three of four layers have Kimi's delta attention with bounded decays,
the others latent attention without positions, which reads the pools of tokens that an indexer chooses. Several residual
streams lie between them (mHC), and after the last layer comes their mean. All but the first layers have DeepSeek-V3's
experts. The gates of all MLPs are bounded.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import latent, llama
from manta.workers.models.deepseek_v3 import read_sigmoid_experts
from manta.workers.models.dense import FULL
from manta.workers.models.experts import experts, limited_gates, stored_either_way, with_limited_gates
from manta.workers.models.glm_moe_dsa import usual_indexer_kinds
from manta.workers.models.hyper_connection_specs import read_mixed_streams, with_connections
from manta.workers.models.indexer import INDEXED, read_indexer, read_shared_layers, with_shared_layers
from manta.workers.models.kimi_linear import delta_attention
from manta.workers.models.model_config import ExpertsConfig, IndexerShape, LatentShape, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent import LINEAR, with_states
from manta.workers.models.recurrent_shapes import DeltaShape
from manta.workers.models.specs import DecoderSpec, ExpertsSpec, GatedMlpSpec, LayerSpec

ARCHITECTURE = "Glm5NextTextModel"

_LATENT = LatentShape(query_rank=1536, kv_rank=512, plain_dim=256, rope_dim=0, value_dim=256)
_INDEXER = IndexerShape(num_heads=32, head_dim=128, num_chosen=2048)
_EXPERTS = ExpertsConfig(num_experts=288, num_chosen=8, intermediate_size=2048, scale=2.5, dense_layers=(0, 1, 2))
_KINDS = {LINEAR: LINEAR, INDEXED: FULL, FULL: FULL, "deepseek_sparse_attention": FULL}
"""Kinds of layers by their names in configurations."""


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_latent`, `read_indexer`, `read_shared_layers` and
    `read_sigmoid_experts` do, and for pools that do not divide the chosen tokens.
    """
    for key in ("mhc", "mla_use_nope", "index_kpool_compress", "index_kpool_always_select_tail"):
        raw[key].only(True)
    raw["hidden_act"].one_of("silu", default="silu")
    raw.ignore("rope_parameters", "rope_theta", "rope_scaling", "rope_interleave", "indexer_rope_interleave")
    raw.ignore("moe_router_dtype", "index_share_for_mtp_iteration", "partial_rotary_factor")
    config = latent.read_latent(
        raw, _LATENT, norm_eps=("rms_norm_eps", 1e-5), is_interleaved=False, indexer=_read_indexer(raw)
    )
    assert config.latent is not None
    num_layers = config.num_layers
    config = msgspec.structs.replace(
        config,
        latent=msgspec.structs.replace(config.latent, norm_eps=config.rms_norm_eps),
        layer_ropes=(None,) * num_layers,
        connections=read_mixed_streams(raw),
    )
    config = read_sigmoid_experts(raw, config, _EXPERTS)
    assert config.experts is not None
    limit = raw["swiglu_limit"].number(10.0)
    config = msgspec.structs.replace(config, experts=msgspec.structs.replace(config.experts, gate_limit=limit))
    config = with_states(config, _read_kinds(raw, num_layers), _read_delta_shape(raw, config.rms_norm_eps))
    listed = read_shared_layers(raw, num_layers, usual_indexer_kinds(raw, num_layers))
    shared = tuple(layer for layer in listed if config.attends[layer])
    if any(not config.attends[layer - 1] for layer in shared):
        raise raw["indexer_types"].refused("full in a layer with attention that follows one without")
    return with_shared_layers(config, shared)


def _read_indexer(raw: RawConfig) -> IndexerShape:
    pool_len, budget = raw["index_kpool"].whole(16), raw["index_topk"]
    indexer = read_indexer(raw, _INDEXER, _LATENT.rope_dim, kinds=tuple(_KINDS))
    if indexer.num_chosen % pool_len:
        raise budget.refused(f"a multiple of index_kpool, {pool_len}")
    return msgspec.structs.replace(indexer, pool_len=pool_len)


def _read_kinds(raw: RawConfig, num_layers: int) -> tuple[str, ...]:
    listed = raw["layer_types"]
    if listed.value is None:
        return tuple(LINEAR if layer % 4 != 3 else FULL for layer in range(num_layers))
    kinds = tuple(_KINDS[kind.one_of(*_KINDS)] for kind in listed.items())
    if len(kinds) != num_layers:
        raise listed.refused(f"a list of {num_layers} kinds, one for each layer")
    return kinds


def _read_delta_shape(raw: RawConfig, norm_eps: float) -> DeltaShape:
    """Reads the sizes of delta attention, which published configurations have in an object of their own."""
    own = raw["linear_attn_config"].object()
    own.ignore("kda_layers", "full_attn_layers")
    num_heads = own["num_heads"].whole(raw["linear_num_heads"].whole(64))
    head_dim = own["head_dim"].whole(raw["linear_head_dim"].whole(128))
    bound, is_safe = raw["linear_lower_bound"], own["safe_gate"].flag(len(own) > 0)
    if "gate_lower_bound" in own:
        bound = own["gate_lower_bound"]
    has_bound = is_safe or bound.value is not None or not bound.is_given
    return DeltaShape(
        num_key_heads=num_heads,
        num_value_heads=num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        width=own["short_conv_kernel_size"].whole(raw["linear_conv_kernel_dim"].whole(4, least=2), least=2),
        norm_eps=norm_eps,
        least_log_decay=bound.number(-5.0, least=-1e6, most=-1e-6) if has_bound else 0.0,
    )


def describe(config: ModelConfig) -> DecoderSpec:
    spec = llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])
    if config.connections is None:  # a draft head, which has one stream
        return spec
    return with_connections(config, spec)._replace(gathering=None)


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    layer, prefix = latent.layer(config, index), f"model.layers.{index}"
    if config.states[index] is not None:
        layer = layer._replace(mixer=delta_attention(config, f"{prefix}.self_attn"))
    return layer._replace(mlp=_mlp(config, index, f"{prefix}.mlp"))


def _mlp(config: ModelConfig, index: int, prefix: str) -> GatedMlpSpec | ExpertsSpec:
    sizes = config.experts
    assert sizes is not None
    if index in sizes.dense_layers:
        return limited_gates(llama.mlp(config, prefix), sizes.gate_limit)
    apart, together = (
        experts(config, prefix, choice_bias="gate.e_score_correction_bias", are_stacked=are_stacked)
        for are_stacked in (False, True)
    )
    return with_limited_gates(stored_either_way(apart, together), sizes.gate_limit, are_shared_limited=True)

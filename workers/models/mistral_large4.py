"""Mistral Large 4 (Mistral AI, 2026), its text decoder: latent attention to the tokens that an indexer chooses. Queries
of each head are scaled by the logarithm of their position, a learned tensor scales the angles of the rope, some layers
have no positions, and some read the latent vectors of an earlier layer.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import glm_moe_dsa, latent, llama
from manta.workers.models.dense import trial_layers
from manta.workers.models.experts import experts, read_dense_layers, read_groups, read_num_experts
from manta.workers.models.indexer import read_indexer, read_shared_layers
from manta.workers.models.latent_specs import GrowthSpec, LatentAttentionSpec
from manta.workers.models.model_config import ExpertsConfig, IndexerShape, LatentShape, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.smollm3 import read_rotations
from manta.workers.models.specs import DecoderSpec, LayerSpec
from manta.workers.models.weight_specs import NormSpec, Split, TensorSpec

ARCHITECTURE = "MistralLarge4TextModel"
"""transformers has no class of the text alone with its head."""

_USUAL = LatentShape(query_rank=None, kv_rank=512, plain_dim=64, rope_dim=64, value_dim=128)
_INDEXER = IndexerShape(num_heads=32, head_dim=128, num_chosen=2048, is_interleaved=True)
_CAP = 30.0


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_latent`, `read_indexer` and `read_shared_layers` do,
    for queries of a latent vector, and for layers that read latent vectors of layers of another kind.
    """
    rope = raw.first_of("rope_parameters", "rope_scaling").object()
    if rope["mscale_all_dim"].number(0.0, least=0):
        raise rope["mscale_all_dim"].refused("left out or 0")
    indexer = read_indexer(raw, _INDEXER, _USUAL.rope_dim, reads_hidden_states=True)
    config = latent.read_latent(raw, _USUAL, norm_eps=("rms_norm_eps", 1e-5), indexer=indexer)
    shape, num_layers = config.latent, config.num_layers
    assert shape is not None
    if shape.query_rank is not None:
        raise raw["q_lora_rank"].refused("null or left out, because queries are products of hidden states")
    shape = msgspec.structs.replace(shape, norm_eps=config.rms_norm_eps)
    without = msgspec.structs.replace(shape, plain_dim=shape.plain_dim + shape.rope_dim, rope_dim=0)
    rotations = read_rotations(raw, num_layers)
    latents = tuple(shape if rotates else without for rotates in rotations)
    sources = _read_sources(raw, rotations)
    shared = read_shared_layers(raw, num_layers, glm_moe_dsa.usual_indexer_kinds(raw, num_layers))
    sizes = _read_experts(raw, num_layers)
    num_keys = [sum(sources[each] == source for each in range(num_layers) if each not in shared) for source in sources]
    widths = [own.cached_dim + count * indexer.head_dim for own, count in zip(latents, num_keys, strict=True)]
    is_dense = [layer in sizes.dense_layers for layer in range(num_layers)]
    reads = [(layer in shared, source != layer) for layer, source in enumerate(sources)]
    return msgspec.structs.replace(
        config,
        latent=shape,
        head_dim=max(widths),
        layer_latents=latents,
        layer_kv_heads=tuple((1, width) for width in widths),
        layer_ropes=tuple(config.rope if rotates else None for rotates in rotations),
        kv_sources=sources if sources != tuple(range(num_layers)) else (),
        indexer=msgspec.structs.replace(indexer, shared_layers=shared),
        experts=sizes,
        final_cap=raw["final_logit_softcapping"].number(_CAP),
        num_trial_layers=trial_layers(list(zip(rotations, is_dense, reads, strict=True))),
    )


def _read_sources(raw: RawConfig, rotations: list[bool]) -> tuple[int, ...]:
    """Returns the layer whose latent vectors each layer reads. As in transformers, a layer with a rope reads those of
    the last layer with one that others read, and a layer without one those of the last such layer without one.
    """
    listed = raw["kv_source_layers"]
    if listed.value is None:
        return tuple(range(len(rotations)))
    sources = listed.wholes(least=0)
    last_read: dict[bool, int] = {}
    are_right = len(sources) == len(rotations)
    for layer, (source, rotates) in enumerate(zip(sources, rotations, strict=False)):
        if source == layer and layer in sources[layer + 1 :]:
            last_read[rotates] = layer
        are_right = are_right and source in (layer, last_read.get(rotates))
    if not are_right:
        raise listed.refused(
            "a list with the number of each layer, or of the last layer before it that others read and that has a rope "
            "if it has one"
        )
    return sources


def _read_experts(raw: RawConfig, num_layers: int) -> ExpertsConfig:
    num_experts = read_num_experts(raw, 128, "n_routed_experts", "num_local_experts")
    num_groups, num_chosen_groups = read_groups(raw, num_experts, (1, 1))
    inner = raw["moe_intermediate_size"].whole(6144)
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=raw["num_experts_per_tok"].whole(4, most=num_experts),
        intermediate_size=inner,
        normalises=True,
        scale=raw["routed_scaling_factor"].number(1.0),
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        ranks_groups_by=min(2, num_experts // num_groups),
        shared_intermediate_size=inner * raw["n_shared_experts"].whole(1, least=0),
        dense_layers=read_dense_layers(raw, num_layers, raw["first_k_dense_replace"], usual=1),
    )


def describe(config: ModelConfig) -> DecoderSpec:
    assert config.latent is not None
    spec = llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])
    exponents = TensorSpec("model.rotary_emb.alpha", (config.latent.rope_dim // 2,), Split.NOTHING)
    return spec._replace(rope_exponents=exponents)


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    assert config.experts is not None
    prefix = f"model.layers.{index}"
    layer = llama.layer(config, index)._replace(mixer=_attention(config, index, f"{prefix}.self_attn"))
    if index in config.experts.dense_layers:
        return layer
    return layer._replace(mlp=experts(config, f"{prefix}.mlp"))


def _attention(config: ModelConfig, index: int, prefix: str) -> LatentAttentionSpec:
    own = msgspec.structs.replace(config, latent=config.layer_latents[index], head_dim=config.heads_of(index).head_dim)
    spec = latent.attention(own, index, prefix)
    sources = config.kv_sources or range(config.num_layers)
    indexer = spec.indexer
    if indexer is not None:
        assert config.indexer is not None
        others = [layer for layer in range(index) if layer not in config.indexer.shared_layers]
        indexer = indexer._replace(
            query_norm=NormSpec(f"{prefix}.indexer.q_input_norm", config.hidden_size, has_bias=True),
            growth=_growth(f"{prefix}.indexer"),
            place=sum(sources[layer] == sources[index] for layer in others),
        )
    spec = spec._replace(indexer=indexer, growth=_growth(prefix))
    if sources[index] == index:
        return spec
    return spec._replace(inputs=spec.inputs._replace(parts=spec.inputs.parts[:1]), latent_norm=None)


def _growth(prefix: str) -> GrowthSpec:
    return GrowthSpec(f"{prefix}.softmax_scaling.scale", f"{prefix}.softmax_scaling.bias")

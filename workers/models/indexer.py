"""The indexer of latent attention (DeepSeek-V3.2, 2025) as the families describe it, and the keys that their
configurations share.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from manta.workers.models.dense import trial_layers
from manta.workers.models.latent_specs import IndexerSpec
from manta.workers.models.model_config import IndexerShape, ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.weight_specs import LinearSpec, NormSpec, Split, TensorSpec, WeightPart

OWN, SHARED = "full", "shared"
"""Kinds of layers in `indexer_types`: with an indexer, and with the choice of the last layer before that has one."""
INDEXED = "indexed_attention"
"""The kind of layers with an indexer in `layer_types`."""


def read_rope_dim(raw: RawConfig, usual: int) -> int:
    """Returns the number of dimensions of a query and a key that rotate: none in a family whose `usual` number is 0."""
    value = raw["qk_rope_head_dim"]
    return value.even(usual) if usual else value.whole(0, least=0, most=0)


def read_indexer(
    raw: RawConfig,
    usual: IndexerShape,
    rope_dim: int,
    *,
    kinds: Sequence[str] = (INDEXED,),
    reads_hidden_states: bool = False,
) -> IndexerShape:
    """Returns the shape of the indexers of a model whose attention rotates `rope_dim` dimensions, and whose layers have
    these `kinds`. `usual` has what a configuration leaves out. `reads_hidden_states` says whether queries are products
    of hidden states.

    Raises `ConfigError` for sizes that do not fit, for other queries without a latent vector, and for layers of other
    kinds.
    """
    rank, head_dim = raw["q_lora_rank"], raw["index_head_dim"].even(usual.head_dim)
    if rank.is_given and rank.value is None and not reads_hidden_states:
        raise rank.refused("a number, because the indexer's queries are products of the latent vector of queries")
    rope_dim = read_rope_dim(raw, rope_dim)
    if head_dim < rope_dim:
        raise raw["index_head_dim"].refused(f"at least qk_rope_head_dim, {rope_dim}")
    listed = raw["layer_types"]
    for kind in () if listed.value is None else listed.items():
        kind.one_of(*kinds)
    return msgspec.structs.replace(
        usual,
        num_heads=raw["index_n_heads"].whole(usual.num_heads),
        head_dim=head_dim,
        num_chosen=raw["index_topk"].whole(usual.num_chosen),
    )


def read_shared_layers(raw: RawConfig, num_layers: int, usual: Sequence[str]) -> tuple[int, ...]:
    """Returns the layers that `indexer_types` calls shared. `usual` are the kinds of a configuration without it.

    Raises `ConfigError` for unknown kinds, for a wrong number of them, and if the first layer has no indexer.
    """
    value = raw["indexer_types"]
    kinds = usual if value.value is None else [kind.one_of(OWN, SHARED) for kind in value.items()]
    if len(kinds) != num_layers or kinds[0] != OWN:
        raise value.refused(f"a list of {num_layers} kinds, one for each layer, of which the first is {OWN}")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == SHARED)


def with_shared_layers(config: ModelConfig, shared_layers: tuple[int, ...]) -> ModelConfig:
    """Returns the model in which these layers have no indexer of their own."""
    assert config.indexer is not None
    kinds = [layer in shared_layers for layer in range(config.num_layers)]
    return msgspec.structs.replace(
        config,
        indexer=msgspec.structs.replace(config.indexer, shared_layers=shared_layers),
        num_trial_layers=max(config.num_trial_layers, trial_layers(kinds)),
    )


def indexer(config: ModelConfig, index: int, prefix: str) -> IndexerSpec | None:
    """Returns the indexer below `prefix` of a layer's attention; None for a layer without one. Its queries are made of
    their latent vector, or of hidden states if they have none.
    """
    shape, latent = config.indexer, config.latent
    if shape is None or index in shape.shared_layers:
        return None
    assert latent is not None
    of_heads = WeightPart(f"{prefix}.wq_b", shape.num_heads * shape.head_dim)
    keys, biases = [WeightPart(f"{prefix}.wk", shape.head_dim)], None
    if shape.pool_len:
        keys.append(WeightPart(f"{prefix}.index_kpool_compress_gate", shape.head_dim))
        of_places = f"{prefix}.index_kpool_compress_ape"
        biases = TensorSpec(of_places, (shape.pool_len, shape.head_dim), Split.NOTHING)
    return IndexerSpec(
        shape,
        queries=LinearSpec((of_heads,), latent.query_rank or config.hidden_size),
        keys=LinearSpec(tuple(keys), config.hidden_size),
        key_norm=NormSpec(f"{prefix}.k_norm", shape.head_dim),
        key_bias=TensorSpec(f"{prefix}.k_norm.bias", (shape.head_dim,), Split.NOTHING),
        shares=LinearSpec((WeightPart(f"{prefix}.weights_proj", shape.num_heads),), config.hidden_size),
        pool_biases=biases,
    )

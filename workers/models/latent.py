"""Latent attention as the families describe it, and the keys that their configurations share."""

from __future__ import annotations

from decimal import Decimal

import msgspec

from manta.workers.models import llama
from manta.workers.models.dense import read_dense, read_rope
from manta.workers.models.indexer import indexer, read_rope_dim
from manta.workers.models.latent_specs import LatentAttentionSpec
from manta.workers.models.model_config import IndexerShape, LatentShape, ModelConfig, RopeConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.row_places import HeadPiece, TailOrder
from manta.workers.models.specs import LayerSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, Split, WeightPart


def read_latent(
    raw: RawConfig,
    usual: LatentShape,
    *,
    norm_eps: tuple[str, float] = ("rms_norm_eps", 1e-6),
    is_interleaved: bool = True,
    is_tied: bool = False,
    ropes_whole_queries: bool = False,
    indexer: IndexerShape | None = None,
) -> ModelConfig:
    """Returns the shape of a decoder with latent attention. `usual` has the sizes that a configuration leaves out.
    `ropes_whole_queries` says whether a partial rotation counts the unrotated dimensions of a head too. A family whose
    attention reads the tokens of an `indexer` has read its shape.

    Raises `ConfigError` as `read_dense` and `read_rope` do, and for sizes that do not fit.
    """
    shape = LatentShape(
        query_rank=_read_query_rank(raw, usual.query_rank),
        kv_rank=raw["kv_lora_rank"].even(usual.kv_rank),
        plain_dim=raw["qk_nope_head_dim"].whole(usual.plain_dim),
        rope_dim=read_rope_dim(raw, usual.rope_dim),
        value_dim=raw["v_head_dim"].whole(usual.value_dim),
    )
    for key in ("head_dim", "qk_head_dim", "num_key_value_heads"):
        raw[key].whole(1, least=1 if shape.rope_dim else 0)  # the other sizes decide
    width = shape.cached_dim + (0 if indexer is None else indexer.cached_dim)
    rope = RopeConfig()
    if shape.rope_dim:
        rope = msgspec.structs.replace(
            read_rope(raw, *_rotated(shape, ropes_whole_queries), is_interleaved=is_interleaved),
            rotary_dim=shape.rope_dim,
        )
    config = read_dense(raw, rope=rope, norm_eps=norm_eps, is_tied=is_tied, kv_heads=(1, width))
    has_biases = raw["attention_bias"].flag(False)
    if has_biases and shape.query_rank is None:
        raise raw["attention_bias"].refused("false if q_lora_rank is null, because only some of the inputs have biases")
    return msgspec.structs.replace(
        config,
        latent=shape,
        indexer=indexer,
        qkv_bias=has_biases,
        output_bias=has_biases,
        attention_scale=(shape.plain_dim + shape.rope_dim) ** -0.5 * _stretch(rope) ** 2,
    )


def _rotated(shape: LatentShape, ropes_whole_queries: bool) -> tuple[int, float, float | None]:
    """Returns a head's width, the usual theta, and the usual part of the head that rotates, for `read_rope`."""
    if not ropes_whole_queries:
        return shape.rope_dim, 10000.0, None
    query_dim = shape.plain_dim + shape.rope_dim
    return query_dim, 10000.0, shape.rope_dim / query_dim


def _read_query_rank(raw: RawConfig, usual: int | None) -> int | None:
    value = raw["q_lora_rank"]
    if value.value is None and (usual is None or value.is_given):
        return None
    return value.whole(usual)


def _stretch(rope: RopeConfig) -> float:
    """The factor on queries and on keys of a stretched context, whose square multiplies their products."""
    if rope.rope_type == "default" or rope.factor <= 1:
        return 1.0
    # `decimal` has the same last bit on every machine, which the logarithms of C libraries have not
    return 0.1 * rope.mscale_all_dim * float(Decimal(rope.factor).ln()) + 1.0


def layer(config: ModelConfig, index: int) -> LayerSpec:
    """Returns Llama's layer with latent attention."""
    return llama.layer(config, index)._replace(mixer=attention(config, index, f"model.layers.{index}.self_attn"))


def of_layer(config: ModelConfig, index: int) -> ModelConfig:
    """Returns the model as its layer `index` sees it: with the latent attention, heads and rope of that layer."""
    heads, rope = config.heads_of(index), config.ropes[index]
    assert rope is not None
    return msgspec.structs.replace(
        config, latent=config.layer_latents[index], num_heads=heads.num_heads, head_dim=heads.head_dim, rope=rope
    )


def attention(config: ModelConfig, index: int, prefix: str, output: str = "o_proj") -> LatentAttentionSpec:
    """Returns the latent attention of a layer below `prefix`, whose linear to the residual stream has the name
    `output`.
    """
    shape = config.latent
    assert shape is not None
    hidden, query_dim = config.hidden_size, shape.plain_dim + shape.rope_dim
    is_interleaved = config.rope.is_interleaved
    query_order = TailOrder(query_dim, shape.rope_dim) if is_interleaved else None
    cached_order = TailOrder(shape.cached_dim, shape.rope_dim) if is_interleaved else None
    cached = WeightPart(f"{prefix}.kv_a_proj_with_mqa", shape.cached_dim, order=cached_order)
    size = config.num_heads * query_dim
    query_norm = queries = None
    if shape.query_rank is None:
        first = WeightPart(f"{prefix}.q_proj", size, Split.QUERY_HEADS, query_order)
    else:
        first = WeightPart(f"{prefix}.q_a_proj", shape.query_rank)
        query_norm = NormSpec(f"{prefix}.q_a_layernorm", shape.query_rank)
        part = WeightPart(f"{prefix}.q_b_proj", size, Split.QUERY_HEADS, query_order, scale=shape.query_scale)
        queries = LinearSpec((part,), shape.query_rank)
        if shape.has_gates:
            queries = LinearSpec(_with_gates(config.num_heads, shape, part), 2 * shape.query_rank)
    to = WeightPart(f"{prefix}.{output}", hidden)
    return LatentAttentionSpec(
        shape=shape,
        head_dim=config.head_dim,
        inputs=LinearSpec((first, cached), hidden, config.qkv_bias),
        query_norm=query_norm,
        queries=queries,
        latent_norm=NormSpec(f"{prefix}.kv_a_layernorm", shape.kv_rank),
        expansion=LinearSpec(_expansion(config, shape, prefix), shape.kv_rank),
        output=LinearSpec((to,), config.num_heads * shape.value_dim, config.output_bias, splits_inputs=True),
        indexer=indexer(config, index, f"{prefix}.indexer"),
    )


def _with_gates(num_heads: int, shape: LatentShape, queries: WeightPart) -> tuple[WeightPart, WeightPart]:
    """Returns the parts for queries and for gates of values, which one tensor has for each head."""
    query_dim = shape.plain_dim + shape.rope_dim
    rows = query_dim + shape.value_dim
    pieces = HeadPiece(rows, 0, query_dim), HeadPiece(rows, query_dim, shape.value_dim)
    queries = queries._replace(piece=pieces[0], stored_rows=num_heads * rows)
    return queries, queries._replace(out_features=num_heads * shape.value_dim, order=None, piece=pieces[1])


def _expansion(config: ModelConfig, shape: LatentShape, prefix: str) -> tuple[WeightPart, ...]:
    """Returns the parts for keys and for values, which GGUF files store apart."""
    of_head = shape.plain_dim + shape.value_dim
    return tuple(
        WeightPart(
            f"{prefix}.kv_b_proj",
            config.num_heads * size,
            Split.QUERY_HEADS,
            piece=HeadPiece(of_head, first, size),
            stored_rows=config.num_heads * of_head,
            scale=shape.latent_scale,
            elsewhere=WeightPart(f"{prefix}.{apart}", config.num_heads * size, Split.QUERY_HEADS),
        )
        for apart, first, size in (
            ("k_b_proj", 0, shape.plain_dim),
            ("v_b_proj", shape.plain_dim, shape.value_dim),
        )
    )

"""Qwen4-Exp (Qwen Team, 2026), its text decoder: Qwen3.5's layers and experts between several residual streams, whose
gated norms each part reads. Attention reads the blocks of tokens that an indexer chooses, and some layers add rows of
tables of n-grams to the streams.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import qwen3_5
from manta.workers.models.block_indexer import BlockIndexerShape, BlockIndexerSpec
from manta.workers.models.dense import FULL
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.ngrams import NgramShape, NgramSpec
from manta.workers.models.qwen3_5_moe import mixture_of_experts, with_experts, with_inner_size
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent_shapes import DeltaShape
from manta.workers.models.specs import DecoderSpec, LayerSpec, NormGateSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, Split, TensorSpec, WeightPart

ARCHITECTURE = "Qwen4ExpForCausalLM"

_INDEXED = ("indexed_attention", "qwen_sparse_attention")
"""Other names of layers with attention."""
_MOST_STREAMS, _MOST_NGRAM, _MOST_TABLES, _MOST_PIECES = 64, 16, 256, 65536


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `qwen3_5.read_config` does, and for an indexer or tables of
    n-grams whose sizes do not fit.
    """
    raw.ignore("number_of_conv_states")  # of transformers' cache
    kinds = raw["layer_types"]
    listed = [] if kinds.value is None else [FULL if each.value in _INDEXED else each.value for each in kinds.items()]
    plain = raw.completed({}, {"layer_types": listed}) if listed else raw
    config = qwen3_5.read_config(with_inner_size(plain), rotary_part=1.0)
    config = with_experts(raw, config, num_experts=512, num_chosen=10)
    shape, activation = config.recurrent, raw["output_gate_type"].value or config.activation
    assert isinstance(shape, DeltaShape)
    if activation not in ("silu", "sigmoid"):
        raise raw["output_gate_type"].refused("silu or sigmoid")
    config = msgspec.structs.replace(
        config,
        recurrent=msgspec.structs.replace(shape, has_sigmoid_gates=activation == "sigmoid"),
        num_gated_streams=raw["hc_count"].whole(4, least=2, most=_MOST_STREAMS),
        norm_gate_rank=raw["hc_lowrank"].whole(320),
        block_indexer=_read_indexer(raw, config) if any(config.attends) else None,
    )
    return _with_ngrams(raw, config)


def _read_indexer(raw: RawConfig, config: ModelConfig) -> BlockIndexerShape:
    raw["indexer_kv_heads"].whole(1, most=1)
    head_dim, budget, block_len = raw["indexer_head_dim"], raw["indexer_budget"], raw["indexer_compress_ratio"]
    rotary_dim = config.rope.rotary_dim or config.head_dim
    if not rotary_dim <= head_dim.whole() <= config.head_dim:
        raise head_dim.refused(f"at least the {rotary_dim} dimensions that rotate, and at most head_dim")
    if budget.whole() % block_len.whole():
        raise budget.refused(f"a multiple of indexer_compress_ratio, {block_len.whole()}")
    return BlockIndexerShape(
        num_heads=raw["indexer_n_heads"].whole(),
        head_dim=head_dim.whole(),
        block_len=block_len.whole(),
        num_chosen=budget.whole() // block_len.whole(),
    )


def _with_ngrams(raw: RawConfig, config: ModelConfig) -> ModelConfig:
    """Returns the model with the tables of its layers, if there are any."""
    layers, end, size = raw["ple_layer_ids"], raw["eos_token_id"], raw["ngram_size"].whole(3, least=2, most=_MOST_NGRAM)
    others = ("ple_conv_kernel_size", "ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by", "seed")
    raw.ignore(*others, "ple_embed_dim", "heads_per_ngram", "split_ngram_parts")
    if layers.value in (None, []):
        return config
    with_tables = tuple(sorted({layer - 1 for layer in layers.wholes()}))
    if any(layer >= config.num_layers or config.states[layer] is None for layer in with_tables):
        raise layers.refused("numbers of layers, from 1, whose kind is linear_attention")
    num_tables = raw["heads_per_ngram"].whole(8, most=_MOST_TABLES)
    width = raw["ple_embed_dim"].whole(config.hidden_size)
    if width % ((size - 1) * num_tables):
        raise raw["ple_embed_dim"].refused(f"a multiple of the {(size - 1) * num_tables} tables")
    conv_width, least_rows, rows_multiple, seed = (raw[name] for name in others)
    shape = NgramShape(
        layers=with_tables,
        size=size,
        num_tables=num_tables,
        width=width,
        least_rows=least_rows.whole(20_000_000),
        rows_multiple=rows_multiple.whole(128),
        num_pieces=raw["split_ngram_parts"].whole(512, most=_MOST_PIECES),
        seed=seed.whole(1234, least=0),
        num_tokens=config.vocab_size,
        end_token=end.wholes(least=0)[0] if isinstance(end.value, list) and end.value else end.whole(least=0),
        conv_width=conv_width.whole(4, least=2),
    )
    channels = config.num_gated_streams * config.hidden_size
    states = tuple(
        shape.with_states(state, channels) if state is not None and layer in with_tables else state
        for layer, state in enumerate(config.states)
    )
    num_trial_layers = max(config.num_trial_layers, with_tables[0] + 1)
    return msgspec.structs.replace(config, ngrams=shape, layer_states=states, num_trial_layers=num_trial_layers)


def describe(config: ModelConfig) -> DecoderSpec:
    spec = qwen3_5.decoder(config, [_layer(config, index) for index in range(config.num_layers)])
    last = "model.hyper_connection_mixer"
    tables = config.ngrams.layers if config.ngrams is not None else ()
    hashes = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")  # numbers that the shape gives
    return spec._replace(
        final_norm=_stream_norm(config, f"{last}.hc_norm"),
        final_gate=_gate(config, last),
        unread=tuple(f"model.layers.{layer}.ple.ple_embedding.{name}" for layer in tables for name in hashes),
    )


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    usual, prefix = qwen3_5.layer(config, index), f"model.layers.{index}"
    before, after = f"{prefix}.attn_hyper_connection", f"{prefix}.mlp_hyper_connection"
    mixer = (
        usual.mixer
        if config.states[index] is not None
        else usual.attention._replace(indexer=_indexer(config, f"{prefix}.self_attn.indexer"))
    )
    return usual._replace(
        mixer=mixer,
        mlp=mixture_of_experts(config, f"{prefix}.mlp"),
        input_norm=_stream_norm(config, f"{before}.hc_norm"),
        mlp_norm=_stream_norm(config, f"{after}.hc_norm"),
        input_gate=_gate(config, before),
        mlp_gate=_gate(config, after),
        stream_shares=(_shares(config, before), _shares(config, after)),
        ngrams=_ngrams(config, config.ngrams, index) if config.ngrams and index in config.ngrams.layers else None,
    )


def _width(config: ModelConfig) -> int:
    """Returns the width of all residual streams together."""
    return config.num_gated_streams * config.hidden_size


def _stream_norm(config: ModelConfig, name: str) -> NormSpec:
    return NormSpec(name, _width(config), adds_one=True)


def _gate(config: ModelConfig, prefix: str) -> NormGateSpec:
    rank, width, scale = config.norm_gate_rank, _width(config), 1 / config.num_gated_streams
    down = WeightPart(f"{prefix}.input_mix_weight_down", rank, scale=scale)
    return NormGateSpec(
        LinearSpec((down,), width),
        LinearSpec((WeightPart(f"{prefix}.input_mix_weight_up", width),), rank),
    )


def _shares(config: ModelConfig, prefix: str) -> LinearSpec:
    count = config.num_gated_streams
    return LinearSpec((WeightPart(f"{prefix}.block_inject_weight", count, scale=1 / count),), _width(config))


def _indexer(config: ModelConfig, prefix: str) -> BlockIndexerSpec:
    shape = config.block_indexer
    assert shape is not None
    projection = WeightPart(f"{prefix}.index_qk_proj", (shape.num_heads + 1) * shape.head_dim)
    query_norm, key_norm = (
        NormSpec(f"{prefix}.{name}_layernorm", shape.head_dim, adds_one=True) for name in ("q", "k")
    )
    return BlockIndexerSpec(shape, LinearSpec((projection,), config.hidden_size), query_norm, key_norm)


def _ngrams(config: ModelConfig, shape: NgramShape, index: int) -> NgramSpec:
    prefix = f"model.layers.{index}.ple"
    pieces = tuple(
        WeightPart(f"{prefix}.ple_embedding.ngram_embedding.shard_{piece}", num_rows)
        for piece, num_rows in enumerate(shape.piece_rows(index))
    )
    width = _width(config)
    return NgramSpec(
        index,
        pieces,
        keys=LinearSpec((WeightPart(f"{prefix}.key_proj", width),), shape.width),
        values=LinearSpec((WeightPart(f"{prefix}.value_proj", config.hidden_size),), shape.width),
        key_norm=_stream_norm(config, f"{prefix}.norm_key"),
        query_norm=_stream_norm(config, f"{prefix}.norm_query"),
        conv_norm=_stream_norm(config, f"{prefix}.norm_conv"),
        kernel=TensorSpec(f"{prefix}.conv1d.weight", (width, 1, shape.conv_width), Split.NOTHING),
    )

"""DeepSeek-V4 (DeepSeek-AI, 2026): attention over the last tokens and over compressed keys of earlier ones, of which an
indexer chooses in some layers; several residual streams that are mixed (mHC); and experts, which a table names for each
token in the first layers. One expert computes every token.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.compressed_shape import CompressedShape
from manta.workers.models.compressed_specs import CompressedAttentionSpec, CompressorSpec, EntryIndexerSpec
from manta.workers.models.dense import MOST_LAYERS, SLIDING, read_dense, read_kinds, read_partial_rope, trial_layers
from manta.workers.models.experts import experts, read_num_experts, stored_either_way, with_limited_gates
from manta.workers.models.hyper_connection_specs import read_mixed_streams, with_connections
from manta.workers.models.model_config import ExpertsConfig, IndexerShape, ModelConfig, RopeConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.specs import DecoderSpec, ExpertsSpec, LayerSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, Split, TensorSpec, WeightPart

ARCHITECTURE = "DeepseekV4ForCausalLM"

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
"""Kinds of layers with entries, in `layer_types`: those that an indexer chooses, and those that are all read."""
_USUAL_RATES = {SLIDING: 0, _SPARSE: 4, _HEAVY: 128}
_RATE_KEYS = {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}
"""The keys of the rates in older configurations."""
_HASHED, _ROUTED = "hash_moe", "moe"
"""Kinds of layers in `mlp_layer_types`."""
_MAIN, _COMPRESS = "main", "compress"
"""Ropes in `rope_parameters`: that of layers without entries, and that of layers with entries."""


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` and `read_kinds` do, and for sizes that do not
    fit.
    """
    for key in ("attention_bias", "mlp_bias"):
        raw[key].only(False)
    raw["norm_topk_prob"].only(True)
    raw["topk_method"].one_of("noaux_tc", default="noaux_tc")
    for key in ("num_key_value_heads", "n_shared_experts"):
        raw[key].whole(1, most=1)
    raw["num_nextn_predict_layers"].whole(1, least=0)  # what drafts tokens has names of its own
    raw.ignore("expert_dtype")  # the tensors say it themselves
    num_layers = raw["num_hidden_layers"].whole(most=MOST_LAYERS)
    kinds, of_experts = _read_layer_kinds(raw, num_layers), _read_mlp_kinds(raw, num_layers)
    ropes = _read_ropes(raw)
    shape = _read_shape(raw, kinds, ropes[_MAIN])
    inner = raw["moe_intermediate_size"].whole(2048)
    completed = raw.completed({"intermediate_size": inner}, {})
    config = read_dense(completed, rope=ropes[_MAIN], kv_heads=(1, shape.cached_dim))
    if config.num_heads % shape.num_output_groups:
        raise raw["o_groups"].refused(f"a divisor of the {config.num_heads} attention heads")
    num_experts = read_num_experts(raw, 256, "n_routed_experts", "num_local_experts")
    states = tuple(shape.state(layer) for layer in range(num_layers))
    return msgspec.structs.replace(
        config,
        compressed=shape,
        indexer=_read_indexer(raw, shape) if shape.overlapping_layers else None,
        attention_scale=shape.head_dim**-0.5,
        layer_states=states if any(states) else (),
        sliding_windows=tuple(None if rate else shape.window for rate in shape.rates),
        layer_ropes=tuple(ropes[_COMPRESS if rate else _MAIN] for rate in shape.rates),
        num_trial_layers=trial_layers(list(zip(kinds, of_experts, strict=True))),
        experts=ExpertsConfig(
            num_experts=num_experts,
            num_chosen=raw["num_experts_per_tok"].whole(6, most=num_experts),
            intermediate_size=inner,
            scores=raw["scoring_func"].one_of("sqrtsoftplus", "sigmoid", default="sqrtsoftplus"),
            normalises=True,
            scale=raw["routed_scaling_factor"].number(1.5),
            shared_intermediate_size=inner,
            hashed_layers=tuple(layer for layer, kind in enumerate(of_experts) if kind == _HASHED),
            gate_limit=raw["swiglu_limit"].number(10.0),
        ),
        connections=read_mixed_streams(raw),
    )


def _read_layer_kinds(raw: RawConfig, num_layers: int) -> tuple[str, ...]:
    """Returns the kind of each layer, which older configurations say by its rate."""
    ratios = raw["compress_ratios"]
    usual = [_HEAVY if layer < 2 or layer % 2 == 0 else _SPARSE for layer in range(num_layers)]
    if ratios.value is not None and raw["layer_types"].value is None:
        names = {rate: kind for kind, rate in _USUAL_RATES.items()}
        found = [names.get(ratio.whole(least=0), "") for ratio in ratios.items()]
        if len(found) < num_layers or "" in found:
            raise ratios.refused(f"a list of {num_layers} rates, each one of {', '.join(map(str, names))}")
        usual = found[:num_layers]  # those of layers that draft tokens follow
    return read_kinds(raw, num_layers, allowed=tuple(_USUAL_RATES), usual=usual)


def _read_mlp_kinds(raw: RawConfig, num_layers: int) -> tuple[str, ...]:
    kinds, num_hashed = raw["mlp_layer_types"], raw["num_hash_layers"].whole(3, least=0)
    if kinds.value is None:
        return tuple(_HASHED if layer < num_hashed else _ROUTED for layer in range(num_layers))
    found = tuple(kind.one_of(_HASHED, _ROUTED) for kind in kinds.items())
    if len(found) != num_layers:
        raise kinds.refused(f"a list of {num_layers} kinds, one for each layer")
    return found


def _read_ropes(raw: RawConfig) -> dict[str, RopeConfig]:
    """Returns the ropes of layers without entries and with entries, which rotate as many dimensions."""
    head_dim, by_kind = raw["head_dim"].even(512), raw["rope_parameters"].object()
    part, rope_dim = raw["partial_rotary_factor"], raw["qk_rope_head_dim"]
    thetas = {_MAIN: raw["rope_theta"].number(10000.0), _COMPRESS: raw["compress_rope_theta"].number(160000.0)}
    if all(by_kind[kind].value is not None for kind in thetas):
        ropes = {}
        for kind in thetas:
            values = by_kind[kind].object()
            rotary_dim = int(head_dim * values["partial_rotary_factor"].number(1.0, most=1))
            ropes[kind] = read_partial_rope(raw, values, values["rope_theta"].number(least=1.001), rotary_dim)
        if ropes[_MAIN].rotary_dim != ropes[_COMPRESS].rotary_dim:
            raise raw["rope_parameters"].refused("ropes that rotate the same part of a head in all layers")
        return ropes
    usual = rope_dim.value / head_dim if rope_dim.value is not None and rope_dim.even(64) else 64 / 512
    rotary_dim = int(head_dim * part.number(usual, most=1))
    values = raw.first_of("rope_parameters", "rope_scaling").object()
    values.ignore("rope_theta", "partial_rotary_factor")  # those of the model win
    rope = read_partial_rope(raw, values, thetas[_COMPRESS], rotary_dim)
    if rope.rope_type == "yarn" and rope.attention_factor is None:
        rope = msgspec.structs.replace(rope, attention_factor=1.0)
    main = RopeConfig(theta=thetas[_MAIN], rotary_dim=rotary_dim, is_interleaved=True)
    return {_MAIN: main, _COMPRESS: rope}


def _read_shape(raw: RawConfig, kinds: tuple[str, ...], rope: RopeConfig) -> CompressedShape:
    rates, given = dict(_USUAL_RATES), raw["compress_rates"].object()
    for kind, key in _RATE_KEYS.items():
        older = raw[key]
        rates[kind] = (given[kind] if older.value is None else older).whole(rates[kind])
    rope_dim = rope.rotary_dim
    if not rope_dim or rope_dim % 2:
        raise raw["partial_rotary_factor"].refused("a number that leaves an even part of a head")
    shape = CompressedShape(
        query_rank=raw["q_lora_rank"].whole(1024),
        head_dim=raw["head_dim"].even(512),
        rope_dim=rope_dim,
        window=raw["sliding_window"].whole(128),
        rates=tuple(rates[kind] for kind in kinds),
        overlapping_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == _SPARSE),
        num_output_groups=raw["o_groups"].whole(8),
        output_rank=raw["o_lora_rank"].whole(1024),
        index_dim=raw["index_head_dim"].even(128),
    )
    for key, width in (("head_dim", shape.head_dim), ("index_head_dim", shape.index_dim)):
        if any(shape.rates) and width % shape.spread:
            raise raw[key].refused(f"a multiple of {shape.spread}, by the tokens of an entry")
    return shape


def _read_indexer(raw: RawConfig, shape: CompressedShape) -> IndexerShape:
    if shape.index_dim < shape.rope_dim:
        raise raw["index_head_dim"].refused(f"at least the {shape.rope_dim} dimensions that rotate")
    return IndexerShape(
        num_heads=raw["index_n_heads"].whole(64),
        head_dim=shape.index_dim,
        num_chosen=raw["index_topk"].whole(512),
        is_interleaved=True,
        rotates_last=True,
    )


def describe(config: ModelConfig) -> DecoderSpec:
    spec = llama.decoder(config, [_layer(config, index) for index in range(config.num_layers)])
    return with_connections(config, spec)


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    prefix = f"model.layers.{index}"
    mixer, mlp = _attention(config, index, f"{prefix}.self_attn"), _experts(config, index, f"{prefix}.mlp")
    return llama.layer(config, index)._replace(mixer=mixer, mlp=mlp)


def _experts(config: ModelConfig, index: int, prefix: str) -> ExpertsSpec:
    sizes = config.experts
    assert sizes is not None
    is_hashed = index in sizes.hashed_layers
    bias = None if is_hashed else "gate.e_score_correction_bias"
    apart, together = (
        experts(config, prefix, choice_bias=bias, are_stacked=are_stacked) for are_stacked in (False, True)
    )
    spec = with_limited_gates(stored_either_way(apart, together), sizes.gate_limit, are_shared_limited=True)
    return spec._replace(table=f"{prefix}.gate.tid2eid" if is_hashed else None)


def _attention(config: ModelConfig, index: int, prefix: str) -> CompressedAttentionSpec:
    shape, hidden = config.compressed, config.hidden_size
    assert shape is not None
    size, groups, rank = config.num_heads * shape.head_dim, shape.num_output_groups, shape.output_rank
    inputs = WeightPart(f"{prefix}.q_a_proj", shape.query_rank), WeightPart(f"{prefix}.kv_proj", shape.head_dim)
    queries = WeightPart(f"{prefix}.q_b_proj", size, Split.QUERY_HEADS)
    of_groups = WeightPart(f"{prefix}.o_a_proj", groups * rank, Split.QUERY_HEADS)
    compressor = entries = indexer = None
    if shape.rates[index]:
        compressor = f"{prefix}.compressor"
        entries = _compressor(config, index, compressor, shape.head_dim)
    if index in shape.overlapping_layers:
        indexer = _indexer(config, index, f"{compressor}.indexer")
    return CompressedAttentionSpec(
        inputs=LinearSpec(inputs, hidden),
        query_norm=NormSpec(f"{prefix}.q_a_norm", shape.query_rank),
        queries=LinearSpec((queries,), shape.query_rank),
        head_norm=NormSpec(f"{prefix}.q_b_norm", shape.head_dim, is_stored=False),
        key_norm=NormSpec(f"{prefix}.kv_norm", shape.head_dim),
        sinks=f"{prefix}.sinks",
        group_outputs=LinearSpec((of_groups,), size // groups),
        output_rank=rank,
        output=LinearSpec((WeightPart(f"{prefix}.o_b_proj", hidden),), groups * rank, splits_inputs=True),
        entries=entries,
        indexer=indexer,
    )


def _compressor(config: ModelConfig, index: int, prefix: str, width: int) -> CompressorSpec:
    shape, hidden = config.compressed, config.hidden_size
    assert shape is not None
    num_products = width * (2 if index in shape.overlapping_layers else 1)
    numbers, gates = (
        LinearSpec((WeightPart(f"{prefix}.{name}_proj", num_products),), hidden) for name in ("kv", "gate")
    )
    biases = TensorSpec(f"{prefix}.position_bias", (shape.rates[index], num_products), Split.NOTHING)
    return CompressorSpec(numbers, gates, biases, NormSpec(f"{prefix}.kv_norm", width))


def _indexer(config: ModelConfig, index: int, prefix: str) -> EntryIndexerSpec:
    sizes, shape = config.indexer, config.compressed
    assert sizes is not None
    assert shape is not None
    of_heads = WeightPart(f"{prefix}.q_b_proj", sizes.num_heads * sizes.head_dim)
    shares = WeightPart(f"{prefix}.scorer.weights_proj", sizes.num_heads)
    return EntryIndexerSpec(
        sizes,
        keys=_compressor(config, index, prefix, sizes.head_dim),
        queries=LinearSpec((of_heads,), shape.query_rank),
        shares=LinearSpec((shares,), config.hidden_size),
    )

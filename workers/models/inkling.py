"""Inkling (Thinking Machines, 2026), its text decoder: attention without positions, whose products have a bias for each
distance, in layers of which most have a window. Short convolutions are added to keys, to values, and to the results of
attention and MLP. Experts that compute every token take part in the sum that divides the others' scores.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from manta.workers.models import llama
from manta.workers.models.block_specs import DistanceSpec
from manta.workers.models.dense import FULL, SLIDING, read_dense, trial_layers, with_kinds
from manta.workers.models.experts import alternating, experts, read_dense_layers, read_num_experts
from manta.workers.models.model_config import ExpertsConfig, ModelConfig, QueryGrowth
from manta.workers.models.part_shapes import InklingShape, LayerLoop
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent_shapes import StateShape
from manta.workers.models.row_places import ExpertRows
from manta.workers.models.specs import AttentionSpec, DecoderSpec, ExpertsSpec, GatedMlpSpec, LayerSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, Split, TensorSpec, WeightPart

ARCHITECTURE = "InklingForCausalLM"

_HEAD_DIM, _WINDOW, _PERIOD = 128, 512, 6
_KINDS = {"hybrid": FULL, "hybrid_sliding": SLIDING}
"""The kinds of layers by their names in configurations."""
_SHARED = 2
"""The usual number of experts that compute every token."""


class Usual(NamedTuple):
    """Values of keys that configurations leave out."""

    num_windowed_kv_heads: int
    window: int
    floor: int | None
    """Position from which queries grow; None if they do not."""


_USUAL = Usual(num_windowed_kv_heads=16, window=_WINDOW, floor=None)


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_layers` does."""
    raw.ignore("number_of_conv_states", "rms_norm_eps_moe_gate")
    raw.ignore("num_mtp_layers", "mtp_local_layer_ids", "chain_hidden_post_norm", "mtp_hidden_states_first")
    raw = respelled(raw)
    config = read_layers(raw, _USUAL)
    dense_layers = _dense_layers(raw, config.num_layers)
    kinds = [(window, layer in dense_layers) for layer, window in enumerate(config.sliding_windows)]
    return msgspec.structs.replace(
        config,
        attention_scale=1 / config.head_dim,
        logits_scale=1 / raw["logits_mup_width_multiplier"].number(24.0),
        experts=_read_experts(raw, config),
        num_trial_layers=trial_layers(kinds),
    )


def read_layers(raw: RawConfig, usual: Usual, loop: LayerLoop | None = None) -> ModelConfig:
    """Returns the shape of a model without its MLPs, in which the layers of a `loop` stand as often as they run.

    Raises `ConfigError` as `read_dense` does, and for layers with windows that have other query heads than the others.
    """
    config = read_dense(raw, _HEAD_DIM, kv_heads=(raw["num_key_value_heads"].whole(8), raw["head_dim"].even(_HEAD_DIM)))
    config = without_padding(raw, config)
    for key, own in (("swa_num_attention_heads", config.num_heads), ("swa_head_dim", config.head_dim)):
        raw[key].whole(own, least=own, most=own)
    windowed = raw["swa_num_key_value_heads"].whole(usual.num_windowed_kv_heads)
    num_kv_heads = {FULL: config.num_kv_heads, SLIDING: windowed}
    for kind, key in ((FULL, "num_key_value_heads"), (SLIDING, "swa_num_key_value_heads")):
        if config.num_heads % num_kv_heads[kind]:
            raise raw[key].refused(f"a divisor of the {config.num_heads} attention heads")
    kinds, width = _read_kinds(raw, config.num_layers), raw["conv_kernel_size"].whole(4, least=2)
    if loop is not None:
        kinds = tuple(kinds[layer] for layer in loop.runs(len(kinds)))
    floor = raw["log_scaling_n_floor"]
    rate, period = raw["log_scaling_alpha"].number(0.1, least=0), floor.value or usual.floor
    growth = None
    if period is not None:
        period = floor.whole(usual.floor)
        growth = QueryGrowth(rate=rate, period=period, first=1, has_steps=False, only_without_window=True)
    config = msgspec.structs.replace(config, num_layers=len(kinds))
    config = with_kinds(config, kinds, raw["sliding_window_size"].whole(usual.window), dict.fromkeys(_KINDS.values()))
    return msgspec.structs.replace(
        config,
        layer_kv_heads=tuple((num_kv_heads[kind], config.head_dim) for kind in kinds),
        layer_states=tuple(_state(num_kv_heads[kind], config, width) for kind in kinds),
        inkling=InklingShape(
            conv_width=width,
            distance_rank=raw["d_rel"].whole(16),
            most_distance=raw["rel_extent"].whole(1024),
            loop=loop,
        ),
        query_growth=growth,
    )


def without_padding(raw: RawConfig, config: ModelConfig) -> ModelConfig:
    """Returns the model without the tokens from `unpadded_vocab_size` on, which only fill up its tables."""
    vocab_size = config.vocab_size
    unpadded = raw["unpadded_vocab_size"].whole(vocab_size, most=vocab_size)
    num_stored = None if unpadded == vocab_size else vocab_size
    return msgspec.structs.replace(config, vocab_size=unpadded, num_stored_tokens=num_stored)


def decoder(config: ModelConfig, layers: list[LayerSpec]) -> DecoderSpec:
    """Returns a whole model with these layers, whose embeddings have a norm and whose tables may have more rows than
    there are tokens.
    """
    spec = llama.decoder(config, layers)
    embedding = spec.embedding._replace(stored_rows=config.num_stored_tokens)
    (head,) = spec.head.parts
    head = embedding if spec.is_tied else head._replace(stored_rows=config.num_stored_tokens)
    norm = NormSpec("model.embed_tokens.embed_norm", config.hidden_size)
    return spec._replace(embedding=embedding, head=spec.head._replace(parts=(head,)), embedding_norm=norm)


def respelled(raw: RawConfig) -> RawConfig:
    """Returns the configuration with the keys of transformers' class, of which published files have other spellings."""
    names = {
        "max_position_embeddings": ("model_max_length", 131072),
        "sliding_window_size": ("sliding_window", None),
        "conv_kernel_size": ("sconv_kernel_size", None),
        "n_routed_experts": ("num_local_experts", None),
        "route_scale": ("routed_scaling_factor", None),
    }
    dense, inner = raw["dense_intermediate_size"].value, raw["intermediate_size"].value
    if dense is not None:  # then the other width is that of experts
        raw = raw.completed({}, {"intermediate_size": dense, "moe_intermediate_size": inner})
    return raw.respelled(names)


def _read_kinds(raw: RawConfig, num_layers: int) -> tuple[str, ...]:
    listed, local = raw["layer_types"], raw["local_layer_ids"]
    if listed.value is not None:
        kinds = tuple(_KINDS[kind.one_of(*_KINDS)] for kind in listed.items())
        if len(kinds) != num_layers:
            raise listed.refused(f"a list of {num_layers} kinds, one for each layer")
        return kinds
    windows = [layer for layer in range(num_layers) if (layer + 1) % _PERIOD]
    windows = windows if local.value is None else [*local.wholes(least=0)]
    return tuple(SLIDING if layer in windows else FULL for layer in range(num_layers))


def _dense_layers(raw: RawConfig, num_layers: int) -> tuple[int, ...]:
    return read_dense_layers(raw, num_layers, raw["dense_mlp_idx"], usual=0)


def _state(num_kv_heads: int, config: ModelConfig, width: int) -> StateShape:
    """Returns the windows of the convolutions of keys, values, and both results. Ranks split the first two."""
    cached, whole = (num_kv_heads, config.head_dim, width - 1), (config.hidden_size, width - 1)
    return StateShape((cached, cached, whole, whole), kept_whole=(0, 0, config.hidden_size, config.hidden_size))


def _read_experts(raw: RawConfig, config: ModelConfig) -> ExpertsConfig:
    """Experts that compute every token are the last ones, which are always chosen."""
    num_experts, num_shared = read_num_experts(raw, 256, "n_routed_experts"), raw["n_shared_experts"].whole(_SHARED)
    raw["shared_expert_sink"].only(True)
    return ExpertsConfig(
        num_experts=num_experts + num_shared,
        num_chosen=raw["num_experts_per_tok"].whole(6, most=num_experts) + num_shared,
        num_always_chosen=num_shared,
        intermediate_size=raw["moe_intermediate_size"].whole(3072),
        scores="sigmoid",
        normalises=True,
        scale=raw["route_scale"].number(8.0),
        dense_layers=_dense_layers(raw, config.num_layers),
    )


def describe(config: ModelConfig) -> DecoderSpec:
    return decoder(config, [_layer(config, index) for index in range(config.num_layers)])


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    usual, prefix, sizes = llama.layer(config, index), f"model.layers.{index}", config.experts
    assert sizes is not None
    is_dense = index in sizes.dense_layers
    return usual._replace(
        mixer=_attention(config, index, f"{prefix}.self_attn"),
        mlp=alternating(llama.mlp(config, f"{prefix}.mlp"), f"{prefix}.mlp.w13_dn")
        if is_dense
        else _experts(config, sizes, f"{prefix}.mlp"),
        mlp_scale=f"{prefix}.mlp.global_scale" if is_dense else f"{prefix}.mlp.gate.global_scale",
        convolutions=(
            filter_of(config, f"{prefix}.attn_sconv", config.hidden_size, Split.NOTHING),
            filter_of(config, f"{prefix}.mlp_sconv", config.hidden_size, Split.NOTHING),
        ),
    )


def filter_of(config: ModelConfig, prefix: str, channels: int, split: Split) -> TensorSpec:
    """Returns the filters of a convolution."""
    assert config.inkling is not None
    return TensorSpec(f"{prefix}.conv1d.weight", (channels, 1, config.inkling.conv_width), split)


def _attention(config: ModelConfig, index: int, prefix: str) -> AttentionSpec:
    heads, hidden, shape = config.heads_of(index), config.hidden_size, config.inkling
    assert shape is not None
    channels = heads.num_kv_heads * heads.head_dim
    qkv = (
        WeightPart(f"{prefix}.q_proj", heads.num_heads * heads.head_dim, Split.QUERY_HEADS),
        WeightPart(f"{prefix}.k_proj", channels, Split.KV_HEADS),
        WeightPart(f"{prefix}.v_proj", channels, Split.KV_HEADS),
    )
    output = WeightPart(f"{prefix}.o_proj", hidden)
    numbers = WeightPart(f"{prefix}.r_proj", heads.num_heads * shape.distance_rank, Split.QUERY_HEADS)
    return AttentionSpec(
        qkv=LinearSpec(qkv, hidden),
        output=LinearSpec((output,), heads.num_heads * heads.head_dim, splits_inputs=True),
        q_norm=NormSpec(f"{prefix}.q_norm", heads.head_dim),
        k_norm=NormSpec(f"{prefix}.k_norm", heads.head_dim),
        convolutions=(
            filter_of(config, f"{prefix}.k_sconv", channels, Split.KV_HEADS),
            filter_of(config, f"{prefix}.v_sconv", channels, Split.KV_HEADS),
        ),
        distances=DistanceSpec(LinearSpec((numbers,), hidden), profiles_of(config, index, f"{prefix}.rel_logits_proj")),
    )


def profiles_of(config: ModelConfig, index: int, prefix: str) -> TensorSpec:
    """Returns the profiles of a layer's distances."""
    shape, window = config.inkling, config.sliding_windows[index]
    assert shape is not None
    sizes = (shape.distance_rank, shape.most_distance if window is None else window)
    return TensorSpec(f"{prefix}.proj", sizes, Split.NOTHING)


def _experts(config: ModelConfig, sizes: ExpertsConfig, prefix: str) -> ExpertsSpec:
    """Returns all experts of a layer. Those that compute every token have a tensor for each of their three linears."""
    num_shared = sizes.num_always_chosen
    usual = experts(config, prefix, are_stacked=True, choice_bias="gate.e_score_correction_bias")
    num_routed = sizes.num_experts - num_shared
    routed = tuple(
        alternating(_among(expert, num_routed), f"{prefix}.experts.w13_weight", ExpertRows(index, num_routed))
        for index, expert in enumerate(usual.experts[:num_routed])
    )
    shared = tuple(_shared(config, f"{prefix}.shared_experts", expert, num_shared) for expert in range(num_shared))
    return usual._replace(experts=(*routed, *shared))


def _among(expert: GatedMlpSpec, num_experts: int) -> GatedMlpSpec:
    """Returns an expert of `num_experts` that are one tensor."""
    return GatedMlpSpec(
        *(linear._replace(parts=tuple(_of(part, num_experts) for part in linear.parts)) for linear in expert)
    )


def _of(part: WeightPart, num_experts: int) -> WeightPart:
    assert part.expert is not None
    return part._replace(expert=part.expert._replace(num_experts=num_experts))


def _shared(config: ModelConfig, prefix: str, expert: int, num_shared: int) -> GatedMlpSpec:
    assert config.experts is not None
    usual, place = (
        llama.mlp(config, prefix, config.experts.intermediate_size),
        ExpertRows(expert, num_shared, are_rows=True),
    )
    stacked = GatedMlpSpec(
        *(linear._replace(parts=tuple(part._replace(expert=place) for part in linear.parts)) for linear in usual)
    )
    return alternating(stacked, f"{prefix}.shared_w13_weight", place)

"""Inkling 2 (Thinking Machines, 2026), its text decoder: Inkling's layers, whose queries and keys have a bounded
length, whose values have a norm, and whose parts read means of blocks of layers instead of a residual stream. Layers
without a window make queries, keys and values of different means, and convolve with taps that depend on the token.
"""

from __future__ import annotations

import msgspec

from manta.workers.models.block_specs import (
    BlockEndsSpec,
    BlockReadsSpec,
    ClippedAttentionSpec,
    ConvolutionSpec,
    DistanceSpec,
    MessageGateSpec,
)
from manta.workers.models.dense import trial_layers
from manta.workers.models.experts import alternating, experts, read_num_experts
from manta.workers.models.inkling import Usual, decoder, filter_of, profiles_of, read_layers, respelled
from manta.workers.models.model_config import ExpertsConfig, ModelConfig
from manta.workers.models.part_shapes import InklingShape, LayerLoop
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.row_places import ExpertRows
from manta.workers.models.specs import DecoderSpec, ExpertsSpec, GatedMlpSpec, LayerSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, Split, TensorSpec, WeightPart

ARCHITECTURE = "Inkling2ForCausalLM"

_USUAL = Usual(num_windowed_kv_heads=8, window=1024, floor=128000)
_HEAD_LIMIT, _NUMBER_LIMIT = 22.627416997969522, 8.0
_GATE_CAP, _UP_CAP, _LOGIT_CAP = 4.0, 25.0, 30.0
_LAYERS_PER_BLOCK = 6


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_layers` does."""
    return read_model(raw, _USUAL, num_experts=384, inner=2304)


def read_model(
    raw: RawConfig, usual: Usual, num_experts: int, inner: int, loop: LayerLoop | None = None
) -> ModelConfig:
    """Reads the shape of a model, in which the layers of a `loop` stand as often as they run. The other arguments are
    usual values. Raises `ConfigError` as `read_layers` does.
    """
    raw.ignore("number_of_conv_states")
    raw = respelled(raw)
    inner = raw.first_of("moe_intermediate_size", "intermediate_size").whole(inner)
    config = read_layers(raw.completed({}, {"intermediate_size": inner}), usual, loop)
    raw["scoring_func"].one_of("sigmoid", default="sigmoid")
    num_experts = read_num_experts(raw, num_experts, "n_routed_experts")
    assert config.inkling is not None
    shape = msgspec.structs.replace(
        config.inkling,
        head_limit=raw["qk_l2_clip_threshold"].number(_HEAD_LIMIT),
        number_limit=raw["rel_l2_clip_threshold"].number(_NUMBER_LIMIT),
        gate_caps=(raw["mlp_gate_softcap"].number(_GATE_CAP), raw["mlp_up_softcap"].number(_UP_CAP)),
        layers_per_block=raw["n_layers_per_attn_res_block"].whole(_LAYERS_PER_BLOCK),
    )
    runs = [shape.layer_at(place) for place in range(config.num_layers)]
    return msgspec.structs.replace(
        config,
        inkling=shape,
        final_cap=raw["final_logit_softcapping"].number(_LOGIT_CAP),
        experts=ExpertsConfig(
            num_experts=num_experts,
            num_chosen=raw["num_experts_per_tok"].whole(8, most=num_experts),
            intermediate_size=inner,
            scores="sigmoid",
            normalises=True,
            scale=raw["route_scale"].number(8.0),
        ),
        num_trial_layers=trial_layers(
            [(window, run > 0) for window, (_, run) in zip(config.sliding_windows, runs, strict=True)]
        ),
    )


def describe(config: ModelConfig) -> DecoderSpec:
    shape, vector = config.inkling, (config.hidden_size,)
    assert shape is not None
    layers = [_layer(config, shape, place) for place in range(config.num_layers)]
    messages = None
    if shape.loop is not None:
        sizes = (2 * shape.loop.length, config.hidden_size)
        names = ("cross_pass_queries", "cross_pass_kv_queries")
        query, cached = (TensorSpec(f"model.middle_cycle_{name}", sizes, Split.NOTHING) for name in names)
        messages = query, cached
    final = TensorSpec("model.final_input.query", vector, Split.NOTHING)
    return decoder(config, layers)._replace(blocks=BlockEndsSpec(final, messages))


def _layer(config: ModelConfig, shape: InklingShape, place: int) -> LayerSpec:
    index, number_of_pass = shape.layer_at(place)
    prefix, hidden = f"model.layers.{index}", config.hidden_size
    return LayerSpec(
        input_norm=None,
        mixer=_attention(config, shape, place, f"{prefix}.self_attn"),
        mlp_norm=NormSpec(f"{prefix}.post_attention_layernorm", hidden),
        mlp=_experts(config, shape, f"{prefix}.mlp"),
        convolutions=(
            filter_of(config, f"{prefix}.post_attention_convolution", hidden, Split.NOTHING),
            filter_of(config, f"{prefix}.post_mlp_convolution", hidden, Split.NOTHING),
        ),
        reads=_reads(config, shape, place, prefix),
        repeats=index if number_of_pass else None,
    )


def _reads(config: ModelConfig, shape: InklingShape, place: int, prefix: str) -> BlockReadsSpec:
    hidden, has_window = config.hidden_size, config.sliding_windows[place] is not None
    index, _ = shape.layer_at(place)
    sizes = (hidden,) if has_window else (3, hidden)
    norms = ("input_layernorm",) if has_window else tuple(f"{name}_input_layernorm" for name in "qkv")
    loops = shape.loop is not None and index in range(shape.loop.first, shape.loop.end)
    return BlockReadsSpec(
        attention=TensorSpec(f"{prefix}.attention_input.query", sizes, Split.NOTHING) if index else None,
        input_norms=tuple(NormSpec(f"{prefix}.{name}", hidden) for name in norms),
        mlp=TensorSpec(f"{prefix}.mlp_input.query", (hidden,), Split.NOTHING),
        gates=tuple(_gate(config, shape, f"{prefix}.{name}_message_gate") for name in ("q", "k", "v", "mlp"))
        if loops
        else (),
    )


def _gate(config: ModelConfig, shape: InklingShape, prefix: str) -> MessageGateSpec:
    assert shape.loop is not None
    hidden, rank = config.hidden_size, shape.loop.gate_rank
    return MessageGateSpec(
        LinearSpec((WeightPart(f"{prefix}.down_proj", rank),), 2 * hidden),
        LinearSpec((WeightPart(f"{prefix}.forget_gate_proj", hidden),), rank),
        LinearSpec((WeightPart(f"{prefix}.message_gate_proj", hidden),), rank),
    )


def _attention(config: ModelConfig, shape: InklingShape, place: int, prefix: str) -> ClippedAttentionSpec:
    heads, hidden, biases = config.heads_of(place), config.hidden_size, f"{prefix}.relative_position_bias"
    width, rank = heads.num_heads * heads.head_dim, shape.distance_rank

    def linear(name: str, size: int, split: Split) -> LinearSpec:
        return LinearSpec((WeightPart(name, size, split),), hidden)

    def convolution(name: str) -> ConvolutionSpec:
        channels = heads.num_kv_heads * heads.head_dim
        if config.sliding_windows[place] is not None:
            return ConvolutionSpec(filter_of(config, f"{name}.sconv", channels, Split.KV_HEADS))
        sizes = (channels, shape.conv_width)
        taps = TensorSpec(f"{name}.sconv.static_weight", sizes, Split.KV_HEADS, is_transposed=True)
        num_added = heads.num_kv_heads * shape.conv_width
        return ConvolutionSpec(taps, linear(f"{name}.sconv.weight_proj", num_added, Split.KV_HEADS))

    query, key, value = (f"{prefix}.{name}_proj" for name in "qkv")
    cached = heads.num_kv_heads * heads.head_dim
    numbers = linear(f"{biases}.linear", heads.num_heads * rank, Split.QUERY_HEADS)
    return ClippedAttentionSpec(
        query=linear(f"{query}.linear", width, Split.QUERY_HEADS),
        query_scale=TensorSpec(f"{query}.norm.scale", (heads.num_heads, heads.head_dim), Split.QUERY_HEADS),
        key=linear(f"{key}.linear", cached, Split.KV_HEADS),
        value=linear(f"{value}.linear", cached, Split.KV_HEADS),
        convolutions=(convolution(key), convolution(value)),
        sinks=linear(f"{prefix}.sink_proj", heads.num_heads, Split.QUERY_HEADS),
        distances=DistanceSpec(numbers, profiles_of(config, place, biases)),
        distance_scale=TensorSpec(f"{biases}.norm.scale", (heads.num_heads, rank), Split.QUERY_HEADS),
        gate=linear(f"{prefix}.o_proj.gate_proj", width, Split.QUERY_HEADS),
        output=LinearSpec((WeightPart(f"{prefix}.o_proj.linear", hidden),), width, splits_inputs=True),
    )


def _experts(config: ModelConfig, shape: InklingShape, prefix: str) -> ExpertsSpec:
    assert config.experts is not None
    num_experts = config.experts.num_experts
    usual = experts(config, prefix, are_stacked=True, choice_bias="gate.e_score_correction_bias")
    stored = (
        alternating(expert, f"{prefix}.experts.w13_weight", ExpertRows(index, num_experts))
        for index, expert in enumerate(usual.experts)
    )
    return usual._replace(experts=tuple(_capped(expert, shape) for expert in stored))


def _capped(expert: GatedMlpSpec, shape: InklingShape) -> GatedMlpSpec:
    return expert._replace(gated=expert.gated._replace(gate_caps=shape.gate_caps))

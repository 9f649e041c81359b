"""The parts that families with recurrent layers share: the kinds of their layers, and the weights of their mixers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from manta.workers.models import llama
from manta.workers.models.dense import FULL, read_dense, trial_layers
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig, RawValue
from manta.workers.models.recurrent_shapes import (
    DeltaShape,
    RecurrentKind,
    RecurrentShape,
    SelectiveShape,
    StateSpaceShape,
)
from manta.workers.models.specs import DecoderSpec, LayerSpec, MixerSpec, RecurrentSpec
from manta.workers.models.weight_specs import LinearSpec, NormSpec, Split, TensorSpec, WeightPart

LINEAR = "linear_attention"
"""The kind of a layer with a recurrent state."""
MOST_POSITIONS = 1 << 20
"""Longest context of a model without attention, whose configuration names none."""
_SPELLINGS = {FULL: FULL, "attention": FULL, LINEAR: LINEAR, "mamba": LINEAR}
"""Kinds of layers by their names in configurations."""


def read_kinds(raw: RawConfig, num_layers: int, usual: Callable[[], Sequence[str]]) -> tuple[str, ...]:
    """Returns the kind of each layer, `FULL` or `LINEAR`: those of `layer_types` or `layers_block_type`; `usual` if
    neither is there.
    """
    layer_types = raw.first_of("layer_types", "layers_block_type")
    if layer_types.value is None:
        return tuple(usual())
    kinds = tuple(_SPELLINGS[kind.one_of(*_SPELLINGS)] for kind in layer_types.items())
    if len(kinds) != num_layers:
        raise layer_types.refused(f"a list of {num_layers} kinds, one for each layer")
    return kinds


def with_states(config: ModelConfig, kinds: Sequence[str], shape: RecurrentShape) -> ModelConfig:
    """Returns the same model, whose layers of the kind `LINEAR` have a recurrent mixer instead of attention. A trial
    takes as many layers as before, or as many more as it takes to meet every kind.
    """
    state = shape.state
    return msgspec.structs.replace(
        config,
        recurrent=shape,
        layer_states=tuple(state if kind == LINEAR else None for kind in kinds),
        layer_attends=tuple(kind != LINEAR for kind in kinds),
        num_trial_layers=max(config.num_trial_layers, trial_layers(kinds)),
    )


def output(name: str, in_features: int, hidden: int, has_bias: bool = False) -> LinearSpec:
    """Returns the linear from a mixer's heads to the residual stream."""
    return LinearSpec((WeightPart(name, hidden),), in_features, has_bias, splits_inputs=True)


def stored_together(
    name: str, sizes: Sequence[int], splits: Sequence[Split], *others: int, is_log_rate: bool = False
) -> tuple[TensorSpec, ...]:
    """Returns the pieces of one stored tensor, which ranks split one by one."""
    starts = [sum(sizes[:piece]) for piece in range(len(sizes))]
    return tuple(
        TensorSpec(name, (size, *others), split, start, sum(sizes), is_log_rate=is_log_rate)
        for size, split, start in zip(sizes, splits, starts, strict=True)
    )


class StateSpaceKeys(NamedTuple):
    """The keys of Mamba 2's sizes in a family's configurations."""

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state_size: str = "mamba_d_state"
    width: str = "mamba_d_conv"
    expand: str = "mamba_expand"
    kernel_bias: str = "mamba_conv_bias"
    bias: str = "mamba_proj_bias"


class StateSpaceSizes(NamedTuple):
    """A family's usual sizes of Mamba 2."""

    heads: int = 128
    groups: int = 1
    state_size: int = 256


BAMBA_KEYS, BAMBA_SIZES = StateSpaceKeys(), StateSpaceSizes()


def read_state_space(
    raw: RawConfig,
    hidden_size: int,
    norm_eps: float | None,
    keys: StateSpaceKeys = BAMBA_KEYS,
    usual: StateSpaceSizes = BAMBA_SIZES,
    inner: int | None = None,
) -> StateSpaceShape:
    """Reads the sizes of Mamba 2. `inner` is the width of all heads, if not `expand` times the hidden size. Raises
    `ConfigError` for heads that do not fill it, and for groups that do not divide them.
    """
    num_heads, num_groups = raw[keys.heads].whole(usual.heads), raw[keys.groups].whole(usual.groups)
    inner = inner or int(raw[keys.expand].number(2) * hidden_size)
    raw.ignore(keys.expand)
    head_dim = raw[keys.head_dim]
    size = max(1, inner // num_heads) if head_dim.value in (None, "auto") else head_dim.whole()
    if size * num_heads != inner:
        raise raw[keys.heads].refused(f"a number of heads that fill {inner} numbers")
    if num_heads % num_groups:
        raise raw[keys.groups].refused(f"a divisor of the {num_heads} heads")
    raw.ignore("mamba_chunk_size", "chunk_size")  # a size of transformers' kernels
    has_bias = raw[keys.bias].flag(False)
    return StateSpaceShape(
        num_groups=num_groups,
        num_heads=num_heads,
        state_size=raw[keys.state_size].whole(usual.state_size),
        head_dim=size,
        width=raw[keys.width].whole(4, least=2),
        norm_eps=norm_eps,
        step_limits=_read_limits(raw["time_step_limit"]),
        has_kernel_bias=raw[keys.kernel_bias].flag(True),
        has_input_bias=has_bias,
        has_output_bias=has_bias,
    )


def _read_limits(limits: RawValue) -> tuple[float, float]:
    """Returns the bounds of time steps. transformers writes infinity as an object."""
    if limits.value is None:
        return 0.0, math.inf
    bounds = [
        math.inf if item.value == {"__float__": "Infinity"} or item.value == math.inf else item.number(least=0)
        for item in limits.items()
    ]
    if len(bounds) != 2:
        raise limits.refused("a list of two numbers, the least and the largest time step")
    return bounds[0], bounds[1]


def state_space(
    config: ModelConfig, prefix: str, scales: tuple[float, ...] = (1.0,) * 5, output_scale: float = 1.0
) -> RecurrentSpec:
    """Returns Mamba 2. `scales` are factors on its gates, x, B, C and time steps."""
    shape = config.recurrent
    assert isinstance(shape, StateSpaceShape)
    shared = shape.num_groups * shape.state_size
    of_groups = Split.NOTHING if shape.num_groups == 1 else Split.CHANNELS
    channels, splits = (shape.inner, shared, shared), (Split.CHANNELS, of_groups, of_groups)
    sizes, of_inputs = (shape.inner, *channels, shape.num_heads), (Split.CHANNELS, *splits, Split.CHANNELS)
    inputs = tuple(
        WeightPart("", size, split, scale=scale) for size, split, scale in zip(sizes, of_inputs, scales, strict=True)
    )
    x, *b_c = stored_together(f"{prefix}.conv1d.weight", channels, splits, 1, shape.width)
    pieces: dict[str, tuple[TensorSpec, ...]] = {
        "kernel": (x,),
        "shared_kernel": tuple(b_c),
        "rates": (TensorSpec(f"{prefix}.A_log", (shape.num_heads,), is_log_rate=True),),
        "time_bias": (TensorSpec(f"{prefix}.dt_bias", (shape.num_heads,)),),
        "skip": (TensorSpec(f"{prefix}.D", (shape.num_heads,)),),
    }
    if shape.has_kernel_bias:
        x, *b_c = stored_together(f"{prefix}.conv1d.bias", channels, splits)
        pieces |= {"kernel_bias": (x,), "shared_bias": tuple(b_c)}
    if shape.norm_eps is not None:
        pieces["norm"] = (TensorSpec(f"{prefix}.norm.weight", (shape.inner,)),)
    to = WeightPart(f"{prefix}.out_proj", config.hidden_size, scale=output_scale)
    return RecurrentSpec(
        RecurrentKind.STATE_SPACE,
        shape,
        {"input": LinearSpec(inputs, config.hidden_size, shape.has_input_bias).stored_as(f"{prefix}.in_proj")},
        LinearSpec((to,), shape.inner, shape.has_output_bias, splits_inputs=True),
        pieces,
    )


def read_selective_scan(
    raw: RawConfig, hidden_size: int, norm_eps: float | None, prefix: str = "mamba_"
) -> SelectiveShape:
    """Reads the sizes of Mamba 1, whose keys begin with `prefix` (Jamba), or have names of their own if it is empty."""
    names = ("d_state", "d_conv", "expand", "dt_rank", "conv_bias", "proj_bias")
    if not prefix:
        names = ("state_size", "conv_kernel", "expand", "time_step_rank", "use_conv_bias", "use_bias")
    size, width, expand, rank, kernel_bias, bias = (raw[prefix + name] for name in names)
    return SelectiveShape(
        channels=int(expand.number(2) * hidden_size),
        state_size=size.whole(16),
        step_rank=-(-hidden_size // 16) if rank.value in (None, "auto") else rank.whole(),
        width=width.whole(4, least=2),
        norm_eps=norm_eps,
        has_kernel_bias=kernel_bias.flag(True),
        has_bias=bias.flag(False),
    )


def selective_scan(config: ModelConfig, prefix: str, norms: tuple[str, ...] = ()) -> RecurrentSpec:
    """Returns Mamba 1, perhaps with weights of its norms of time steps, B and C."""
    shape = config.recurrent
    assert isinstance(shape, SelectiveShape)
    channels, rank, size = shape.channels, shape.step_rank, shape.state_size
    inputs = LinearSpec((WeightPart("", channels, Split.CHANNELS),) * 2, config.hidden_size, shape.has_bias)
    selection = WeightPart(f"{prefix}.x_proj", shape.selected)
    pieces: dict[str, tuple[TensorSpec, ...]] = {
        "kernel": (TensorSpec(f"{prefix}.conv1d.weight", (channels, 1, shape.width)),),
        "rates": (TensorSpec(f"{prefix}.A_log", (channels, size), is_log_rate=True),),
        "time_bias": (TensorSpec(f"{prefix}.dt_proj.bias", (channels,)),),
        "skip": (TensorSpec(f"{prefix}.D", (channels,)),),
    }
    if shape.has_kernel_bias:
        pieces["kernel_bias"] = (TensorSpec(f"{prefix}.conv1d.bias", (channels,)),)
    for name, stored, width in zip(("time_norm", "b_norm", "c_norm"), norms, (rank, size, size), strict=False):
        pieces[name] = (TensorSpec(f"{prefix}.{stored}.weight", (width,), Split.NOTHING),)
    return RecurrentSpec(
        RecurrentKind.SELECTIVE_SCAN,
        shape,
        {
            "input": inputs.stored_as(f"{prefix}.in_proj"),
            "selection": LinearSpec((selection,), channels, splits_inputs=True),
            "time": LinearSpec((WeightPart(f"{prefix}.dt_proj", channels, Split.CHANNELS),), rank),
        },
        output(f"{prefix}.out_proj", channels, config.hidden_size, shape.has_bias),
        pieces,
    )


def read_without_attention(raw: RawConfig, num_heads: int, inner: int) -> ModelConfig:
    """Reads the shape of a model that has only recurrent mixers, with a norm before each and no MLP. Ranks split the
    `num_heads` heads and the `inner` channels of these.
    """
    sizes = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": inner}
    complete = raw.completed({"max_position_embeddings": MOST_POSITIONS}, sizes)
    config = read_dense(complete, norm_eps=("layer_norm_epsilon", 1e-5))
    return msgspec.structs.replace(
        config, num_heads=num_heads, num_kv_heads=num_heads, layer_ropes=(None,) * config.num_layers
    )


def decoder_of_mixers(config: ModelConfig, layers: list[LayerSpec]) -> DecoderSpec:
    """Returns a whole model with these layers, whose names are those of Mamba's checkpoints."""
    spec = llama.decoder(config, layers)
    embedding = spec.embedding._replace(name="backbone.embeddings")
    head = spec.head._replace(parts=(embedding,)) if config.tie_word_embeddings else spec.head
    return spec._replace(embedding=embedding, head=head, final_norm=NormSpec("backbone.norm_f", config.hidden_size))


def mixer_alone(config: ModelConfig, index: int, mixer: MixerSpec) -> LayerSpec:
    """Returns a layer without an MLP."""
    return LayerSpec(NormSpec(f"backbone.layers.{index}.norm", config.hidden_size), mixer, None, None)


def read_factors(factors: RawValue, count: int) -> tuple[float, ...]:
    """Returns a list of `count` factors, all 1 if it is missing."""
    if factors.value is None:
        return (1.0,) * count
    numbers = tuple(item.number() for item in factors.items())
    if len(numbers) != count:
        raise factors.refused(f"a list of {count} numbers")
    return numbers


def read_delta_shape(raw: RawConfig, norm_eps: float) -> DeltaShape:
    """Reads the sizes of Qwen's gated delta nets."""
    num_key_heads = raw["linear_num_key_heads"].whole(16)
    num_value_heads = raw["linear_num_value_heads"].whole(32)
    if num_value_heads % num_key_heads:
        raise raw["linear_num_value_heads"].refused(f"a multiple of the {num_key_heads} key heads")
    return DeltaShape(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=raw["linear_key_head_dim"].whole(128),
        value_dim=raw["linear_value_head_dim"].whole(128),
        width=raw["linear_conv_kernel_dim"].whole(4, least=2),
        norm_eps=norm_eps,
    )

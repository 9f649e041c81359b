"""What families with recurrent layers share: the kinds of their layers, and the weights of their mixers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from manta.workers.models.dense import FULL, trial_layers
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig
from manta.workers.models.recurrent_shapes import DeltaShape, RecurrentShape
from manta.workers.models.specs import LinearSpec, NormSpec, Split, TensorSpec, WeightPart

LINEAR = "linear_attention"
"""The kind of a layer with a recurrent state."""
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
    """Returns the same model, whose layers of the kind `LINEAR` have a recurrent mixer instead of attention."""
    state = shape.state
    return msgspec.structs.replace(
        config,
        recurrent=shape,
        layer_states=tuple(state if kind == LINEAR else None for kind in kinds),
        layer_attends=tuple(kind == FULL for kind in kinds),
        num_trial_layers=trial_layers(kinds),
    )


def output(name: str, in_features: int, hidden: int, has_bias: bool = False) -> LinearSpec:
    """Returns the linear from a mixer's heads to the residual stream."""
    return LinearSpec((WeightPart(name, hidden),), in_features, has_bias, splits_inputs=True)


def norm_of_one(name: str, size: int) -> NormSpec:
    """Returns a norm whose tensor holds the weight less one."""
    return NormSpec(name, size, adds_one=True)


def stored_together(
    name: str, sizes: Sequence[int], splits: Sequence[Split], *others: int, is_log_rate: bool = False
) -> tuple[TensorSpec, ...]:
    """Returns the pieces of one stored tensor, which ranks split one by one."""
    starts = [sum(sizes[:piece]) for piece in range(len(sizes))]
    return tuple(
        TensorSpec(name, (size, *others), split, start, sum(sizes), is_log_rate)
        for size, split, start in zip(sizes, splits, starts, strict=True)
    )


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

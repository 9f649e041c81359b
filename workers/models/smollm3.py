"""SmolLM3 (Hugging Face, 2025): Llama's layers, of which each fourth has no positions."""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.dense import SLIDING, read_dense, read_head_dim, read_kinds, read_rope, trial_layers
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.raw_config import RawConfig

ARCHITECTURE = "SmolLM3ForCausalLM"

_THETA = 2000000.0

describe = llama.describe


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ConfigError` as `read_dense` and `read_kinds` do."""
    rope = read_rope(raw, read_head_dim(raw), _THETA)
    config = read_dense(raw, rope=rope, is_tied=True)
    has_biases, mlp_bias = raw["attention_bias"].flag(False), raw["mlp_bias"].flag(False)
    ropes = tuple(rope if rotates else None for rotates in read_rotations(raw, config.num_layers))
    windows = _read_windows(raw, [each is not None for each in ropes])
    return msgspec.structs.replace(
        config,
        qkv_bias=has_biases,
        output_bias=has_biases,
        mlp_bias=mlp_bias,
        layer_ropes=ropes,
        sliding_windows=windows,
        num_trial_layers=trial_layers(list(zip(ropes, windows, strict=True))),
    )


def read_rotations(raw: RawConfig, num_layers: int) -> list[bool]:
    """Returns whether each layer has positions: by `no_rope_layers`, which is 1 where it has them, else all but each
    `no_rope_layer_interval`-th.
    """
    listed, interval = raw["no_rope_layers"], raw["no_rope_layer_interval"].whole(4)
    if listed.value is None:
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    rotations = [item.whole(least=0, most=1) == 1 for item in listed.items()]
    if len(rotations) < num_layers:
        raise listed.refused(f"a list of {num_layers} numbers, one for each layer")
    return rotations[:num_layers]


def _read_windows(raw: RawConfig, rotations: list[bool]) -> tuple[int | None, ...]:
    """Returns the window of each layer: by `layer_types`, else of layers without positions if there is a window."""
    window, uses_windows = raw["sliding_window"], raw["use_sliding_window"].flag(False)
    if raw["layer_types"].value is None:
        has_windows = uses_windows and window.value is not None
        return tuple(window.whole() if has_windows and not rotates else None for rotates in rotations)
    kinds = read_kinds(raw, len(rotations))
    return tuple(window.whole() if kind == SLIDING else None for kind in kinds)

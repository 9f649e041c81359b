"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama's layers with biases on queries, keys and values. A few of the models
have sliding windows in their later layers.
"""

from __future__ import annotations

import msgspec

from manta.workers.models import llama
from manta.workers.models.model_config import ModelConfig, ModelError
from manta.workers.models.raw_config import RawConfig, read_dense

ARCHITECTURE = "Qwen2ForCausalLM"

describe = llama.describe


def read_config(raw: RawConfig) -> ModelConfig:
    """Reads the shape of a model. Raises `ModelError` as `read_dense` and `read_windows` do."""
    config = read_dense(raw)
    return msgspec.structs.replace(config, qkv_bias=True, sliding_windows=read_windows(raw, config.num_layers))


def read_windows(raw: RawConfig, num_layers: int) -> tuple[int | None, ...]:
    """Returns the sliding window of each layer, None for layers without one.

    They come from `layer_types` if it is there, else layers from `max_window_layers` on have one. Raises `ModelError`
    for unknown kinds or a wrong number of `layer_types`.
    """
    if not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    window = raw.get("sliding_window", 4096)
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = raw.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown or len(layer_types) != num_layers:
        raise ModelError(
            f"layer_types of {raw.architecture} must be full_attention or sliding_attention for each of "
            f"{num_layers} layers, not {layer_types}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)

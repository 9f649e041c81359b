"""The configuration of a dense decoder: its shape, rope parameters, sliding windows and dtype.

Reads the spellings of transformers 4 and 5. Called by the families and by `workers/checkpoints/model_folder.py`.
"""

from __future__ import annotations

from manta.workers.models.model_config import DTYPE_BYTES, ModelConfig, RopeConfig
from manta.workers.models.raw_config import MOST_VOCABULARY, RawConfig

MOST_LAYERS = 4096
_MOST_FACTOR = 1e6
"""Largest factor of a scaled rope."""


def read_dense(raw: RawConfig, usual_head_dim: int | None = None) -> ModelConfig:
    """Returns the shape of a dense decoder without biases, in which every token sees all before it.

    `usual_head_dim` is the head dimension of a configuration that names none; None divides the hidden size by the
    number of heads. Raises `ConfigError` for an activation other than SiLU, for sizes that do not fit, and as
    `read_rope` does.
    """
    raw["hidden_act"].one_of("silu", "swish", default="silu")
    hidden_size = raw["hidden_size"].whole()
    num_heads = raw["num_attention_heads"].whole(most=hidden_size)
    num_kv_heads = raw["num_key_value_heads"].whole(num_heads)
    if num_heads % num_kv_heads:
        raise raw["num_key_value_heads"].refused(f"a divisor of the {num_heads} attention heads")
    head_dim = raw["head_dim"].whole(usual_head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise raw["head_dim"].refused(f"an even number, whose halves rope rotates, instead of {head_dim}")
    num_layers = raw["num_hidden_layers"].whole(most=MOST_LAYERS)
    rope = read_rope(raw, head_dim)
    return ModelConfig(
        architecture=str(raw.architecture),
        native=True,
        vocab_size=raw["vocab_size"].whole(most=MOST_VOCABULARY),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=raw["intermediate_size"].whole(),
        rms_norm_eps=raw["rms_norm_eps"].number(1e-6, least=0, most=1),
        rope=rope,
        max_position_embeddings=_longest_context(raw["max_position_embeddings"].whole(), rope),
        tie_word_embeddings=raw["tie_word_embeddings"].flag(False),
        sliding_windows=(None,) * num_layers,
        dtype=read_dtype(raw),
    )


def read_rope(raw: RawConfig, head_dim: int) -> RopeConfig:
    """Reads `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of older ones.

    Raises `ConfigError` for a type of scaling that is not supported, that lacks its factor, or that differs by layer.
    """
    values = raw.first_of("rope_parameters", "rope_scaling").object()
    for of_layers in values.objects():
        raise of_layers.refused("one value for all layers")
    rope_type = values.first_of("rope_type", "type").one_of("default", "linear", "llama3", "yarn", default="default")
    rotated_part = (values if "partial_rotary_factor" in values else raw)["partial_rotary_factor"]
    if rotated_part.number(1.0) != 1:
        raise rotated_part.refused("left out or 1")
    theta = (values if "rope_theta" in values else raw)["rope_theta"].number(10000.0, least=1.001)
    raw.ignore("rope_theta", "partial_rotary_factor")  # those of `rope_parameters` win
    if rope_type == "default":
        if values["factor"].number(1.0) != 1:
            raise values["factor"].refused("left out or 1, unless rope_type names a scaling")
        return RopeConfig(theta=theta, frequency_divisors=_divisors(values, head_dim))
    usual = RopeConfig()
    low = values["low_freq_factor"].number(usual.low_freq_factor, most=_MOST_FACTOR)
    high = values["high_freq_factor"].number(usual.high_freq_factor, most=_MOST_FACTOR)
    if rope_type == "llama3" and high <= low:
        raise values["high_freq_factor"].refused(f"above low_freq_factor, {low:g}")
    factor = values["attention_factor"]
    # transformers prefers the model's number of positions to that of the scaling.
    original = (raw if raw["original_max_position_embeddings"].value is not None else values)[
        "original_max_position_embeddings"
    ]
    return RopeConfig(
        rope_type=rope_type,
        theta=theta,
        factor=values["factor"].number(most=_MOST_FACTOR),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original.whole(raw["max_position_embeddings"].whole()),
        attention_factor=None if factor.value is None else factor.number(least=0, most=_MOST_FACTOR),
        mscale=values["mscale"].number(0.0, least=0, most=_MOST_FACTOR),
        mscale_all_dim=values["mscale_all_dim"].number(0.0, least=0, most=_MOST_FACTOR),
        beta_fast=values["beta_fast"].number(usual.beta_fast, most=_MOST_FACTOR),
        beta_slow=values["beta_slow"].number(usual.beta_slow, most=_MOST_FACTOR),
        truncate=values["truncate"].flag(usual.truncate),
    )


def read_windows(raw: RawConfig, num_layers: int) -> tuple[int | None, ...]:
    """Returns the sliding window of each layer, None for layers without one.

    They come from `layer_types` if it is there, else layers from `max_window_layers` on have one. Raises `ConfigError`
    for unknown kinds or a wrong number of `layer_types`.
    """
    layer_types, first_layer = raw["layer_types"], raw["max_window_layers"]
    if not raw["use_sliding_window"].flag(False):
        raw.ignore("sliding_window")
        return (None,) * num_layers
    window = read_window(raw)
    if layer_types.value is None:
        first = first_layer.whole(28, least=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    kinds = [kind.one_of("full_attention", "sliding_attention") for kind in layer_types.items()]
    if len(kinds) != num_layers:
        raise layer_types.refused(f"a list of {num_layers} kinds, one for each layer")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def read_window(raw: RawConfig) -> int | None:
    """Returns the number of positions in a sliding window. As in transformers, null means no window, and a missing
    value means 4096 positions.
    """
    window = raw["sliding_window"]
    return None if window.is_given and window.value is None else window.whole(4096)


def read_dtype(raw: RawConfig) -> str:
    """Returns the checkpoint's dtype, `torch_dtype` before transformers 5; a missing one means float32, as there."""
    dtype = raw.first_of("dtype", "torch_dtype")
    name = dtype.text("float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise dtype.refused(" or ".join(DTYPE_BYTES))
    return name


def _divisors(values: RawConfig, head_dim: int) -> tuple[float, ...] | None:
    divisors = values["frequency_divisors"]
    if divisors.value is None:
        return None
    numbers = tuple(item.number() for item in divisors.items())
    if len(numbers) != head_dim // 2:
        raise divisors.refused(f"a list of {head_dim // 2} numbers")
    return numbers


def _longest_context(positions: int, rope: RopeConfig) -> int:
    """Returns the longest context in tokens, rope scaling included.

    Published llama3 configurations give the scaled number of positions, linear ones the unscaled, and yarn ones either.
    """
    if rope.rope_type == "linear":
        return int(positions * rope.factor)
    if rope.rope_type == "yarn":
        return max(positions, int(rope.original_max_position_embeddings * rope.factor))
    return positions

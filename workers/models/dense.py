"""The configuration of a dense decoder: its shape, rope parameters, sliding windows and dtype.

Reads the spellings of transformers 4 and 5. Called by the families and by `workers/checkpoints/model_folder.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from manta.workers.models.model_config import DTYPE_BYTES, ModelConfig, RopeConfig
from manta.workers.models.raw_config import MOST_VOCABULARY, RawConfig, RawValue

MOST_LAYERS = 4096
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
"""Kinds of layers in `layer_types`."""
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Activations by their names in transformers."""
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "su")
_THETA_KEYS = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}
"""The key of theta in older configurations, by the kind of layer."""
_MOST_FACTOR = 1e6
"""Largest factor of a scaled rope."""


def read_dense(
    raw: RawConfig,
    usual_head_dim: int | None = None,
    *,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    norm_eps: tuple[str, float] = ("rms_norm_eps", 1e-6),
    rope: RopeConfig | None = None,
    is_tied: bool = False,
    kv_heads: tuple[int, int] | None = None,
) -> ModelConfig:
    """Returns the shape of a dense decoder without biases, in which every token sees all before it.

    `usual_head_dim` is the head dimension of a configuration that names none; None divides the hidden size by the
    number of heads. `activation` and `norm_eps` are the family's keys for its activation and for the constant in its
    norms, with their usual values. `is_tied` says whether a head is tied if the configuration does not say. A family
    with a `rope` of its own has read it, and one with `kv_heads` of its own their number and width. Raises
    `ConfigError` for sizes that do not fit, and as `read_rope` does.
    """
    hidden_size = raw["hidden_size"].whole()
    num_heads = raw["num_attention_heads"].whole(most=hidden_size)
    num_kv_heads, head_dim = kv_heads or (read_num_kv_heads(raw), read_head_dim(raw, usual_head_dim))
    num_layers = raw["num_hidden_layers"].whole(most=MOST_LAYERS)
    rope = rope or read_rope(raw, head_dim)
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
        rms_norm_eps=raw[norm_eps[0]].number(norm_eps[1], least=0, most=1),
        rope=rope,
        max_position_embeddings=_longest_context(raw["max_position_embeddings"].whole(), rope),
        tie_word_embeddings=raw["tie_word_embeddings"].flag(is_tied),
        sliding_windows=(None,) * num_layers,
        activation=ACTIVATIONS[raw[activation[0]].one_of(*ACTIVATIONS, default=activation[1])],
        dtype=read_dtype(raw),
    )


def read_num_kv_heads(raw: RawConfig) -> int:
    """Returns the number of KV heads. Raises `ConfigError` unless it divides that of the query heads."""
    num_heads = raw["num_attention_heads"].whole()
    num_kv_heads = raw["num_key_value_heads"].whole(num_heads)
    if num_heads % num_kv_heads:
        raise raw["num_key_value_heads"].refused(f"a divisor of the {num_heads} attention heads")
    return num_kv_heads


def read_head_dim(raw: RawConfig, usual: int | None = None) -> int:
    """Returns the width of a head. Raises `ConfigError` unless it is even."""
    hidden_size = raw["hidden_size"].whole()
    num_heads = raw["num_attention_heads"].whole(most=hidden_size)
    head_dim = raw["head_dim"].whole(usual or hidden_size // num_heads)
    if head_dim % 2:
        raise raw["head_dim"].refused(f"an even number, whose halves rope rotates, instead of {head_dim}")
    return head_dim


def read_rope(
    raw: RawConfig,
    head_dim: int,
    usual_theta: float = 10000.0,
    usual_part: float | None = None,
    is_interleaved: bool = False,
) -> RopeConfig:
    """Reads `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of older ones.

    `usual_part` is the part of each head that rotates if the configuration does not say; None for families that rotate
    whole heads. Raises `ConfigError` for a type of scaling that is not supported, that lacks its factor, or that
    differs by layer.
    """
    values = raw.first_of("rope_parameters", "rope_scaling").object()
    for of_layers in values.objects():
        raise of_layers.refused("one value for all layers")
    theta = (values if "rope_theta" in values else raw)["rope_theta"].number(usual_theta, least=1.001)
    part = (values if "partial_rotary_factor" in values else raw)["partial_rotary_factor"]
    raw.ignore("rope_theta", "partial_rotary_factor")  # those of `rope_parameters` win
    rotary_dim = _read_rotary_dim(part, head_dim, usual_part)
    rope = _read_scaling(raw, values, theta, rotary_dim)
    return msgspec.structs.replace(
        rope, rotary_dim=None if rotary_dim == head_dim else rotary_dim, is_interleaved=is_interleaved
    )


def read_ropes_of_kinds(raw: RawConfig, head_dim: int, usual_thetas: dict[str, float]) -> dict[str, RopeConfig]:
    """Returns the rope of each kind of layer. `usual_thetas` has the kinds, `full_attention` and `sliding_attention`.

    They come from `rope_parameters`, an object of a rope for each kind. In older configurations `rope_theta` and
    `rope_scaling` are those of layers that see everything, and `rope_local_base_freq` that of layers with a window.
    """
    by_kind = raw["rope_parameters"].object()
    raw.ignore("rope_scaling")
    ropes = {}
    for kind, usual_theta in usual_thetas.items():
        values, theta = by_kind[kind].object(), raw[_THETA_KEYS[kind]]
        if kind == "full_attention" and not len(values):
            values = raw["rope_scaling"].object()
        if "rope_theta" in values:
            theta = values["rope_theta"]
        ropes[kind] = _read_scaling(raw, values, theta.number(usual_theta, least=1.001), head_dim)
    return ropes


def read_proportional_rope(
    values: RawConfig, head_dim: int, usual_theta: float, usual_type: str, usual_part: float = 1.0
) -> RopeConfig:
    """Reads a rope of the type `default` or `proportional` from the object that holds it. `usual_part` is the part of
    the dimensions that rotates in a proportional one that does not say. Raises `ConfigError` if none does.
    """
    theta = values["rope_theta"].number(usual_theta, least=1.001)
    if values["rope_type"].one_of("proportional", "default", default=usual_type) == "default":
        return RopeConfig(theta=theta)
    part = values["partial_rotary_factor"]
    angles = int(part.number(usual_part, most=1) * head_dim // 2)
    if not angles:
        raise part.refused(f"a number that leaves a part of the {head_dim} dimensions of a head")
    return RopeConfig(rope_type="proportional", theta=theta, rotary_dim=2 * angles, factor=values["factor"].number(1.0))


def read_partial_rope(raw: RawConfig, values: RawConfig, theta: float, rotary_dim: int) -> RopeConfig:
    """Reads the rope of layers in whose heads `rotary_dim` dimensions rotate, neighbours together, from the object that
    holds it.
    """
    rope = _read_scaling(raw, values, theta, rotary_dim)
    return msgspec.structs.replace(rope, rotary_dim=rotary_dim, is_interleaved=True)


def _read_rotary_dim(part: RawValue, head_dim: int, usual: float | None) -> int:
    if usual is None:
        if part.number(1.0) != 1:
            raise part.refused("left out or 1")
        return head_dim
    rotary_dim = int(head_dim * part.number(usual, most=1))
    if rotary_dim % 2 or not rotary_dim:
        raise part.refused(f"a number that leaves an even part of the {head_dim} dimensions of a head")
    return rotary_dim


def _read_scaling(raw: RawConfig, values: RawConfig, theta: float, rotary_dim: int) -> RopeConfig:
    """Reads the type of a rope and its parameters from the object that holds them."""
    rope_type = values.first_of("rope_type", "type").one_of(*_ROPE_TYPES, default="default")
    rope_type = "longrope" if rope_type == "su" else rope_type  # its first name
    if rope_type == "default":
        if values["factor"].number(1.0) != 1:
            raise values["factor"].refused("left out or 1, unless rope_type names a scaling")
        return RopeConfig(theta=theta, frequency_divisors=_divisors(values["frequency_divisors"], rotary_dim))
    usual = RopeConfig()
    low = values["low_freq_factor"].number(usual.low_freq_factor, most=_MOST_FACTOR)
    high = values["high_freq_factor"].number(usual.high_freq_factor, most=_MOST_FACTOR)
    if rope_type == "llama3" and high <= low:
        raise values["high_freq_factor"].refused(f"above low_freq_factor, {low:g}")
    attention_factor = values["attention_factor"]
    positions = raw["max_position_embeddings"].whole()
    # transformers prefers the model's number of positions to that of the scaling.
    source = raw if raw["original_max_position_embeddings"].value is not None else values
    original = source["original_max_position_embeddings"].whole(positions)
    is_longrope = rope_type == "longrope"
    return RopeConfig(
        rope_type=rope_type,
        theta=theta,
        factor=values["factor"].number(positions / original if is_longrope else None, most=_MOST_FACTOR),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
        longest_context=positions,
        attention_factor=None
        if attention_factor.value is None
        else attention_factor.number(least=0, most=_MOST_FACTOR),
        mscale=values["mscale"].number(0.0, least=0, most=_MOST_FACTOR),
        mscale_all_dim=values["mscale_all_dim"].number(0.0, least=0, most=_MOST_FACTOR),
        beta_fast=values["beta_fast"].number(usual.beta_fast, most=_MOST_FACTOR),
        beta_slow=values["beta_slow"].number(usual.beta_slow, most=_MOST_FACTOR),
        truncate=values["truncate"].flag(usual.truncate),
        short_factors=(_divisors(values["short_factor"], rotary_dim, must=True) or ()) if is_longrope else (),
        long_factors=(_divisors(values["long_factor"], rotary_dim, must=True) or ()) if is_longrope else (),
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
    return tuple(window if kind == SLIDING else None for kind in read_kinds(raw, num_layers))


def read_kinds(
    raw: RawConfig,
    num_layers: int,
    period: int = 1,
    allowed: tuple[str, ...] = (FULL, SLIDING),
    usual: Sequence[str] | None = None,
) -> tuple[str, ...]:
    """Returns the kind of each layer, one of those `allowed`: those of `layer_types` if it is there, else the `usual`
    ones. None: each `period`-th layer sees everything, and the others have a window.
    """
    layer_types = raw["layer_types"]
    if layer_types.value is None:
        return tuple(usual or (SLIDING if (layer + 1) % period else FULL for layer in range(num_layers)))
    kinds = tuple(kind.one_of(*allowed) for kind in layer_types.items())
    if len(kinds) != num_layers:
        raise layer_types.refused(f"a list of {num_layers} kinds, one for each layer")
    return kinds


def with_kinds(
    config: ModelConfig, kinds: tuple[str, ...], window: int, ropes: Mapping[str, RopeConfig | None] | None = None
) -> ModelConfig:
    """Returns the same model with layers of these kinds: those with a window, and perhaps a rope for each kind."""
    return msgspec.structs.replace(
        config,
        sliding_windows=tuple(window if kind == SLIDING else None for kind in kinds),
        layer_ropes=() if ropes is None else tuple(ropes[kind] for kind in kinds),
        num_trial_layers=trial_layers(kinds),
    )


def trial_layers(kinds: Sequence[object]) -> int:
    """Returns the number of first layers among which is one of every kind."""
    return 1 + max(kinds.index(kind) for kind in set(kinds))


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


def _divisors(divisors: RawValue, rotary_dim: int, must: bool = False) -> tuple[float, ...] | None:
    """Returns a divisor for each frequency; None if there are none, unless they `must` be there."""
    if divisors.value is None and not must:
        return None
    numbers = tuple(item.number() for item in divisors.items())
    if len(numbers) != rotary_dim // 2:
        raise divisors.refused(f"a list of {rotary_dim // 2} numbers")
    return numbers


def _longest_context(positions: int, rope: RopeConfig) -> int:
    """Returns the longest context in tokens, rope scaling included.

    Published llama3 and longrope configurations give the scaled number of positions, linear and dynamic ones the
    unscaled, and yarn ones either.
    """
    if rope.rope_type in ("linear", "dynamic"):
        return int(positions * rope.factor)
    if rope.rope_type == "yarn":
        return max(positions, int(rope.original_max_position_embeddings * rope.factor))
    return positions

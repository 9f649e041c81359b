"""Shared functions for reading a `config.json`: checked fields, rope parameters, the shape of a dense decoder.

Reads the formats of transformers 4 and 5. Refuses by name what Manta cannot run.
"""

from __future__ import annotations

from typing import Any

import msgspec

from manta.workers.models.model_config import DTYPE_BYTES, ModelConfig, ModelError, RopeConfig


class RawConfig(dict[str, Any]):
    """The JSON object of a `config.json`. It remembers the key that was read last, which an error message can blame."""

    last_key = ""

    def get(self, key: str, default: Any = None) -> Any:
        self.last_key = key
        return super().get(key, default)

    @property
    def architecture(self) -> str | None:
        """The first of `architectures`; None if it names none."""
        return (self.get("architectures") or [None])[0]

    def positive(self, name: str) -> int:
        """Returns the positive integer at `name`. Raises `ModelError` for every other value."""
        value = self.get(name)
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"config.json: {name} must be a positive integer, not {value!r}")
        return value

    def positive_or(self, name: str, default: int) -> int:
        """Returns the positive integer at `name`, or the default if the key is missing, null or 0."""
        return self.positive(name) if self.get(name) else default


def read_dense(raw: RawConfig, usual_head_dim: int | None = None) -> ModelConfig:
    """Returns the shape of a dense decoder without biases, in which every token sees all before it.

    `usual_head_dim` is the head dimension of a configuration that names none; None divides the hidden size by the
    number of heads. Raises `ModelError` for an activation other than SiLU, for sizes that do not fit, and as
    `read_rope` does.
    """
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"activation {activation!r} of {raw.architecture} is not supported; only silu is")
    num_heads = raw.positive("num_attention_heads")
    num_kv_heads = raw.positive_or("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"{num_heads} attention heads cannot share {num_kv_heads} KV heads evenly")
    hidden_size = raw.positive("hidden_size")
    num_layers = raw.positive("num_hidden_layers")
    rope = read_rope(raw)
    return ModelConfig(
        architecture=str(raw.architecture),
        native=True,
        vocab_size=raw.positive("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=raw.positive_or("head_dim", usual_head_dim or hidden_size // num_heads),
        intermediate_size=raw.positive("intermediate_size"),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=rope,
        max_position_embeddings=_longest_context(raw.positive("max_position_embeddings"), rope),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        sliding_windows=(None,) * num_layers,
        dtype=checkpoint_dtype(raw),
    )


def read_rope(raw: RawConfig) -> RopeConfig:
    """Reads `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of older ones.

    Raises `ModelError` for a type of scaling that is not supported, or that lacks its factor.
    """
    values = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope_type = values.get("rope_type", values.get("type", "default"))
    if rope_type not in ("default", "linear", "llama3", "yarn"):
        raise ModelError(
            f"rope type {rope_type!r} of {raw.architecture} is not supported; default, linear, llama3 and yarn are"
        )
    for name in ("partial_rotary_factor", "mscale", "mscale_all_dim"):
        if values.get(name, raw.get(name)) not in (None, 1.0):
            raise ModelError(f"{name} of {raw.architecture}'s rope parameters is not supported; it must be left out")
    theta = values.get("rope_theta", raw.get("rope_theta", 10000.0))
    if rope_type == "default":
        divisors = values.get("frequency_divisors")
        return RopeConfig(theta=theta, frequency_divisors=None if divisors is None else tuple(divisors))
    known = {name: values[name] for name in RopeConfig.__struct_fields__ if values.get(name) is not None}
    if "factor" not in known:
        raise ModelError(f"rope type {rope_type!r} of {raw.architecture} lacks its factor")
    known.setdefault("original_max_position_embeddings", raw.positive("max_position_embeddings"))
    return msgspec.convert(known | {"rope_type": rope_type, "theta": theta}, RopeConfig, strict=False)


def _longest_context(positions: int, rope: RopeConfig) -> int:
    """Returns the longest context in tokens, rope scaling included.

    Published llama3 configurations give the scaled number of positions, linear ones the unscaled, and yarn ones either.
    """
    if rope.rope_type == "linear":
        return int(positions * rope.factor)
    if rope.rope_type == "yarn":
        return max(positions, int(rope.original_max_position_embeddings * rope.factor))
    return positions


def checkpoint_dtype(raw: dict[str, Any]) -> str:
    """Returns the checkpoint's dtype, `torch_dtype` before transformers 5; a missing one means float32, as there.

    Raises `ModelError` for one that is not in `DTYPE_BYTES`.
    """
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"dtype {dtype} is not supported; use a checkpoint in {', '.join(DTYPE_BYTES)}")
    return dtype

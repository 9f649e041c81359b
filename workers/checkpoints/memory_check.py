"""Refuses a model whose weights or cache have no room on this machine, and says what would fit. Reads headers only."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from manta.workers.checkpoints.memory import weight_bytes
from manta.workers.models.model_config import ModelConfig, ModelError


def gib(num_bytes: int) -> str:
    """Returns a number of bytes in a unit that suits its size."""
    if num_bytes < 2**16:
        return f"{num_bytes / 2**10:.1f} KiB"
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.1f} MiB"


def smaller_weights(folder: pathlib.Path, dtype: str, model: ModelConfig, device: str) -> dict[str, int]:
    """Returns the bytes of a model's weights by the values of the option `weights` that make them smaller."""
    lossless = ("lossless",) if (device, dtype) == ("cpu", "bfloat16") else ()
    return {form: weight_bytes(folder, dtype, model, form) for form in (*lossless, "int8", "int4")}


def check_memory(
    weights: int, kv_bytes: int, dtype: str, free: int, smaller: Mapping[str, int], beside: str = ""
) -> None:
    """Raises `ModelError` if weights and KV cache do not fit into `free` bytes. `smaller` has the bytes of weights
    in other forms, and `beside` says what else takes memory.
    """
    is_free = f"{gib(free)} of memory is free{beside}"
    if weights >= free:
        smaller = {form: num_bytes for form, num_bytes in smaller.items() if num_bytes < weights}
        fitting = {form: num_bytes for form, num_bytes in smaller.items() if num_bytes < free}
        *others, last = [f"{gib(each)} with weights: {form}" for form, each in (fitting or smaller).items()] or [""]
        sizes = f"{', '.join(others)} and {last}" if others else last
        remedy = "free some, or take a smaller model"
        if sizes:
            remedy = f"they take {sizes}" if fitting else f"{remedy} (this one takes {sizes})"
        raise ModelError(f"its weights take {gib(weights)} in {dtype}, and {is_free}; {remedy}")
    if weights + kv_bytes > free:
        raise ModelError(
            f"its weights take {gib(weights)} and the KV cache {gib(kv_bytes)}, and {is_free}; lower kv_cache_bytes to "
            f"at most {gib(free - weights)}"
        )

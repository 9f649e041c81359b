"""The option `weights`: in how many bits linears keep their weights, and how many bytes that takes.

Plain arithmetic, read by the memory plan, the loader and `manta check`. `workers/kernels/rounding.py` rounds the
weights.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from workers.models.model_config import ModelError

WeightsOption = Literal["auto", "dense", "int8", "int4"]


class KeptBits(NamedTuple):
    """Bits of the integers to which floating-point weights are rounded; None keeps them in the model's dtype."""

    layers: int | None
    head: int | None


KEPT_BITS: dict[str, KeptBits] = {
    "auto": KeptBits(None, None),
    "dense": KeptBits(None, None),
    "int8": KeptBits(8, 8),
    "int4": KeptBits(4, 8),
}
"""The head decides between tokens, so its weights keep 8 bits beside layers of 4. Embeddings and norms stay as they
are.
"""
GROUPS = {8: 128, 4: 32}
"""Inputs with one scale, by bits. Relative error (L2 norm) of weights that are normally distributed: 0.65% with 8 bits,
8.3% with 4. Other sizes of groups were measured too: 8 bits have 0.53% in groups of 32, and many rows then take 1.4
times as long; 4 bits have 9.7% in groups of 128.
"""
SCALE_BYTES = 2
_LEAST_GROUP = 8


def group_of(in_features: int, bits: int) -> int:
    """Returns the inputs that share a scale: as in `GROUPS`, or the largest half, quarter, ... that divides
    `in_features`; all inputs if no group of 8 or more does.
    """
    group = GROUPS[bits]
    while group >= _LEAST_GROUP:
        if in_features % group == 0:
            return group
        group //= 2
    return in_features


def kept_bytes(out_features: int, in_features: int, bits: int) -> int:
    """Returns the bytes of a rounded weight with its scales."""
    num_scales = out_features * in_features // group_of(in_features, bits)
    return out_features * in_features * bits // 8 + num_scales * SCALE_BYTES


def describe_kept(weights: str) -> str | None:
    """Returns what `weights` does, in words; None if it changes nothing."""
    bits = KEPT_BITS[weights]
    if bits.layers is None or bits.head is None:
        return "in the model's dtype, whatever the checkpoint stores" if weights == "dense" else None
    head = "" if bits.head == bits.layers else f", the head int{bits.head} in groups of {GROUPS[bits.head]}"
    return f"int{bits.layers} in groups of {GROUPS[bits.layers]}{head}; embedding and norms unchanged"


def check_weights(weights: str, device: str) -> None:
    """Raises `ModelError` if the device `cpu`, `cuda` or `tpu` has no kernels for what `weights` asks for."""
    if KEPT_BITS[weights].layers is not None and device == "tpu":
        raise ModelError(
            f"weights {weights} is for CPUs and CUDA GPUs, and a TPU has no kernels for integer weights; leave weights "
            "out, or set device to cpu or cuda"
        )

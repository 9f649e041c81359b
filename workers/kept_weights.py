"""The option `weights`: the number of bits of a linear's weights, and the bytes that they take.

Plain arithmetic for the memory plan, the loader and `manta check`. `workers/kernels/rounding.py` rounds the weights.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from manta.workers.models.model_config import ModelError

WeightsOption = Literal["auto", "dense", "lossless", "int8", "int4"]
LOSSLESS_BITS = 12
"""Bits that bfloat16 weights take without loss (`workers/kernels/native/lossless.h`)."""


class KeptBits(NamedTuple):
    """Number of bits of the integers to which floating-point weights are rounded, or `LOSSLESS_BITS`, which changes
    none of them. None keeps the model's dtype.
    """

    layers: int | None
    head: int | None


KEPT_BITS: dict[str, KeptBits] = {
    "auto": KeptBits(None, None),
    "dense": KeptBits(None, None),
    "lossless": KeptBits(LOSSLESS_BITS, LOSSLESS_BITS),
    "int8": KeptBits(8, 8),
    "int4": KeptBits(4, 8),
}
"""The head chooses between tokens, so it keeps 8 bits beside layers of 4. Embeddings and norms are not rounded."""
GROUPS = {8: 128, 4: 32}
"""Number of inputs that share a scale, by bits.

The relative error (L2 norm) of normally distributed weights is 0.65% with 8 bits and 8.3% with 4. Groups of 32 with 8
bits have 0.53%, but many rows take 1.4 times as long. Groups of 128 with 4 bits have 9.7%.
"""
SCALE_BYTES = 2
_LOSSLESS_CHUNK = 1024, 5
"""Weights that share a base, and the bytes of it and of the place of their exceptions."""
_LEAST_GROUP = 8


def group_of(in_features: int, bits: int) -> int:
    """Returns the number of inputs that share a scale: the value in `GROUPS`, or its largest half, quarter, ... that
    divides `in_features`. All inputs share one if no group of 8 or more divides them.
    """
    group = GROUPS[bits]
    while group >= _LEAST_GROUP:
        if in_features % group == 0:
            return group
        group //= 2
    return in_features


def kept_bytes(out_features: int, in_features: int, bits: int) -> int:
    """Returns the bytes of a rounded weight with its scales. Without loss, those of trained weights, which have hardly
    any exceptions.
    """
    if bits == LOSSLESS_BITS:
        num_weights, each = _LOSSLESS_CHUNK
        return out_features * in_features * bits // 8 + -(-out_features * in_features // num_weights) * each
    num_scales = out_features * in_features // group_of(in_features, bits)
    return out_features * in_features * bits // 8 + num_scales * SCALE_BYTES


def describe_kept(weights: str) -> str | None:
    """Describes the effect of `weights`; None if it has none."""
    bits = KEPT_BITS[weights]
    if bits.layers is None or bits.head is None:
        return "in the model's dtype, whatever the checkpoint stores" if weights == "dense" else None
    if weights == "lossless":
        return "bfloat16 in 12 bits, without loss; embedding and norms unchanged"
    head = "" if bits.head == bits.layers else f", the head int{bits.head} in groups of {GROUPS[bits.head]}"
    return f"int{bits.layers} in groups of {GROUPS[bits.layers]}{head}; embedding and norms unchanged"


def check_weights(weights: str, device: str, dtype: str | None = None, why_slow: str | None = None) -> None:
    """Raises `ModelError` if the device `cpu`, `cuda` or `tpu`, or a machine without kernels (`why_slow` says why it
    has none), cannot keep weights as `weights` says, or not in the activations' `dtype`, if that is known.
    """
    remedy = "or leave weights out"
    if weights == "lossless" and device != "cpu":
        raise ModelError(f"weights lossless is for CPUs, and the device is {device}; set device to cpu, {remedy}")
    if weights == "lossless" and dtype not in (None, "bfloat16"):
        raise ModelError(f"weights lossless keeps bfloat16, and dtype is {dtype}; set dtype to bfloat16, {remedy}")
    if weights == "lossless" and why_slow is not None:
        raise ModelError(f"weights lossless needs the compiled kernels: {why_slow}; {remedy}")
    if KEPT_BITS[weights].layers is not None and device == "tpu":
        raise ModelError(
            f"weights {weights} is for CPUs and CUDA GPUs, and a TPU has no kernels for integer weights; leave weights "
            "out, or set device to cpu or cuda"
        )

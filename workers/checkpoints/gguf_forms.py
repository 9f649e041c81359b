"""The shapes and forms in which GGUF files hold the tensors of layers, as llama.cpp's converter makes them."""

from __future__ import annotations

import math
from typing import Any

from manta.workers.checkpoints.formats.stored_form import AS_IT_IS, StoredForm
from manta.workers.checkpoints.gguf_architectures import ARCHITECTURES

_CONVOLUTIONS = ("shortconv.conv.weight", "ssm_conv1d.weight")
"""Tensors [channels, width] that torch keeps as [channels, 1, width]."""
_OF_HEADS = ("ssm_a", "ssm_d")
"""Tensors of Mamba 2 with a number for each head, which files hold as [heads, 1]."""
_LATENT_KEYS, _LATENT_VALUES = "attn_k_b.weight", "attn_v_b.weight"
"""The linears from the latent vector to keys [heads, rank, width], transposed, and to values [heads, width, rank]."""
_TILING = ("qwen35", "qwen35moe")
"""Architectures whose value heads of one key head are apart: first one of each key head, then the next of each."""


def usual_shape(part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape in transformers of a layer's tensor, given llama.cpp's name and the shape in the file."""
    if part in _CONVOLUTIONS:
        return shape[0], 1, *shape[1:]
    if part in _OF_HEADS and shape[-1] == 1:
        return shape[:1]
    if part == "ssm_norm.weight":
        return (math.prod(shape),)
    if part == "ffn_gate_inp_shexp.weight" and len(shape) == 1:
        return 1, *shape
    if part == _LATENT_KEYS and len(shape) == 3:
        return shape[0] * shape[2], shape[1]
    if part == _LATENT_VALUES and len(shape) == 3:
        return shape[0] * shape[1], shape[2]
    return shape


def form_of(architecture: str, part: str, shape: tuple[int, ...], config: dict[str, Any]) -> StoredForm:
    """Returns what the converter has done to a layer's tensor of this shape in the file."""
    (base, _, suffix), own = part.rpartition("."), ARCHITECTURES[architecture]
    if own.interleaves_heads and base in ("attn_q", "attn_k") and not suffix.endswith("scale"):
        return StoredForm(interleaved_head_dim=config["head_dim"])
    if own.adds_one and base.endswith("norm") and base != "ssm_norm":
        return StoredForm(added=1)
    if part == _LATENT_KEYS and len(shape) == 3:
        return StoredForm(transposed_heads=shape[0])
    form = StoredForm(is_rate=True) if part == "ssm_a" else AS_IT_IS
    if architecture not in _TILING:
        return form
    return form._replace(head_order=_tiled_heads(part, config), orders_inputs=part == "ssm_out.weight")


def form_of_whole(architecture: str, name: str) -> StoredForm:
    """Returns what the converter has done to a tensor that belongs to no layer."""
    is_norm = name.rpartition(".")[0].endswith("norm")
    return StoredForm(added=1) if ARCHITECTURES[architecture].adds_one and is_norm else AS_IT_IS


def _tiled_heads(part: str, config: dict[str, Any]) -> tuple[int, ...]:
    """Returns the file's head for each head of a delta net's tensor; none where both have one order."""
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    repeats = num_values // num_keys
    if repeats == 1:
        return ()
    values = tuple(value % repeats * num_keys + value // repeats for value in range(num_values))
    if part in ("attn_qkv.weight", "ssm_conv1d.weight"):  # heads of queries and of keys, then those of values
        return (*range(2 * num_keys), *(2 * num_keys + value for value in values))
    of_values = (
        "attn_gate.weight",
        "ssm_alpha.weight",
        "ssm_beta.weight",
        "ssm_a",
        "ssm_dt.bias",
        "ssm_dt",
        "ssm_out.weight",
    )
    return values if part in of_values else ()

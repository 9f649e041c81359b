"""The weights of a decoder, as the loader hands them to a platform and to the model: plain data, nothing computed.

They mirror the descriptions of `workers/models/specs.py`: norms are tensors, and linears are objects that keep their
weights to themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.models.model_config import ModelConfig


@dataclasses.dataclass(slots=True, frozen=True)
class LinearWeight:
    """A linear as the checkpoint has it, from which a platform makes the `Linear`."""

    name: str
    """The names of its parts in the checkpoint, for messages."""
    weight: torch.Tensor
    """[out_features, in_features] in `dtype`; a meta tensor where `quantized` is set. It may be a view of a file, or
    memory that is overwritten once the linear is made.
    """
    bias: torch.Tensor | None
    """[out_features] in `dtype`, on the device."""
    dtype: torch.dtype
    """The dtype of the activations."""
    gated: bool = False
    """The first half of the rows are a gate's, the second what it lets through: the result is `activation(gate) * up`,
    half as wide (Shazeer, 2020).
    """
    quantized: QuantizedWeight | None = None
    """The weight as integers, if the checkpoint stores it so."""
    rounded_to: int | None = None
    """Bits of the integers to which the platform rounds `weight` when it makes the linear; None keeps its dtype."""
    activation: str = "silu"
    """The function of the gate, by its name in `ModelConfig.activation`."""

    def dense(self) -> torch.Tensor:
        """Returns the weight [out_features, in_features] in `dtype`, computed anew if it is quantised."""
        return self.weight if self.quantized is None else self.quantized.dequantized(self.dtype)


class Linear(Protocol):
    """A linear of any scheme, on any platform; of a model's share, perhaps with the sum over ranks inside."""

    def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
        """x [num_rows, in_features] -> [num_rows, out_features], same dtype. `step` tells which sequence each row
        belongs to, for linears that differ by sequence; None where the rows are not those of a step.
        """
        ...


Embedding = Callable[[torch.Tensor], torch.Tensor]
"""Token ids, int64 [num_tokens] -> [num_tokens, hidden] in the dtype of the activations, which may be written to."""


RowNorm = Callable[[torch.Tensor], torch.Tensor]
"""Normalises rows [num_tokens, width]; of ranks, each has a part of the width."""


class SharedLinears(Protocol):
    """Makes the linears of one model while it is read, in memory that processes share."""

    @property
    def are_packed(self) -> bool:
        """Whether some process has packed these weights: then only their shapes are looked at."""
        ...

    def make_linear(self, weight: LinearWeight) -> Linear: ...


MLP_BYTES = 32 << 20
"""Largest buffer of the widest activations on a CPU, which are made for as many rows at a time as fit. The C library
gives larger buffers back at once, and the system would zero new pages for the next ones.
"""


@dataclasses.dataclass(slots=True, frozen=True)
class AttentionWeights:
    qkv: Linear
    """hidden -> (num_heads + 2 * num_kv_heads) * head_dim: queries, keys, values."""
    output: Linear
    q_norm: torch.Tensor | None
    """[head_dim]; None in families that do not normalise heads. As is `k_norm`."""
    k_norm: torch.Tensor | None
    wide_norms: tuple[RowNorm, RowNorm] | None = None
    """Norms over all query heads and over all key heads, before the rotation; None in families without them."""
    sinks: torch.Tensor | None = None
    """float32 [num_heads]; None in families without attention sinks."""


@dataclasses.dataclass(slots=True, frozen=True)
class GatedMlpWeights:
    gated: Linear
    """hidden -> intermediate: activation(gate) * up."""
    down: Linear


@dataclasses.dataclass(slots=True, frozen=True)
class ExpertsWeights:
    router: Linear
    """hidden -> num_experts"""
    experts: list[GatedMlpWeights]
    """Of ranks, each has a part of every expert's inner width."""
    num_chosen: int
    normalises_choice: bool
    """Whether the weights of the chosen experts sum to one."""
    join: Callable[[torch.Tensor], torch.Tensor]
    """Sums the results [num_tokens, hidden] of ranks."""


@dataclasses.dataclass(slots=True, frozen=True)
class LayerWeights:
    """A layer of `LayerSpec`: norms are tensors [hidden], or None where a family has none."""

    input_norm: torch.Tensor | None
    mixer: AttentionWeights
    mlp_norm: torch.Tensor | None
    mlp: GatedMlpWeights | ExpertsWeights
    mixer_output_norm: torch.Tensor | None = None
    mlp_output_norm: torch.Tensor | None = None
    is_parallel: bool = False


@dataclasses.dataclass(slots=True, frozen=True)
class DecoderWeights:
    embedding: Embedding
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    head: Linear
    """hidden -> vocab_size; of ranks, only the one that draws gets them all."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations and norms. Linears may keep their weights in another one."""
        return self.final_norm.dtype


def max_mlp_rows(config: ModelConfig, dtype: torch.dtype) -> int:
    """Rows for which the widest activations are made at a time, at least 1."""
    return max(1, MLP_BYTES // (config.intermediate_size * dtype.itemsize))

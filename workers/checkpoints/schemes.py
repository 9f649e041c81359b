"""How checkpoints store the weight of a linear: for each scheme, which tensors there are and how they are read.

To add a scheme: let `model_config.py` accept its `quantization_config` and set `ModelConfig.scheme`, add its reader to
`READERS`, and add what makes its linears to each platform that runs it (`CpuPlatform.linears`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from workers.checkpoints.model_config import UNQUANTIZED
from workers.checkpoints.weights import LinearWeight


class Tensors(Protocol):
    """A reader's access to the checkpoint's tensors. `row_shape` is the shape of one output's part of a tensor."""

    def __contains__(self, name: str) -> bool: ...

    def stacked(self, parts: list[tuple[str, int]], row_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensors [rows, *row_shape] of `parts` (name, rows), concatenated by rows, in `dtype`. One part may be a
        view of the file; several lie in memory that the next call reuses.
        """
        ...

    def copied(self, parts: list[tuple[str, int]], row_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The same for small tensors: a copy on the device, which belongs to the caller."""
        ...


class LinearSource(NamedTuple):
    """The linears `parts` (name, out_features) of a checkpoint, which read the same input and become one linear, in
    this order.
    """

    parts: tuple[tuple[str, int], ...]
    in_features: int
    has_bias: bool
    gated: bool
    """As `LinearWeight.gated`: the first half of the parts gates the second."""
    scheme: str
    dtype: torch.dtype
    """The dtype of the activations."""
    tensors: Tensors

    @property
    def name(self) -> str:
        return " + ".join(name for name, _ in self.parts)

    def has(self, suffix: str) -> bool:
        """Whether every part has a tensor with this suffix."""
        return all(f"{name}.{suffix}" in self.tensors for name, _ in self.parts)

    def stacked(self, suffix: str, row_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """[out_features, *row_shape], valid until the next large tensor is read."""
        return self.tensors.stacked(self._parts(suffix), row_shape, dtype)

    def copied(self, suffix: str, row_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """[out_features, *row_shape] of a small tensor, as the caller's own copy."""
        return self.tensors.copied(self._parts(suffix), row_shape, dtype)

    def bias(self) -> torch.Tensor | None:
        return self.copied("bias", (), self.dtype) if self.has_bias else None

    def _parts(self, suffix: str) -> list[tuple[str, int]]:
        return [(f"{name}.{suffix}", out_features) for name, out_features in self.parts]


def read_linear(source: LinearSource) -> LinearWeight:
    """Reads by the source's scheme. Raises `ModelError` naming a tensor that is missing or does not fit."""
    return READERS[source.scheme](source)


def read_unquantized(source: LinearSource) -> LinearWeight:
    """`weight` [out_features, in_features], in any floating-point dtype."""
    weight = source.stacked("weight", (source.in_features,), source.dtype)
    return LinearWeight(source.name, weight, source.bias(), source.dtype, source.gated)


READERS: dict[str, Callable[[LinearSource], LinearWeight]] = {UNQUANTIZED: read_unquantized}
"""The reader of each scheme."""

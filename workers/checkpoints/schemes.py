"""How checkpoints store the weight of a linear: for each scheme, which tensors there are and how they are read.

To add a scheme: let `model_folder.py` accept its `quantization_config` and set `ModelConfig.scheme`, and add its reader
to `READERS`. Readers of integers make a `QuantizedWeight`, which every platform takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from workers.kernels.weights import LinearWeight
from workers.models.model_config import UNQUANTIZED
from workers.models.specs import LinearSpec


class Tensors(Protocol):
    """A reader's access to the tensors `PART.SUFFIX` of a linear's parts, concatenated by rows. `row_shape` is the
    shape of one output's part of a tensor.
    """

    def __contains__(self, name: str) -> bool: ...

    def stacked(self, linear: LinearSpec, suffix: str, row_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns [out_features, *row_shape] in `dtype`, valid until the next large tensor is read. One part may be a
        view of the file; several lie in memory that the next call reuses.
        """
        ...

    def copied(self, linear: LinearSpec, suffix: str, row_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The same for small tensors: a copy on the device, which belongs to the caller."""
        ...


class LinearSource(NamedTuple):
    """A linear of a checkpoint."""

    spec: LinearSpec
    scheme: str
    dtype: torch.dtype
    """The dtype of the activations."""
    tensors: Tensors

    def has(self, suffix: str) -> bool:
        """Returns whether every part has a tensor with this suffix."""
        return all(f"{part.name}.{suffix}" in self.tensors for part in self.spec.parts)

    def stacked(self, suffix: str, row_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As `Tensors.stacked`."""
        return self.tensors.stacked(self.spec, suffix, row_shape, dtype)

    def copied(self, suffix: str, row_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As `Tensors.copied`."""
        return self.tensors.copied(self.spec, suffix, row_shape, dtype)

    def bias(self) -> torch.Tensor | None:
        return self.copied("bias", (), self.dtype) if self.spec.has_bias else None


def read_linear(source: LinearSource) -> LinearWeight:
    """Reads by the source's scheme. Raises `ModelError` naming a tensor that is missing or does not fit."""
    return READERS[source.scheme](source)


def read_unquantized(source: LinearSource) -> LinearWeight:
    """`weight` [out_features, in_features], in any floating-point dtype."""
    spec = source.spec
    weight = source.stacked("weight", (spec.in_features,), source.dtype)
    return LinearWeight(spec.name, weight, source.bias(), source.dtype, spec.is_gated)


READERS: dict[str, Callable[[LinearSource], LinearWeight]] = {UNQUANTIZED: read_unquantized}
"""The reader of each scheme."""

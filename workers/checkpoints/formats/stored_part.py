"""One part of a quantised linear as stored in a checkpoint, from which the readers read.

Its tensors are whole views of the file. Ranks cut the reader's result, never the tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from manta.workers.checkpoints.formats.stored_form import StoredForm
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.models.model_config import ModelError, WeightFormat
from manta.workers.models.row_places import ExpertRows

EXPONENTS = ("F8_E8M0", "U8")
"""Kinds of tensors that hold powers of two as exponents of 8 bits (E8M0 of OCP's Microscaling Formats 1.0)."""
EXPONENT_BIAS = 127
"""The number that is added to each of these exponents."""


class StoredTensors(Protocol):
    """The whole tensors of a checkpoint by name, as the readers of formats need them."""

    def __contains__(self, name: str) -> bool: ...

    def shape_of(self, name: str) -> tuple[int, ...]: ...

    def kind_of(self, name: str) -> str:
        """Returns a tensor's dtype in safetensors' spelling, or its GGUF type."""
        ...

    def view(self, name: str, shape: tuple[int, ...], kind: torch.dtype = ...) -> torch.Tensor:
        """Returns a tensor. With `kind` float32 it may have any floating-point dtype.

        Raises `ModelError` naming a tensor that is missing or has another shape or dtype.
        """
        ...

    def blocks(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns a tensor of a GGUF type whose weight has this shape: uint8 [out_features, bytes of a row]."""
        ...

    def form_of(self, name: str) -> StoredForm:
        """Returns what a GGUF file has done to a tensor. `blocks` undoes what concerns the order of rows alone."""
        ...


class StoredPart(NamedTuple):
    """The stored form of a part, whose whole weight is `scales * values + offsets` [out_features, in_features]."""

    name: str
    out_features: int
    in_features: int
    format: WeightFormat
    dtype: torch.dtype
    """Dtype of the activations, which weights other than integers get."""
    tensors: StoredTensors
    keeps_float8: bool = False
    """Whether the platform multiplies by E4M3 weights as they are."""
    expert: ExpertRows | None = None
    """The place in a tensor of all experts of a layer; None if the tensors are this part's alone."""

    def has(self, suffix: str) -> bool:
        return f"{self.name}.{suffix}" in self.tensors

    def kind_of(self, suffix: str) -> str | None:
        """Returns the kind of a tensor; None if it is missing."""
        return self.tensors.kind_of(f"{self.name}.{suffix}") if self.has(suffix) else None

    def stored(self, suffix: str, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        return self.tensors.view(f"{self.name}.{suffix}", shape, kind)

    def skip(self, *suffixes: str) -> None:
        """Marks tensors as read that do not describe the weight."""
        for suffix in suffixes:
            if self.has(suffix):
                name = f"{self.name}.{suffix}"
                kind = _DTYPES.get(self.tensors.kind_of(name), torch.float32)
                self.tensors.view(name, self.tensors.shape_of(name), kind)

    @property
    def num_groups(self) -> int:
        """Number of groups of inputs by the configuration. The last group may be smaller."""
        return -(-self.in_features // (self.format.group_size or self.in_features))

    def grouped(self, suffix: str, kind: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns a tensor with one element for each output and group, each output, or the whole weight, as
        [out_features, num_groups].
        """
        name = f"{self.name}.{suffix}"
        shape = self.tensors.shape_of(name) if name in self.tensors else ()
        expected = (self.out_features, self.num_groups)
        if self.num_groups == 1 and shape in ((), (1,), (1, 1)):
            return self.stored(suffix, shape, kind).reshape(1, 1).expand(expected)
        if self.num_groups == 1 and shape == expected[:1]:
            return self.stored(suffix, shape, kind).view(expected)
        return self.stored(suffix, expected, kind)

    def no_bias(self) -> None:
        """Accepts the zeros that some tools store as the bias of a linear without one. Raises `ModelError` if the bias
        is not zero.
        """
        name = f"{self.name}.bias"
        bias = self.tensors.view(name, (self.out_features,))
        if not bias.is_meta and bias.any():
            raise ModelError(f"{name} is not zero, and its architecture has no bias there")


Reader = Callable[[StoredPart], "QuantizedWeight | torch.Tensor"]
"""Reads one part: integers in groups, or a plain weight in the activations' dtype.

Raises `ModelError` naming a tensor that is missing or does not fit.
"""

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float32,
    "BF16": torch.float32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}

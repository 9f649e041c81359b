"""Reads the weight of a linear in any form: unquantised, or by one of the readers in `formats/`.

To add a format, let `workers/models/quantization.py` accept its `quantization_config` and add its reader to `READERS`.
Readers of integers return a `QuantizedWeight`, which every platform takes.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from manta.workers.checkpoints.formats.awq import read_awq
from manta.workers.checkpoints.formats.compressed_tensors import read_int, read_mxfp4, read_packed
from manta.workers.checkpoints.formats.float8 import read_float8
from manta.workers.checkpoints.formats.gguf_blocks import read_gguf
from manta.workers.checkpoints.formats.gptq import read_gptq
from manta.workers.checkpoints.formats.stored_part import Reader, StoredPart, StoredTensors
from manta.workers.checkpoints.memory import FLOATING
from manta.workers.checkpoints.weight_parts import stack
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.kernels.weights import LinearWeight
from manta.workers.models.model_config import ModelError, Quantization, WeightFormat
from manta.workers.models.specs import LinearSpec, Part

READERS: dict[str, Reader] = {
    "int": read_int,
    "packed": read_packed,
    "mxfp4": read_mxfp4,
    "float8": read_float8,
    "gptq": read_gptq,
    "awq": read_awq,
    "gguf": read_gguf,
}
"""The reader for each kind of `WeightFormat`."""
GGUF = WeightFormat(reader="gguf")
"""The format of every tensor with a GGUF type."""
_MARKS = ("weight_scale", "weight_scale_inv", "weight_packed", "qweight")
"""Suffixes of tensors that only a quantised linear has. Each one has at least one of them."""


class Tensors(StoredTensors, Protocol):
    """A reader's access to the tensors `PART.SUFFIX` of a linear's parts."""

    def stacked(self, linear: LinearSpec, suffix: str, row_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns the tensors of all parts, concatenated by rows: [out_features, *row_shape] in `dtype`. The result is
        valid until the next large tensor is read: it may view the file, or memory that the next call reuses.
        """
        ...

    def copied(self, linear: LinearSpec, suffix: str, row_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns small tensors like `stacked`, as a copy on the device that belongs to the caller."""
        ...

    def part(self, part: Part, in_features: int) -> torch.Tensor:
        """Returns the `weight` of an unquantised part as a view of the file: [out_features, in_features]."""
        ...

    def has_blocks(self, name: str) -> bool:
        """Returns whether a tensor is of a GGUF type."""
        ...

    def whole_shape(self, name: str, shape: tuple[int, int]) -> tuple[int, int]:
        """Returns the shape of a part's whole weight, of which this rank holds `shape`."""
        ...

    def cut(self, name: str, weight: QuantizedWeight | torch.Tensor) -> QuantizedWeight | torch.Tensor:
        """Returns this rank's share of a part's whole weight."""
        ...


class LinearSource(NamedTuple):
    """A linear of a checkpoint."""

    spec: LinearSpec
    quantization: Quantization | None
    dtype: torch.dtype
    """Dtype of the activations."""
    tensors: Tensors
    keeps_float8: bool = False
    """Whether E4M3 weights stay so where the checkpoint was made for activations that are rounded like them."""

    def bias(self) -> torch.Tensor | None:
        return self.tensors.copied(self.spec, "bias", (), self.dtype) if self.spec.has_bias else None

    def format_of(self, part: Part) -> WeightFormat | None:
        """Returns the format of a part; None if it is not quantised.

        Raises `ModelError` if configuration and tensors disagree.
        """
        weight = f"{part.name}.weight"
        marks = [suffix for suffix in _MARKS if f"{part.name}.{suffix}" in self.tensors]
        if self.quantization is None:
            if marks and weight not in self.tensors:
                raise ModelError(
                    f"config.json has no quantization_config, and the checkpoint has {part.name}.{marks[0]}; add the "
                    "entry, which older tools wrote to a file of its own, such as quantize_config.json"
                )
            return None
        if self.tensors.has_blocks(weight):
            return GGUF
        if not marks and weight in self.tensors and self.tensors.kind_of(weight) in FLOATING:
            return None
        format_ = self.quantization.format_of(part.name)
        if format_ is None and marks:
            raise ModelError(
                f"quantization_config leaves {part.name} unquantised, and the checkpoint has {part.name}.{marks[0]}; "
                "take the config.json that belongs to these weights"
            )
        return format_


def read_linear(source: LinearSource) -> LinearWeight:
    """Returns the weight of a linear. Raises `ModelError` naming a tensor that is missing or does not fit."""
    spec = source.spec
    formats = [source.format_of(part) for part in spec.parts]
    if not any(formats):
        weight = source.tensors.stacked(spec, "weight", (spec.in_features,), source.dtype)
        return LinearWeight(spec.name, weight, source.bias(), source.dtype, spec.is_gated)
    parts = [
        source.tensors.part(part, spec.in_features) if format_ is None else read_quantized(source, part, format_)
        for part, format_ in zip(spec.parts, formats, strict=True)
    ]
    stacked = stack(parts, source.dtype)
    if isinstance(stacked, torch.Tensor):
        return LinearWeight(spec.name, stacked, source.bias(), source.dtype, spec.is_gated)
    shape = torch.empty(stacked.values.shape, dtype=source.dtype, device="meta")
    return LinearWeight(spec.name, shape, source.bias(), source.dtype, spec.is_gated, stacked)


def read_quantized(source: LinearSource, part: Part, format_: WeightFormat) -> QuantizedWeight | torch.Tensor:
    """Reads a whole part and returns this rank's share. Raises `ModelError` like `read_linear`."""
    shape = source.tensors.whole_shape(part.name, (part.out_features, source.spec.in_features))
    stored = StoredPart(part.name, *shape, format_, source.dtype, source.tensors, source.keeps_float8)
    weight = READERS[format_.reader](stored)
    if not source.spec.has_bias and stored.has("bias"):
        stored.no_bias()
    return source.tensors.cut(part.name, weight)

"""The tensors of a checkpoint as torch tensors: views of its mapped files, for the loader."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from manta.workers.checkpoints.formats.gguf_blocks import BLOCK_TYPES
from manta.workers.checkpoints.memory import FLOATING, TensorEntry
from manta.workers.checkpoints.tensor_files import TensorFiles
from manta.workers.kernels.quantized_weight import QuantizedWeight

_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_COMPUTED = (torch.float32, torch.bfloat16, torch.float16)


class Checkpoint(TensorFiles):
    """The tensors of a folder's weight files, mapped but not read. Implements `StoredTensors`."""

    def view(self, name: str, shape: tuple[int, ...], kind: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns the tensor as a view of the file, in the checkpoint's dtype. If `kind` is a dtype to compute in, the
        tensor may have any of these; otherwise it must have `kind`.

        Raises `ModelError` like `find`.
        """
        readable = {
            stored: dtype.itemsize
            for stored, dtype in _DTYPES.items()
            if (stored in FLOATING if kind in _COMPUTED else dtype == kind)
        }
        mapped, entry = self.find(name, shape, readable)
        flat = torch.frombuffer(mapped, dtype=_DTYPES[entry.dtype], count=math.prod(shape), offset=entry.start)
        return _in_order(flat.view(shape), entry)

    def stored(self, name: str, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        return Checkpoint.view(self, name, shape, kind)

    def blocks(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns a tensor of a GGUF type whose weight has this shape: uint8 [out_features, bytes of a row]."""
        mapped, entry = self.find_blocks(name, shape)
        flat = torch.frombuffer(mapped, dtype=torch.uint8, count=entry.end - entry.start, offset=entry.start)
        return _in_order(flat.view(shape[0], -1), entry)

    def has_blocks(self, name: str) -> bool:
        """Returns whether a tensor is of a GGUF type."""
        return name in self and self.kind_of(name) in BLOCK_TYPES

    def whole_shape(self, name: str, shape: tuple[int, int]) -> tuple[int, int]:
        """Returns the shape of a part's whole weight, of which this rank holds `shape`."""
        return shape

    def cut(self, name: str, weight: QuantizedWeight | torch.Tensor) -> QuantizedWeight | torch.Tensor:
        """Returns this rank's share of a part's whole weight."""
        return weight


def _in_order(rows: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Returns the rows in Hugging Face's order, in which the halves of each head are not interleaved."""
    if not entry.interleaved_head_dim:
        return rows
    heads = torch.arange(rows.shape[0]).view(-1, entry.interleaved_head_dim // 2, 2)
    return rows[heads.transpose(1, 2).reshape(-1)]


class CheckpointHeaders(Checkpoint):
    """A checkpoint whose tensors have shapes but no data."""

    def view(self, name: str, shape: tuple[int, ...], kind: torch.dtype = torch.float32) -> torch.Tensor:
        return super().view(name, shape, kind).to("meta")

    def stored(self, name: str, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        return super().stored(name, shape, kind).to("meta")

    def blocks(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return super().blocks(name, shape).to("meta")

    def release(self, names: Iterable[str]) -> None:
        pass

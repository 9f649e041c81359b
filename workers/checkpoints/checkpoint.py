"""The tensors of a checkpoint as torch tensors: views of its mapped files, for the loader."""

from __future__ import annotations

import mmap

import torch

from manta.workers.checkpoints.memory import FLOATING, TensorEntry
from manta.workers.checkpoints.tensor_files import TensorFiles

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Dtypes by their names in safetensors."""


class Checkpoint(TensorFiles):
    """The tensors of a folder's weight files, mapped but not read. Implements `StoredTensors`."""

    def view(self, name: str, shape: tuple[int, ...], kind: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns the tensor as a view of the file, in the checkpoint's dtype. With `kind` float32 the tensor may have
        any dtype to compute in; otherwise it must have `kind`.

        Raises `ModelError` like `find`.
        """
        readable = {
            stored: dtype.itemsize
            for stored, dtype in DTYPES.items()
            if (stored in FLOATING if kind == torch.float32 else dtype == kind)
        }
        mapped, entry = self.find(name, shape, readable)
        return self._view(mapped, entry, shape, DTYPES[entry.dtype])

    def blocks(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns a tensor of a GGUF type whose weight has this shape: uint8 [out_features, bytes of a row]."""
        mapped, entry = self.find_blocks(name, shape)
        return self._view(mapped, entry, (shape[0], (entry.end - entry.start) // shape[0]), torch.uint8)

    def _view(self, mapped: mmap.mmap, entry: TensorEntry, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns the numbers as Hugging Face stores them: with nothing added, and without halves that interleave."""
        count = (entry.end - entry.start) // dtype.itemsize
        rows = torch.frombuffer(mapped, dtype=dtype, count=count, offset=entry.start).view(shape)
        if entry.added:
            return rows - entry.added
        return in_halves(rows, entry.interleaved_head_dim) if entry.interleaved_head_dim else rows


class CheckpointHeaders(Checkpoint):
    """A checkpoint whose tensors have shapes but no data, of which nothing is read."""

    def _view(self, mapped: mmap.mmap, entry: TensorEntry, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def release(self) -> None:
        pass


def in_halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Returns the rows of heads whose two halves were interleaved, with one half behind the other."""
    heads = torch.arange(rows.shape[0]).view(-1, head_dim // 2, 2)
    return rows[heads.transpose(1, 2).reshape(-1)]

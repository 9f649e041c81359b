"""The tensors of a checkpoint as torch tensors: views of its mapped files, for the loader."""

from __future__ import annotations

import mmap

import torch

from manta.workers.checkpoints.formats.head_orders import in_halves, in_head_order, rows_of_transposed
from manta.workers.checkpoints.formats.stored_form import StoredForm
from manta.workers.checkpoints.formats.stored_part import StoredTensors
from manta.workers.checkpoints.memory import FLOATING, TensorEntry
from manta.workers.checkpoints.tensor_files import TensorFiles

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,  # powers of two, read as the exponents that they store
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Dtypes by their names in safetensors."""
_DECIDING = ("g_idx", ".qzeros")
"""Ends of the names of tensors that say whether a weight has act-order, and whether it has offsets."""


class Checkpoint(TensorFiles):
    """The tensors of a folder's weight files, mapped but not read. Implements `StoredTensors`."""

    def view(self, name: str, shape: tuple[int, ...], kind: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns the tensor as a view of the file, in the checkpoint's dtype. With `kind` float32 the tensor may have
        any dtype to compute in; otherwise it must have `kind`.

        Raises `ModelError` like `find`.
        """
        mapped, entry = self._find(name, shape, kind)
        return self._view(mapped, entry, shape, DTYPES[entry.dtype])

    def blocks(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns a tensor of a GGUF type whose weight has this shape: uint8 [out_features, bytes of a row]. Rows are
        the file's where `form_of` says that heads are transposed.
        """
        mapped, entry = self.find_blocks(name, shape)
        return self._view(mapped, entry, _block_shape(entry, shape), torch.uint8)

    def without_data(self) -> StoredTensors:
        """Returns the same tensors with shapes but no data. What is asked of them counts as read."""
        return _Shapes(self)

    def _find(self, name: str, shape: tuple[int, ...], kind: torch.dtype) -> tuple[mmap.mmap, TensorEntry]:
        readable = {
            stored: dtype.itemsize
            for stored, dtype in DTYPES.items()
            if (stored in FLOATING if kind == torch.float32 else dtype == kind)
        }
        return self.find(name, shape, readable)

    def form_of(self, name: str) -> StoredForm:
        """Returns what the file has done to a tensor. `blocks` undoes what concerns the order of rows alone."""
        return self.entry(name).form

    def _view(self, mapped: mmap.mmap, entry: TensorEntry, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns the numbers as Hugging Face stores them, or blocks of them."""
        self.expect(mapped, entry)
        count = (entry.end - entry.start) // dtype.itemsize
        stored = torch.frombuffer(mapped, dtype=dtype, count=count, offset=entry.start)
        form = entry.form
        if form.added:
            return stored.view(shape) - form.added
        if form.is_rate:
            stored = (-stored.float()).log()
        if form.transposed_heads and dtype != torch.uint8:
            return rows_of_transposed(stored, form.transposed_heads, shape)
        rows = stored.view(shape)
        if form.interleaved_head_dim:
            return in_halves(rows, form.interleaved_head_dim)
        if not form.head_order:
            return rows
        if not form.orders_inputs:
            return rows[in_head_order(form.head_order, shape[0])]
        return rows if dtype == torch.uint8 else rows[:, in_head_order(form.head_order, shape[1])]


def _block_shape(entry: TensorEntry, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the rows of blocks and the bytes of a row of a tensor whose weight has a shape."""
    num_bytes, heads = entry.end - entry.start, entry.form.transposed_heads
    num_rows = heads * shape[1] if heads else shape[0]
    return num_rows, num_bytes // num_rows


class _Shapes:
    """The shapes of an open checkpoint. Small tensors by whose values a reader decides the form of a weight have their
    data.
    """

    def __init__(self, opened: Checkpoint) -> None:
        self._opened = opened
        self.shape_of = opened.shape_of
        self.kind_of = opened.kind_of
        self.form_of = opened.form_of

    def __contains__(self, name: str) -> bool:
        return name in self._opened

    def view(self, name: str, shape: tuple[int, ...], kind: torch.dtype = torch.float32) -> torch.Tensor:
        if name.endswith(_DECIDING):
            return self._opened.view(name, shape, kind)
        _, entry = self._opened._find(name, shape, kind)
        return torch.empty(shape, dtype=DTYPES[entry.dtype], device="meta")

    def blocks(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        _, entry = self._opened.find_blocks(name, shape)
        return torch.empty(_block_shape(entry, shape), dtype=torch.uint8, device="meta")


class CheckpointHeaders(Checkpoint):
    """A checkpoint whose tensors have shapes but no data, of which nothing is read."""

    def _view(self, mapped: mmap.mmap, entry: TensorEntry, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def release(self) -> None:
        pass

"""The tensors of a checkpoint as torch's: views of its mapped safetensors files. Called by the loader."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from workers.checkpoints.tensor_files import TensorFiles

_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}


class Checkpoint(TensorFiles):
    """The tensors of a folder's safetensors files, mapped but not read."""

    def view(self, name: str, shape: tuple[int, ...], kind: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns the tensor as a view of the file, in the checkpoint's dtype. If `kind` is a floating-point dtype, the
        tensor's may be any floating-point dtype; else it must be `kind`.

        Raises `ModelError` as `find` does.
        """
        readable = {
            stored: dtype.itemsize
            for stored, dtype in _DTYPES.items()
            if (dtype.is_floating_point if kind.is_floating_point else dtype == kind)
        }
        mapped, entry = self.find(name, shape, readable)
        flat = torch.frombuffer(mapped, dtype=_DTYPES[entry.dtype], count=math.prod(shape), offset=entry.start)
        return flat.view(shape)


class CheckpointHeaders(Checkpoint):
    """A checkpoint whose tensors have shapes but no data."""

    def view(self, name: str, shape: tuple[int, ...], kind: torch.dtype = torch.float32) -> torch.Tensor:
        return super().view(name, shape, kind).to("meta")

    def release(self, names: Iterable[str]) -> None:
        pass

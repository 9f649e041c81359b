"""An adapter as it was read, and what its readers share: the bound on a file, the checks of tensors, and the digest."""

from __future__ import annotations

import hashlib
import math
import pathlib
from typing import NamedTuple

import torch

from manta.workers.checkpoints.checkpoint import DTYPES
from manta.workers.checkpoints.memory import FLOATING
from manta.workers.checkpoints.stored_files import COPY_AGAIN, open_file
from manta.workers.models.model_config import ModelError

_DIGEST_BYTES = 16


class LowRankModule(NamedTuple):
    """What an adapter adds to one module: `scale * (x @ a.T) @ b.T`."""

    a: torch.Tensor
    """[rank, in_features]"""
    b: torch.Tensor
    """[out_features, rank]"""
    scale: float
    is_interleaved: bool = False
    """Whether the two halves of each head are interleaved in the rows of `b`, as llama.cpp stores them."""
    num_experts: int = 0
    """Number of experts that it is of together: `a` is then [num_experts * rank, in_features], and `b` is
    [out_features, rank * num_experts], as PEFT stores them. 0 for a module of its own.
    """
    is_of_old_peft: bool = False
    """Whether PEFT before 0.19 saved it. That one takes a parameter [experts, outputs, inputs] for one of
    [experts, inputs, outputs], so inputs and outputs have changed places in the two halves.
    """

    @property
    def rank(self) -> int:
        return len(self.a) // max(1, self.num_experts)

    def of_expert(self, expert: int, has_outputs_first: bool) -> LowRankModule:
        """Returns what it adds to one of its experts. If the halves have changed places, `has_outputs_first` is set."""
        a = self.a.view(self.num_experts, self.rank, -1)[expert]
        b = self.b.view(len(self.b), self.rank, self.num_experts)[:, :, expert]
        first, second = (b.T, a.T) if has_outputs_first else (a, b)
        return LowRankModule(first, second, self.scale)


class Adapter(NamedTuple):
    """An adapter as it was read."""

    source: str
    """The path, hub id or URL that it was read from."""
    base_model: str
    """The base model that it names; empty if it names none."""
    digest: str
    """Hexadecimal digest of all values: names, numbers and scales of its modules."""
    modules: dict[str, LowRankModule]
    """By the modules' names in the base model."""

    @property
    def rank(self) -> int:
        """The highest rank of a module."""
        return max(module.rank for module in self.modules.values())


def matrix_of(file: pathlib.Path, name: str, kind: str, shape: tuple[int, ...], content: memoryview) -> torch.Tensor:
    """Returns one of a file's tensors as a matrix, without copying its content. Raises `ModelError` if it is none, or
    holds what is no number.
    """
    if kind not in FLOATING:
        raise ModelError(f"{file}: tensor {name} is {kind}; only {', '.join(FLOATING)} is read")
    dtype = DTYPES[kind]
    if len(shape) != 2 or content.nbytes != math.prod(shape) * dtype.itemsize or content.nbytes == 0:
        raise ModelError(f"{file}: tensor {name} has shape {list(shape)}, and is no matrix")
    tensor = torch.frombuffer(content, dtype=dtype).view(shape)
    if not tensor.isfinite().all():
        raise ModelError(f"{file}: tensor {name} holds infinities or what is no number; {COPY_AGAIN}")
    return tensor


def digest_of(modules: dict[str, LowRankModule]) -> str:
    """Returns the digest of the values of modules, in the order of the dictionary."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name, module in modules.items():
        order = " interleaved" if module.is_interleaved else ""
        if module.num_experts:
            order = f" {module.num_experts} {module.is_of_old_peft}"
        digest.update(f"{name} {module.scale!r} {module.a.dtype} {module.a.shape} {module.b.shape}{order}\0".encode())
        for half in (module.a, module.b):
            digest.update(half.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_bounded(path: pathlib.Path, max_bytes: int) -> bytearray:
    """Returns the content of an adapter's file. Raises `ModelError` if it has more than twice `max_bytes`, and as
    `open_file` does.
    """
    with open_file(path.parent, path.name) as file:
        data = bytearray(file.read(2 * max_bytes + 1))
    if len(data) > 2 * max_bytes:
        raise ModelError(f"{path} has more than twice {max_bytes} bytes; raise max_adapter_bytes")
    return data


def wrong_shape(adapter: Adapter, module: str, half: str, tensor: torch.Tensor, wanted: str) -> ModelError:
    """Returns the error for a half of a module that does not fit the base model."""
    return ModelError(
        f"{adapter.source}: lora_{half} of {module} has shape {list(tensor.shape)}, and this model asks for {wanted}; "
        "take the adapter's own base model"
    )

"""Reads an adapter that PEFT saved: a folder with `adapter_config.json` and `adapter_model.safetensors`.

The folder's author is not trusted: pickles are never opened, files must lie in the folder, and every tensor must be
half of a module that the base model has. The whole file is read before anything of it is used, so that it may be
replaced at any time.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import torch

from manta.workers.adapters.peft_config import CONFIG, PeftConfig, read_peft_config
from manta.workers.checkpoints.checkpoint import DTYPES
from manta.workers.checkpoints.memory import FLOATING, TensorEntry, read_header, usual_name
from manta.workers.checkpoints.stored_files import COPY_AGAIN, find_file, lfs_pointer, open_file
from manta.workers.models.model_config import ModelError

WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_PREFIX = "base_model.model."
_HALVES = {".lora_A.weight": "A", ".lora_B.weight": "B"}
_DIGEST_BYTES = 16


class LowRankModule(NamedTuple):
    """What an adapter adds to one module: `scale * (x @ a.T) @ b.T`."""

    a: torch.Tensor
    """[rank, in_features]"""
    b: torch.Tensor
    """[out_features, rank]"""
    scale: float


class Adapter(NamedTuple):
    """An adapter as it was read."""

    folder: pathlib.Path
    base_model: str
    """The base model that it names; empty if it names none."""
    digest: str
    """Hexadecimal digest of all values: names, numbers and scales of its modules."""
    modules: dict[str, LowRankModule]
    """By the modules' names in the base model."""

    @property
    def rank(self) -> int:
        """The highest rank of a module."""
        return max(len(module.a) for module in self.modules.values())


def read_adapter(path: str, max_bytes: int) -> Adapter:
    """Reads an adapter's folder. `max_bytes` is the memory that adapters may take: stored in float32 and kept in
    bfloat16, the file may have twice as many.

    Raises `ModelError` naming the file, key or tensor that is missing, damaged or not supported.
    """
    folder = pathlib.Path(path).expanduser()
    if not folder.is_dir():
        raise ModelError(f"adapter {path}: there is no such folder; give a local folder that PEFT saved")
    if find_file(folder, CONFIG) is None:
        raise ModelError(f"adapter {folder} holds no {CONFIG}; give a folder that PEFT saved with save_pretrained")
    config = read_peft_config(folder)
    entries, data = _read_weights(folder, max_bytes)
    return _assembled(folder, config, {name: _tensor(folder, name, entry, data) for name, entry in entries.items()})


def describe_adapters(folders: Mapping[str, str], max_bytes: int) -> tuple[str, ...]:
    """Reads adapters by name, and returns what each is in words. Raises `ModelError` as `read_adapter` does."""
    read = {name: read_adapter(path, max_bytes) for name, path in folders.items()}
    return tuple(f"{name}: rank {each.rank}, {len(each.modules)} linears" for name, each in read.items())


def _read_weights(folder: pathlib.Path, max_bytes: int) -> tuple[dict[str, TensorEntry], bytearray]:
    """Returns the tensors' places in the file, and the whole file."""
    if find_file(folder, WEIGHTS) is None:
        if find_file(folder, _PICKLE) is not None:
            raise ModelError(
                f"adapter {folder} holds {_PICKLE}, a pickle, which is never opened; save it as safetensors "
                "(save_pretrained with safe_serialization=True)"
            )
        raise ModelError(f"adapter {folder} holds no {WEIGHTS}; {COPY_AGAIN}")
    if (pointer := lfs_pointer(folder, WEIGHTS)) is not None:
        raise ModelError(pointer)
    entries, data = read_header(folder / WEIGHTS), read_weights_file(folder, max_bytes)
    if len(data) != max((entry.end for entry in entries.values()), default=0):
        raise ModelError(f"{folder / WEIGHTS} holds no tensors, or changed while it was read; {COPY_AGAIN}")
    return entries, data


def read_weights_file(folder: pathlib.Path, max_bytes: int) -> bytearray:
    """Returns the whole file of an adapter's values. Raises `ModelError` if it has more than twice `max_bytes`."""
    with open_file(folder, WEIGHTS) as file:
        data = bytearray(file.read(2 * max_bytes + 1))
    if len(data) > 2 * max_bytes:
        raise ModelError(f"{folder / WEIGHTS} has more than twice {max_bytes} bytes; raise max_adapter_bytes")
    return data


def _tensor(folder: pathlib.Path, name: str, entry: TensorEntry, data: bytearray) -> torch.Tensor:
    """Returns a matrix as a view of the file. Raises `ModelError` if it is none, or holds what is no number."""
    if entry.dtype not in FLOATING:
        raise ModelError(f"{folder / WEIGHTS}: tensor {name} is {entry.dtype}; only {', '.join(FLOATING)} is read")
    dtype = DTYPES[entry.dtype]
    count = (entry.end - entry.start) // dtype.itemsize
    if len(entry.shape) != 2 or count != entry.shape[0] * entry.shape[1] or count == 0:
        raise ModelError(f"{folder / WEIGHTS}: tensor {name} has shape {list(entry.shape)}, and is no matrix")
    tensor = torch.frombuffer(data, dtype=dtype, count=count, offset=entry.start).view(entry.shape)
    if not tensor.isfinite().all():
        raise ModelError(f"{folder / WEIGHTS}: tensor {name} holds infinities or what is no number; {COPY_AGAIN}")
    return tensor


def _assembled(folder: pathlib.Path, config: PeftConfig, tensors: dict[str, torch.Tensor]) -> Adapter:
    """Joins the two halves of each module and compares them with the configuration."""
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        suffix = next((each for each in _HALVES if name.endswith(each)), None)
        if suffix is None or not name.startswith(_PREFIX):
            raise ModelError(
                f"{folder / WEIGHTS}: tensor {name} is none of a plain LoRA adapter, whose tensors are called "
                f"{_PREFIX}MODULE.lora_A.weight and .lora_B.weight"
            )
        module = usual_name(name.removeprefix(_PREFIX).removesuffix(suffix))
        if halves.setdefault(module, {}).setdefault(_HALVES[suffix], tensor) is not tensor:
            raise ModelError(f"{folder / WEIGHTS}: module {module} has its lora_{_HALVES[suffix]} twice")
    modules = {name: _module(folder, config, name, own) for name, own in sorted(halves.items())}
    for target in config.targets or ():
        if not any(f".{name}".endswith(f".{target}") for name in modules):
            raise ModelError(f"{folder}: {CONFIG} names the target module {target}, and no tensor is of one")
    return Adapter(folder, config.base_model, _digest_of(modules), modules)


def _module(folder: pathlib.Path, config: PeftConfig, name: str, halves: dict[str, torch.Tensor]) -> LowRankModule:
    for half in ("A", "B"):
        if half not in halves:
            raise ModelError(f"{folder / WEIGHTS}: module {name} has no lora_{half}; {COPY_AGAIN}")
    a, b, rank = halves["A"], halves["B"], config.rank_of(name)
    if (len(a), b.shape[1]) != (rank, rank):
        raise ModelError(
            f"{folder / WEIGHTS}: the rank of {name} is {rank} in {CONFIG}, and its tensors have the shapes "
            f"{list(a.shape)} and {list(b.shape)}; {COPY_AGAIN}"
        )
    return LowRankModule(a, b, config.scale_of(name))


def _digest_of(modules: dict[str, LowRankModule]) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name, module in modules.items():
        digest.update(f"{name} {module.scale!r} {module.a.dtype} {module.a.shape} {module.b.shape}\0".encode())
        for half in (module.a, module.b):
            digest.update(half.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()

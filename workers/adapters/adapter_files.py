"""Reads an adapter that PEFT saved: a folder with `adapter_config.json` and `adapter_model.safetensors`. Adapters in
GGUF files are left to `gguf_adapter.py`.

The folder's author is not trusted: pickles are never opened, files must lie in the folder, and every tensor must be
half of a module that the base model has. The whole file is read before anything of it is used, so that it may be
replaced at any time.
"""

from __future__ import annotations

import pathlib

import torch

from manta.workers.adapters.adapter_sources import local_adapter
from manta.workers.adapters.combined_adapter import combine, parts_of
from manta.workers.adapters.gguf_adapter import SUFFIX, read_gguf_adapter
from manta.workers.adapters.low_rank_adapter import Adapter, LowRankModule, digest_of, matrix_of, read_bounded
from manta.workers.adapters.peft_config import CONFIG, WEIGHTS, PeftConfig, read_peft_config
from manta.workers.checkpoints.memory import TensorEntry, read_header, usual_name
from manta.workers.checkpoints.stored_files import COPY_AGAIN, find_file, lfs_pointer
from manta.workers.models.model_config import ModelError

_PICKLE = "adapter_model.bin"
_PREFIX = "base_model.model."
_HALVES = {".lora_A.weight": "A", ".lora_B.weight": "B"}
_INNER = ".base_layer"
_WRAPPERS = (".experts", f".experts{_INNER}")
"""Ends of the names of what changes a parameter of all experts of a layer. PEFT wraps a second one around the first."""
_GATED, _DOWN = ("gate_up_proj", "up_proj"), "down_proj"
"""Names of these parameters."""


def read_adapter(path: str, max_bytes: int) -> Adapter:
    """Reads an adapter's folder, or its GGUF file; `path` is that of `local_adapter`, or of a combination
    (`combined_path`). `max_bytes` is the memory that adapters may take: stored in float32 and kept in bfloat16, the
    file may have twice as many.

    Raises `ModelError` naming the file, key or tensor that is missing, damaged or not supported.
    """
    if parts := parts_of(path):
        return combine(path, parts, [read_adapter(each.path, max_bytes) for each in parts])
    with local_adapter(path, max_bytes) as local:
        return _read(local, max_bytes)._replace(source=path)


def _read(folder: pathlib.Path, max_bytes: int) -> Adapter:
    if folder.suffix == SUFFIX and folder.is_file():
        return read_gguf_adapter(folder, max_bytes)
    if not folder.is_dir():
        raise ModelError(
            f"adapter {folder}: there is no such folder; give a folder that PEFT saved, an adapter's GGUF file, a hub "
            "id or a URL"
        )
    if find_file(folder, CONFIG) is None:
        raise ModelError(f"adapter {folder} holds no {CONFIG}; give a folder that PEFT saved with save_pretrained")
    config = read_peft_config(folder)
    entries, data = _read_weights(folder, max_bytes)
    view, file = memoryview(data), folder / WEIGHTS
    tensors = {
        name: matrix_of(file, name, each.dtype, each.shape, view[each.start : each.end])
        for name, each in entries.items()
    }
    return _assembled(folder, config, tensors)


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
    entries, data = read_header(folder / WEIGHTS), read_bounded(folder / WEIGHTS, max_bytes)
    if len(data) != max((entry.end for entry in entries.values()), default=0):
        raise ModelError(f"{folder / WEIGHTS} holds no tensors, or changed while it was read; {COPY_AGAIN}")
    return entries, data


def _assembled(folder: pathlib.Path, config: PeftConfig, tensors: dict[str, torch.Tensor]) -> Adapter:
    """Joins the two halves of each module and compares them with the configuration, whose expressions are about the
    names that the file has. Those of a text decoder in a multimodal model differ from the usual ones.
    """
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        suffix = next((each for each in _HALVES if name.endswith(each)), None)
        if suffix is None or not name.startswith(_PREFIX):
            raise ModelError(
                f"{folder / WEIGHTS}: tensor {name} is none of a plain LoRA adapter, whose tensors are called "
                f"{_PREFIX}MODULE.lora_A.weight and .lora_B.weight; merge the adapter into its base model (peft: "
                "merge_and_unload), or save it with save_embedding_layers=False if it trained no embedding and no head"
            )
        halves.setdefault(name.removeprefix(_PREFIX).removesuffix(suffix), {})[_HALVES[suffix]] = tensor
    wrapped = {name: halves.pop(name) for name in list(halves) if config.parameters and name.endswith(_WRAPPERS)}
    stored = {name: _module(folder, config, name, own) for name, own in halves.items()}
    stored |= _stacked_modules(folder, config, wrapped)
    for kind, targets in (("module", config.targets or ()), ("parameter", config.parameters)):
        for target in dict.fromkeys(targets):
            if not any(f".{name}".endswith(f".{target.removesuffix('.weight')}") for name in stored):
                raise ModelError(f"{folder}: {CONFIG} names the target {kind} {target}, and no tensor is of one")
    modules: dict[str, LowRankModule] = {}
    for name, module in sorted(stored.items()):
        if modules.setdefault(usual_name(name), module) is not module:
            raise ModelError(f"{folder / WEIGHTS}: module {usual_name(name)} is there twice, also as {name}")
    modules = dict(sorted(modules.items()))
    return Adapter(str(folder), config.base_model, digest_of(modules), modules)


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


def _stacked_modules(
    folder: pathlib.Path, config: PeftConfig, wrapped: dict[str, dict[str, torch.Tensor]]
) -> dict[str, LowRankModule]:
    """Joins the two halves of modules of all experts of a layer, under the names of the parameters that they change,
    which PEFT does not store: of two it wraps the second linear's around the first one's.
    """
    leaves = [leaf for leaf in (*_GATED, _DOWN) if any(each.rpartition(".")[2] == leaf for each in config.parameters)]
    modules = {}
    for container in sorted({name.removesuffix(_INNER) for name in wrapped}):
        own = [wrapped[name] for name in (container + _INNER, container) if name in wrapped]
        if len(own) != len(leaves) or any(len(halves) < len(_HALVES) for halves in own):
            raise ModelError(f"{folder / WEIGHTS}: {container} and the parameters of {CONFIG} differ; {COPY_AGAIN}")
        for leaf, halves in zip(leaves, own, strict=True):
            name, (a, b) = f"{container}.{leaf}", (halves["A"], halves["B"])
            rank = config.rank_of(name)
            if len(a) != b.shape[1] or len(a) % rank:
                raise ModelError(
                    f"{folder / WEIGHTS}: the rank of {name} is {rank} in {CONFIG}, and its tensors have the shapes "
                    f"{list(a.shape)} and {list(b.shape)}; {COPY_AGAIN}"
                )
            of_all = len(a) // rank, config.is_old
            modules[name] = LowRankModule(a, b, config.scale_of(name), False, *of_all)
    return modules

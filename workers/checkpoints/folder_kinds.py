"""Explains what a path is that was given as a model but holds none, and what to give instead.

Reads names and the first bytes of files.
"""

from __future__ import annotations

import pathlib

from manta.workers.checkpoints.gguf_parts import models_in
from manta.workers.checkpoints.stored_files import read_json
from manta.workers.models.model_config import ModelError

_OTHER_WEIGHTS = {"*.bin": "PyTorch's own format", "*.gguf": "GGUF, llama.cpp's format", "*.onnx": "ONNX"}
_MOST_SHOWN = 8
"""Most files that a message lists."""


def why_no_folder(path: pathlib.Path) -> str | None:
    """Describes a file that was given instead of a folder; None if there is no file."""
    if not path.is_file():
        return None
    if path.name == "config.json" or path.suffix in (".safetensors", ".json"):
        return f"{path} is one file of a model; give its folder, {path.parent}"
    return f"{path} is a file; give a folder with config.json and safetensors, or a GGUF file"


def why_no_checkpoint(folder: pathlib.Path) -> str:
    """Describes a folder without `config.json`."""
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        return (
            f"{folder} is a LoRA adapter{_of_base(adapter)}; give its base model as the model, and this folder under a "
            "name in adapters (--lora-modules NAME=FOLDER)"
        )
    snapshots = _with_config(folder / "snapshots")
    if snapshots:
        return f"{folder} is a folder of the hub's cache; give its snapshot, {snapshots[-1]}"
    if ggufs := models_in(folder):
        shown = ", ".join(str(path) for path in ggufs[:_MOST_SHOWN]) + ", …" * (len(ggufs) > _MOST_SHOWN)
        return f"{folder} holds no config.json but {len(ggufs)} GGUF models; give one of {shown}"
    models = _with_config(folder)
    if models:
        return f"{folder} holds no config.json, and {len(models)} of its folders do; give one, such as {models[0]}"
    return f"{folder} holds no config.json; give a folder in Hugging Face format"


def why_no_weights(folder: pathlib.Path) -> str:
    """Describes a folder without `model.safetensors`."""
    for pattern, name in _OTHER_WEIGHTS.items():
        if any(folder.glob(pattern)):
            return f"{folder} holds no model.safetensors, and weights in {name} only; save them as safetensors"
    return f"{folder} holds no model.safetensors; download the weights too"


def _with_config(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the subfolders that hold a model, the newest last."""
    found = [path.parent for path in folder.glob("*/config.json")]
    return sorted(found, key=lambda path: (path.stat().st_mtime, path))


def _of_base(adapter: pathlib.Path) -> str:
    try:
        named = read_json(adapter.parent, adapter.name).get("base_model_name_or_path")
    except ModelError:
        return ""
    return f" for {named}" if isinstance(named, str) else ""

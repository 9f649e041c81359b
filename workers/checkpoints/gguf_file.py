"""Serves a GGUF file as a checkpoint: writes a folder in the cache that stands for this version of the file.

The folder has `config.json` and the tokenizer in Hugging Face's format. In place of weights it has an index of the
tensors in the file. The keys: https://github.com/ggml-org/ggml, `docs/gguf.md`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from manta.workers.checkpoints.gguf_architectures import (
    ARCHITECTURES,
    EXPERT,
    LayerTensor,
    head_name_of,
    layer_tensor,
    name_of,
)
from manta.workers.checkpoints.gguf_config import IN_CONFIG, gguf_config
from manta.workers.checkpoints.gguf_forms import form_of, form_of_whole, usual_shape
from manta.workers.checkpoints.gguf_metadata import GgufFile
from manta.workers.checkpoints.gguf_parts import first_part, parts_of, read_model
from manta.workers.checkpoints.memory import GGUF_INDEX, GGUF_NO_TOKENIZER, gguf_cache
from manta.workers.checkpoints.stored_files import lfs_pointer
from manta.workers.models.model_config import ModelError

_FOLDER = re.compile(r".+-[0-9a-f]{16}|\.new-.{8}")
"""Form of the names of these folders, finished and not."""
_OF_TOWERS = ("v.", "a.", "mm.")
"""Beginnings of llama.cpp's names of tensors that see, hear, or join both to a text decoder."""
_WITH_JOINED_HEADS, _JOINED_HEADS = ("chatglm",), "qkv_proj"
"""Architectures of which files may hold queries, keys and values as one tensor, and its name."""
_MOST_NAME_BYTES = 128
"""Most bytes of a file's name that the folder's name has."""
_LAYOUT = 8
"""Version of the folder's contents. Folders of another version are not used."""


def gguf_folder(path: pathlib.Path) -> pathlib.Path:
    """Returns the folder that stands for a GGUF file or all files of a split model, and writes it if it does not exist.

    Raises `ModelError` if the file is damaged, or if its architecture or a tensor's type is not served.
    """
    path = first_part(path.absolute())
    parts = [each.resolve() for each in parts_of(path) if each.is_file()]
    identity = f"{_LAYOUT} {[(str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in parts]}"
    name = hashlib.blake2b(os.fsencode(identity), digest_size=8).hexdigest()
    folder = gguf_cache() / f"{_shortened(path.stem)}-{name}"
    if _is_whole(folder):
        return folder
    for each in parts:
        if (pointer := lfs_pointer(each.parent, each.name)) is not None:
            raise ModelError(pointer)
    try:
        new = pathlib.Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
        try:
            _write(read_model(path), new)
            _forget_gone(folder.parent)
            _rename(new, folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"{path} needs a folder in {folder.parent}: {error.strerror}; set MANTA_CACHE") from error
    return folder


def _shortened(name: str) -> str:
    """Returns the beginning of a name, so that more fits behind it into the name of a folder."""
    return os.fsencode(name)[:_MOST_NAME_BYTES].decode(errors="ignore")


def _forget_gone(parent: pathlib.Path) -> None:
    """Removes the folders of files that no longer exist."""
    for index in parent.glob(f"*/{GGUF_INDEX}"):
        if not _FOLDER.fullmatch(index.parent.name):
            continue
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # another process removes it too
            if not all(pathlib.Path(path).exists() for path in json.loads(index.read_text())["files"]):
                shutil.rmtree(index.parent, ignore_errors=True)


def _rename(new: pathlib.Path, folder: pathlib.Path) -> None:
    """Renames a folder, unless another process has done so. Removes a torn folder of this name first."""
    try:
        new.rename(folder)
    except OSError:
        if _is_whole(folder):
            return
        shutil.rmtree(folder)
        new.rename(folder)


def _is_whole(folder: pathlib.Path) -> bool:
    """Returns whether the folder has an index, which is written last, and all files that the index names."""
    try:
        files = json.loads((folder / GGUF_INDEX).read_text())["folder"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # none, torn, or of another version
        return False


def _write(file: GgufFile, folder: pathlib.Path) -> None:
    config = gguf_config(file)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    no_tokenizer = _write_tokenizer(file, config["vocab_size"], folder)
    index = _index(file, config) | {GGUF_NO_TOKENIZER: no_tokenizer}
    index["folder"] = {each.name: each.stat().st_size for each in folder.iterdir()}
    (folder / GGUF_INDEX).write_text(json.dumps(index))
    for each in folder.iterdir():
        with each.open("rb") as written:
            os.fsync(written.fileno())  # before the folder gets its name


def _index(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the place of each tensor: the number of its file, and its `TensorEntry`. The tensor of all experts of a
    layer becomes one for each. What sees or hears in Ollama's files is left out, and so are draft heads but the first.
    """
    architecture, tensors = file.architecture, {}
    for stored, (kind, shape, start, num_bytes, number) in file.tensors.items():
        if stored in IN_CONFIG or stored.startswith(_OF_TOWERS):
            continue
        place = layer_tensor(stored)
        name = _usual_name(architecture, stored, place, config)
        if name is None:
            continue
        if place is None:
            form = form_of_whole(architecture, stored)
        else:
            form = form_of(architecture, place.part, shape, config)
            shape = usual_shape(place.part, shape)
        changes = {key: value for key, value in form._asdict().items() if value}
        if EXPERT not in name:
            for part, rows, own_start, own_end in _parts(architecture, name, shape, start, num_bytes, config):
                tensors[part] = (number, kind, (rows, *shape[1:]), own_start, own_end, changes)
            continue
        own_bytes = num_bytes // shape[0]
        for expert in range(shape[0]):
            own_start = start + expert * own_bytes
            own = (number, kind, shape[1:], own_start, own_start + own_bytes, changes)
            tensors[name.replace(EXPERT, str(expert))] = own
    return {"files": {str(path): path.stat().st_size for path in file.paths}, "tensors": tensors}


def _parts(
    architecture: str, name: str, shape: tuple[int, ...], start: int, num_bytes: int, config: dict[str, Any]
) -> Iterator[tuple[str, int, int, int]]:
    """Yields name, number of rows, start and end of each tensor in transformers that a tensor of the file holds: one,
    or queries, keys and values.
    """
    if architecture not in _WITH_JOINED_HEADS or _JOINED_HEADS not in name:
        yield name, shape[0], start, start + num_bytes
        return
    query, key = (config[heads] * config["head_dim"] for heads in ("num_attention_heads", "num_key_value_heads"))
    if shape[0] != query + 2 * key:
        raise ModelError(f"a GGUF file's tensor for {name} has {shape[0]} rows, and its heads have {query + 2 * key}")
    row_bytes = num_bytes // shape[0]
    for part, rows in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
        yield name.replace(_JOINED_HEADS, part), rows, start, start + rows * row_bytes
        start += rows * row_bytes


def _usual_name(architecture: str, stored: str, place: LayerTensor | None, config: dict[str, Any]) -> str | None:
    """Returns transformers' name of a tensor, perhaps with `EXPERT` in it; None if it is left out."""
    own, num_layers = ARCHITECTURES[architecture], config["num_hidden_layers"]
    if place is None or place.layer < num_layers:
        return name_of(own, stored)
    is_read = place.layer == num_layers and config["architectures"] == [own.model]
    return head_name_of(own, place) if is_read else None


def _write_tokenizer(file: GgufFile, num_rows: int, folder: pathlib.Path) -> str | None:
    """Writes the tokenizer. Returns why the file has none; then only the option `tokenizer` can name one."""
    from manta.workers.checkpoints.gguf_tokenizer import write_tokenizer

    try:
        write_tokenizer(file.path, file.values, num_rows, folder)
    except ModelError as error:
        return str(error)
    return None

"""The files of a GGUF model: one, or several that llama.cpp's `llama-gguf-split` has made of one.

Each file of a split model has its own tensors, and the first one all metadata. A name ends in `-00001-of-00003.gguf`.
The names are those of links too, because the hub's cache holds files without names, and links to them.
"""

from __future__ import annotations

import pathlib
import re

from manta.workers.checkpoints.gguf_header import read_gguf_header
from manta.workers.checkpoints.gguf_metadata import GgufFile
from manta.workers.checkpoints.gguf_values import check_values
from manta.workers.models.model_config import ModelError
from manta.workers.models.raw_config import RawConfig

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MOST_PARTS = 9999
_TOWER = "mmproj"
"""Part of the name of each file with nothing but a model's towers that see or hear, as llama.cpp looks for them."""
_MOST_LINKS = 40
"""Most links that are followed, as Linux follows them."""


def first_part(path: pathlib.Path) -> pathlib.Path:
    """Returns the first file of the model that a file belongs to, by its name; the file itself if it is alone. If only
    the file to which a link leads has such a name, that one's counts.
    """
    given = path
    for _ in range(_MOST_LINKS):
        if _PART.fullmatch(path.name) or not path.is_symlink():
            break
        path = path.parent / path.readlink()
    found = _PART.fullmatch(path.name)
    return given if found is None else path.with_name(_part_name(found[1], 1, int(found[3])))


def parts_of(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns all files of the model whose first file this is, by their names."""
    found = _PART.fullmatch(path.name)
    count = 1 if found is None else min(int(found[3]), _MOST_PARTS)
    if found is None or count < 2:
        return [path]
    return [path.with_name(_part_name(found[1], number + 1, count)) for number in range(count)]


def models_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the first file of each GGUF model in a folder, without hidden ones and those that see or hear for a model
    beside them.
    """
    found = [path for path in folder.glob("*.gguf") if not path.name.startswith(".")]
    return sorted({first_part(path) for path in found if _TOWER not in path.name.lower()})


def read_model(path: pathlib.Path) -> GgufFile:
    """Reads the headers of a model's files, given the first. Raises `ModelError` if one is missing or damaged, or
    belongs to another model.
    """
    paths = parts_of(path)
    values, tensors = read_gguf_header(path)
    check_values(values, str(path))
    metadata = RawConfig(values, str(path))
    count = metadata["split.count"].whole(1, least=0)
    if max(1, count) != len(paths):
        raise ModelError(
            f"{path} is one of {count} files of a model, and its name says {len(paths)}; give it the name that ends in "
            f"{_part_name('', 1, count)}, beside the others"
        )
    for number, other in enumerate(paths[1:], start=1):
        if not other.is_file():
            raise ModelError(f"{other} is missing, one of the {count} files of a model; copy it there")
        own_values, own = read_gguf_header(other)
        own_metadata = RawConfig(own_values, str(other))
        own_metadata["split.no"].whole(least=number, most=number)
        own_metadata["split.count"].whole(least=count, most=count)
        if twice := sorted(tensors.keys() & own.keys()):
            raise ModelError(f"{other} and a file before it both hold {twice[0]}; take the files of one model")
        tensors |= {name: tensor._replace(file=number) for name, tensor in own.items()}
    if count > 1:
        metadata["split.tensors.count"].whole(len(tensors), least=len(tensors), most=len(tensors))
    return GgufFile(tuple(each.resolve() for each in paths), metadata, tensors)


def _part_name(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number:05}-of-{count:05}.gguf"

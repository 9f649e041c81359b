"""Files of GGUF models: in several parts, behind links, and with names of all kinds."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest

from manta.workers.checkpoints.gguf_file import gguf_folder
from manta.workers.checkpoints.gguf_parts import models_in
from manta.workers.checkpoints.memory import GGUF_INDEX, gguf_cache
from manta.workers.checkpoints.model_folder import load_model_config, resolve_model_folder
from manta.workers.models.model_config import ModelError
from tests.converted_gguf import convert
from tests.workers.test_gguf_architectures import converted, original
from tests.workers.test_quantised_formats import expected_of, greedy


def split(folder: pathlib.Path, name: str = "olmo2") -> list[pathlib.Path]:
    """Writes a model as several files. The first holds metadata alone."""
    folder.mkdir(exist_ok=True)
    convert(original(name), folder / f"{name}.gguf", tensors_each=20)
    return sorted(folder.glob(f"{name}-*.gguf"))


def test_a_split_model_is_served_by_any_of_its_files_or_its_folder(tmp_path: pathlib.Path) -> None:
    parts = split(tmp_path)
    assert len(parts) > 2
    folders = {resolve_model_folder(str(path)) for path in (*parts, tmp_path)}
    assert len(folders) == 1
    assert greedy(parts[1]) == expected_of(original("olmo2"))


def test_links_to_the_files_of_a_model_are_followed(tmp_path: pathlib.Path) -> None:
    """The hub's cache holds files without names, and links that have the names. A link may have any other name."""
    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    snapshot.mkdir()
    blobs.mkdir()
    for number, part in enumerate(split(tmp_path / "written")):
        part.rename(blobs / f"{number:064}")
        (snapshot / part.name).symlink_to(f"../blobs/{number:064}")
    links = sorted(snapshot.iterdir())
    named = tmp_path / "current.gguf"
    named.symlink_to(tmp_path / "again.gguf")
    (tmp_path / "again.gguf").symlink_to(links[1])
    alone = tmp_path / "models"
    alone.mkdir()
    for name in ("mine.gguf", "yours.gguf"):
        (alone / name).symlink_to(f"../blobs/{0:064}")
    assert models_in(alone) == [alone / "mine.gguf", alone / "yours.gguf"], "names of links are names of models"
    (folder,) = {resolve_model_folder(str(path)) for path in (*links, snapshot, named)}
    index = json.loads((folder / GGUF_INDEX).read_text())
    assert [*index["files"]] == [str(path) for path in sorted(blobs.iterdir())], "another target is another model"
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    with pytest.raises(ModelError):
        resolve_model_folder(str(tmp_path / "loop.gguf"))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["é" * 124, "a" * 250, "caf\udce9", "a\nb", " ", "100%.x", "-q", "模型 [1]"])
def test_a_file_may_have_any_name(name: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / f"{name}.gguf"
    shutil.copy(converted("olmo2"), path)
    folder = gguf_folder(path)
    assert (gguf_folder(path), folder.parent) == (folder, gguf_cache())
    assert load_model_config(folder).num_layers > 0


def test_a_folder_with_what_a_model_sees_with_is_that_models(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.gguf").symlink_to(converted("olmo2"))
    (tmp_path / "mmproj-a-F16.gguf").symlink_to(converted("olmo2"))
    assert resolve_model_folder(str(tmp_path)) == gguf_folder(tmp_path / "a.gguf")


def test_parts_that_are_missing_or_foreign_are_named(tmp_path: pathlib.Path) -> None:
    first, second, *_, last = split(tmp_path)
    kept = last.read_bytes()
    last.unlink()
    with pytest.raises(ModelError, match=f"{last.name} is missing"):
        gguf_folder(first)
    last.write_bytes(second.read_bytes())
    with pytest.raises(ModelError, match=r"split\.no"):
        gguf_folder(first)
    last.write_bytes(kept[:-64])
    with pytest.raises(ModelError, match=f"{last.name} is truncated"):
        gguf_folder(first)
    last.write_bytes(kept)
    first.rename(tmp_path / "whole.gguf")
    with pytest.raises(ModelError, match="its name says 1; give it the name that ends in -00001-of-"):
        gguf_folder(tmp_path / "whole.gguf")

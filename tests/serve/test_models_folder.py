"""Which models a folder (`models_dir`) holds, in the layouts of llama.cpp's router and of downloads."""

from __future__ import annotations

import errno
import os
import pathlib

import msgspec
import pytest

from manta.cluster.config import load_config
from manta.cluster.models_folder import with_models_dir


def test_folders_of_gguf_files_are_models_too(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """As llama.cpp's router has them: a folder is a model if it holds one, and else each of its models is. A name that
    is not UTF-8 and a folder that cannot be read take no other model along.
    """
    files = (
        "gemma/gemma-Q4.gguf",
        "gemma/mmproj-F16.gguf",
        "split/b-00001-of-00002.gguf",
        "split/b-00002-of-00002.gguf",
    )
    files += ("pair/main.gguf", "pair/draft.gguf", "Übung_1/ü.gguf", "towers/mmproj-F16.gguf", "notes/README.md")
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    os.mkdir(os.fsencode(tmp_path) + b"/caf\xe9")
    (tmp_path / "caf\udce9" / "m.gguf").write_bytes(b"")
    (tmp_path / "caf\udce9.gguf").write_bytes(b"")
    unreadable = tmp_path / "lost+found"
    unreadable.mkdir()
    found = pathlib.Path.is_file

    def is_file(path: pathlib.Path) -> bool:
        if path.parent == unreadable:
            raise PermissionError(errno.EACCES, "Permission denied")
        return found(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pathlib.Path, "is_file", is_file)
        models = with_models_dir(load_config(None, {"models_dir": str(tmp_path)})).models
    assert {model.model_name for model in models} == {"gemma", "split", "draft", "main", "Übung_1"}
    assert msgspec.json.encode(models), "the list goes to other processes"
    assert caplog.text.count("is left out") == 3

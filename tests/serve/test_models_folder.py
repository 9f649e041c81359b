"""Which models a folder (`models_dir`) holds, in the layouts of llama.cpp's router and of downloads."""

from __future__ import annotations

import errno
import os
import pathlib
from typing import Any

import msgspec
import pytest

from manta.cluster.config import load_config
from manta.cluster.models_folder import with_models_dir
from manta.cluster.serve import app


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


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with two checkpoints, a GGUF file, one in two parts, and what is no model."""
    for name in ("qwen", "llama", ".cache"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    for name in ("small.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", ".hidden.gguf", "README.md"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "mmproj-small-F16.gguf").write_bytes(b"")
    return tmp_path


def test_a_folder_is_a_list_of_models(folder: pathlib.Path) -> None:
    options = {"models_dir": str(folder), "engine.dtype": "float32", "default_model": "small"}
    config = with_models_dir(load_config(None, options | {"models": [{"name": "first", "model": "demo"}]}))
    assert [model.model_name for model in config.models] == ["first", "llama", "qwen", "big-00001-of-00002", "small"]
    assert [model.on_demand for model in config.models] == [False, True, True, True, True]
    assert {model.engine.dtype for model in config.models} == {"float32"}
    assert config.models[1].engine.model == str(folder / "llama")
    assert config.models_dir is None
    config.check_default_model()
    assert [each.model_name for each in config.of_each_model_at_start] == ["first"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"models_dir": "{folder}/notes"}, "holds no model"),
        ({"models_dir": "{folder}/nowhere"}, "cannot be read"),
        ({"models_dir": "{folder}", "engine.model": "other"}, "engine.model is other"),
        ({"models_dir": "{folder}", "served_model_name": "a"}, "served_model_name"),
        ({"models_dir": "{folder}", "models": [{"name": "llama"}]}, "'llama' is a name of llama and of llama"),
        ({"models": [{"name": "a", "on_demand": True}], "max_loaded_models": 0}, "max_loaded_models"),
        ({"models": [{"name": "a", "on_demand": True}], "min_loaded_s": -1}, "min_loaded_s"),
        ({"models": [{"name": "a", "on_demand": True}], "max_loaded_bytes": "1GB"}, "kv_cache_bytes"),
        ({"models_dir": "{folder}", "max_loaded_bytes": "1GB"}, "kv_cache_bytes"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused(options: dict[str, Any], words: str, folder: pathlib.Path) -> None:
    given = {name: value.format(folder=folder) if isinstance(value, str) else value for name, value in options.items()}
    with pytest.raises(ValueError, match=words):
        with_models_dir(load_config(None, given))


def test_an_address_lists_models(folder: pathlib.Path) -> None:
    def listed(built: Any) -> list[tuple[str, bool, str]]:
        models = built._bound_deployment.init_args[-1]._bound_deployment.init_args[0]
        return [(each.model_name, each.on_demand, each.engine.dtype) for each in models]

    models = [{"name": "a", "model": "demo", "on_demand": True}, {"name": "b", "model": "demo"}]
    options = {"http_server": "listener", "engine": {"dtype": "float32"}, "models": models}
    assert listed(app.build_address(options)) == [("a", True, "float32"), ("b", False, "float32")]
    found = listed(app.build_address({"models_dir": str(folder)}))
    assert [name for name, _, _ in found] == ["llama", "qwen", "big-00001-of-00002", "small"]
    llm = [{"model_loading_config": {"model_id": "c", "model_source": "demo"}, "engine_kwargs": {"dtype": "half"}}]
    assert listed(app.build_app({"llm_configs": llm})) == [("c", False, "float16")]
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        app.build_app({"llm_configs": [llm[0] | {"engine_kwargs": {"gpu_memory_utilization": 0.9}}]})
    with pytest.raises(ValueError, match="llm_configs"):
        app.build_app({"models": models})
    with pytest.raises(ValueError, match="on_demand"):
        app.build_model({"name": "a", "on_demand": True})

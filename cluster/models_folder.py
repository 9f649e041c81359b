"""The models in a folder (`models_dir`), each of which becomes an entry of `models` that is loaded on demand."""

from __future__ import annotations

import pathlib

import msgspec

from manta.cluster.config import ServeConfig, ServedModel
from manta.workers.checkpoints.gguf_parts import models_in


def with_models_dir(config: ServeConfig) -> ServeConfig:
    """Returns the configuration with the models of its `models_dir` among `models`, so that it names none any more.
    What `engine` sets holds for each of them. Raises `ValueError` if the folder cannot be read or holds no model, and
    if a name has two owners.
    """
    if config.models_dir is None:
        return config
    folder = pathlib.Path(config.models_dir).expanduser().resolve()
    try:
        paths = _models_of(folder)
    except OSError as error:
        raise ValueError(f"models_dir: {folder} cannot be read: {error.strerror}") from error
    if not paths:
        raise ValueError(f"models_dir: {folder} holds no model; put folders with a config.json, or GGUF files, into it")
    found = [
        ServedModel(on_demand=True, engine=msgspec.structs.replace(config.engine, model=str(path))) for path in paths
    ]
    return msgspec.structs.replace(config, models_dir=None, models=(*config.models, *found))


def _models_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folders of checkpoints in a folder, and the first file of each GGUF model. Hidden ones are left
    out.
    """
    folders = [path for path in sorted(folder.iterdir()) if (path / "config.json").is_file()]
    return [path for path in (*folders, *models_in(folder)) if not path.name.startswith(".")]

"""The models in a folder (`models_dir`), each of which becomes an entry of `models` that is loaded on demand."""

from __future__ import annotations

import os
import pathlib

import msgspec

from manta.cluster.config import ServeConfig, ServedModel
from manta.structured.visible_logs import logger_of
from manta.workers.checkpoints.gguf_parts import models_in

logger = logger_of(__name__)


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
    """Returns what is a model in a folder: folders of checkpoints, folders of GGUF files as `_of_subfolder` has them,
    and GGUF files. Hidden ones are left out, and so is what cannot be read or named, with a warning.
    """
    found: list[pathlib.Path] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if not _has_text(path):
            logger.warning("models_dir: %r is left out, because its name is not UTF-8", os.fsencode(path))
            continue
        try:
            found += _of_subfolder(path) if path.is_dir() else []
        except OSError as error:
            logger.warning("models_dir: %s is left out, because it cannot be read: %s", path, error.strerror)
    return [*found, *filter(_has_text, models_in(folder))]


def _of_subfolder(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folder if it holds a checkpoint or nothing but one GGUF model, else the GGUF models in it."""
    if (folder / "config.json").is_file():
        return [folder]
    models = [path for path in models_in(folder) if _has_text(path)]
    return [folder] if len(models) == 1 else models


def _has_text(path: pathlib.Path) -> bool:
    """Returns whether a path is UTF-8, so that it can stand in a configuration."""
    return os.fsencode(path).decode(errors="ignore") == str(path)

"""The files of a tokenizer other than `tokenizer.json`: their places, its configuration and its chat templates."""

from __future__ import annotations

import json
import pathlib
from typing import Any

_SPECIAL_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TokenizerError(ValueError):
    """The tokenizer's files are missing or unusable; the message says which and what to do."""


def resolve_folder(folder: str | pathlib.Path) -> pathlib.Path:
    """Returns the folder itself if it exists, else the one that the model loader finds for the name. Raises
    `TokenizerError` if it finds none.
    """
    path = pathlib.Path(folder).expanduser()
    if path.is_dir():
        return path
    from manta.workers.checkpoints.model_folder import resolve_model_folder
    from manta.workers.models.model_config import ModelError

    try:
        return resolve_model_folder(str(folder))
    except ModelError as error:
        raise TokenizerError(f"tokenizer: {error}") from error


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file; empty if there is no such file. Raises `TokenizerError` if it holds anything
    else.
    """
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise TokenizerError(f"{path} must hold an object, not a {type(data).__name__}")
    return data


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Returns the texts of the special tokens in a `tokenizer_config.json`, by role, such as `eos_token`."""
    found = {}
    for role in _SPECIAL_ROLES:
        value = config.get(role)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[role] = value
    return found


def has_chat_template(folder: pathlib.Path) -> bool:
    """Returns whether the model in a folder has a chat template; reads no large file."""
    return bool(read_chat_templates(folder, read_json(folder / "tokenizer_config.json")))


def read_chat_templates(folder: pathlib.Path, config: dict[str, Any]) -> dict[str, str]:
    """Returns the sources of a model's chat templates by name. They come from the first of `chat_template.jinja`,
    `chat_template.json` and `config` (that of `tokenizer_config.json`) that holds any.
    """
    sources: dict[str, str] = {}
    file = folder / "chat_template.jinja"
    if file.is_file():
        sources["default"] = file.read_text(encoding="utf-8")
        for other in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            sources[other.stem] = other.read_text(encoding="utf-8")
        return sources
    found = read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, str):
        sources["default"] = found
    elif isinstance(found, list):
        sources = {entry["name"]: entry["template"] for entry in found}
    elif isinstance(found, dict):
        sources = dict(found)
    return sources

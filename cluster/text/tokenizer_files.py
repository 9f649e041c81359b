"""The files of a tokenizer other than `tokenizer.json`: their places, its configuration and its chat templates."""

from __future__ import annotations

import pathlib

import msgspec

from manta.workers.checkpoints.stop_tokens import added_token_id
from manta.workers.checkpoints.stored_files import MOST_TEMPLATE_BYTES, find_file, read_json, read_text
from manta.workers.models.model_config import ModelError
from manta.workers.models.raw_config import RawConfig, RawValue

_SPECIAL_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
OTHER_TEMPLATES = "additional_chat_templates"
"""Folder of the chat templates beside the first one."""
_MOST_TEMPLATES = 100


class TokenizerError(ModelError):
    """The tokenizer's files are missing or unusable; the message says which and what to do."""


class DeclaredToken(msgspec.Struct, frozen=True):
    """A token that `tokenizer_config.json` declares in `added_tokens_decoder`."""

    content: str
    is_special: bool
    options: dict[str, bool]
    """Flags of `tokenizers.AddedToken` that are given, such as `lstrip`."""


class TokenizerConfig(msgspec.Struct, frozen=True):
    """The checked content of `tokenizer_config.json`, and the chat templates wherever they are."""

    special_tokens: dict[str, str] = {}
    """Texts of the special tokens by role, such as `eos_token`."""
    declared: tuple[DeclaredToken, ...] = ()
    """In the order of their ids."""
    extra: tuple[str, ...] = ()
    """Texts of further special tokens without a role."""
    chat_templates: dict[str, str] = {}
    """Sources of the chat templates by name."""


def resolve_folder(folder: str | pathlib.Path) -> pathlib.Path:
    """Returns the folder itself if it exists, else the one that the model loader finds for the name. Raises
    `TokenizerError` if it finds none.
    """
    path = pathlib.Path(folder).expanduser()
    if path.is_dir():
        return path
    from manta.workers.checkpoints.model_folder import resolve_model_folder

    try:
        return resolve_model_folder(str(folder))
    except ModelError as error:
        raise TokenizerError(f"tokenizer: {error}") from error


def read_tokenizer_config(folder: pathlib.Path) -> TokenizerConfig:
    """Reads `tokenizer_config.json`, which may be missing, and the chat templates. `manta check` and every start read
    them through this function.

    Raises `ModelError` naming the file, and the key whose value is not what transformers writes there.
    """
    raw = _read(folder, _CONFIG)
    declared = raw["added_tokens_decoder"].object()
    in_order = sorted((declared[key] for key in declared), key=added_token_id)
    extra = raw.first_of("additional_special_tokens", "extra_special_tokens")
    named = {role: _content(raw[role]) for role in _SPECIAL_ROLES if raw[role].value is not None}
    return TokenizerConfig(named, tuple(map(_declared, in_order)), _extra(extra), _chat_templates(folder, raw))


def has_chat_template(folder: pathlib.Path) -> bool:
    """Returns whether the model in a folder has a chat template; reads no large file. Raises `ModelError` as
    `read_tokenizer_config` does.
    """
    return bool(read_tokenizer_config(folder).chat_templates)


def _read(folder: pathlib.Path, name: str) -> RawConfig:
    values = {} if find_file(folder, name) is None else read_json(folder, name)
    return RawConfig(values, str(folder / name))


def _content(value: RawValue) -> str:
    """Returns the text of a token, which is given alone or in an object with its flags."""
    if isinstance(value.value, dict):
        return value.object()["content"].text()
    return value.text()


def _declared(value: RawValue) -> DeclaredToken:
    entry = value.object()
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    options = {name: entry[name].flag(False) for name in flags if entry[name].value is not None}
    return DeclaredToken(entry["content"].text(), entry["special"].flag(False), options)


def _extra(value: RawValue) -> tuple[str, ...]:
    if isinstance(value.value, dict):
        by_name = value.object()
        return tuple(_content(by_name[name]) for name in by_name)
    return () if value.value is None else tuple(map(_content, value.items()))


def _chat_templates(folder: pathlib.Path, config: RawConfig) -> dict[str, str]:
    """Returns the sources of a model's chat templates by name. They come from the first of `chat_template.jinja`,
    `chat_template.json` and `config` that holds any.
    """
    if find_file(folder, _TEMPLATE) is not None:
        others = sorted((folder / OTHER_TEMPLATES).glob("*.jinja"))
        if len(others) > _MOST_TEMPLATES:
            raise TokenizerError(
                f"{folder / OTHER_TEMPLATES} holds {len(others)} templates and the limit is {_MOST_TEMPLATES}; "
                "remove some"
            )
        texts = {path.stem: read_text(folder, f"{OTHER_TEMPLATES}/{path.name}", MOST_TEMPLATE_BYTES) for path in others}
        return {"default": read_text(folder, _TEMPLATE, MOST_TEMPLATE_BYTES)} | texts
    found = _read(folder, "chat_template.json")["chat_template"]
    if not found.value:
        found = config["chat_template"]
    if isinstance(found.value, list):
        entries = [entry.object() for entry in found.items()]
        templates = {entry["name"].text(): entry["template"] for entry in entries}
    elif isinstance(found.value, dict):
        by_name = found.object()
        templates = {name: by_name[name] for name in by_name}
    else:
        templates = {"default": found} if found.value is not None else {}
    if len(templates) > _MOST_TEMPLATES:
        raise found.refused(f"at most {_MOST_TEMPLATES} templates, instead of {len(templates)}")
    return {name: _source(template) for name, template in templates.items()}


def _source(template: RawValue) -> str:
    source = template.text()
    if len(source) > MOST_TEMPLATE_BYTES:
        raise template.refused(f"at most {MOST_TEMPLATE_BYTES} characters, instead of {len(source)}")
    return source

"""Finds the end-of-sequence token that only a tokenizer names, in its files.

The engine and `manta check` add it to the tokens of `config.json` and `generation_config.json`. Makes no tokenizer.
"""

from __future__ import annotations

import pathlib

from manta.workers.checkpoints.model_folder import read_json_object, resolve_model_folder
from manta.workers.checkpoints.stored_files import MOST_JSON_BYTES, MOST_TOKENIZER_BYTES, find_file
from manta.workers.models.raw_config import MOST_VOCABULARY, RawConfig, RawValue


def with_tokenizers_eos(eos_token_ids: tuple[int, ...], folder: str | pathlib.Path, vocab_size: int) -> tuple[int, ...]:
    """Returns a model's end-of-sequence tokens, and the tokenizer's if it is another one and the model can draw it.

    `folder` is the tokenizer's, given as a model's is. Raises `ModelError` if a file in it cannot be read.
    """
    path = pathlib.Path(folder).expanduser()
    token_id = _eos_token_id(path if path.is_dir() else resolve_model_folder(str(folder)))
    if token_id is None or token_id >= vocab_size:
        return eos_token_ids
    return tuple(dict.fromkeys((*eos_token_ids, token_id)))


def _eos_token_id(folder: pathlib.Path) -> int | None:
    """Returns the id of the token that `tokenizer_config.json` calls `eos_token`; None if it names none, or one that
    neither it nor `tokenizer.json` has.
    """
    config = _read(folder, "tokenizer_config.json", MOST_JSON_BYTES)
    named = config["eos_token"]
    text = named.object()["content"].value if isinstance(named.value, dict) else named.value
    if not isinstance(text, str):
        return None
    for added in config["added_tokens_decoder"].object().objects():
        if added.object()["content"].value == text:
            return added_token_id(added)
    tokenizer = _read(folder, "tokenizer.json", MOST_TOKENIZER_BYTES)
    listed = tokenizer["added_tokens"]
    for added in listed.items() if listed.value else ():
        if added.object()["content"].value == text:
            return added.object()["id"].whole(least=0)
    vocabulary = tokenizer["model"].object()["vocab"]
    if not isinstance(vocabulary.value, dict):
        return None
    found = vocabulary.object()[text]
    return None if found.value is None else found.whole(least=0)


def added_token_id(entry: RawValue) -> int:
    """Returns the token id that is the key of an entry of `added_tokens_decoder`. Raises `ConfigError` for others."""
    spelled = entry.key.removeprefix("added_tokens_decoder.")
    is_id = spelled.isascii() and spelled.isdecimal() and len(spelled) <= len(str(MOST_VOCABULARY))
    if not is_id or int(spelled) >= MOST_VOCABULARY:
        raise entry.refused(f"under the id of a token, from 0 to {MOST_VOCABULARY - 1}, instead of {spelled!r}")
    return int(spelled)


def _read(folder: pathlib.Path, name: str, most_bytes: int) -> RawConfig:
    if find_file(folder, name) is None:
        return RawConfig({}, str(folder / name))
    return read_json_object(folder, name, most_bytes)

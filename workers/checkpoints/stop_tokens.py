"""Finds the end-of-sequence token that only a tokenizer names, in its files.

The engine and `manta check` add it to the tokens of `config.json` and `generation_config.json`. Makes no tokenizer.
"""

from __future__ import annotations

import pathlib

from manta.workers.checkpoints.model_folder import read_json_object, resolve_model_folder
from manta.workers.models.raw_config import RawConfig


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
    config = _read(folder / "tokenizer_config.json")
    named = config["eos_token"]
    text = named.object()["content"].value if isinstance(named.value, dict) else named.value
    if not isinstance(text, str):
        return None
    for added in config["added_tokens_decoder"].object().objects():
        if added.object()["content"].value == text:
            return int(added.key.rpartition(".")[2])
    tokenizer = _read(folder / "tokenizer.json")
    listed = tokenizer["added_tokens"]
    for added in listed.items() if listed.value else ():
        if added.object()["content"].value == text:
            return added.object()["id"].whole(least=0)
    vocabulary = tokenizer["model"].object()["vocab"]
    if not isinstance(vocabulary.value, dict):
        return None
    found = vocabulary.object()[text]
    return None if found.value is None else found.whole(least=0)


def _read(path: pathlib.Path) -> RawConfig:
    return read_json_object(path) if path.is_file() else RawConfig({}, str(path))

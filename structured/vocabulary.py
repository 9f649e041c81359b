"""The part of a tokenizer that grammar backends need, read from `tokenizer.json`: which bytes a token stands for.

Plain data that can be sent to processes. Imports neither torch nor transformers. `cluster/text/tokenizer.py` encodes
and decodes text.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
from collections.abc import Iterable

import msgspec
import numpy as np

from manta.structured.constraint import ConstraintError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary(msgspec.Struct, frozen=True, array_like=True):
    """A tokenizer, and the width of the logits that it is used with."""

    tokenizer_json: str
    vocab_size: int
    """The logits' padded width: ids from the tokenizer's size on are padding and never allowed."""
    eos_token_ids: tuple[int, ...]

    @classmethod
    def load(cls, folder: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
        """Raises `ConstraintError` if the folder's `tokenizer.json` cannot be read."""
        path = pathlib.Path(folder).expanduser() / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            cause = f"constraints need the tokenizer's vocabulary, and {path} cannot be read ({error.strerror})"
            remedy = "save the tokenizer in the fast format"
            raise ConstraintError.because("unfit", "", cause=cause, remedy=remedy) from error
        return cls(_same(text), vocab_size, eos_token_ids)

    @property
    def tokens(self) -> list[bytes]:
        """The bytes of each id below the tokenizer's size: a special token has its name's, an unused id has none."""
        return tokens_of(self.tokenizer_json)

    @property
    def special_token_ids(self) -> list[int]:
        """Tokens that do not stand for text: a grammar can allow them only by name."""
        return _tables(self.tokenizer_json)[1]

    @property
    def mark_token_ids(self) -> list[int]:
        """The special tokens, and the added tokens that are written `<...>`, such as `<tool_call>`: no text holds them,
        so a grammar means other tokens by the same characters.
        """
        return _tables(self.tokenizer_json)[2]

    def difference(self, other: Vocabulary) -> str | None:
        """Returns in words where an id means another token than in another vocabulary; None if all mean the same."""
        if self.tokenizer_json == other.tokenizer_json:
            return None
        pairs = enumerate(zip(self.tokens, other.tokens, strict=False))
        differing_id = next((token_id for token_id, (own, others) in pairs if own != others), None)
        if differing_id is not None:
            return f"they differ at id {differing_id}"
        if len(self.tokens) != len(other.tokens):
            return f"{len(self.tokens)} and {len(other.tokens)} tokens"
        return None if self.special_token_ids == other.special_token_ids else "other tokens are special"

    def byte_token_ids(self) -> dict[int, int]:
        """Returns the token of each byte that has one of its own. Most vocabularies of trained tokenizers lack some."""
        return _byte_token_ids(self.tokenizer_json)[0]

    def bytes_without_token(self) -> bytes:
        """Returns the bytes that occur in the text of a token, and that have no token of their own."""
        return _byte_token_ids(self.tokenizer_json)[1]

    def forbid_padding(self, rows: np.ndarray) -> None:
        """Clears the bits of unused ids at the end of packed rows, int32 [..., words]."""
        num_words, num_bits = divmod(min(len(self.tokens), self.vocab_size), 32)
        words = rows.view(np.uint32)
        if num_bits:
            words[..., num_words] &= np.uint32((1 << num_bits) - 1)
            num_words += 1
        words[..., num_words:] = 0

    def set_tokens(self, rows: np.ndarray, token_ids: Iterable[int], allow: bool) -> None:
        """Allows or forbids tokens in packed rows, int32 [..., words]."""
        words = rows.view(np.uint32)
        for token_id in token_ids:
            word, bit = token_id // 32, np.uint32(1 << token_id % 32)
            if allow:
                words[..., word] |= bit
            else:
                words[..., word] &= ~bit


def tokens_of(tokenizer_json: str) -> list[bytes]:
    """The bytes of each token of a `tokenizer.json`, as `Vocabulary.tokens` has them."""
    return _tables(tokenizer_json)[0]


@functools.lru_cache(maxsize=4)
def _same(text: str) -> str:
    """One object for all equal texts, so that the cache of `_tables`, which is asked at every row, finds a text by
    identity: comparing megabytes would take 2 ms.
    """
    return text


@functools.lru_cache(maxsize=4)
def _tables(tokenizer_json: str) -> tuple[list[bytes], list[int], list[int]]:
    """(bytes of each id, ids of special tokens, ids of marks)."""
    data = json.loads(tokenizer_json)
    vocab = data["model"]["vocab"]
    names = {token: index for index, (token, _) in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
    added = {entry["id"]: entry for entry in data.get("added_tokens", [])}
    size = max([*names.values(), *added], default=-1) + 1
    tokens = [b""] * size
    is_byte_level = '"ByteLevel"' in json.dumps([data.get("decoder"), data.get("pre_tokenizer")])
    decode = _byte_level if is_byte_level else _metaspace
    for name, index in names.items():
        tokens[index] = decode(name)
    for index, entry in added.items():
        tokens[index] = entry["content"].encode()
    special = {index for index, entry in added.items() if entry.get("special")}
    marks = {index for index, entry in added.items() if entry["content"][:1] == "<" and entry["content"][-1:] == ">"}
    return tokens, sorted(special), sorted(special | marks)


@functools.lru_cache(maxsize=4)
def _byte_token_ids(tokenizer_json: str) -> tuple[dict[int, int], bytes]:
    """(the token of each byte that has one, the bytes that occur only within longer tokens)."""
    tokens, special, _ = _tables(tokenizer_json)
    is_special = frozenset(special)
    texts = {token_id: token for token_id, token in enumerate(tokens) if token_id not in is_special}
    found = {token[0]: token_id for token_id, token in texts.items() if len(token) == 1}
    return found, bytes(sorted(set().union(*texts.values()) - found.keys()))


def _byte_level(name: str) -> bytes:
    table = byte_of_character()
    try:
        return bytes(table[character] for character in name)
    except KeyError:
        return name.encode()  # an added token holds plain text


def _metaspace(name: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(name)
    return bytes([int(match[1], 16)]) if match else name.replace("\u2581", " ").encode()


@functools.cache
def byte_of_character() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's table), inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}

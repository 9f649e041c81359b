"""Splits the text that a constraint forces into tokens, as the model's tokenizer would, but never into special ones.

llguidance forces whole tokens: where only one text may follow, its masks leave one token. A tokenizer takes the name of
a special token for that token, which does not stand for text, so a forced text must be split by another one. The
llguidance backend makes llguidance's tokenizer of this one.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

from manta.structured.vocabulary import Vocabulary


class ForcedText:
    """Tells `llguidance.LLTokenizer` the bytes of each token, and splits texts for it.

    `num_markers` tokens behind the model's `vocab_size` stand for nothing that a model writes. Behind these, each of
    the vocabulary's `bytes_without_token` has a token, so that any text can be followed byte by byte.
    """

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary, num_markers: int) -> None:
        width = vocabulary.vocab_size + num_markers
        known = vocabulary.tokens
        named = (f"<[{token_id}]>".encode() for token_id in range(len(known), width))
        self.tokens = [*known, *named, *(bytes([byte]) for byte in vocabulary.bytes_without_token())]
        """The bytes of each token, and the names of those that stand for no text."""
        self.special_token_ids = [*vocabulary.mark_token_ids, *range(len(known), width)]
        """Tokens that no text holds: a grammar allows them only by name or id."""
        self.eos_token_id = next(iter(vocabulary.eos_token_ids), width - 1)
        self.bos_token_id = None
        self._marks = frozenset(vocabulary.mark_token_ids)
        self._by_bytes = {token: token_id for token_id, token in reversed(list(enumerate(known)))}
        for token_id in self._marks:
            self._by_bytes.pop(known[token_id], None)
        self._longest = max(map(len, self._by_bytes), default=0)
        self._tokenizer = _without_marks(vocabulary.tokenizer_json, self._marks)

    def __call__(self, text: str) -> list[int]:
        """Returns tokens that stand for exactly `text`: the tokenizer's, or the longest that fit, one after another, if
        the tokenizer gives a mark or another text. A normaliser may change a text.
        """
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        wanted = text.encode()
        if self._marks.isdisjoint(found) and b"".join(self.tokens[token_id] for token_id in found) == wanted:
            return found
        return self._longest_first(wanted)

    def _longest_first(self, text: bytes) -> list[int]:
        """Leaves out bytes that no token has: no model can write them."""
        found: list[int] = []
        at = 0
        while at < len(text):
            for end in range(min(len(text), at + self._longest), at, -1):
                token_id = self._by_bytes.get(text[at:end])
                if token_id is not None:
                    found.append(token_id)
                    at = end
                    break
            else:
                at += 1
        return found


def _without_marks(tokenizer_json: str, marks: frozenset[int]) -> Tokenizer:
    """The tokenizer that takes marks' names for text, and that puts no space before a text."""
    data = json.loads(tokenizer_json)
    for entry in data.get("added_tokens", []):
        entry["special"] = entry["id"] in marks
    data["normalizer"] = _without_prefix(data.get("normalizer"))
    data["pre_tokenizer"] = _without_prefix(data.get("pre_tokenizer"))
    data["post_processor"] = data["truncation"] = data["padding"] = None
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.encode_special_tokens = True  # as text
    return tokenizer


def _without_prefix(part: Any) -> Any:
    """A normaliser or pre-tokenizer without what puts a space before a text; None if nothing is left."""
    if part is None or part["type"] == "Prepend":
        return None
    inner = next((name for name in ("normalizers", "pretokenizers") if name in part), None)
    if inner is not None:
        parts = [each for each in map(_without_prefix, part[inner]) if each is not None]
        return {**part, inner: parts} if parts else None
    if part["type"] == "Metaspace":
        part = {**part, "prepend_scheme": "never"}
    return {**part, "add_prefix_space": False} if "add_prefix_space" in part else part

"""Writes texts for Lark grammars in llguidance's dialect: literals, special tokens, parts of regular expressions."""

from __future__ import annotations

import re
from collections.abc import Callable

from manta.cluster.protocol.constraint_fields import json_text

TokenId = Callable[[str], int | None]
"""A function that returns the id of the token with a given name, or None."""

_MARK = re.compile(r"(<\|[^|<>]*\|>|<｜[^｜<>]*｜>|</?[\w:]+>|<\|\w+>|<\w+\|>|\[/?[A-Z_]+\])")
"""Texts that some tokenizers have as one special token."""
ANY_TEXT = "(?s:.*)"


def literal(text: str, token_id: TokenId) -> str:
    """Returns an expression of a rule that matches `text`: its special tokens as tokens, the rest as it stands."""
    parts = []
    for part in _MARK.split(text):
        found = token_id(part) if _MARK.fullmatch(part) else None
        if found is not None:
            parts.append(f"<[{found}]>")
        elif parts and parts[-1].startswith('"') and part:
            parts[-1] = parts[-1][:-1] + json_text(part)[1:]
        elif part:
            parts.append(json_text(part))
    return " ".join(parts)


def starts_with_token(text: str, token_id: TokenId) -> bool:
    """Returns whether `literal` begins with a special token."""
    return literal(text, token_id).startswith("<[")


def escaped(text: str) -> str:
    """Returns `text` as a part of a regular expression between slashes."""
    return "".join(c if c.isalnum() and c.isascii() else rf"\U{ord(c):08x}" for c in text)


def without(text: str) -> str:
    """Returns a regular expression of the texts that contain `text`, to be excluded by `& ~`."""
    return f"/{ANY_TEXT}{escaped(text)}{ANY_TEXT}/"

"""The key of an adapter: which values are added to a model's, and what they are multiplied by.

Requests, sequences and the prefix cache know it as a text: the digest of the values, and behind a star the factor,
unless it is 1. Several adapters that act together have one key, with theirs in it. Imports no framework.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_STAR = "*"
_AND = "&"


class AdapterKey(NamedTuple):
    """An adapter as a sequence has it."""

    digest: str
    """Hexadecimal digest of the adapter's values (`AdapterInfo.digest`)."""
    scale: float = 1.0
    """Factor on what the adapter adds, beside that of the adapter itself."""

    @classmethod
    def of(cls, text: str) -> AdapterKey:
        """Returns the key that `text` has made. That of several adapters has their text in the place of a digest,
        which no values have.
        """
        if _AND in text:
            return cls(text)
        digest, star, scale = text.partition(_STAR)
        return cls(digest, float(scale) if star else 1.0)

    @property
    def text(self) -> str:
        return self.digest if self.scale == 1 else f"{self.digest}{_STAR}{self.scale!r}"


def text_of(keys: Iterable[AdapterKey]) -> str:
    """Returns the text of the adapters that act together, in any order; empty for none."""
    return _AND.join(sorted(key.text for key in keys))


def keys_of(text: str) -> tuple[AdapterKey, ...]:
    """Returns the keys of the adapters that act together, of which `text_of` has made a text."""
    return tuple(map(AdapterKey.of, text.split(_AND))) if text else ()

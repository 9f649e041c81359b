"""The key of an adapter: which values are added to a model's, and what they are multiplied by.

Requests, sequences and the prefix cache know it as a text: the digest of the values, and behind a star the factor,
unless it is 1. Imports no framework.
"""

from __future__ import annotations

from typing import NamedTuple

_STAR = "*"


class AdapterKey(NamedTuple):
    """An adapter as a sequence has it."""

    digest: str
    """Hexadecimal digest of the adapter's values (`AdapterInfo.digest`)."""
    scale: float = 1.0
    """Factor on what the adapter adds, beside that of the adapter itself."""

    @classmethod
    def of(cls, text: str) -> AdapterKey:
        """Returns the key that `text` has made."""
        digest, star, scale = text.partition(_STAR)
        return cls(digest, float(scale) if star else 1.0)

    @property
    def text(self) -> str:
        return self.digest if self.scale == 1 else f"{self.digest}{_STAR}{self.scale!r}"

"""Bounds on one request body, checked before any work that grows with it.

Without these bounds a body of a few kilobytes could block the ingress for seconds, and every stream with it. The
decoder of bodies and the endpoints call this module; each refusal is a `RequestRefused` that names value, bound and
remedy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from manta.cluster.config import BodyLimits
from manta.cluster.errors import refuse

MAX_TOOLS = 128
"""Most tools of one body, as in OpenAI's API. If their grammar is refused, each tool is compiled by itself to find the
one at fault.
"""
MAX_STOP_CHARACTERS = 4096
"""Most characters of all stop strings together, because each token is searched for them."""
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARACTERS = 20_000
"""Most characters of all `bad_words` together. They are tokenised, and each token is searched for them."""
MAX_CHOICES = 128
"""Largest `n`, as in OpenAI's API. An engine with a smaller `max_num_sequences` refuses earlier."""

MAX_METADATA = 16
"""Most pairs of `metadata`; this bound and the next two are those of OpenAI's API."""
MAX_METADATA_KEY_CHARACTERS = 64
MAX_METADATA_VALUE_CHARACTERS = 512


def check_num_values(body: bytes, limits: BodyLimits) -> None:
    """Checks the number of JSON values before decoding. Each value of a list or an object follows a comma or an opening
    bracket, so these are counted.
    """
    num_values = body.count(b",") + body.count(b"[") + body.count(b"{")
    if num_values > limits.max_values:
        unit, remedy = "values (commas and opening brackets count)", "send less, or raise body.max_values"
        refuse("over_limit", "", num_values, limits.max_values, remedy, unit=unit)


def check_sizes(body: Any) -> None:
    """Checks the lists that have the same limit everywhere. Raises `RequestRefused` naming the field."""
    for field, what, size, limit in _sizes(body):
        if size > limit:
            refuse("over_limit", field, size, limit, "leave some out", unit=what)


def _sizes(body: Any) -> Iterator[tuple[str, str, int, int]]:
    """Yields a field, what is counted in it, how many there are, and how many are allowed."""
    if tools := getattr(body, "tools", None):
        yield "tools", "entries", len(tools), MAX_TOOLS
    if stop := getattr(body, "stop", None):
        yield "stop", "characters", len(stop) if isinstance(stop, str) else sum(map(len, stop)), MAX_STOP_CHARACTERS
    if words := getattr(body, "bad_words", None):
        yield "bad_words", "entries", len(words), MAX_BAD_WORDS
        yield "bad_words", "characters", sum(map(len, words)), MAX_BAD_WORD_CHARACTERS


def check_metadata(metadata: dict[str, str] | None) -> None:
    if not metadata:
        return
    if len(metadata) > MAX_METADATA:
        refuse("over_limit", "metadata", len(metadata), MAX_METADATA, "leave some out", unit="pairs")
    longest_key, longest_value = max(map(len, metadata)), max(map(len, metadata.values()))
    for what, length, limit in (
        ("key", longest_key, MAX_METADATA_KEY_CHARACTERS),
        ("value", longest_value, MAX_METADATA_VALUE_CHARACTERS),
    ):
        if length > limit:
            refuse("over_limit", "metadata", length, limit, "shorten it", unit=f"characters in a {what}")


def check_n(n: int) -> None:
    if not 1 <= n <= MAX_CHOICES:
        bound = f"between 1 and {MAX_CHOICES}"
        refuse("wrong_value", "n", n, bound, "send several requests for more choices")


def refuse_length(field: str, length: int, limit: int) -> NoReturn:
    """Refuses a text that is empty or too long."""
    if length:
        refuse("over_limit", field, length, limit, "shorten it", unit="characters")
    refuse("empty", field, remedy="leave it out")

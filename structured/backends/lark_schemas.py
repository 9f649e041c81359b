"""Finds the JSON schemas within a Lark grammar, `%json {...}`, such as those of tools' arguments."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from manta.structured.schemas.numbers import json_decoder

_LEXEMES = re.compile(
    r"""
    (?P<json> %json\s* )
    | " (?: \\. | [^"\\\n] )* "     # a string
    | / (?!/) (?: \\. | [^/\\] )+ / # a regular expression
    | (?: \# | // ) [^\n]*          # a comment
    """,
    re.VERBOSE | re.DOTALL,
)
"""Parts of a grammar that may hold `%json`; only in the first is it a schema."""
_TOKEN_IDS = re.compile(r"<\[([^\]<>]*)\]>")
_UNKNOWN_LENGTH = re.compile(r"\bmax_tokens\s*=|<\[\s*[*^]")
"""A bound on tokens, and references to all tokens or to all but some."""


class EmbeddedSchema(NamedTuple):
    """A schema within a grammar's text."""

    start: int
    """Index of its `%json`."""
    end: int
    """Index behind it."""
    schema: Any


def embedded_schemas(grammar: str) -> list[EmbeddedSchema]:
    """Returns the schemas of a Lark grammar in order. Raises `ValueError` if the text behind a `%json` is no JSON."""
    found: list[EmbeddedSchema] = []
    at, decoder = 0, json_decoder()
    while (match := _LEXEMES.search(grammar, at)) is not None:
        at = match.end()
        if match["json"]:
            schema, at = decoder.raw_decode(grammar, at)
            found.append(EmbeddedSchema(match.start(), at, schema))
    return found


def with_replaced(grammar: str, found: list[EmbeddedSchema], texts: list[str]) -> str:
    """The grammar with a text in the place of each of its schemas."""
    parts, end = [], 0
    for each, text in zip(found, texts, strict=True):
        parts += [grammar[end : each.start], text]
        end = each.end
    return "".join([*parts, grammar[end:]])


def named_token_ids(grammar: str) -> frozenset[int]:
    """Tokens that a Lark grammar names by their ids: `<[5]>`, `<[7-9,12]>`."""
    found: set[int] = set()
    for ranges in _TOKEN_IDS.findall(grammar):
        for text in ranges.split(","):
            low, _, high = text.partition("-")
            if low.strip().isdigit():
                found |= set(range(int(low), int(high or low) + 1))
    return frozenset(found)


def counts_tokens(grammar: str) -> bool:
    """Whether a Lark grammar depends on how its text is divided into tokens."""
    return _UNKNOWN_LENGTH.search(grammar) is not None

"""Extreme numbers in every numeric field of every body, alone and in pairs, and in every numeric query and header.

Fields are found in the server's OpenAPI document, so that a new one is fuzzed too. Values are JSON texts, because some
of them (10^400, NaN) are no values of Python's `json`.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

from tests.fuzz.http.connection import request
from tests.fuzz.http.good import CHAT, COMPLETIONS

_TENTH = 10**5
_LONGEST_URL = 6000
"""Characters of a number in a URL or header; longer heads are refused as such."""
EXTREMES: dict[str, str] = {
    **{name: name for name in ("0", "-0.0", "-1", "1.5", "5e-324", "1e-45", "1e-38", "1e308", "1e400", "-1e400")},
    **{name: name for name in ("NaN", "Infinity", "-Infinity", "null", "true", '"1"', "{}")},
    **{
        f"2^{power}{step:+}": str(2**power + step)
        for power, step in itertools.product((31, 32, 53, 63, 64), (-1, 0, 1))
    },
    "-2^31-1": str(-(2**31) - 1),
    "-2^63-1": str(-(2**63) - 1),
    "10^400": "1" + "0" * 400,
    "-10^400": "-1" + "0" * 400,
    "10^5000": "1" + "0" * 5000,
    "a list of 10^5": json.dumps([1] * _TENTH),
    "a list of 10^5 large": "[" + ",".join([str(2**63)] * _TENTH) + "]",
}
"""Name to JSON text."""

_BASES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "The quick", "max_tokens": 4},
    CHAT: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [5, 9]},
}
_SCHEMA = '{"type": "json_schema", "json_schema": {"name": "a", "schema": %s}}'
_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems")


class Place(NamedTuple):
    """Where a number stands in a body: `text` is the JSON of the field's value with `%s` in the number's place."""

    path: str
    field: str
    text: str = "%s"


def places(document: dict[str, Any]) -> list[Place]:
    """Every place of a number in the bodies of `_BASES`."""
    return [place for path in _BASES for place in _places_of(path, document)]


def _places_of(path: str, document: dict[str, Any]) -> Iterator[Place]:
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    for field, schema in document["components"]["schemas"][reference.rpartition("/")[2]]["properties"].items():
        kinds = _kinds(schema)
        if {"integer", "number"} & set(kinds):
            yield Place(path, field)
        if "array" in kinds:
            yield from (Place(path, field, text) for text in ("[%s]", "[1, %s, 2]", "[[%s]]"))
    if path in (COMPLETIONS, CHAT):
        yield from (Place(path, "logit_bias", text) for text in ('{"5": %s}', '{"%s": 1}'))
        yield Place(path, "logits_processors", '[{"name": "automaton", "arguments": {"num_states": %s}}]')
        yield Place(path, "logits_processors", '[{"name": "automaton", "arguments": {"num_states": 5, "x": [%s]}}]')
        for keyword in _KEYWORDS:
            kind = {"L": "string", "I": "array"}.get(keyword[3], "number")
            yield Place(path, "response_format", _SCHEMA % f'{{"type": "{kind}", "{keyword}": %s}}')
        yield Place(path, "response_format", _SCHEMA % '{"enum": [%s]}')
        yield Place(path, "structured_outputs", '{"regex": "a{%s}"}')
    if path == CHAT:
        yield Place(path, "chat_template_kwargs", '{"a": %s}')


def _kinds(schema: dict[str, Any]) -> list[str]:
    kinds = schema.get("type", [])
    found = [kinds] if isinstance(kinds, str) else list(kinds)
    return found + [kind for option in schema.get("anyOf", ()) for kind in _kinds(option)]


def body(model: str, path: str, *numbers: tuple[Place, str]) -> bytes:
    """A request's body; each of `numbers` is a place and the name of the extreme that stands there."""
    fields = {name: json.dumps(value) for name, value in {"model": model, **_BASES[path]}.items()}
    for place, name in numbers:
        fields[place.field] = place.text.replace("%s", EXTREMES[name])
    return ("{" + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}").encode()


_HEADERS = {
    "x-resumable-s": ("%s",),
    "content-length": ("%s",),
    "last-event-id": ("%s", f"strm_{'0' * 38}:%s"),
    "x-request-id": ("%s",),
    "range": ("bytes=%s-",),
    "traceparent": ("00-%s-%s-01",),
}
"""Headers that hold numbers, or that a server might read one from, and their forms."""


def queries(document: dict[str, Any], ids: dict[str, str]) -> Iterator[bytes]:
    """Requests with each extreme in each numeric parameter of a URL. `ids` has names of things for the paths."""
    for path, methods in document["paths"].items():
        for parameter in methods.get("get", {}).get("parameters", ()):
            if parameter["in"] == "query" and {"integer", "number"} & set(_kinds(parameter["schema"])):
                for text in EXTREMES.values():
                    value = quote(text[:_LONGEST_URL])
                    yield request(f"{path.format(**ids)}?stream=true&{parameter['name']}={value}", b"", "GET")


def headers(model: str, ids: dict[str, str]) -> Iterator[bytes]:
    """Requests with each extreme in each header."""
    stream = json.dumps({"model": model, **_BASES[COMPLETIONS], "stream": True}).encode()
    reads = f"/v1/streams/{ids['stream_id']}"
    for (name, forms), text in itertools.product(_HEADERS.items(), EXTREMES.values()):
        for form in forms:
            given = {name: form.replace("%s", text[:_LONGEST_URL])}
            yield request(reads, b"", "GET", **given)
            yield request(COMPLETIONS, stream, **given)


def drawn(document: dict[str, Any], model: str, generator: random.Random) -> tuple[str, bytes]:
    """(path, body) with one or two extremes."""
    first = generator.choice(places(document))
    others = [place for place in _places_of(first.path, document) if place.field != first.field]
    chosen = [first, generator.choice(others)] if others and generator.random() < 0.6 else [first]
    return first.path, body(model, first.path, *((place, generator.choice(list(EXTREMES))) for place in chosen))

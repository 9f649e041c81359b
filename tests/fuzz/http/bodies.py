"""Bodies that may be wrong: good ones with something changed, JSON that is none, and what schemathesis draws from
`/openapi.json`.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import hypothesis
import schemathesis
from schemathesis import GenerationMode

from tests.fuzz.http.connection import encoded

NO_JSON = (
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"{not json",
    b'{"model": "a"} {"model": "b"}',
    b"\xff\xfe{}",
    b'{"model": "\xed\xa0\x80"}',
    b'{"model": "\\ud800"}',
    b'{"prompt": "\\ud800\\ud800", "model": 1}',
    b'{"a": 1, "a": 2}',
    b'{"temperature": 1e999}',
    b'{"n": 1' + b"0" * 5000 + b"}",
    b"[" * 5000,
    b'{"messages":' * 3000,
    b"\x00",
    b" " * 5000,
)
_WRONG: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**31, 2**63, -(2**70), 1e-320, 1.5, float("nan"), float("inf")),
    *("", "x", "\ud800", "a\udfffb", "\x00", "é" * 300, "a" * 10_000),
    *([], {}, [[]], [None], [{}], {"": {}}, {"type": "object"}, {"\ud800": 1}),
    *([1] * 3000, ["a"] * 200, {str(number): 1 for number in range(300)}),
)
MOST_TOKENS, MOST_CHOICES = 16, 4
"""Usual bounds of a drawn body. The fuzzer looks for wrong input, not for long answers."""


def changed(fields: dict[str, Any], generator: random.Random) -> bytes:
    """With a value replaced, taken away or added, somewhere."""
    fields = copy.deepcopy(fields)
    for _ in range(generator.choice((1, 1, 2))):
        places = list(_places(fields))
        holder, key = generator.choice(places)
        deed = generator.random()
        if deed < 0.75:
            holder[key] = copy.deepcopy(generator.choice(_WRONG))
        elif deed < 0.9 and isinstance(holder, dict):
            del holder[key]
        else:
            fields["unknown" + "\ud800" * generator.randint(0, 1)] = copy.deepcopy(generator.choice(_WRONG))
    return encoded(fields)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in it."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, item in items:
        yield value, key
        yield from _places(item)


def drawn(document: dict[str, Any], seed: int, num_examples: int) -> list[tuple[str, Any]]:
    """(path, body) for every path that takes JSON: at most so many that fit
    the document's schema, and as many that do not.
    """
    schema = schemathesis.openapi.from_dict(document)
    found: list[tuple[str, Any]] = []
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if "application/json" in content else ():
            cases = _examples(schema[path]["POST"].as_strategy(generation_mode=mode), seed, num_examples)
            found += [(path, case.body) for case in cases if _is_json(case.body)]
    return found


def _examples(strategy: Any, seed: int, count: int) -> list[Any]:
    found: list[Any] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def draw(case: Any) -> None:
        found.append(case)

    draw()
    return found


def _is_json(body: Any) -> bool:
    try:
        json.dumps(body)
    except (TypeError, ValueError, RecursionError):  # schemathesis' mark for no body at all
        return False
    return True


def tamed(path: str, body: Any, model: str) -> Any:
    """A drawn body for the model that is served, which asks for little."""
    if not isinstance(body, dict):
        return body
    body = {**body, "model": model}
    for name, most in (("max_tokens", MOST_TOKENS), ("max_completion_tokens", MOST_TOKENS), ("n", MOST_CHOICES)):
        if type(body.get(name)) is int:
            body[name] = min(body[name], most)
    if path.endswith("/chat/completions") and body.get("max_completion_tokens") is None:
        body.setdefault("max_tokens", MOST_TOKENS)
    return body

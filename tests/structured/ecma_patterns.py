"""Patterns and texts at random, and the verdicts of `regress`, an implementation of ECMA-262 that is not ours."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import regress

ATOMS = [
    *(
        "a",
        "b",
        "-",
        "é",
        ".",
        "\\w",
        "\\W",
        "\\d",
        "\\D",
        "\\s",
        "\\S",
        "[ab]",
        "[^a]",
        "[^\\w]",
        "[\\d-]",
        "[]",
        "[^]",
    ),
    *("\\b", "\\B", "^", "$", "\\n", "\\x61", "\\u0061", "\\u{e9}", "\\u{1F600}", "\\0", "\\cJ", "[\\b]", "[a-b\\-]"),
    *(
        "\\p{L}",
        "\\P{L}",
        "\\p{Lu}",
        "[\\p{Ll}\\d]",
        "\\p{Script=Greek}",
        "\\p{ASCII}",
        "\\/",
        "[/&&]",
        "[a~-é]",
        "\\.",
    ),
    *("[^\\s\\S]", "[\\u{61}-\\u{62}]", "\\ud83d\\ude00", "[\\0-\\x1f]", "λ", "\u2028", "1"),
]
REPEATS = ["*", "+", "?", "{1,2}", "{2}", "*?", "+?", "??", "{0,2}?", "{1,}", "{0}"]
GROUPS = ["(", "(?:", "(?=", "(?!", "(?<=", "(?<!", "(?i:", "(?s:", "(?m:", "(?-i:"]
FAULTS = ["*", "{,3}", "{", "]", "(", ")", "\\A", "\\1", "(?P<n>a)", "(?>a)", "a++", "(?i)", "\\p{Nothing}", "[b-a]"]
CHARACTERS = "ab1-é\n_AB λ\u2028\x00/&~É.\U0001f600\u017f"


def any_pattern(rng: random.Random, depth: int = 3) -> str:
    kind = rng.random()
    if depth == 0 or kind < 0.35:
        return rng.choice(ATOMS)
    if kind < 0.6:
        return any_pattern(rng, depth - 1) + any_pattern(rng, depth - 1)
    if kind < 0.7:
        return f"(?:{any_pattern(rng, depth - 1)}|{any_pattern(rng, depth - 1)})"
    if kind < 0.85:
        return f"({any_pattern(rng, depth - 1)}){rng.choice(REPEATS)}"
    return f"{rng.choice(GROUPS)}{any_pattern(rng, depth - 1)})"


def any_text(rng: random.Random) -> str:
    return "".join(rng.choice(CHARACTERS) for _ in range(rng.randint(0, 5)))


def is_valid(pattern: str) -> bool:
    try:
        regress.Regex(pattern, "u")
    except regress.RegressError:
        return False
    return True


def finds(pattern: str, text: str) -> bool:
    return regress.Regex(pattern, "u").find(text) is not None


@functools.cache
def reading_ecma(kind: Any) -> Any:
    """A class of `jsonschema`'s validators, with patterns as `regress` reads them; its own reads Python's."""

    def pattern(validator: Any, value: str, instance: Any, schema: Any) -> Iterator[Any]:
        if isinstance(instance, str) and not finds(value, instance):
            yield jsonschema.ValidationError(value)

    def pattern_properties(validator: Any, rules: Any, instance: Any, schema: Any) -> Iterator[Any]:
        for name, item in instance.items() if isinstance(instance, dict) else ():
            for rule, inner in rules.items():
                if finds(rule, name):
                    yield from validator.descend(item, inner)

    def additional_properties(validator: Any, inner: Any, instance: Any, schema: Any) -> Iterator[Any]:
        rules = schema.get("patternProperties", {})
        for name, item in instance.items() if isinstance(instance, dict) else ():
            if name not in schema.get("properties", {}) and not any(finds(rule, name) for rule in rules):
                yield from validator.descend(item, inner)

    own = {
        "pattern": pattern,
        "patternProperties": pattern_properties,
        "additionalProperties": additional_properties,
    }
    return jsonschema.validators.extend(kind, own)

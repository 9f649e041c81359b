"""The patterns of a JSON schema on their way to a grammar backend: checked, and in the spelling that backends read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from manta.structured.backends.keywords import escaped, subschemas
from manta.structured.constraint import ConstraintError
from manta.structured.regexes.automata import Ranges, TooLarge, Tree, ranges_of
from manta.structured.regexes.ecma import Unreadable, parse
from manta.structured.regexes.regex_constraint import TOO_LARGE, refused
from manta.structured.schemas.patterns import for_grammar, is_small

_BY_NAME = frozenset(["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"])
_VALUES = frozenset(["const", "enum", "default", "examples"])
CONTROLS: Ranges = ((0, 7), (11, 11), (14, 31), (127, 127))
"""Characters that JSON spells as `\\u00XX` alone, and DEL."""
_NO_TEXT = {"minLength": 1, "maxLength": 0}
"""Stands for a pattern that no text has."""


def _patterns_in(schema: Any) -> Iterator[tuple[str, str]]:
    """The patterns of a schema, each behind its JSON pointer."""
    for path, subschema in subschemas(schema):
        if isinstance(subschema.get("pattern"), str):
            yield f"{path}/pattern", subschema["pattern"]
        rules = subschema.get("patternProperties")
        for rule in rules if isinstance(rules, dict) else ():
            yield f"{path}/patternProperties/{escaped(rule)}", rule


def check_patterns(schema: Any, is_loose: bool = False) -> None:
    """Raises `ConstraintError` for the first pattern that is none of ECMA-262; unless `is_loose`, also for one that no
    automaton can hold.
    """
    for place, pattern in _patterns_in(schema):
        try:
            parse(pattern)
        except Unreadable as error:
            if error.kind == "invalid" or not is_loose:
                raise refused(error, place) from error


def unenforced_patterns(schema: Any) -> list[str]:
    """The patterns that no grammar can have, each as `#/path/pattern: why`."""
    found = []
    for place, pattern in _patterns_in(schema):
        try:
            if not is_small(pattern):
                found.append(f"{place}: {TOO_LARGE}")
        except ConstraintError as error:
            found.append(f"{place}: {error.refusal.place}")
    return found


def demands_controls(schema: Any) -> bool:
    """Whether a pattern, in the spelling of backends, has a place that control characters alone can take. llguidance
    leaves such a place out where JSON may not spell them as `\\u00XX`.
    """
    return any(_has_set_within(CONTROLS, parse(pattern)) for _, pattern in _patterns_in(schema))


def _has_set_within(ranges: Ranges, tree: Tree) -> bool:
    if tree[0] == "set":
        return bool(tree[1]) and ranges_of([*tree[1], *ranges]) == ranges
    if tree[0] in ("cat", "alt"):
        return any(_has_set_within(ranges, part) for part in tree[1])
    return tree[0] == "repeat" and _has_set_within(ranges, tree[1])


def with_grammar_patterns(schema: Any) -> Any:
    """A copy of the schema whose patterns are in the spelling of grammar backends, without `unenforced_patterns`."""
    if isinstance(schema, list):
        return [with_grammar_patterns(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: _within(name, value) for name, value in schema.items()}
    if isinstance(result.get("pattern"), str):
        result |= _of_pattern(result.pop("pattern"))
    if isinstance(result.get("patternProperties"), dict):
        result["patternProperties"] = _with_grammar_rules(result["patternProperties"])
    return result


def _within(name: str, value: Any) -> Any:
    if name in _VALUES:
        return value
    if name in _BY_NAME and isinstance(value, dict):
        return {key: with_grammar_patterns(item) for key, item in value.items()}
    return with_grammar_patterns(value)


def _of_pattern(pattern: str) -> dict[str, Any]:
    try:
        found = for_grammar(pattern)
    except (ConstraintError, TooLarge):
        return {}
    return _NO_TEXT if found is None else {"pattern": found}


def _with_grammar_rules(rules: dict[str, Any]) -> dict[str, Any]:
    """Rules that are spelled alike become one."""
    result: dict[str, Any] = {}
    for rule, value in rules.items():
        text = _of_pattern(rule).get("pattern")
        if text is not None:
            result[text] = {"allOf": [result[text], value]} if text in result else value
    return result

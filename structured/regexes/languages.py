"""Regular expressions as sets of texts: an expression without anchors and looks around, its automaton, its text.

`whole_texts` is what JSON Schema means by a pattern: all texts in which it is found. Where anchors stand at the ends
alone, they are resolved. Everything else goes by the automaton of `assertions.Pattern`.
"""

from __future__ import annotations

import functools
from typing import Any

from manta.structured.regexes.assertions import Pattern
from manta.structured.regexes.automata import ALL, EMPTY, Dfa, Ranges, Tree, class_text
from manta.structured.regexes.ecma import END, START, parse


def whole_texts(pattern: str) -> Tree:
    """The texts in which the pattern is found, with anchors and looks around. Raises `Unreadable`."""
    return ("cat", (ALL, parse(pattern), ALL))


def is_plain(pattern: str) -> bool:
    """Whether the pattern needs no automaton, because it neither looks around nor has anchors within. Raises
    `Unreadable`.
    """
    return _without_anchors(parse(pattern)) is not None


@functools.lru_cache(maxsize=256)
def automaton(pattern: str) -> Dfa:
    """The automaton of the texts in which the pattern is found. Raises `Unreadable` and `TooLarge`."""
    plain = _without_anchors(parse(pattern))
    return Dfa.of(plain) if plain is not None else Pattern(whole_texts(pattern)).dfa()


@functools.lru_cache(maxsize=256)
def expression(pattern: str) -> str | None:
    """An expression without anchors and looks around, for the whole texts in which the pattern is found. ECMA-262 and
    the grammar backends read it alike. None if there is no such text. Raises `Unreadable` and `TooLarge`.
    """
    plain = _without_anchors(parse(pattern))
    return Pattern(whole_texts(pattern)).dfa().expression() if plain is None else written(plain)


# ---- anchors ---------------------------------------------------------------------------------------------------------


def _without_anchors(tree: Tree) -> Tree | None:
    """The whole texts in which `tree` is found, without anchors; None if it looks around or has anchors within."""
    found = [_anchored(list(parts)) for parts in _sequences(tree)]
    return None if None in found else ("alt", tuple(found))


def _sequences(tree: Tree) -> list[tuple[Tree, ...]]:
    """The alternatives at the top, each as a sequence."""
    if tree[0] == "alt":
        return [sequence for part in tree[1] for sequence in _sequences(part)]
    if tree[0] != "cat":
        return [(tree,)]
    parts = tree[1]
    for index in (0, len(parts) - 1):
        if parts and parts[index][0] in ("alt", "cat") and _asserts(parts[index]):
            inner = _sequences(parts[index])
            spread = [("cat", (*parts[:index], *each, *parts[index + 1 :])) for each in inner]
            return [sequence for each in spread for sequence in _sequences(each)]
    return [parts]


def _anchored(parts: list[Tree]) -> Tree | None:
    """The whole text in which a sequence is found: anything may stand where there is no anchor."""
    starts = ends = False
    while parts and parts[0] == START:
        starts, parts = True, parts[1:]
    while parts and parts[-1] == END:
        ends, parts = True, parts[:-1]
    if any(map(_asserts, parts)):
        return None
    return ("cat", (*([] if starts else [ALL]), *parts, *([] if ends else [ALL])))


def _asserts(tree: Any) -> bool:
    if tree[0] in ("cat", "alt"):
        return any(map(_asserts, tree[1]))
    return tree[0] != "set" and (tree[0] != "repeat" or _asserts(tree[1]))


# ---- text ------------------------------------------------------------------------------------------------------------


def written(tree: Tree) -> str | None:
    """The expression of a tree without anchors and looks around; None if nothing matches it."""
    found = _simple(tree)
    return None if found is None else _text(found)


def _simple(tree: Tree) -> Tree | None:
    """The tree without what matches nothing; None if that is all of it."""
    if tree[0] == "set":
        ranges = _without_surrogates(tree[1])
        return ("set", ranges) if ranges else None
    if tree[0] == "repeat":
        inner = _simple(tree[1])
        if inner is None or inner == EMPTY or tree[3] == 0:
            return EMPTY if inner == EMPTY or tree[2] == 0 else None
        return ("repeat", inner, tree[2], tree[3])
    parts = [_simple(part) for part in tree[1]]
    if tree[0] == "cat":
        return None if None in parts else ("cat", tuple(part for part in parts if part != EMPTY))
    kept = tuple(dict.fromkeys(part for part in parts if part is not None))
    return ("alt", kept) if len(kept) > 1 else kept[0] if kept else None


def _without_surrogates(ranges: Ranges) -> Ranges:
    """Halves of surrogate pairs stand in no text, and Rust refuses them as ends of a range."""
    found = []
    for low, high in ranges:
        low, high = 0xE000 if 0xD800 <= low <= 0xDFFF else low, 0xD7FF if 0xD800 <= high <= 0xDFFF else high
        if low <= high:
            found.append((low, high))
    return tuple(found)


def _text(tree: Tree) -> str:
    if tree[0] == "set":
        return class_text(tree[1])
    if tree[0] == "alt":
        return "|".join(map(_text, tree[1]))
    if tree[0] == "cat":
        return "".join(f"(?:{_text(part)})" if part[0] == "alt" else _text(part) for part in tree[1])
    _, inner, low, high = tree
    text = _text(inner) if inner[0] == "set" else f"(?:{_text(inner)})"
    counts = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high))
    if counts is None:
        counts = f"{{{low}}}" if low == high else f"{{{low},{'' if high is None else high}}}"
    return text + counts

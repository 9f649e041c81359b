"""Finite automata over Unicode: complement, intersection, emptiness, and back to a regular expression.

An expression is a tree of tuples; `ecma.py` reads one from a pattern. `Dfa.of` compiles it by the subset
construction, `Dfa.expression` goes back by state elimination (Hopcroft and Ullman, sections 2.3 and 3.2).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

MAX_CHARACTER = 0x10FFFF
MAX_STATES = 250
"""Most states of one automaton."""
MAX_LENGTH = 20_000
"""Most characters of an expression that is made from an automaton."""

Ranges = tuple[tuple[int, int], ...]
"""Sorted, apart from each other, inclusive."""
ANY: Ranges = ((0, MAX_CHARACTER),)

State = TypeVar("State", bound=Hashable)
"""A state while its automaton is explored."""
Tree = tuple[Any, ...]
"""`("set", ranges)`, `("cat", trees)`, `("alt", trees)` or `("repeat", tree, low, high or None)`."""
EMPTY: Tree = ("cat", ())
ALL: Tree = ("repeat", ("set", ANY), 0, None)


class TooLarge(Exception):
    """An automaton or an expression exceeds its bound."""


def ranges_of(parts: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(parts):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    edges = [-1, *itertools.chain.from_iterable(ranges), MAX_CHARACTER + 1]
    pairs = [(edges[index] + 1, edges[index + 1] - 1) for index in range(0, len(edges), 2)]
    return tuple((low, high) for low, high in pairs if low <= high)


class _Nfa:
    """Thompson's construction: `steps[state]` are (ranges, target), `free[state]` the targets that cost nothing."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[Ranges, int]]] = []
        self.free: list[list[int]] = []
        self._closures: dict[frozenset[int], frozenset[int]] = {}

    def state(self) -> int:
        if len(self.steps) >= 10 * MAX_STATES:
            raise TooLarge
        self.steps.append([])
        self.free.append([])
        return len(self.steps) - 1

    def add(self, tree: Tree, start: int) -> int:
        """Returns the state where `tree` ends if it begins at `start`."""
        kind = tree[0]
        if kind == "set":
            end = self.state()
            self.steps[start].append((tree[1], end))
            return end
        if kind == "cat":
            for part in tree[1]:
                start = self.add(part, start)
            return start
        if kind == "alt":
            end = self.state()
            for part in tree[1]:
                begin = self.state()
                self.free[start].append(begin)
                self.free[self.add(part, begin)].append(end)
            return end
        return self._repeat(tree[1], tree[2], tree[3], start)

    def _repeat(self, tree: Tree, low: int, high: int | None, start: int) -> int:
        for _ in range(low):
            start = self.add(tree, start)
        end = self.state()
        if high is None:
            loop = self.state()
            self.free[start].append(loop)
            self.free[self.add(tree, loop)].append(loop)
            self.free[loop].append(end)
            return end
        self.free[start].append(end)
        for _ in range(high - low):
            start = self.add(tree, start)
            self.free[start].append(end)
        return end

    def moves(self, states: Iterable[int], edges: list[int]) -> list[frozenset[int]]:
        """The states that are reached by a character of each class."""
        first_class = {edge: index for index, edge in enumerate(edges)}
        reached: list[set[int]] = [set() for _ in edges]
        for state in states:
            for ranges, target in self.steps[state]:
                for low, high in ranges:
                    for index in range(first_class[low], first_class.get(high + 1, len(edges))):
                        reached[index].add(target)
        return [frozenset(each) for each in reached]

    def closure(self, states: frozenset[int]) -> frozenset[int]:
        known = self._closures.get(states)
        if known is None:
            known = self._closures[states] = self._closure(states)
        return known

    def _closure(self, states: Iterable[int]) -> frozenset[int]:
        found, pending = set(states), list(states)
        while pending:
            for target in self.free[pending.pop()]:
                if target not in found:
                    found.add(target)
                    pending.append(target)
        return frozenset(found)


class Dfa:
    """Complete: each state has a target for each class of characters. State 0 is the first."""

    def __init__(self, edges: list[int], targets: list[list[int]], accepting: set[int]) -> None:
        self.edges = edges
        """First characters of the classes; the first is 0."""
        self.targets = targets
        self.accepting = accepting

    @classmethod
    def of(cls, tree: Tree) -> Dfa:
        nfa = _Nfa()
        first = nfa.state()
        last = nfa.add(tree, first)
        cuts = {0}
        for low, high in (pair for steps in nfa.steps for ranges, _ in steps for pair in ranges):
            cuts |= {low, high + 1}
        edges = sorted(cut for cut in cuts if cut <= MAX_CHARACTER)
        start = nfa.closure(frozenset([first]))
        return cls.explored(
            edges, start, lambda states: map(nfa.closure, nfa.moves(states, edges)), lambda states: last in states
        )

    @classmethod
    def explored(
        cls,
        edges: list[int],
        start: State,
        successors: Callable[[State], Iterable[State]],
        accepts: Callable[[State], bool],
    ) -> Dfa:
        """Returns the automaton of the states reached from `start`. `successors` gives a state's target for each
        class of characters. Raises `TooLarge` for more than `MAX_STATES`.
        """
        numbers = {start: 0}
        targets: list[list[int]] = []
        pending = [start]
        for state in pending:  # grows
            row = []
            for reached in successors(state):
                if reached not in numbers:
                    numbers[reached] = len(numbers)
                    pending.append(reached)
                row.append(numbers[reached])
            targets.append(row)
            if len(numbers) > MAX_STATES:
                raise TooLarge
        return cls(edges, targets, {number for state, number in numbers.items() if accepts(state)})

    def complement(self) -> Dfa:
        return Dfa(self.edges, self.targets, set(range(len(self.targets))) - self.accepting)

    def and_(self, other: Dfa) -> Dfa:
        edges = sorted({*self.edges, *other.edges})
        mine, theirs = (positions(edges, each.edges) for each in (self, other))

        def successors(pair: tuple[int, int]) -> Iterator[tuple[int, int]]:
            one, two = self.targets[pair[0]], other.targets[pair[1]]
            return ((one[left], two[right]) for left, right in zip(mine, theirs, strict=True))

        return Dfa.explored(
            edges, (0, 0), successors, lambda pair: pair[0] in self.accepting and pair[1] in other.accepting
        )

    def is_empty(self) -> bool:
        found, pending = {0}, [0]
        while pending:
            state = pending.pop()
            if state in self.accepting:
                return False
            pending += set(self.targets[state]) - found
            found |= set(self.targets[state])
        return True

    def accepts(self, text: str) -> bool:
        state = 0
        for character in text:
            index = sum(edge <= ord(character) for edge in self.edges) - 1
            state = self.targets[state][index]
        return state in self.accepting

    def _minimal(self) -> Dfa:
        """Moore's partition refinement."""
        group = [int(state in self.accepting) for state in range(len(self.targets))]
        while True:
            keys = [(group[state], *(group[to] for to in row)) for state, row in enumerate(self.targets)]
            numbers: dict[tuple[int, ...], int] = {}
            refined = [numbers.setdefault(key, len(numbers)) for key in keys]
            if len(numbers) == len(set(group)):
                break
            group = refined
        first_of = {number: state for state, number in reversed(list(enumerate(refined)))}
        targets = [[refined[to] for to in self.targets[first_of[number]]] for number in range(len(first_of))]
        return Dfa(self.edges, targets, {refined[state] for state in self.accepting})

    def expression(self) -> str | None:
        """A regular expression for the whole text; None if nothing is accepted."""
        dfa = self._minimal()
        arrows = dfa._arrows()
        start, end = -1, -2
        arrows[start], arrows[end] = {0: ""}, {}
        for state in dfa.accepting:
            arrows[state][end] = ""
        while len(arrows) > 2:
            state = min((s for s in arrows if s >= 0), key=lambda s: _cost(arrows, s))
            _eliminate(arrows, state)
            if sum(len(text) for row in arrows.values() for text in row.values()) > MAX_LENGTH:
                raise TooLarge
        return arrows[start].get(end)

    def _arrows(self) -> dict[int, dict[int, str]]:
        """Returns the expressions by which each state reaches others."""
        ends = [*(edge - 1 for edge in self.edges[1:]), MAX_CHARACTER]
        arrows: dict[int, dict[int, str]] = {}
        for state, row in enumerate(self.targets):
            reached: dict[int, list[tuple[int, int]]] = {}
            for low, high, target in zip(self.edges, ends, row, strict=True):
                reached.setdefault(target, []).append((low, high))
            arrows[state] = {target: class_text(ranges_of(parts)) for target, parts in reached.items()}
        return arrows


def positions(edges: list[int], own: list[int]) -> list[int]:
    """Returns the class of `own` that holds each class of the finer partition `edges`."""
    found, index = [], 0
    for edge in edges:
        while index + 1 < len(own) and own[index + 1] <= edge:
            index += 1
        found.append(index)
    return found


def _cost(arrows: dict[int, dict[int, str]], state: int) -> int:
    incoming = sum(state in row for source, row in arrows.items() if source != state)
    return incoming * len(arrows[state])


def _eliminate(arrows: dict[int, dict[int, str]], state: int) -> None:
    row = arrows.pop(state)
    loop = row.pop(state, None)
    middle = "" if not loop else f"{_grouped(loop)}*"
    for targets in arrows.values():
        before = targets.pop(state, None)
        if before is None:
            continue
        for target, after in row.items():
            text = _part(before) + middle + _part(after)
            known = targets.get(target)
            targets[target] = text if known is None else _either(known, text)


def _either(one: str, other: str) -> str:
    if one == other:
        return one
    if not one or not other:
        return f"(?:{one or other})?"
    return f"{one}|{other}"


def _part(text: str) -> str:
    """`text` as part of a sequence."""
    return f"(?:{text})" if "|" in text else text


def _grouped(text: str) -> str:
    """`text` as one atom, to be repeated."""
    return text if len(text) == 1 or text == _ANY_TEXT else f"(?:{text})"


def class_text(ranges: Ranges) -> str:
    """A set of characters as ECMA-262 and the grammar backends read it."""
    if ranges == ANY:
        return _ANY_TEXT
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _character(ranges[0][0])
    is_negated = ranges[-1][1] == MAX_CHARACTER
    parts = complement(ranges) if is_negated else ranges
    body = "".join(_character(a) if a == b else f"{_character(a)}-{_character(b)}" for a, b in parts)
    return f"[{'^' if is_negated else ''}{body}]"


def _character(code: int) -> str:
    character = chr(code)
    if code < 128 and (character.isalnum() or character == "_"):
        return character
    if character in _SYNTAX:
        return "\\" + character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\u{{{code:x}}}"


_ANY_TEXT = r"[\u0000-\u{10ffff}]"
_SYNTAX = "^$\\.*+?()[]{}|/"
"""Characters that ECMA-262 and grammar backends read as themselves behind a backslash."""

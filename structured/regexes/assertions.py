"""Automata of regular expressions that look around: read from left to right, they know at the end of a text whether the
whole text matches.

What a lookahead demands of the rest of the text goes with the run that passed it, as an obligation. An obligation is
runs of the lookahead's own expression, one of which must succeed, or none of which may. What a lookbehind demands is
known, because its own runs begin at every position. A state of the automaton is the set of runs, so the construction is
that of subsets (Hopcroft and Ullman, section 2.3) over alternating runs (Chandra, Kozen and Stockmeyer 1981).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from manta.structured.regexes.automata import ANY, MAX_CHARACTER, MAX_STATES, Dfa, Ranges, TooLarge, Tree, ranges_of

MAX_RUNS = 2_000
"""Most runs in one state of an automaton."""
TRUE = 0
"""The state whose runs have succeeded, whatever follows."""


class Obligation(NamedTuple):
    """A demand on the rest of the text: one of the runs must succeed, or none may if it `is_negated`."""

    is_negated: bool
    runs: frozenset[Run]
    final: int


class Run(NamedTuple):
    """A run of the nondeterministic automaton, which counts only if its obligations are met."""

    state: int
    obligations: frozenset[Obligation]


class Position(NamedTuple):
    """A state of the deterministic automaton: all that was read of a text."""

    is_start: bool
    runs: frozenset[Run]
    behind: tuple[frozenset[Run], ...]
    """Runs of each lookbehind that began at any position so far."""


_NONE: frozenset[Obligation] = frozenset()


class Pattern:
    """The nondeterministic automaton of the whole texts that an expression matches, its characters grouped into
    symbols. `tree` is what `ecma.parse` makes. Raises `TooLarge`.
    """

    def __init__(self, tree: Tree) -> None:
        self._sets: list[Ranges] = []
        self._steps: list[list[tuple[Ranges, int]]] = []
        self._moves: list[list[tuple[str, int, bool, int]]] = []
        self._ahead: list[tuple[int, int]] = []
        self._behind: list[tuple[int, int]] = []
        self._state()
        self._steps[TRUE].append((ANY, TRUE))
        self._first = self._state()
        self._final = self._part(tree, self._first)
        self.symbols = _symbols(list(dict.fromkeys(self._sets)))
        """Classes of characters that the expression does not tell apart."""
        self._numbers = [
            [(_covered(ranges, self.symbols), target) for ranges, target in steps] for steps in self._steps
        ]

    # ---- building ------------------------------------------------------------------------------------------------

    def _state(self) -> int:
        if len(self._steps) > 20 * MAX_STATES:
            raise TooLarge
        self._steps.append([])
        self._moves.append([])
        return len(self._steps) - 1

    def _set(self, ranges: Ranges, start: int) -> int:
        self._sets.append(ranges)
        end = self._state()
        self._steps[start].append((ranges, end))
        return end

    def _free(self, start: int, end: int) -> None:
        self._moves[start].append(("free", 0, False, end))

    def _part(self, tree: Tree, start: int) -> int:
        """Returns the state where `tree` ends if it begins at `start`."""
        kind = tree[0]
        if kind == "set":
            return self._set(tree[1], start)
        if kind == "cat":
            for part in tree[1]:
                start = self._part(part, start)
            return start
        if kind == "alt":
            return self._branch(tree[1], start)
        if kind == "repeat":
            return self._repeat(tree[1], tree[2], tree[3], start)
        if kind == "look":
            return self._look(tree[1], tree[2], tree[3], start)
        if kind == "edge":
            return self._edge(tree[1], tree[2], start)
        if kind == "end":
            return self._no_more(start)
        assert kind == "start"
        end = self._state()
        self._moves[start].append(("start", 0, False, end))
        return end

    def _branch(self, branches: Iterable[Tree], start: int) -> int:
        end = self._state()
        for branch in branches:
            begin = self._state()
            self._free(start, begin)
            self._free(self._part(branch, begin), end)
        return end

    def _repeat(self, inner: Tree, low: int, high: int | None, start: int) -> int:
        if max(low, high or 0) > 20 * MAX_STATES:
            raise TooLarge
        for _ in range(low):
            start = self._part(inner, start)
        end = self._state()
        self._free(start, end)
        if high is None:
            loop = self._state()
            self._free(start, loop)
            last = self._part(inner, loop)
            self._free(last, loop)
            self._free(last, end)
            return end
        for _ in range(high - low):
            start = self._part(inner, start)
            self._free(start, end)
        return end

    def _edge(self, is_other: bool, word: Ranges, start: int) -> int:
        end = self._state()
        behind, ahead = self._one_of(word, self._behind), self._one_of(word, self._ahead)
        for is_word in (False, True):
            middle = self._state()
            self._moves[start].append(("behind", behind, not is_word, middle))
            self._moves[middle].append(("ahead", ahead, is_word != is_other, end))
        return end

    def _one_of(self, ranges: Ranges, looks: list[tuple[int, int]]) -> int:
        """A look around for one of these characters; its number in `looks`."""
        first = self._state()
        last = self._set(ranges, first)
        looks.append((first, self._end_of(last) if looks is self._ahead else last))
        return len(looks) - 1

    def _no_more(self, start: int) -> int:
        """Returns the state that is reached from `start` if no character follows."""
        first, end = self._state(), self._state()
        self._ahead.append((first, self._end_of(self._set(ANY, first))))
        self._moves[start].append(("ahead", len(self._ahead) - 1, True, end))
        return end

    def _end_of(self, state: int) -> int:
        """The end of a lookahead: its runs stay there, whatever follows."""
        self._steps[state].append((ANY, state))
        return state

    def _look(self, is_behind: bool, is_negated: bool, inner: Tree, start: int) -> int:
        first, end = self._state(), self._state()
        last = self._state()
        self._free(self._part(inner, first), last)
        if is_behind:
            self._behind.append((first, last))
            self._moves[start].append(("behind", len(self._behind) - 1, is_negated, end))
        else:
            self._ahead.append((first, self._end_of(last)))
            self._moves[start].append(("ahead", len(self._ahead) - 1, is_negated, end))
        return end

    # ---- reading -------------------------------------------------------------------------------------------------

    def start(self) -> Position:
        return self._position(True, [Run(self._first, _NONE)], [[] for _ in self._behind])

    def after(self, position: Position, symbol: int) -> Position:
        """The position behind one more character, of the symbol with this number."""
        behind = [list(self._stepped(runs, symbol)) for runs in position.behind]
        return self._position(False, list(self._stepped(position.runs, symbol)), behind)

    def _position(self, is_start: bool, runs: list[_Raw], behind: list[list[_Raw]]) -> Position:
        known: list[frozenset[Run]] = []
        for (first, _), found in zip(self._behind, behind, strict=True):  # one within another comes before it
            known.append(self._closed([*found, Run(first, _NONE)], is_start, known))
        return Position(is_start, self._closed(runs, is_start, known), tuple(known))

    def _stepped(self, runs: Iterable[Run], symbol: int) -> Iterator[_Raw]:
        for run in runs:
            for symbols, target in self._numbers[run.state]:
                if symbol in symbols:
                    stepped = [
                        Obligation(each.is_negated, tuple(self._stepped(each.runs, symbol)), each.final)  # type: ignore[arg-type]
                        for each in run.obligations
                    ]
                    yield Run(target, stepped)  # type: ignore[arg-type]

    def _closed(self, runs: list[_Raw], is_start: bool, behind: list[frozenset[Run]]) -> frozenset[Run]:
        """The runs with all that they reach without a character, their obligations too."""
        found: set[Run] = set()
        pending = []
        for run in runs:
            obligations = self._met(run.obligations, is_start, behind)
            if obligations is not None:
                pending.append(Run(run.state, obligations))
        while pending:
            run = pending.pop()
            if run in found:
                continue
            found.add(run)
            if len(found) > MAX_RUNS:
                raise TooLarge
            for move in self._moves[run.state]:
                for more in self._passed(move, is_start, behind):
                    pending.append(Run(move[3], run.obligations | more))
        return _weakest(found)

    def _met(
        self, obligations: Iterable[Obligation], is_start: bool, behind: list[frozenset[Run]]
    ) -> frozenset[Obligation] | None:
        """The obligations that are still open; None if one is broken."""
        still = set()
        for each in obligations:
            answer = _simplified(each._replace(runs=self._closed(list(each.runs), is_start, behind)))
            if answer is False:
                return None
            if answer is not True:
                still.add(answer)
        return frozenset(still)

    def _passed(
        self, move: tuple[str, int, bool, int], is_start: bool, behind: list[frozenset[Run]]
    ) -> list[frozenset[Obligation]]:
        """The obligations at the price of which a move is possible, in as many ways as there are."""
        kind, number, is_negated, _ = move
        if kind == "free" or (kind == "start" and is_start):
            return [_NONE]
        if kind == "start":
            return []
        if kind == "ahead":
            first, last = self._ahead[number]
            runs = self._closed([Run(first, _NONE)], is_start, behind)
            return _ways(_simplified(Obligation(is_negated, runs, last)))
        last = self._behind[number][1]
        ends = [run for run in behind[number] if run.state == last]
        if not is_negated:
            return [run.obligations for run in ends]
        return _ways(_simplified(Obligation(True, frozenset(Run(TRUE, run.obligations) for run in ends), TRUE)))

    def accepts(self, position: Position) -> bool:
        """Whether the text may end here."""
        return _one_succeeds(position.runs, self._final)

    def dfa(self) -> Dfa:
        """The deterministic automaton of the same texts. Raises `TooLarge`."""
        numbered = sorted((low, number) for number, symbol in enumerate(self.symbols) for low, _ in symbol)

        def successors(position: Position) -> Iterator[Position]:
            reached = [self.after(position, number) for number in range(len(self.symbols))]
            return (reached[number] for _, number in numbered)

        return Dfa.explored([low for low, _ in numbered], self.start(), successors, self.accepts)


_Raw = Run
"""A run whose obligations were moved on by a character and not yet closed."""


def _ways(answer: Obligation | bool) -> list[frozenset[Obligation]]:
    if isinstance(answer, bool):
        return [_NONE] if answer else []
    return [frozenset([answer])]


def _simplified(obligation: Obligation) -> Obligation | bool:
    """True if the obligation is met, False if it is broken, else the obligation: the rest of the text decides."""
    has_matched = any(run.state == obligation.final and not run.obligations for run in obligation.runs)
    if has_matched:
        return not obligation.is_negated
    can_match = bool(obligation.runs)
    return obligation if can_match else obligation.is_negated


def _weakest(runs: set[Run]) -> frozenset[Run]:
    """The runs without those that demand more than another one in the same state."""
    of_state: dict[int, list[Run]] = {}
    for run in runs:
        of_state.setdefault(run.state, []).append(run)
    return frozenset(
        run
        for group in of_state.values()
        for run in group
        if not any(other.obligations < run.obligations for other in group)
    )


def _one_succeeds(runs: Iterable[Run], final: int) -> bool:
    return any(
        run.state == final and all(_one_succeeds(each.runs, each.final) != each.is_negated for each in run.obligations)
        for run in runs
    )


# ---- characters ------------------------------------------------------------------------------------------------------


def _symbols(sets: list[Ranges]) -> list[Ranges]:
    """Classes of characters that the sets do not tell apart."""
    edges = sorted({0, *(edge for ranges in sets for low, high in ranges for edge in (low, high + 1))})
    members: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    places = [0] * len(sets)
    for low, high in itertools.pairwise([*(edge for edge in edges if edge <= MAX_CHARACTER), MAX_CHARACTER + 1]):
        key = []
        for index, ranges in enumerate(sets):
            while places[index] < len(ranges) and ranges[places[index]][1] < low:
                places[index] += 1
            if places[index] < len(ranges) and ranges[places[index]][0] <= low:
                key.append(index)
        members.setdefault(tuple(key), []).append((low, high - 1))
    return [ranges_of(parts) for parts in members.values()]


def _covered(ranges: Ranges, symbols: list[Ranges]) -> frozenset[int]:
    """The numbers of the symbols that lie within `ranges`."""
    firsts = [symbol[0][0] for symbol in symbols]
    return frozenset(number for number, first in enumerate(firsts) if any(low <= first <= high for low, high in ranges))

"""Finds patterns in texts in linear time: the judge's side of a pattern, whose other side is the grammar's mask.

A backtracking engine may take exponential time over `^(a+)+$`, and holds Python's lock meanwhile. Here a text goes
through the automaton of `assertions.Pattern`, whose positions are made as texts reach them and are kept.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable

from manta.structured.regexes.assertions import Pattern, Position
from manta.structured.regexes.languages import whole_texts

MAX_RUNS_KEPT = 20_000
"""Most runs of all positions that one matcher keeps, about 4 MB."""
MAX_CHARACTERS = 2_000
"""Most characters whose symbols one matcher remembers."""


class Matcher:
    """Raises `Unreadable` and `TooLarge`. Threads may share it, because they only add what each would find."""

    def __init__(self, pattern: str) -> None:
        self._pattern = Pattern(whole_texts(pattern))
        firsts = sorted((low, number) for number, symbol in enumerate(self._pattern.symbols) for low, _ in symbol)
        self._firsts = [low for low, _ in firsts]
        self._symbols = [number for _, number in firsts]
        self._symbol_of: dict[str, int] = {}
        self._start = self._pattern.start()
        self._after: dict[Position, dict[int, Position]] = {}
        self._num_kept = 0

    def finds(self, text: str, spend: Callable[[int], None] = lambda cost: None) -> bool:
        """Whether the pattern is found in the text. `spend` is told the cost of each character, the runs that are
        followed, and may raise to give up. Raises `TooLarge` if more runs than `assertions.MAX_RUNS` are.
        """
        position = self._start
        for character in text:
            if not position.runs:
                return False
            spend(_num_runs(position))
            position = self._next(position, self._symbol(character))
        return self._pattern.accepts(position)

    def _symbol(self, character: str) -> int:
        found = self._symbol_of.get(character)
        if found is None:
            found = self._symbols[bisect.bisect_right(self._firsts, ord(character)) - 1]
            if len(self._symbol_of) < MAX_CHARACTERS:
                self._symbol_of[character] = found
        return found

    def _next(self, position: Position, symbol: int) -> Position:
        known = self._after.get(position)
        if known is None:
            self._num_kept += _num_runs(position)
            if self._num_kept > MAX_RUNS_KEPT:
                self._after.clear()
                self._num_kept = 0
            known = self._after[position] = {}
        found = known.get(symbol)
        if found is None:
            found = known[symbol] = self._pattern.after(position, symbol)
        return found


def _num_runs(position: Position) -> int:
    return len(position.runs) + sum(map(len, position.behind))


@functools.lru_cache(maxsize=64)
def matcher_of(pattern: str) -> Matcher:
    return Matcher(pattern)

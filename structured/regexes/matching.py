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

MAX_POSITIONS = 2_000
"""Most positions that one matcher keeps."""


class Matcher:
    """Raises `Unreadable` and `TooLarge`. Not for two threads at once."""

    def __init__(self, pattern: str) -> None:
        self._pattern = Pattern(whole_texts(pattern))
        firsts = sorted((low, number) for number, symbol in enumerate(self._pattern.symbols) for low, _ in symbol)
        self._firsts = [low for low, _ in firsts]
        self._symbols = [number for _, number in firsts]
        self._symbol_of: dict[str, int] = {}
        self._start = self._pattern.start()
        self._after: dict[Position, dict[int, Position]] = {}

    def finds(self, text: str, spend: Callable[[int], None] = lambda cost: None) -> bool:
        """Whether the pattern is found in the text. `spend` is told the cost of each character, the runs that are
        followed, and may raise to give up. Raises `TooLarge` if more runs than `assertions.MAX_RUNS` are.
        """
        position = self._start
        for character in text:
            spend(len(position.runs))
            position = self._next(position, self._symbol(character))
        return self._pattern.accepts(position)

    def _symbol(self, character: str) -> int:
        found = self._symbol_of.get(character)
        if found is None:
            found = self._symbols[bisect.bisect_right(self._firsts, ord(character)) - 1]
            if len(self._symbol_of) < MAX_POSITIONS:
                self._symbol_of[character] = found
        return found

    def _next(self, position: Position, symbol: int) -> Position:
        known = self._after.get(position)
        if known is None:
            if len(self._after) >= MAX_POSITIONS:
                self._after.clear()
            known = self._after[position] = {}
        found = known.get(symbol)
        if found is None:
            found = known[symbol] = self._pattern.after(position, symbol)
        return found


@functools.lru_cache(maxsize=256)
def matcher_of(pattern: str) -> Matcher:
    return Matcher(pattern)

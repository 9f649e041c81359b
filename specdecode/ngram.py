"""Prompt lookup: proposes what followed the last tokens of a sequence when they stood there before.

The index of a sequence grows with it, by one entry a token, and a look-up compares a few places: neither depends on the
sequence's length. Imports no torch. Called by `specdecode/proposers.py`. After A. Saxena, "Prompt Lookup Decoding"
(2023); that a proposal may run over the end of the text into itself is LZ77's way with repetitions.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_PLACES = 8
"""Latest places that a look-up compares."""


class NgramIndex:
    """Where each run of `ngram_min` tokens of one sequence ended."""

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        self._min = ngram_min
        self._max = ngram_max
        self._tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}
        """A run of tokens to the index of what followed its latest occurrence."""
        self._previous: list[int] = []
        """For the run that ends before an index, the same of the occurrence before; -1 for none."""

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds tokens behind those that it has."""
        tokens, last, previous, size = self._tokens, self._last, self._previous, self._min
        for token_id in token_ids:
            # The run before this token: the newest run of all stays out, or a look-up would find itself.
            index = len(tokens)
            if index < size:
                previous.append(-1)
            else:
                run = tuple(tokens[index - size :])
                previous.append(last.get(run, -1))
                last[run] = index
            tokens.append(token_id)

    def propose(self, count: int) -> list[int]:
        """Up to `count` tokens, none where the last ones are new."""
        tokens = self._tokens
        place = self._last.get(tuple(tokens[-self._min :]), -1)
        if place < 0 or count < 1:
            return []
        period = tokens[self._longest(place) :][:count]
        return [period[index % len(period)] for index in range(count)]

    def _longest(self, place: int) -> int:
        """The place with the longest match, the latest of them."""
        tokens, limit = self._tokens, self._max
        best, best_length = place, 0
        for _ in range(MAX_PLACES):
            length = self._min
            while length < limit and length < place and tokens[place - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > best_length:
                best, best_length = place, length
                if length == limit:
                    break
            place = self._previous[place]
            if place < 0:
                break
        return best

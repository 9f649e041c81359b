"""Prompt lookup: proposes the tokens that followed an earlier occurrence of the sequence's last tokens.

The method is A. Saxena's "Prompt Lookup Decoding" (2023). Each token adds one entry to its sequence's index, and a
look-up compares at most `MAX_PLACES` occurrences, so the cost does not grow with the sequence. A proposal that reaches
the end of the text continues from its own beginning, as LZ77 encodes repetitions. Called by `specdecode/proposers.py`;
imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_PLACES = 8
"""Most occurrences that a look-up compares, the latest first."""


class NgramIndex:
    """An index of where each run of `ngram_min` tokens occurred in one sequence."""

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        self._min = ngram_min
        self._max = ngram_max
        self._tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}
        """Runs of tokens, each with the index of the token after its latest occurrence."""
        self._previous: list[int] = []
        """Entry `i`: the index of the token that followed the previous occurrence of the run that ends before token
        `i`; -1 for none.
        """

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens."""
        tokens, last, previous, size = self._tokens, self._last, self._previous, self._min
        for token_id in token_ids:
            # Index the run before this token. The run at the end is not indexed, or a look-up would find itself.
            index = len(tokens)
            if index < size:
                previous.append(-1)
            else:
                run = tuple(tokens[index - size :])
                previous.append(last.get(run, -1))
                last[run] = index
            tokens.append(token_id)

    def propose(self, count: int) -> list[int]:
        """Returns `count` tokens, or none if the last tokens have not occurred before."""
        tokens = self._tokens
        place = self._last.get(tuple(tokens[-self._min :]), -1)
        if place < 0 or count < 1:
            return []
        start = self._longest(place)
        period = tokens[start : start + count]
        return period if len(period) == count else (period * (count // len(period) + 1))[:count]

    def _longest(self, place: int) -> int:
        """Returns the occurrence with the longest match, the latest of equal ones."""
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

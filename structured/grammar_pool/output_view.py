"""The output of a sequence as grammar sessions read it: the end of a list of tokens, without a copy of it.

The engine asks for masks in each step, and a copy of the output each time would make long outputs quadratic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

MOST_REWRITTEN = 256
"""Most tokens at the end of a session's output that a later request may have replaced while the output grew. Earlier
ones are not compared in each step, which would take longer and longer.
"""


class OutputView(Sequence[int]):
    """The tokens of a list from index `first` on. It shows what the list holds when it is read."""

    __slots__ = ("_first", "_token_ids")

    def __init__(self, token_ids: list[int], first: int) -> None:
        self._token_ids = token_ids
        self._first = first

    def __len__(self) -> int:
        return len(self._token_ids) - self._first

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        places = range(self._first, len(self._token_ids))[index]
        if isinstance(places, int):
            return self._token_ids[places]
        return self._token_ids[places.start : places.stop] if places.step == 1 else [self._token_ids[i] for i in places]


def num_common(old: list[int], new: Sequence[int]) -> int:
    """Returns the number of leading tokens that are the same, if none before the last `MOST_REWRITTEN` differ."""
    known = min(len(old), len(new))
    first = max(0, known - MOST_REWRITTEN)
    if list(new[first:known]) == old[first:known]:
        return known
    pairs = enumerate(zip(old, new, strict=False))
    return next((index for index, pair in pairs if pair[0] != pair[1]), known)

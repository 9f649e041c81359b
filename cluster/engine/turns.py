"""The order in which sequences run, and whose request is next among those of equal priority: clients take turns,
whoever asked first and however often.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): a client's requests are numbered from the turn that is reached
now, or after its own last one, and the lowest number goes first. So a client with a thousand requests waiting has as
many numbers, and another one's only request goes before all but the next of them. One client's run in their order.
"""

from __future__ import annotations

import bisect
import operator

from cluster.engine.sequence import Sequence

_ORDER = operator.attrgetter("order")

KEPT_CLIENTS = 1024
"""Beyond so many, those are forgotten whose turns have passed."""


class SequenceQueue(list[Sequence]):
    """Sequences in their order. `add` and `remove` look for a place by bisection, however many there are."""

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self, sequence, key=_ORDER)

    def remove(self, sequence: Sequence) -> None:
        index = bisect.bisect_left(self, sequence.order, key=_ORDER)
        while self[index] is not sequence:  # a beam and its parent are equal
            index += 1
        del self[index]


class Turns:
    """The client "" shares with nobody: its requests come in order of arrival."""

    def __init__(self) -> None:
        self._reached = 0
        """The highest turn of a sequence that has run."""
        self._next: dict[str, int] = {}
        """By client: the turn after its last request."""
        self._num_arrivals = 0

    def give(self, sequence: Sequence) -> None:
        """A turn for each of its choices, and its place among those of the same turn."""
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1
        if not sequence.client:
            return
        sequence.turn = max(self._reached, self._next.get(sequence.client, 0))
        self._next[sequence.client] = sequence.turn + sequence.num_places
        if len(self._next) > KEPT_CLIENTS:
            self._next = {client: turn for client, turn in self._next.items() if turn > self._reached}

    def reach(self, sequence: Sequence) -> None:
        """It begins to run."""
        self._reached = max(self._reached, sequence.turn)

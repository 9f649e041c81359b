"""The order in which sequences run, and whose request is next among those of equal priority: clients take turns,
whoever asked first and however often.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): a client's requests are numbered from the turn that is reached
now, or after its own last one, and the lowest number goes first. So a client with a thousand requests waiting has as
many numbers, and another one's only request goes before all but the next of them. One client's run in their order. The
numbers of a client with weight 2 are half as far apart: while all have requests waiting, clients begin choices in
proportion to their weights.

A client with one request at a time waits for nobody's end: it goes first, and whoever has most places gives way. What
gave way waits for its turn: else two could take each other's places for ever.
"""

from __future__ import annotations

import bisect
import operator
from collections import Counter

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
        self._reached = 0.0
        """The highest turn of a sequence that has run."""
        self._next: dict[str, float] = {}
        """By client: the turn after its last request."""
        self._num_arrivals = 0
        self._without_loner: tuple[object, ...] = ()
        """The state in which no client's only request was found."""

    def give(self, sequence: Sequence) -> None:
        """A turn for each of its choices, and its place among those of the same turn."""
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1
        if not sequence.client:
            return
        sequence.turn = max(self._reached, self._next.get(sequence.client, 0.0))
        self._next[sequence.client] = sequence.turn + sequence.num_places / sequence.weight
        if len(self._next) > KEPT_CLIENTS:
            self._next = {client: turn for client, turn in self._next.items() if turn > self._reached}

    def reach(self, sequence: Sequence) -> None:
        """It begins to run."""
        self._reached = max(self._reached, sequence.turn)

    def first(self, running: SequenceQueue, waiting: SequenceQueue) -> Sequence | None:
        """Who is next: the first of `waiting`, but before it a client's only request, which is put there."""
        first = next((sequence for sequence in waiting if not sequence.is_paused), None)
        if first is None:
            return None
        clients = {sequence.client for sequence in running}
        state = self._num_arrivals, len(waiting), clients
        if first.client not in clients or state == self._without_loner:
            return first
        counts = Counter(sequence.client for sequence in waiting)
        for loner in waiting:
            is_alone = counts[loner.client] == 1 and loner.client not in clients
            if is_alone and not loner.has_given_way and loner.priority == first.priority:
                waiting.remove(loner)
                loner.turn = first.turn - 1
                waiting.add(loner)
                return loner
        self._without_loner = state
        return first

    def who_gives_way(self, running: SequenceQueue, first: Sequence) -> Sequence | None:
        """Who loses its place, if need be, to the first in the queue: the least urgent one, if it is less urgent; else,
        for a client of which nothing runs, the last one of the client that has most places for its weight, and two at
        least.
        """
        if not running or first.priority < running[-1].priority:
            return running[-1] if running else None
        if not first.client or first.has_given_way or any(sequence.client == first.client for sequence in running):
            return None
        places: Counter[str] = Counter()
        for sequence in running:
            if sequence.priority == first.priority:
                places[sequence.client] += sequence.num_places
        several = [sequence for sequence in running if places[sequence.client] > 1]
        return max(
            several, key=lambda sequence: (places[sequence.client] / sequence.weight, sequence.order), default=None
        )

    def put_behind(self, waiting: SequenceQueue, victim: Sequence, first: Sequence) -> None:
        """It lost its place to `first`, and is next of its client after it."""
        if victim.priority == first.priority:
            victim.has_given_way = True
            waiting.remove(victim)
            victim.turn = max(victim.turn, first.turn + 1 / victim.weight)
            waiting.add(victim)

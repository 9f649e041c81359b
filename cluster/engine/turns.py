"""The order of sequences in the queues: by priority, and by fair turns of clients among equal priorities.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): each request of a client gets a turn number. The number is the
turn reached now, or the turn after the client's last request if that is later. The lowest number runs first. A client
with a thousand waiting requests has a thousand numbers, so another client's only request runs before all but the next
of them. Requests of one client keep their order. Numbers of a client with weight 2 are half as far apart: while all
clients have requests waiting, each starts choices in proportion to its weight.

A client with one request at a time does not wait for others to end: its request goes first, and the client with the
most places loses one. A sequence that lost its place so waits for its turn and takes nobody's place; otherwise two
sequences could preempt each other forever.

A sequence that another engine admitted, and that continues here, gets the turn and the arrival of the last one that has
started: its client waits for the next token, so it goes behind those that run and before all others.
"""

from __future__ import annotations

import bisect
import operator
from collections import Counter

from manta.cluster.engine.sequence import Sequence

_ORDER = operator.attrgetter("order")

KEPT_CLIENTS = 1024
"""Number of clients above which those whose turns have passed are forgotten."""


class SequenceQueue(list[Sequence]):
    """Sequences sorted by `Sequence.order`. `add` and `remove` find the place by bisection."""

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self, sequence, key=_ORDER)

    def remove(self, sequence: Sequence) -> None:
        index = bisect.bisect_left(self, sequence.order, key=_ORDER)
        while self[index] is not sequence:  # a beam and its parent have equal keys
            index += 1
        del self[index]


class Turns:
    """Assigns turns to sequences. Requests of the client "" all have turn 0, in order of arrival."""

    def __init__(self) -> None:
        self._reached = 0.0
        """The highest turn of a sequence that has started to run."""
        self._next: dict[str, float] = {}
        """Clients, each with the turn after its last request."""
        self._num_arrivals = 0
        self._last_started = 0
        """The highest arrival number of a sequence that has started to run."""
        self._without_loner: tuple[object, ...] = ()
        """The state in which the last search found no client with a single request; it need not be searched again."""

    def give(self, sequence: Sequence) -> None:
        """Sets the turn and the arrival number of a sequence; its client uses one turn for each choice."""
        sequence.arrival = self._last_started if sequence.is_continued else self._num_arrivals
        self._num_arrivals += 1
        if not sequence.client:
            return
        turn = max(self._reached, self._next.get(sequence.client, 0.0))
        sequence.turn = self._reached if sequence.is_continued else turn
        self._next[sequence.client] = turn + sequence.num_places / sequence.weight
        if len(self._next) > KEPT_CLIENTS:
            self._next = {client: turn for client, turn in self._next.items() if turn > self._reached}

    def reach(self, sequence: Sequence) -> None:
        """Notes that the sequence begins to run."""
        self._reached = max(self._reached, sequence.turn)
        self._last_started = max(self._last_started, sequence.arrival)

    def promote_next(self, running: SequenceQueue, waiting: SequenceQueue) -> Sequence | None:
        """Returns the next sequence to admit, or None. That is the first sequence in `waiting` that is not paused, or a
        promoted one.

        If the client of the first sequence runs already, another client's only request is promoted: it moves to the
        front of `waiting`. A request is promoted only if it has the same priority, its client runs nothing, and it
        never lost its place. None is promoted before a request that another engine admitted.
        """
        first = next((sequence for sequence in waiting if not sequence.is_paused), None)
        if first is None:
            return None
        clients = {sequence.client for sequence in running}
        state = self._num_arrivals, len(waiting), clients
        if first.is_continued or first.client not in clients or state == self._without_loner:
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
        """Returns the running sequence to preempt if `first` finds no place, or None.

        - The last running sequence, if its priority is less urgent than that of `first`.
        - Otherwise, if the client of `first` runs nothing and `first` never lost its place: the last sequence of the
          client with the most places for its weight. Only clients with two places or more, at the priority of `first`,
          count.
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
        """Gives `victim`, which lost its place to `first`, the next turn after it."""
        if victim.priority == first.priority:
            victim.has_given_way = True
            waiting.remove(victim)
            victim.turn = max(victim.turn, first.turn + 1 / victim.weight)
            waiting.add(victim)

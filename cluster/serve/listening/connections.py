"""Bounds the number of connections, overall and per address, and chooses which one gives way to a new one.

Half-sent requests cost their sender nothing and the ingress a file descriptor each. At a bound, the connection that has
rested longest is closed: one that waits for the head of a request or for the next request. If none rests, the new one
is refused. `cluster/serve/listening/listener.py` uses it. It knows nothing of HTTP.
"""

from __future__ import annotations

import resource
from collections import OrderedDict
from typing import Protocol

from manta.cluster.http.access.addresses import network_of
from manta.cluster.serve.listening.frame_budget import ADDRESS_FRAMES_PER_S, Allowance
from manta.structured.visible_logs import logger_of


class Guest(Protocol):
    """A connection, as this module needs it."""

    address: str
    """IP address of the client."""

    def give_way(self) -> bool:
        """Closes the connection and returns True. Returns False, and keeps it, if the client has not taken all of the
        last answer.
        """
        ...


class _Room:
    """Connections under one bound."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.guests: set[Guest] = set()
        self.resting: OrderedDict[Guest, None] = OrderedDict()
        """Connections without a request, longest-resting first."""
        self.frames = Allowance(ADDRESS_FRAMES_PER_S)
        """WebSocket frames that they may send together; used for those of one address."""


class Connections:
    """The connections of a listener: at most `max_all`, and at most `max_per_address` per address."""

    def __init__(self, max_all: int, max_per_address: int) -> None:
        self._max_per_address = max_per_address
        self._all = _Room(max_all)
        self._by_address: dict[str, _Room] = {}

    def __len__(self) -> int:
        return len(self._all.guests)

    def enter(self, guest: Guest, instead_of: Guest | None = None) -> bool:
        """Adds a connection, which rests at first, and removes `instead_of`. Returns False if there is no room."""
        if instead_of is not None:
            self.leave(instead_of)
        address = network_of(guest.address)
        for room in (self._by_address.get(address), self._all):
            if room is not None and len(room.guests) >= room.limit and not self._make_place(room):
                return False
        self._by_address.setdefault(address, _Room(self._max_per_address))
        for room in self._rooms(guest):
            room.guests.add(guest)
        self.rest(guest)
        return True

    def frames_of(self, guest: Guest) -> Allowance:
        """Returns the WebSocket frames that all connections of a guest's address may send together."""
        return self._rooms(guest)[-1].frames

    def leave(self, guest: Guest) -> None:
        """Removes a connection; harmless if it is unknown."""
        self.work(guest)
        for room in self._rooms(guest):
            room.guests.discard(guest)
        address = network_of(guest.address)
        if address in self._by_address and not self._by_address[address].guests:
            del self._by_address[address]

    def rest(self, guest: Guest) -> None:
        """Records that the connection rests: its last request is answered, and no complete new head has arrived."""
        for room in self._rooms(guest):
            if guest in room.guests:
                room.resting[guest] = None

    def work(self, guest: Guest) -> None:
        """Records that the complete head of a request has arrived."""
        for room in self._rooms(guest):
            room.resting.pop(guest, None)

    def _make_place(self, room: _Room) -> bool:
        while room.resting:
            oldest = next(iter(room.resting))
            self.work(oldest)
            if oldest.give_way():
                self.leave(oldest)
                return True
        return False

    def _rooms(self, guest: Guest) -> list[_Room]:
        of_address = self._by_address.get(network_of(guest.address))
        return [self._all] if of_address is None else [self._all, of_address]


def within_file_limit(max_connections: int) -> int:
    """Returns `max_connections`, but at most half of the files that this process may open, because it needs the rest
    otherwise.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY or max_connections <= files // 2:
        return max_connections
    logger_of(__name__).warning(
        "listener.max_connections %d is cut to %d, half of the %d files that this process may open (ulimit -n)",
        max_connections,
        files // 2,
        files,
    )
    return files // 2

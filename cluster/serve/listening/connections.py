"""Bounds the connections, in all and from one address, and chooses which of them gives way to a new one.

Half-sent requests cost their sender nothing and the ingress a file descriptor each. So at a bound the connection that
has rested longest goes: one that waits for the head of a request, or for the next request. If none rests the new one is
refused. Kept by `cluster/serve/listening/listener.py`; knows no HTTP.
"""

from __future__ import annotations

import logging
import resource
from collections import OrderedDict
from typing import Protocol

from cluster.http.access.addresses import network_of


class Guest(Protocol):
    """A connection."""

    address: str
    """The address of the client."""

    def give_way(self) -> bool:
        """Closes the connection; False if its client has not taken all of the last answer; then it stays."""
        ...


class _Room:
    """The connections under one bound."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.guests: set[Guest] = set()
        self.resting: OrderedDict[Guest, None] = OrderedDict()
        """The connections without a request, the longest first."""


class Connections:
    """The connections of a listener: at most `max_all`, and `max_per_address` of one address."""

    def __init__(self, max_all: int, max_per_address: int) -> None:
        self._max_per_address = max_per_address
        self._all = _Room(max_all)
        self._by_address: dict[str, _Room] = {}

    def __len__(self) -> int:
        return len(self._all.guests)

    def enter(self, guest: Guest, instead_of: Guest | None = None) -> bool:
        """Adds a connection, which rests at first, in another one's place if one is named. Returns False if there is no
        room for it.
        """
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

    def leave(self, guest: Guest) -> None:
        """Removes a connection; one that is not here is no error."""
        self.work(guest)
        for room in self._rooms(guest):
            room.guests.discard(guest)
        address = network_of(guest.address)
        if address in self._by_address and not self._by_address[address].guests:
            del self._by_address[address]

    def rest(self, guest: Guest) -> None:
        """Notes that its request is answered, and that none has come whole since."""
        for room in self._rooms(guest):
            if guest in room.guests:
                room.resting[guest] = None

    def work(self, guest: Guest) -> None:
        """Notes that the head of a request has come whole."""
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
    """`max_connections`, but at most half of the files that this process may open: the others are not connections."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY or max_connections <= files // 2:
        return max_connections
    logging.getLogger(__name__).warning(
        "listener.max_connections %d is cut to %d, half of the %d files that this process may open (ulimit -n)",
        max_connections,
        files // 2,
        files,
    )
    return files // 2

"""Divides a bounded pool among its clients, so that none of them keeps the others out.

A client may use what nobody else wants, but never the last quarter of a pool. That quarter is for clients within their
share: the bound divided by the number of clients that hold something. If the pool is full, whoever asks within its
share gets room from the clients over theirs, as far as their holdings can be refused or made again. Not thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable


class ClientShares:
    """The amounts of a pool with at most `bound` units, such as bytes or requests, by client. A client holds at most
    `most_each`. With `drops_own` the pool holds what can be made again, so a client that may take no more loses its own
    oldest holdings first.
    """

    def __init__(self, bound: int, most_each: int | None = None, drops_own: bool = False) -> None:
        self._given_most = most_each
        self.total = 0
        """Units that all clients hold."""
        self.resize(bound)
        self._drops_own = drops_own
        self._held: dict[str, int] = {}
        """Units of the clients that hold any."""
        self._losable: dict[str, dict[Holding, None]] = {}
        """Holdings that the pool may take away, by client, oldest first."""

    def resize(self, bound: int) -> None:
        """Changes the bound. What clients hold already stays theirs."""
        self.bound = bound
        self._beside_spare = bound - bound // 4
        self._most_each = self._beside_spare if self._given_most is None else min(self._given_most, self._beside_spare)

    def held(self, client: str) -> int:
        """Returns the units that a client holds."""
        return self._held.get(client, 0)

    def share(self, client: str) -> int:
        """Returns the units that a client can have whatever the others want."""
        num_clients = len(self._held) + (client not in self._held)
        return min(self._most_each, self.bound // num_clients)

    def most(self, client: str) -> int:
        """Returns the most units that a client may hold now, without taking any away from others."""
        others = self.total - self.held(client)
        within_share = min(self.share(client), self.bound - others)
        return max(0, min(self._most_each, max(self._beside_spare - others, within_share)))

    def take(self, client: str, amount: int) -> bool:
        """Takes units for a client. Returns False, and takes nothing, if it may not have so many."""
        if self.held(client) + amount > self.most(client):
            self._make_room(client, amount)
        if self.held(client) + amount > self.most(client):
            return False
        self.add(client, amount)
        return True

    def add(self, client: str, amount: int) -> None:
        """Adds units that are there already, whatever the bounds say."""
        self.total += amount
        left = self.held(client) + amount
        if left:
            self._held[client] = left
        else:
            self._held.pop(client, None)

    def give_back(self, client: str, amount: int) -> None:
        self.add(client, -amount)

    def hold(self, client: str, on_lost: Callable[[], None] | None = None) -> Holding:
        """Returns a holding without units; see `Holding`."""
        return Holding(self, client, on_lost)

    # ---- taking away -----------------------------------------------------------------------------------------------

    def _make_room(self, client: str, amount: int) -> None:
        """Takes holdings away if that lets a client take `amount` more."""
        self._drop_own(client, amount, max(self.most(client), self.share(client)))
        if self.held(client) + amount <= self.share(client):
            for holding in self._over_share(client, self.total + amount - self.bound):
                holding.lose()
        self._drop_own(client, amount, self.most(client))

    def _drop_own(self, client: str, amount: int, limit: int) -> None:
        """Takes a client's oldest holdings away until `amount` more stays within `limit`, if the pool drops own ones.
        Takes none if `amount` alone exceeds the limit.
        """
        for holding in list(self._losable.get(client, ())) if self._drops_own and amount <= limit else ():
            if self.held(client) + amount <= limit:
                return
            holding.lose()

    def _over_share(self, client: str, needed: int) -> list[Holding]:
        """Returns holdings of other clients with `needed` units in all. The client with the most units loses its oldest
        holding first, and nobody that is within the share of `client`. Empty if these are too few.
        """
        share, left, found = self.share(client), dict(self._held), list[Holding]()
        oldest = {other: iter(holdings) for other, holdings in self._losable.items() if other != client}
        while needed > 0 and oldest:
            most = max(oldest, key=left.__getitem__)
            holding = next(oldest[most], None) if left[most] > share else None
            if holding is None:
                del oldest[most]
                continue
            found.append(holding)
            left[most] -= holding.amount
            needed -= holding.amount
        return found if needed <= 0 else []

    def note(self, holding: Holding) -> None:
        """Notes whether a holding can be taken away, after it changed."""
        losable = self._losable.setdefault(holding.client, {})
        if holding.amount and holding.on_lost is not None:
            losable.setdefault(holding)
        else:
            losable.pop(holding, None)
        if not losable:
            del self._losable[holding.client]


class Holding:
    """The units of a pool that one request, connection or recording holds for its client. With `on_lost` the pool may
    take them away; it calls `on_lost` when it has. A lost holding gets no more units.
    """

    def __init__(self, shares: ClientShares, client: str, on_lost: Callable[[], None] | None) -> None:
        self.client = client
        self.amount = 0
        self.on_lost = on_lost
        self.is_lost = False
        """Whether the pool took the units away."""
        self._shares = shares

    def take(self, amount: int) -> bool:
        """Takes more units. Returns False, and takes none, if the client may not have so many."""
        if self.is_lost or not self._shares.take(self.client, amount):
            return False
        self._grow(amount)
        return True

    def add(self, amount: int) -> None:
        """Adds units that are there already, whatever the bounds say."""
        self._shares.add(self.client, amount)
        self._grow(amount)

    def may_be_lost(self, on_lost: Callable[[], None]) -> None:
        """Lets the pool take the units away from now on."""
        self.on_lost = on_lost
        self._shares.note(self)

    def give_back(self) -> None:
        """Gives all units back; harmless if it has none."""
        self._shares.give_back(self.client, self.amount)
        self._grow(-self.amount)

    def lose(self) -> None:
        """Takes the units away. The pool calls it."""
        self.give_back()
        self.is_lost = True
        if self.on_lost is not None:
            self.on_lost()

    def _grow(self, amount: int) -> None:
        self.amount += amount
        self._shares.note(self)


class HoldingLost(Exception):
    """A pool took a holding away from work that was under way."""


@contextlib.asynccontextmanager
async def held(shares: ClientShares, client: str) -> AsyncIterator[Holding]:
    """Yields a holding that is given back after the body of the `async with`. If the pool takes it away before, the
    body is cancelled and this raises `HoldingLost`.
    """
    timeout = asyncio.timeout(None)

    def end() -> None:
        if not timeout.expired():
            timeout.reschedule(asyncio.get_running_loop().time())

    holding = shares.hold(client, end)
    try:
        async with timeout:
            yield holding
    except TimeoutError as error:
        if holding.is_lost:
            raise HoldingLost from error
        raise
    finally:
        holding.give_back()

"""The keepers of recordings as one ingress sees them: which one has its copies, and what all of them know of a stream.

`streams.py` decides what becomes of a stream; this module only carries messages and notices lost keepers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from cluster.errors import Unavailable
from cluster.serve.streams.keeping import Ask, Copy, FromKeeper, Keep, Kept, Notice, Write
from cluster.serve.streams.token_channel import Connection

ANSWER_S = 1.0
"""Seconds that a keeper gets to answer. One that does not is avoided, because its process hangs or is overloaded."""
LOOK_UP_S = 5.0
"""Seconds that a keeper gets to say whether it has a stream that a client asks for."""
AVOID_S = 5.0
"""Seconds for which a keeper that did not answer gets no recordings."""

What = Literal["read", "claim", "cancel"]


class Found(NamedTuple):
    """A copy of a stream, and the connection to the keeper that has it."""

    copy: Copy
    connection: Connection


class Copies:
    """Writes recordings to one keeper. `host` is this machine's address; a keeper on another machine is preferred.

    - `on_kept` is called with what was passed to `write`, once it is stored, and with the refused streams.
    - `on_keeper` is called when another keeper was chosen, or none is left; everything must be written again.
    - `on_notice` is called with notices and the connection on which they came.
    """

    def __init__(
        self,
        host: str,
        on_kept: Callable[[list[tuple[str, int]], list[str]], None],
        on_keeper: Callable[[], None],
        on_notice: Callable[[Notice, Connection], None],
    ) -> None:
        self.keeper: Connection | None = None
        self._host = host
        self._on_kept = on_kept
        self._on_keeper = on_keeper
        self._on_notice = on_notice
        self._connections: set[Connection] = set()
        self._avoided: dict[Connection, float] = {}
        """Time until which a keeper gets no recordings, on `time.monotonic`'s clock."""
        self._number = 0
        self._unkept: dict[int, list[tuple[str, int]]] = {}
        """Writes without an answer, by number: each stream with its number of entries then."""
        self._asked: dict[int, asyncio.Future[Copy]] = {}

    def connected(self, connection: Connection) -> None:
        self._connections.add(connection)
        if self.keeper is None:
            self._choose()

    def lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._avoided.pop(connection, None)
        if self.keeper is connection:
            self._choose()

    def _choose(self) -> None:
        now = time.monotonic()
        free = [each for each in self._connections if self._avoided.get(each, 0.0) <= now]
        self.keeper = min(free, key=lambda each: (each.peer_host == self._host, each.replica), default=None)
        self._unkept.clear()
        self._on_keeper()

    def write(self, writes: list[Write], counts: list[tuple[str, int]]) -> None:
        """Sends entries to the keeper. `counts` names each stream and its number of entries."""
        assert self.keeper is not None
        self._number += 1
        self._unkept[self._number] = counts
        self.keeper.send(Keep(self._number, writes))
        asyncio.get_running_loop().call_later(ANSWER_S, self._check, self._number)

    def _check(self, number: int) -> None:
        """Leaves the keeper if it has not answered the write."""
        if number in self._unkept and self.keeper is not None:
            self._avoided[self.keeper] = time.monotonic() + AVOID_S
            self._choose()
            if self.keeper is None:
                asyncio.get_running_loop().call_later(AVOID_S, self._choose_again)

    def _choose_again(self) -> None:
        if self.keeper is None and self._connections:
            self._choose()

    def receive(self, message: FromKeeper, connection: Connection) -> None:
        if isinstance(message, Kept):
            counts = self._unkept.pop(message.number, None) if connection is self.keeper else None
            if counts is not None:
                self._on_kept(counts, message.refused)
        elif isinstance(message, Copy):
            asked = self._asked.pop(message.number, None)
            if asked is not None and not asked.done():
                asked.set_result(message)
        else:
            self._on_notice(message, connection)

    # ---- questions -------------------------------------------------------------------------------------------------

    async def ask(
        self,
        connections: Iterable[Connection],
        stream_id: str,
        what: What,
        first: int = 0,
    ) -> Found | None:
        """Asks keepers about a stream, and returns the newest copy; None if none of them answers that it has one."""
        found, _ = await self._ask(connections, stream_id, what, first, ANSWER_S)
        return found

    async def _ask(
        self, connections: Iterable[Connection], stream_id: str, what: What, first: int, seconds: float
    ) -> tuple[Found | None, bool]:
        """Returns the newest copy, and whether every keeper has answered within `seconds`."""
        asked: dict[asyncio.Future[Copy], Connection] = {}
        numbers = []
        for connection in connections:
            self._number += 1
            numbers.append(self._number)
            answer: asyncio.Future[Copy] = asyncio.get_running_loop().create_future()
            self._asked[self._number] = answer
            asked[answer] = connection
            connection.send(Ask(self._number, stream_id, what, first))
        if not asked:
            return None, False
        try:
            done, silent = await asyncio.wait(asked, timeout=seconds)
        finally:
            for number in numbers:
                self._asked.pop(number, None)
        found = [Found(answer.result(), asked[answer]) for answer in done if answer.result().epoch >= 0]
        return max(found, key=_newness, default=None), not silent

    async def look_up(self, stream_id: str) -> Found | None:
        """Returns the newest copy; None if no keeper has one. Raises `Unavailable` if a keeper that might have one does
        not answer.
        """
        found, is_certain = await self._ask(list(self._connections), stream_id, "read", 0, LOOK_UP_S)
        if found is None and not is_certain:
            raise Unavailable("not every engine says now whether it has a copy of this stream; retry")
        return found

    async def ask_all(self, stream_id: str, what: Literal["read", "cancel"], first: int = 0) -> Found | None:
        return await self.ask(list(self._connections), stream_id, what, first)

    def drop(self, stream_id: str, epoch: int, connection: Connection | None = None) -> None:
        """Removes the copies that are no newer than `epoch`, of one keeper or of all."""
        for each in [connection] if connection is not None else self._connections:
            each.send(Ask(0, stream_id, "drop", epoch=epoch))


def _newness(found: Found) -> tuple[int, bool, bool, int]:
    copy = found.copy
    return copy.epoch, copy.is_ended, copy.is_owned, copy.num_entries

"""The keepers of recordings as one ingress sees them: which one has its copies, and what all of them know of a stream.

An ingress and its keeper must not die with one node. So a keeper on another node is preferred. If it has to be left for
one on the same node, another node's is chosen again as soon as one answers.

`streams.py` decides what becomes of a stream; this module only carries messages and notices lost keepers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

from manta.cluster.errors import Unavailable
from manta.cluster.serve.channel.keeping import (
    Ask,
    Copy,
    FromKeeper,
    Join,
    Keep,
    Kept,
    News,
    Notice,
    Write,
    stream_format,
)
from manta.cluster.serve.channel.token_channel import Connection
from manta.structured.refusals import Refusal
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

ANSWER_S = 1.0
"""Seconds that a keeper gets to answer. One that does not is avoided, because its process hangs or is overloaded."""
NUM_LOOKS = 4
"""Number of times within `ANSWER_S` at which an answer is looked for. So a pause of this process counts as one look."""
LOOK_UP_S = 5.0
"""Seconds that a keeper gets to say whether it has a stream that a client asks for."""
MOVE_S = 5.0
"""Seconds after the loss of a keeper within which its copies may be at no keeper, because their owners are writing them
to another one. The next one may not answer either.
"""
SETTLE_S = 0.3
"""Seconds after the loss of a keeper within which nobody claims an orphan: it may be an old copy, to which its owner
returns now.
"""
AVOID_S = 5.0
"""Seconds for which a keeper that did not answer gets no recordings while another one can."""

What = Literal["read", "peek", "claim", "cancel"]


class Found(NamedTuple):
    """A copy of a stream, and the connection to the keeper that has it."""

    copy: Copy
    connection: Connection


class Owner(Protocol):
    """The streams whose copies an ingress writes. `RecordedStreams` implements it."""

    def on_kept(self, counts: list[tuple[str, int]], refused: list[str]) -> None:
        """Called with what was passed to `Copies.write`, once it is stored, and with the refused streams."""
        ...

    def on_keeper(self) -> None:
        """Called when another keeper was chosen, or none is left; everything must be written again."""
        ...

    def on_connected(self, connection: Connection) -> None:
        """Called with a keeper that connects and gets no recordings."""
        ...

    def on_lost(self, connection: Connection) -> None:
        """Called with a keeper whose connection broke."""
        ...

    def on_news(self, news: News, connection: Connection) -> None:
        """Called with news of followed streams, and the connection on which they came."""
        ...

    def on_notice(self, notice: Notice, connection: Connection) -> None:
        """Called with what a keeper says without having been asked."""
        ...


class Copies:
    """Writes recordings to one keeper. `node` is the id of the Ray node that this process runs on. `has_peers` says
    whether there may be other ingresses.
    """

    def __init__(self, node: str, has_peers: bool, owner: Owner) -> None:
        self.keeper: Connection | None = None
        self._node = node
        self._owner = owner
        self.connections: set[Connection] = set()
        self.strangers: set[Connection] = set()
        """Connections to engines of another version, which are sent none of these messages."""
        self._avoided: dict[Connection, float] = {}
        """Time until which a keeper gets no recordings, on `time.monotonic`'s clock."""
        self._lost_at = time.monotonic() if has_peers else -MOVE_S
        """Time of the last loss of a keeper, on `time.monotonic`'s clock. Other ingresses may have lost one just before
        this one started.
        """
        self._returning: asyncio.Task[None] | None = None
        """Looks for a keeper on another node while the present one is on this node."""
        self._number = 0
        self._unkept: dict[int, list[tuple[str, int]]] = {}
        """Writes without an answer, by number: each stream with its number of entries then."""
        self._asked: dict[int, tuple[asyncio.Future[Copy], Connection]] = {}

    def connected(self, connection: Connection) -> None:
        if connection.stream_format != stream_format():
            logger.warning(
                "engine %s is of another version: it keeps no streams of this ingress, and streams that it has do not "
                "go on here",
                connection.replica,
            )
            self.strangers.add(connection)
            return
        connection.send(Join())
        self.connections.add(connection)
        if self.keeper is None or (self._is_near(self.keeper) and not self._is_near(connection)):
            self._choose()
        else:
            self._owner.on_connected(connection)

    def lost(self, connection: Connection) -> None:
        if connection in self.connections:
            self._lost_at = time.monotonic()
        self.connections.discard(connection)
        self.strangers.discard(connection)
        self._avoided.pop(connection, None)
        self._owner.on_lost(connection)
        for answer, keeper in self._asked.values():
            if keeper is connection:
                answer.cancel()
        if self.keeper is connection:
            self.keeper = None
            self._choose()

    def _choose(self) -> None:
        """Chooses a keeper that is not avoided. If all are, the present one stays, because an entry that no keeper has
        would be lost with this process.
        """
        now = time.monotonic()
        free = {each for each in self.connections if self._avoided.get(each, 0.0) <= now}
        if self.keeper is not None and not free:
            return
        choice = free or self.connections
        self.keeper = min(choice, key=lambda each: (self._is_near(each), each.replica), default=None)
        self._unkept.clear()
        self._owner.on_keeper()
        if self._returning is None and self._better():
            self._returning = asyncio.ensure_future(self._return())

    def _is_near(self, connection: Connection) -> bool:
        """Returns whether a keeper is on this process's node, and would die with it."""
        return connection.node == self._node

    def _better(self) -> set[Connection]:
        """Returns the keepers on other nodes if the present one is on this node."""
        if self.keeper is None or not self._is_near(self.keeper):
            return set()
        return {each for each in self.connections if not self._is_near(each)}

    async def _return(self) -> None:
        """Chooses a keeper on another node once one answers in time. Until then recordings need not wait for it."""
        try:
            while self._better():
                await asyncio.sleep(AVOID_S)
                answers = await self._ask(self._better(), "", "read", 0, ANSWER_S)
                heard, until = {found.connection for found in answers}, time.monotonic() + AVOID_S
                self._avoided.update({each: 0.0 if each in heard else until for each in self._better()})
                if heard & self._better():
                    self._choose()
        finally:
            self._returning = None

    def write(self, writes: list[Write], counts: list[tuple[str, int]]) -> None:
        """Sends entries to the keeper. `counts` names each stream and its number of entries."""
        assert self.keeper is not None
        self._number += 1
        self._unkept[self._number] = counts
        self.keeper.send(Keep(self._number, writes))
        self._check_later(self._number, NUM_LOOKS)

    def _check_later(self, number: int, num_looks: int) -> None:
        asyncio.get_running_loop().call_later(ANSWER_S / NUM_LOOKS, self._check, number, num_looks - 1)

    def _check(self, number: int, num_looks: int) -> None:
        """Leaves the keeper if it has not answered the write by the last look."""
        if number not in self._unkept:
            return
        if not num_looks:
            assert self.keeper is not None
            self._avoided[self.keeper] = time.monotonic() + AVOID_S
            self._choose()
        if number in self._unkept:
            self._check_later(number, num_looks or NUM_LOOKS)

    def receive(self, message: FromKeeper, connection: Connection) -> None:
        if isinstance(message, Kept):
            counts = self._unkept.pop(message.number, None) if connection is self.keeper else None
            if counts is not None:
                self._owner.on_kept(counts, message.refused)
        elif isinstance(message, Copy):
            answer, _ = self._asked.pop(message.number, (None, None))
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif isinstance(message, News):
            self._owner.on_news(message, connection)
        else:
            self._owner.on_notice(message, connection)

    # ---- questions -------------------------------------------------------------------------------------------------

    async def ask_all(
        self, stream_id: str, what: Literal["peek", "cancel"], first: int = 0, seconds: float = ANSWER_S
    ) -> Found | None:
        """Asks every keeper about a stream. Returns the newest copy; None if none of them answers within `seconds` that
        it has one.
        """
        return _newest(await self._ask(self.connections, stream_id, what, first, seconds))

    async def claim(self, stream_id: str, connection: Connection) -> Copy | None:
        """Claims an orphan at one keeper. Returns the copy; None if the connection breaks.

        There is no other limit: a claim that is granted after the claimer gave up would leave the stream to nobody.
        """
        found = await self._ask([connection], stream_id, "claim", 0, None)
        return found[0].copy if found else None

    async def until_settled(self) -> bool:
        """Waits until owners had time to write the copies of a lost keeper to another one. Returns whether it had to
        wait.
        """
        left_s = self._lost_at + SETTLE_S - time.monotonic()
        if left_s > 0:
            await asyncio.sleep(left_s)
        return left_s > 0

    async def look_up(self, stream_id: str, replicas: Iterable[str]) -> Found | None:
        """Returns the newest copy; None if no keeper has one. `replicas` are the names of all running engines.

        Raises `Unavailable` if a keeper that might have a copy is not connected or does not answer, or if one was lost
        just now.
        """
        for _ in range(2):  # a copy may move from a keeper that is asked late to one that has answered
            connected = list(self.connections)
            answers = await self._ask(connected, stream_id, "read", 0, LOOK_UP_S)
            found = _newest(answers)
            if found is not None:
                return found
            unheard = set(replicas) - {each.connection.replica for each in answers}
            if unheard or not answers or len(answers) < len(connected):
                raise _unsure()
        if time.monotonic() < self._lost_at + MOVE_S:
            raise _unsure()
        return None

    async def _ask(
        self, connections: Iterable[Connection], stream_id: str, what: What, first: int, seconds: float | None
    ) -> list[Found]:
        """Returns the answers that come within `seconds`. `None` waits as long as the connections last."""
        numbers: list[int] = []
        for connection in list(connections):
            self._number += 1
            numbers.append(self._number)
            self._asked[self._number] = asyncio.get_running_loop().create_future(), connection
            connection.send(Ask(self._number, stream_id, what, first))
        if not numbers:
            return []
        asked = dict(self._asked[number] for number in numbers)
        try:
            done, _ = await asyncio.wait(asked, timeout=seconds)
        finally:
            for number in numbers:
                self._asked.pop(number, None)
        return [Found(answer.result(), asked[answer]) for answer in done if not answer.cancelled()]

    def drop(self, stream_id: str, epoch: int, connection: Connection | None = None) -> None:
        """Removes the copies that are no newer than `epoch`, of one keeper or of all."""
        for each in [connection] if connection is not None else self.connections:
            each.send(Ask(0, stream_id, "drop", epoch=epoch))

    def drop_elsewhere(self, stream_id: str, epoch: int) -> None:
        """Removes the copies that are no newer than `epoch` of all keepers but the present one."""
        for each in self.connections - {self.keeper}:
            self.drop(stream_id, epoch, each)


def _unsure() -> Unavailable:
    cause = "not every engine says now whether it has a copy of this stream"
    return Unavailable(Refusal("unavailable", cause=cause, remedy="retry"))


def _newest(answers: list[Found]) -> Found | None:
    """Returns the newest of the copies. Ownership counts last, because a keeper may not have noticed a lost owner."""
    return max((found for found in answers if found.copy.epoch >= 0), key=_newness, default=None)


def _newness(found: Found) -> tuple[int, bool, int, bool]:
    copy = found.copy
    return copy.epoch, copy.is_ended, copy.num_entries, copy.is_owned

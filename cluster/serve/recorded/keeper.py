"""Copies of recordings in an engine's process, so that a stream survives the death of the ingress that runs it.

An ingress writes each recording to one keeper, and shows its readers only what the keeper has acknowledged. When the
connection to that ingress breaks, its streams are orphans: the keeper offers each to another ingress, which claims and
continues it. It does so at once if the ingress's process has ended, and otherwise after a grace period, because an
ingress that lives writes them elsewhere. The same happens if the ingress is silent while another one reads its streams.
The keeper decides who owns its copy: a claim raises the copy's epoch, and writes of an earlier epoch are refused. All
messages travel over the token channel. A keeper knows nothing of the engine in whose process it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec

from manta.cluster.serve.channel.keeping import (
    Ask,
    Copy,
    FromKeeper,
    Join,
    Keep,
    Kept,
    Look,
    News,
    Notice,
    ToKeeper,
    Write,
    next_epoch,
)
from manta.cluster.serve.channel.token_channel import Address
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

GRACE_S = 0.3
"""Seconds after a connection broke at which its streams are offered, unless its ingress is known to have died. An
ingress that lives writes them elsewhere meanwhile.
"""
ENDED_AFTER_S = 0.5
"""Further seconds after which ended streams of a lost ingress are offered. Readers find them without an owner, so those
that run go first.
"""
ENDED_EVERY_S = 0.005
"""Seconds between the offers of two ended streams. An ingress may have hundreds, and the streams that run would have to
wait while all are copied.
"""
BETWEEN_OFFERS_S = 0.05
"""Least seconds between two looks for orphans to offer, each of which reads all streams."""
OFFER_S = 1.0
"""Seconds between two offers of orphans that nobody has claimed."""


class SilenceTimes(msgspec.Struct, frozen=True, kw_only=True):
    """When an ingress counts as silent whose streams are read elsewhere, in seconds."""

    read_share: float = 1 / 16
    """Share of the time for which a stream is kept unread, after which its owner is told again that it is read."""
    min_read_s: float = 0.25
    """Least seconds between two such notices."""
    silent_s: float = 10.0
    """Seconds for which an ingress may leave such notices unanswered. Then its streams are orphans, although its
    connection has not broken: its process hangs, or its machine is gone without a word.
    """


USUAL_TIMES = SilenceTimes()


class _Stream(msgspec.Struct):
    """The copy of one recording."""

    epoch: int
    owner: Address | None
    opening: bytes
    keep_s: float
    began: float
    """Time of the stream's begin, on `time.monotonic`'s clock."""
    entries: list[bytes] = []
    is_ended: bool = False
    orphan_since: float = 0.0
    """Time at which the owner was lost, on `time.monotonic`'s clock."""
    offered_at: float = 0.0
    """Time at which an orphan is offered next, on `time.monotonic`'s clock."""
    told_at: float = 0.0
    """Time at which the owner was last told that somebody reads."""

    def is_owned_by_another(self, epoch: int, address: Address) -> bool:
        return self.epoch == epoch and self.owner not in (None, address)

    def copy(self, stream_id: str, first: int, address: Address) -> Copy:
        """Returns the entries from `first` on, for the ingress at `address`."""
        return Copy(
            0,
            stream_id,
            self.epoch,
            len(self.entries),
            self.entries[first:],
            is_ended=self.is_ended,
            is_owned=self.owner is not None,
            is_yours=self.owner == address,
            age_s=time.monotonic() - self.began,
        )


async def _nobody_knows(_: Address) -> bool:
    """Returns False: the ingress may live."""
    return False


class Keeper:
    """The copies of one engine process. `send` sends a message to an ingress. `has_died` finds out whether the process
    of an ingress has ended whose connection broke. Only the event loop uses it.
    """

    def __init__(
        self,
        send: Callable[[Address, FromKeeper], None],
        times: SilenceTimes = USUAL_TIMES,
        has_died: Callable[[Address], Awaitable[bool]] = _nobody_knows,
    ) -> None:
        self.times = times
        self._send = send
        self._has_died = has_died
        self._asking: set[asyncio.Task[None]] = set()
        """Tasks that find out whether an ingress has died."""
        self._joined: dict[Address, None] = {}
        """Connected ingresses that may be offered orphans, in the order of their coming."""
        self._silent_since: dict[Address, float] = {}
        """Time of the first notice that an owner has not answered, on `time.monotonic`'s clock."""
        self._streams: dict[str, _Stream] = {}
        self._num_offers = 0
        self._offering: asyncio.TimerHandle | None = None

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def receive(self, address: Address, message: ToKeeper) -> None:
        self._silent_since.pop(address, None)
        if isinstance(message, Join):
            if not self._joined:
                self._offer_in(0.0)  # orphans that nobody could take
            self._joined[address] = None
        elif isinstance(message, Keep):
            refused = [write.stream_id for write in message.writes if not self._write(address, write)]
            self._send(address, Kept(message.number, refused))
        elif isinstance(message, Look):
            self._send(address, self._news(address, message))
        elif message.what == "drop":
            self._drop(address, message)
        else:
            self._answer(address, message)

    def lose(self, address: Address) -> None:
        """Makes orphans of the streams of an ingress whose connection broke."""
        self._joined.pop(address, None)
        if orphans := self._orphan(address):
            asking = asyncio.ensure_future(self._offer_if_died(address, orphans))
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)

    def _orphan(self, address: Address) -> list[_Stream]:
        """Makes orphans of the streams of an ingress, and returns them."""
        self._silent_since.pop(address, None)
        now, orphans = time.monotonic(), [each for each in self._streams.values() if each.owner == address]
        num_ended = 0
        for stream in orphans:
            later_s = min(ENDED_AFTER_S + num_ended * ENDED_EVERY_S, stream.keep_s / 2) if stream.is_ended else 0.0
            num_ended += stream.is_ended
            stream.owner, stream.orphan_since, stream.offered_at = None, now, now + GRACE_S + later_s
        if orphans:
            self._offer_in(GRACE_S)
        return orphans

    async def _offer_if_died(self, address: Address, orphans: list[_Stream]) -> None:
        """Offers orphans without the grace period if the process of their owner has ended: it writes nothing again."""
        if await self._has_died(address):
            now = time.monotonic()
            for stream in orphans:
                if not stream.is_ended:
                    stream.offered_at = min(stream.offered_at, now)
            self._offer_in(0.0)

    def _write(self, address: Address, write: Write) -> bool:
        """Returns whether the sender owns the stream, so that its entries were stored."""
        stream = self._streams.get(write.stream_id)
        if stream is not None and (stream.epoch > write.epoch or stream.is_owned_by_another(write.epoch, address)):
            return False
        if write.first == 0:
            began = time.monotonic() - write.age_s
            stream = _Stream(write.epoch, address, write.opening, write.keep_s, began)
            self._streams[write.stream_id] = stream
        if stream is None or stream.owner != address or write.first > len(stream.entries):
            return False
        stream.entries[write.first :] = write.entries
        stream.is_ended = write.is_ended
        return True

    def _drop(self, address: Address, ask: Ask) -> None:
        stream = self._streams.get(ask.stream_id)
        if stream is None:
            return
        if stream.epoch > ask.epoch:
            self._send(address, Notice(ask.stream_id, "taken", stream.epoch))
            return
        if stream.is_owned_by_another(ask.epoch, address):
            return  # it was an orphan when the sender decided, and its owner has written it again since
        del self._streams[ask.stream_id]
        if stream.owner not in (None, address):
            assert stream.owner is not None
            self._send(stream.owner, Notice(ask.stream_id, "taken", ask.epoch))

    def _answer(self, address: Address, ask: Ask) -> None:
        stream = self._streams.get(ask.stream_id)
        if stream is None:
            self._send(address, Copy(ask.number, ask.stream_id))
            return
        if ask.what == "claim" and stream.owner is None:
            stream.owner, stream.epoch = address, next_epoch(stream.epoch)
        elif ask.what == "cancel" and stream.owner is not None:
            self._send(stream.owner, Notice(ask.stream_id, "cancel"))
        elif ask.what != "peek":
            self._note_read(ask.stream_id, stream, address)
        copy = stream.copy(ask.stream_id, len(stream.entries) if ask.what == "peek" else ask.first, address)
        copy.number, copy.opening = ask.number, b"" if ask.first else stream.opening
        self._send(address, copy)

    def _news(self, address: Address, look: Look) -> News:
        """Notes that the streams are read, and returns what the sender lacks."""
        news = News([], [])
        for stream_id, num_known in zip(look.stream_ids, look.num_known, strict=True):
            stream = self._streams.get(stream_id)
            if stream is None:
                news.unknown.append(stream_id)
                continue
            self._note_read(stream_id, stream, address)
            if stream.is_ended or len(stream.entries) > num_known:
                news.copies.append(stream.copy(stream_id, num_known, address))
        return news

    def _note_read(self, stream_id: str, stream: _Stream, reader: Address) -> None:
        """Tells the owner now and then that another ingress has a reader of its stream."""
        if stream.owner in (None, reader):
            return
        now = time.monotonic()
        if now >= stream.told_at + max(self.times.min_read_s, self.times.read_share * stream.keep_s):
            stream.told_at = now
            assert stream.owner is not None
            self._send(stream.owner, Notice(stream_id, "read"))
            silent_s = self.times.silent_s
            if now > self._silent_since.setdefault(stream.owner, now) + silent_s:
                logger.warning("an ingress has not answered for %g s: its streams are offered to others", silent_s)
                self._orphan(stream.owner)

    # ---- orphans ---------------------------------------------------------------------------------------------------

    def _offer_in(self, seconds: float) -> None:
        """Offers orphans after so many seconds, unless it does so earlier."""
        at = time.monotonic() + seconds
        if self._offering is not None:
            if self._offering.when() <= at:
                return
            self._offering.cancel()
        self._offering = asyncio.get_running_loop().call_at(at, self._offer)

    def _offer(self) -> None:
        """Offers each orphan whose time has come to one of the ingresses, in turn, and removes those that nobody took
        in time.
        """
        self._offering = None
        now, ingresses = time.monotonic(), list(self._joined)
        orphans = [(stream_id, stream) for stream_id, stream in self._streams.items() if stream.owner is None]
        for stream_id, stream in orphans:
            if now > stream.orphan_since + stream.keep_s:
                logger.warning("stream %s is dropped: no ingress has claimed it for %g s", stream_id, stream.keep_s)
                del self._streams[stream_id]
            elif ingresses and stream.offered_at <= now:
                stream.offered_at = now + OFFER_S
                self._num_offers += 1
                self._send(ingresses[self._num_offers % len(ingresses)], Notice(stream_id, "orphan"))
        if orphans:
            next_s = min(stream.offered_at for _, stream in orphans) - now
            self._offer_in(max(next_s, BETWEEN_OFFERS_S if ingresses else OFFER_S))

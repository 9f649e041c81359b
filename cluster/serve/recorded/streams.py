"""The recorded streams of one ingress: it runs some, reads others through their keepers, and adopts orphans.

A stream has one owner, the ingress that runs its request. The owner writes every entry to a keeper (`keeper.py`) before
a client sees it. So whoever continues the stream has all that any client has seen. An owner that was not the first one,
or changed its keeper, then has all other copies dropped: nobody may continue an old one. Of two owners, which each took
a stream that the other could not see, the one with the lower epoch gives up. Implements
`manta.cluster.http.exchange.recordings.Streams`.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any

from manta.cluster.errors import RequestRefused, error_of, refuse
from manta.cluster.http.exchange.engines import UNMETERED, Meter
from manta.cluster.http.exchange.recordings import (
    Opening,
    Recording,
    decode_entry,
    decode_opening,
    encode_entry,
    encode_opening,
    never_deleted,
)
from manta.cluster.serve.channel.keeping import Join, News, Notice, Write, next_epoch
from manta.cluster.serve.channel.token_channel import Connection
from manta.cluster.serve.recorded.copies import LOOK_UP_S, Copies, Found
from manta.cluster.serve.recorded.following import POLL_S, Following, add_copy
from manta.cluster.serve.recorded.recorder import Reader, Recorder
from manta.cluster.serve.requests.turn_budget import TurnBudget
from manta.cluster.serve.starting.start_failure import in_words
from manta.cluster.serve_limits import StreamLimits
from manta.cluster.telemetry.request_log import log_event
from manta.structured.client_shares import ClientShares, Holding
from manta.structured.refusals import Refusal
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

CANCEL_S = 5.0
"""Seconds after which a cancellation that has not ended its stream fails."""
LATE_S = 0.5
"""Seconds after which an acknowledgement of a keeper is late, so that the request log tells of it."""
REPLAYED_A_TURN = 4096
"""Recorded entries that adopted streams take in one turn of the event loop; each costs one or two microseconds."""
READ_A_TURN = 2048
"""Recorded entries that all readers turn into events in one turn of the event loop; each costs seven microseconds."""
GROWTH = 2
"""Multiple of the byte limits at which running streams end. At the limits themselves, requests are refused."""


class _Own:
    """A stream that this ingress runs, or ran."""

    def __init__(self, recording: Recording, epoch: int, opening: bytes, room: Holding) -> None:
        self.recording = recording
        self.room = room
        """Bytes that count against the limits now."""
        self.epoch = epoch
        self.opening = opening
        self.num_sent = 0
        """Entries that the present keeper was sent."""
        self.unsafe_since: float | None = None
        """Time of the oldest entry that the keeper has not acknowledged, on `time.monotonic`'s clock; None without."""
        self.has_one_copy = False
        """Whether the present keeper has all of it, and the others were told to drop their copies."""
        self.recorder: Recorder | None = None
        self.task: asyncio.Task[None] | None = None
        self.expiry: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        """Aborts the request at once, so that no output is appended any more. The task alone would end a turn later."""
        if self.recorder is not None and self.task is not None:
            self.recorder.close()
            self.task.cancel()


class RecordedStreams:
    """Owns the recordings of one ingress. `client` is its `EngineClient`, and `node` the id of its Ray node. `shares`
    counts their bytes together with those of other models; None counts them alone.
    """

    def __init__(self, client: Any, limits: StreamLimits, node: str, shares: ClientShares | None = None) -> None:
        self._client = client
        self._limits = limits
        self.copies = Copies(node, client.metrics.replica is not None, self)
        client.keepers = self.copies
        self._following = Following(self.copies)
        self._own: dict[str, _Own] = {}
        self._adopting: dict[str, asyncio.Future[None]] = {}
        """Streams that are being adopted, each with what is done when that has ended."""
        self._replaying = TurnBudget(REPLAYED_A_TURN)
        """Entries of adopted streams that are read."""
        self._catching_up = TurnBudget(READ_A_TURN)
        """Entries that readers catch up on. They are many when another ingress has ended, whose clients come here."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._unwritten: dict[str, _Own] = {}
        """Streams with entries that no keeper was sent."""
        self.shares = shares or ClientShares(limits.max_bytes, limits.max_client_bytes, drops_own=True)
        """Bytes of recordings, by client. Those of ended streams that the storage has too can be taken away."""
        self.meter_of: Callable[[Opening], Meter] = lambda _: UNMETERED
        self.on_end: Callable[[Recording], None] = lambda _: None
        self.is_deleted: Callable[[Opening], Awaitable[bool]] = never_deleted

    # ---- what the HTTP application asks ----------------------------------------------------------------------------

    def begin(self, opening: Opening, meter: Meter | None = None, is_repeated: bool = False) -> Recording:
        if self.copies.keeper is None and self.copies.strangers:
            cause = "the server is being updated: no engine is of this ingress's version and can keep this stream"
            refuse("unavailable", remedy="retry", cause=cause)
        try:
            encoded = encode_opening(opening)
        except (OverflowError, ValueError) as error:
            cause = f"it cannot be recorded: {error}"
            raise RequestRefused(Refusal("unfit", cause=cause)) from error
        recording = Recording(opening, self._on_unread)
        own = _Own(recording, next_epoch(0) if is_repeated else 0, encoded, self.shares.hold(opening.client))
        if not own.room.take(recording.num_bytes):
            raise error_of(self._no_room(recording))
        own.has_one_copy = not is_repeated
        try:
            self._run(own, meter or self.meter_of(opening))
        except BaseException:
            own.room.give_back()
            raise
        self._hold(own)
        return recording

    def may_forget(self, recording: Recording) -> None:
        own = self._own.get(recording.opening.stream_id)
        if own is not None and own.recording.is_ended:
            own.room.may_be_lost(lambda: self._drop(own))

    async def find(self, stream_id: str, owner: str) -> Recording | None:
        if stream_id in self._adopting:
            await asyncio.wait([self._adopting[stream_id]], timeout=LOOK_UP_S)
        recording = self._known(stream_id)
        if recording is None:
            await self._client.until_greeted()
            found = await self.copies.look_up(stream_id, self._client.replicas_running)
            recording = self._known(stream_id) or (None if found is None else self._copy_of(found))
        return None if recording is None or recording.opening.owner != owner else recording

    def follow(self, recording: Recording) -> Recording:
        known = self._known(recording.opening.stream_id)
        if known is None and not recording.is_complete:
            self._following.add(recording)
        return known or recording

    def read(self, recording: Recording) -> Reader:
        return Reader(self._client.tokenizer, self.follow(recording), self._catching_up)

    async def cancel(self, recording: Recording) -> None:
        deadline = time.monotonic() + CANCEL_S
        while not await self._has_cancelled(recording):
            if time.monotonic() > deadline:
                cause = f"the stream has not ended within {CANCEL_S:g} s of its cancellation"
                refuse("unavailable", remedy="repeat it", cause=cause)
            await asyncio.sleep(POLL_S)

    async def _has_cancelled(self, recording: Recording) -> bool:
        """Cancels a stream here or at its owner, and adopts it if it has none. Returns whether it has ended."""
        stream_id = recording.opening.stream_id
        own = self._own.get(stream_id)
        if own is not None:
            self._cancel(own)
            return own.recording.is_complete  # otherwise another ingress may have adopted it
        found = await self.copies.ask_all(stream_id, "cancel", len(recording.entries))
        if found is None:
            found = await self.copies.look_up(stream_id, self._client.replicas_running)
        if found is None or found.copy.is_ended:
            return True
        if not found.copy.is_owned:
            await self._adopt(stream_id, found.connection)
        return False

    def _known(self, stream_id: str) -> Recording | None:
        own = self._own.get(stream_id)
        return self._following.get(stream_id) if own is None else own.recording

    def _no_room(self, recording: Recording) -> Refusal:
        """Returns the refusal of a new stream for which its client gets no room."""
        client = recording.opening.client
        most, num_bytes = self.shares.most(client), self.shares.held(client) + recording.num_bytes
        option = "max_client_bytes" if most >= self._limits.max_client_bytes else "max_bytes"
        return _too_many(num_bytes, most, f"streams.{option}")

    def _overgrown(self, recording: Recording) -> Refusal | None:
        """Returns the refusal of a running stream whose client has `GROWTH` times what it may have."""
        client = recording.opening.client
        num_bytes, each = self.shares.held(client), GROWTH * self._limits.max_client_bytes
        if num_bytes >= each:
            return _too_many(num_bytes, each, f"{GROWTH} times streams.max_client_bytes")
        share = GROWTH * self.shares.share(client)
        if num_bytes >= share and self.shares.total >= GROWTH * self._limits.max_bytes:
            return _too_many(num_bytes, share, f"{GROWTH} times a client's share of streams.max_bytes")
        return None

    # ---- own streams -----------------------------------------------------------------------------------------------

    def _run(self, own: _Own, meter: Meter) -> None:
        on_entry = functools.partial(self._on_entry, own)
        own.recorder = Recorder(self._client, own.recording, own.epoch, meter, on_entry, self._replaying)
        own.task = self._start(self._record(own, own.recorder))

    def _hold(self, own: _Own) -> None:
        """Keeps a stream, with a copy at the keeper, until nobody has read it for long enough."""
        self._own[own.recording.opening.stream_id] = own
        self._note(own)
        self._expire_later(own)

    async def _record(self, own: _Own, recorder: Recorder) -> None:
        try:
            await recorder.run()
        except Exception as error:
            self._fail(own, error)
        else:
            self._end(own)

    def _fail(self, own: _Own, error: Exception) -> None:
        """Ends a stream whose output cannot be recorded, because of a bug."""
        logger.error("stream %s failed", own.recording.opening.stream_id, exc_info=error)
        self._end_with(own, Refusal("failed", cause=f"the stream cannot go on: {in_words(error)}"))

    def _end_with(self, own: _Own, reason: Refusal) -> None:
        own.recording.append(encode_entry(0, reason))
        self._end(own)

    def _end(self, own: _Own) -> None:
        own.recording.is_ended = True
        own.recording.changed()
        self._note(own)
        self.on_end(own.recording)

    def _cancel(self, own: _Own) -> None:
        if own.recording.is_ended:
            return
        own.stop()
        self._end_with(own, Refusal("cancelled"))

    def _on_entry(self, own: _Own) -> None:
        """Notes a new entry. A stream that has grown beyond the limits ends with an error."""
        self._note(own)
        refusal = self._overgrown(own.recording)
        if refusal is not None:
            own.stop()
            self._end_with(own, refusal)

    def _note(self, own: _Own) -> None:
        """Has new entries, or the end, written with those of other streams of this turn of the event loop."""
        own.room.add(own.recording.num_bytes - own.room.amount)
        own.unsafe_since = own.unsafe_since or time.monotonic()
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self._write)
        self._unwritten[own.recording.opening.stream_id] = own

    def _write(self) -> None:
        unwritten, self._unwritten = self._unwritten, {}
        if self.copies.keeper is None:
            for own in unwritten.values():
                if own.recording.is_ended:  # no engine is there, and its client must be told why
                    own.recording.make_safe(len(own.recording.entries))
            return
        writes, counts = [], []
        for stream_id, own in unwritten.items():
            recording, first = own.recording, own.num_sent
            write = Write(stream_id, own.epoch, first, recording.entries[first:], is_ended=recording.is_ended)
            if first == 0:
                write.opening, write.keep_s = own.opening, recording.opening.unread_s
                write.age_s = recording.age_s
            own.num_sent = len(recording.entries)
            writes.append(write)
            counts.append((stream_id, own.num_sent))
        if writes:
            self.copies.write(writes, counts)

    def on_keeper(self) -> None:
        """Writes every stream as a whole, because another keeper was chosen, or shows what waited for the lost one."""
        for own in self._own.values():
            own.num_sent, own.has_one_copy = 0, False
        if self._own:
            self._unwritten = {**self._own}
            self._write()
            self._start(self._cancel_deleted())

    async def _cancel_deleted(self) -> None:
        """Ends the streams that were deleted while nobody could tell this ingress."""
        for stream_id, own in list(self._own.items()):
            is_deleted = not own.recording.is_ended and await self.is_deleted(own.recording.opening)
            if is_deleted and self._own.get(stream_id) is own:
                self._cancel(own)

    def on_kept(self, counts: list[tuple[str, int]], refused: list[str]) -> None:
        for stream_id, num_entries in counts:
            own = self._own.get(stream_id)
            if own is not None and stream_id in refused:
                self._give_up(own)
            elif own is not None:
                own.recording.make_safe(num_entries)
                self._note_safe(own, num_entries)
                if not own.has_one_copy:
                    own.has_one_copy = True
                    self.copies.drop_elsewhere(stream_id, own.epoch)

    def on_connected(self, connection: Connection) -> None:
        """Has a keeper drop what it has of streams that were taken from another owner, which may still write there."""
        for stream_id, own in self._own.items():
            if own.epoch and own.has_one_copy:
                self.copies.drop(stream_id, own.epoch, connection)

    def _note_safe(self, own: _Own, num_entries: int) -> None:
        """Writes an event if readers had to wait for the keeper."""
        now = time.monotonic()
        waited_s = 0.0 if own.unsafe_since is None else now - own.unsafe_since
        if waited_s > LATE_S:
            log_event("kept", own.recording.opening.stream_id, seconds=round(waited_s, 4))
        own.unsafe_since = now if num_entries < len(own.recording.entries) else None

    def on_lost(self, connection: Connection) -> None:
        self._following.lost(connection)

    def on_news(self, news: News, connection: Connection) -> None:
        self._following.receive(news, connection)

    def _give_up(self, own: _Own) -> None:
        """Stops running a stream that another ingress has adopted. Readers here read what that one writes."""
        recording = own.recording
        self._forget(own)
        del recording.entries[recording.num_safe :]
        recording.is_ended = False
        if recording.num_readers:
            self._following.add(recording)

    def _forget(self, own: _Own) -> None:
        stream_id = own.recording.opening.stream_id
        del self._own[stream_id]
        self._unwritten.pop(stream_id, None)
        own.room.give_back()
        own.stop()
        if own.expiry is not None:
            own.expiry.cancel()

    # ---- streams that nobody reads ---------------------------------------------------------------------------------

    def _on_unread(self, recording: Recording) -> None:
        stream_id = recording.opening.stream_id
        own = self._own.get(stream_id)
        if own is not None:
            self._expire_later(own)
        else:
            self._following.pop(stream_id)

    def _expire_later(self, own: _Own) -> None:
        """Starts the timer that forgets a stream when nobody has read it for `unread_s` seconds. A refused request is
        forgotten at once.
        """
        if own.expiry is not None:
            own.expiry.cancel()
        recording = own.recording
        seconds = 0.0 if _is_refusal(recording) else recording.opening.unread_s
        left_s = recording.last_read + seconds - time.monotonic()
        own.expiry = asyncio.get_running_loop().call_later(left_s, self._expire, own)

    def _expire(self, own: _Own) -> None:
        """Drops a stream that nobody has read for long enough, and aborts its request."""
        recording = own.recording
        if recording.num_readers:
            return  # the last reader's end sets the timer again
        unread_s = time.monotonic() - recording.last_read
        if unread_s < recording.opening.unread_s and not _is_refusal(recording):
            self._expire_later(own)
            return
        if not recording.is_ended:
            log_event("unread", recording.opening.stream_id, seconds=round(unread_s, 1))
            self.on_end(recording)
        self._drop(own)

    def _drop(self, own: _Own) -> None:
        """Forgets a stream here and at its keeper."""
        self._forget(own)
        self.copies.drop(own.recording.opening.stream_id, own.epoch)

    # ---- streams of others -----------------------------------------------------------------------------------------

    def _copy_of(self, found: Found) -> Recording:
        """Returns a recording that is not followed before somebody reads it, because following counts as reading."""
        recording = Recording(decode_opening(found.copy.opening), self._on_unread, found.copy.age_s)
        add_copy(recording, found.copy)
        return recording

    def on_notice(self, notice: Notice, connection: Connection) -> None:
        own = self._own.get(notice.stream_id)
        if notice.what == "orphan":
            self._start(self._adopt(notice.stream_id, connection))
        elif notice.what == "read":
            connection.send(Join())  # an owner that answers nothing loses its streams
            if own is not None:
                own.recording.last_read = time.monotonic()
        elif own is not None and notice.what == "taken":
            if notice.epoch > own.epoch:
                self._give_up(own)
        elif own is not None:
            self._cancel(own)

    async def _adopt(self, stream_id: str, connection: Connection) -> None:
        """Claims an orphan at `connection` and continues it, unless there is a better copy or it is already ours."""
        own = self._own.get(stream_id)
        if own is not None:
            if own.has_one_copy and self.copies.keeper is not connection:
                self.copies.drop(stream_id, own.epoch, connection)
            return
        if stream_id in self._adopting:
            return
        ended = self._adopting[stream_id] = asyncio.get_running_loop().create_future()
        began = time.monotonic()
        try:
            await self._client.until_greeted()  # an engine that is not connected yet may have the newest copy
            # A keeper that answers late may have the newest copy, so each gets longer than for other questions.
            found = await self.copies.ask_all(stream_id, "peek", seconds=LOOK_UP_S)
            while await self.copies.until_settled():
                found = await self.copies.ask_all(stream_id, "peek", seconds=LOOK_UP_S)
            if found is None:
                return
            if found.copy.is_owned:
                if found.connection is not connection:  # else another ingress has claimed it since the offer
                    self.copies.drop(stream_id, found.copy.epoch, connection)
                return
            opening = decode_opening(found.copy.opening)  # before the claim, because it may be of another version
            if await self.is_deleted(opening):
                self.copies.drop(stream_id, found.copy.epoch)
                return
            claimed = await self.copies.claim(stream_id, found.connection)
            if claimed is not None and claimed.is_yours:
                self._take_over(Found(claimed, found.connection), opening, time.monotonic() - began)
        finally:
            del self._adopting[stream_id]
            ended.set_result(None)

    def _take_over(self, found: Found, opening: Opening, seconds: float) -> None:
        """Runs a claimed stream from here on. `seconds` have passed since it was offered."""
        copy = found.copy
        recording = self._following.pop(copy.stream_id) or Recording(opening, self._on_unread, copy.age_s)
        recording.last_read = time.monotonic()
        add_copy(recording, copy)
        own = _Own(recording, copy.epoch, copy.opening, self.shares.hold(opening.client))
        if found.connection is self.copies.keeper and recording.entries == copy.entries:
            own.num_sent = copy.num_entries  # they need not be written again
        log_event("adopted", copy.stream_id, entries=copy.num_entries, seconds=round(seconds, 4))
        self._hold(own)
        if recording.is_ended:
            return  # the ingress that ended it has called `on_end`
        try:
            self._run(own, self.meter_of(opening))
        except Exception as error:
            self._fail(own, error)

    def _start(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _too_many(num_bytes: int, limit: int, cause: str) -> Refusal:
    unit, remedy = "bytes of your streams are kept here", "retry when some are forgotten"
    return Refusal("too_many_streams", "", num_bytes, limit, remedy, cause, unit)


def _is_refusal(recording: Recording) -> bool:
    """Returns whether the request was refused before it had any output, which its client was told."""
    return recording.is_ended and len(recording.entries) == 1 and decode_entry(recording.entries[0]).failure is not None

"""Recorded streams: what was asked, and what the engines put out, in order. A client that lost its connection reads on.

The events of an answer are a function of its `Opening` and its entries. So an event's number means the same wherever
and however often the answer is written. `cluster/serve/recorded/streams.py` keeps recordings and runs their requests.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from manta.cluster.engine.request import SequenceOutput
from manta.cluster.errors import GenerationFailed, ServingError, refuse
from manta.cluster.http.exchange.engines import UNMETERED, Generation, GenerationRequest, Meter
from manta.structured.refusals import Refusal

OVERHEAD_BYTES, ENTRY_BYTES = 8192, 40
"""Bytes that a recording counts beside its content, and that each entry does: what Python needs for the objects."""


class Opening(msgspec.Struct, kw_only=True, frozen=True):
    """Everything from which a stream can be continued and its answer be written again, apart from the output."""

    stream_id: str
    owner: str
    """Owner of the API key that asked; nobody else finds the stream."""
    path: str
    """Path of the route that answers `body`."""
    body: bytes
    """Body as the client sent it."""
    created: int
    """Time of creation, in seconds since 1970."""
    unread_s: float
    """Seconds for which the stream goes on, and is kept, while nobody reads it."""
    generation: GenerationRequest
    seeds: list[int]
    """Seed of each prompt."""
    model: str = ""
    """Name of the model that answers; empty in openings of versions that knew one model only."""

    @property
    def client(self) -> str:
        """Name of the client whose room in memory the recording takes."""
        return self.generation.engine.client or self.owner


class Entry(msgspec.Struct, array_like=True):
    """The output that one message of an engine added to one prompt, or the failure that ended the answer."""

    prompt: int
    """Index of the prompt in the body."""
    at: int
    """Time in seconds since 1970."""
    output: SequenceOutput | None
    failure: Refusal | None = None
    """Set if `output` is None."""


STORED = (Opening, Entry)
"""Types of what is encoded."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)
_opening_decoder = msgspec.msgpack.Decoder(Opening)


def encode_entry(prompt: int, item: SequenceOutput | Refusal) -> bytes:
    """Returns an entry of now. The engine's request id is left out, because it is long and nobody needs it."""
    at = int(time.time())
    if isinstance(item, Refusal):
        return _encoder.encode(Entry(prompt, at, None, item))
    return _encoder.encode(Entry(prompt, at, msgspec.structs.replace(item, request_id="")))


def decode_entry(data: bytes) -> Entry:
    return _decoder.decode(data)


def encode_opening(opening: Opening) -> bytes:
    return _encoder.encode(opening)


def decode_opening(data: bytes) -> Opening:
    """Raises `GenerationFailed` for an opening of another version."""
    try:
        return _opening_decoder.decode(data)
    except msgspec.ValidationError as error:
        cause = "another version of this server began this request, and it cannot go on here"
        raise GenerationFailed(Refusal("failed", remedy="send it again", cause=cause)) from error


class Recording:
    """A stream's opening and its entries, as far as this process has them. `on_unread` is called when the last reader
    leaves.
    """

    def __init__(
        self, opening: Opening, on_unread: Callable[[Recording], None] = lambda _: None, age_s: float = 0.0
    ) -> None:
        """`age_s` are the seconds since the stream began, in whichever process."""
        self.opening = opening
        self._began = time.monotonic() - age_s
        self.entries: list[bytes] = []
        self.num_safe = 0
        """Entries that another process has too, or that need not be anywhere else; readers get only these."""
        self.is_ended = False
        """Whether `entries` is complete."""
        self.num_readers = 0
        self.last_read = time.monotonic()
        self.lost: ServingError | None = None
        """Reason why no further entries will come although the stream has not ended."""
        self.num_bytes = OVERHEAD_BYTES + 2 * len(opening.body) + 8 * sum(map(len, opening.generation.prompts))
        """Bytes that count against the limits."""
        self._on_unread = on_unread
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def is_complete(self) -> bool:
        """Whether readers can get all of it."""
        return self.is_ended and self.num_safe == len(self.entries)

    @property
    def age_s(self) -> float:
        """Seconds since the stream began, which no clock that is set anew changes."""
        return time.monotonic() - self._began

    @property
    def num_tokens(self) -> int:
        """Output tokens of all choices, counted anew each time."""
        outputs = (decode_entry(entry).output for entry in self.entries)
        return sum(len(output.token_ids) for output in outputs if output is not None)

    def append(self, entry: bytes) -> None:
        self.entries.append(entry)
        self.num_bytes += len(entry) + ENTRY_BYTES
        self.changed()

    def make_safe(self, num_entries: int) -> None:
        if num_entries > self.num_safe:
            self.num_safe = num_entries
            self.changed()

    def changed(self) -> None:
        """Wakes everybody who waits in `entry` or `until_complete`."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def entry(self, number: int, only_safe: bool = True) -> Entry:
        """Returns an entry once it is there. Raises `ServingError` if it will not come."""
        while number >= (self.num_safe if only_safe else len(self.entries)):
            if self.lost is not None:
                raise self.lost
            await self._next_change()
        return decode_entry(self.entries[number])

    async def until_complete(self) -> None:
        """Waits for the end. Raises `ServingError` if it will not come."""
        while not self.is_complete:
            if self.lost is not None:
                raise self.lost
            await self._next_change()

    async def _next_change(self) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            await waiting
        finally:
            self._waiting.discard(waiting)

    def begin_reading(self) -> None:
        self.num_readers += 1

    def end_reading(self) -> None:
        self.num_readers -= 1
        self.last_read = time.monotonic()
        if not self.num_readers:
            self._on_unread(self)


class Streams(Protocol):
    """The recorded streams of all ingresses, as the HTTP application sees them."""

    def may_forget(self, recording: Recording) -> None:
        """Lets an ended stream be forgotten when its room is needed, because the storage has all of it."""
        ...

    def begin(self, opening: Opening, meter: Meter | None = None, is_repeated: bool = False) -> Recording:
        """Sends the request to the engines and records its output, whose tokens `meter` counts; None if the request was
        admitted elsewhere. `is_repeated` says that another process may have begun it too. Raises `QueueFull` if the
        client may have no more bytes of recordings.
        """
        ...

    async def find(self, stream_id: str, owner: str) -> Recording | None:
        """Returns a recording of `owner`, from whichever process has it; None if there is none. Raises `Unavailable` if
        a process that might have it does not answer.
        """
        ...

    def follow(self, recording: Recording) -> Recording:
        """Returns the recording of this stream that is kept up to date here. The caller calls `begin_reading` on it at
        once, and the recording is followed until `end_reading`.
        """
        ...

    def read(self, recording: Recording) -> Generation:
        """Returns the answer from its beginning, each entry an event of its own."""
        ...

    async def cancel(self, recording: Recording) -> None:
        """Ends a stream, wherever it runs, and returns when it has ended. Raises `Unavailable` if it does not end
        soon.
        """
        ...

    is_deleted: Callable[[Opening], Awaitable[bool]]
    """Returns whether the client has deleted what a stream makes. Asked before a stream of a lost ingress goes on, and
    when a stream moves to another keeper.
    """
    meter_of: Callable[[Opening], Meter]
    """Returns the meter of a stream that was admitted elsewhere."""
    on_end: Callable[[Recording], None]
    """Called in the process that ran the request, when it has ended or was aborted because nobody read it."""


async def never_deleted(_: Opening) -> bool:
    """Returns False, where nothing that streams make is kept."""
    return False


class NoStreams:
    """Stands for `Streams` in an application that records nothing."""

    def __init__(self) -> None:
        self.meter_of: Callable[[Opening], Meter] = lambda _: UNMETERED
        self.on_end: Callable[[Recording], None] = lambda _: None
        self.is_deleted: Callable[[Opening], Awaitable[bool]] = never_deleted

    def begin(self, opening: Opening, meter: Meter | None = None, is_repeated: bool = False) -> Recording:
        cause = "streams cannot be resumed here"
        refuse("unfit", remedy="send the request without x-resumable-s", cause=cause)

    async def find(self, stream_id: str, owner: str) -> Recording | None:
        return None

    def follow(self, recording: Recording) -> Recording:
        raise AssertionError("there are no recordings")

    def read(self, recording: Recording) -> Generation:
        raise AssertionError("there are no recordings")

    async def cancel(self, recording: Recording) -> None: ...

    def may_forget(self, recording: Recording) -> None: ...


_EVENT_ID = re.compile(r"(strm_[0-9a-f]{38}):(\d{1,15})")


def last_event(headers: Mapping[str, str]) -> tuple[str, int] | None:
    """Returns the stream and the number of the event in `Last-Event-ID`; None if it names none."""
    found = _EVENT_ID.fullmatch(headers.get("last-event-id", ""))
    return None if found is None else (found[1], int(found[2]))

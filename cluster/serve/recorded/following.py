"""The streams of other ingresses that somebody reads here: reads on through the keepers that have their copies.

Each keeper gets one message every `POLL_S` about all streams that are read from it, and answers with what is new. A
keeper that has not answered gets no further one. `streams.py` decides which streams are followed.
"""

from __future__ import annotations

import asyncio
import time

from manta.cluster.errors import Unavailable
from manta.cluster.http.exchange.recordings import Recording
from manta.cluster.serve.channel.keeping import Copy, Look, News
from manta.cluster.serve.channel.token_channel import Connection
from manta.cluster.serve.recorded.copies import Copies
from manta.structured.refusals import Refusal

POLL_S = 0.05
"""Seconds between two looks at the streams that are followed."""
TURNS = 20
"""Number of looks of which one asks every keeper about every stream, because another keeper may have a newer copy."""
LOST_S = 15.0
"""Seconds without any copy after which a stream counts as lost. An ingress that has just started may have to connect to
the keepers first.
"""


class _Followed:
    """A recording that is kept up to date, and the newest copy that was seen of it."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.keeper: Connection | None = None
        """The keeper of the newest copy; None if it is unknown, and all are asked."""
        self.newness = (-1, False, -1)
        """Epoch, end and number of entries of that copy."""
        self.heard = time.monotonic()
        """Time at which a keeper last had a copy, on `time.monotonic`'s clock."""


class Following:
    """The followed streams of one ingress. `copies` are its keepers."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._followed: dict[str, _Followed] = {}
        self._unanswered: dict[Connection, list[str]] = {}
        """Streams that a keeper was asked about and has not answered, in the order of the question."""
        self._timer: asyncio.TimerHandle | None = None
        self._num_looks = 0

    def __len__(self) -> int:
        return len(self._followed)

    def get(self, stream_id: str) -> Recording | None:
        followed = self._followed.get(stream_id)
        return None if followed is None else followed.recording

    def add(self, recording: Recording) -> None:
        self._followed[recording.opening.stream_id] = _Followed(recording)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(POLL_S, self._look)

    def pop(self, stream_id: str) -> Recording | None:
        followed = self._followed.pop(stream_id, None)
        return None if followed is None else followed.recording

    def lost(self, connection: Connection) -> None:
        """Forgets a keeper whose connection broke."""
        self._unanswered.pop(connection, None)
        for followed in self._followed.values():
            if followed.keeper is connection:
                followed.keeper = None

    def _look(self) -> None:
        self._timer = None
        self._drop_ended()
        if not self._followed:
            return
        asks_all = self._num_looks % TURNS == 0
        self._num_looks += 1
        for connection in self._copies.connections:
            asked = [
                stream_id
                for stream_id, each in self._followed.items()
                if asks_all or each.keeper is None or each.keeper is connection
            ]
            if asked and connection not in self._unanswered:
                self._unanswered[connection] = asked
                known = [len(self._followed[stream_id].recording.entries) for stream_id in asked]
                connection.send(Look(asked, known))
        self._timer = asyncio.get_running_loop().call_later(POLL_S, self._look)

    def _drop_ended(self) -> None:
        """Stops following what is complete or lost."""
        now = time.monotonic()
        for stream_id, followed in list(self._followed.items()):
            recording = followed.recording
            if recording.is_complete:
                del self._followed[stream_id]
            elif now > followed.heard + LOST_S:
                del self._followed[stream_id]
                recording.lost = Unavailable(Refusal("stream_lost", remedy="ask again"))
                recording.changed()

    def receive(self, news: News, connection: Connection) -> None:
        """Adds what a keeper answered. It says nothing of streams without news."""
        now, unknown = time.monotonic(), set(news.unknown)
        for stream_id in self._unanswered.pop(connection, []):
            followed = self._followed.get(stream_id)
            if followed is None:
                continue
            if stream_id not in unknown:
                followed.heard = now
            elif followed.keeper is connection:
                followed.keeper = None
        for copy in news.copies:
            followed = self._followed.get(copy.stream_id)
            if followed is None:
                continue
            newness = (copy.epoch, copy.is_ended, copy.num_entries)
            if newness > followed.newness:
                followed.keeper, followed.newness = connection, newness
                add_copy(followed.recording, copy)


def add_copy(recording: Recording, copy: Copy) -> None:
    """Adds the entries of a copy that the recording lacks."""
    first = copy.num_entries - len(copy.entries)
    num_known = len(recording.entries)
    if first <= num_known < copy.num_entries:
        for entry in copy.entries[num_known - first :]:
            recording.append(entry)
    recording.is_ended = copy.is_ended and copy.num_entries == len(recording.entries)
    recording.make_safe(len(recording.entries))
    recording.changed()

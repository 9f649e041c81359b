"""The recorded streams of several models: each model's are kept by its own engines, and found by their ids in all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from manta.cluster.errors import refuse
from manta.cluster.http.exchange.engines import UNMETERED, Generation, Meter
from manta.cluster.http.exchange.recordings import Opening, Recording, never_deleted
from manta.cluster.serve.recorded.streams import RecordedStreams


class StreamsOfModels:
    """The streams of all models of one ingress. Implements `manta.cluster.http.exchange.recordings.Streams`."""

    def __init__(self) -> None:
        self._of: dict[str, RecordedStreams] = {}
        self.meter_of: Callable[[Opening], Meter] = lambda _: UNMETERED
        self.on_end: Callable[[Recording], None] = lambda _: None
        self.is_deleted: Callable[[Opening], Awaitable[bool]] = never_deleted

    def put(self, model: str, streams: RecordedStreams) -> None:
        """Adds the streams of a model by its name."""
        streams.meter_of, streams.on_end, streams.is_deleted = self.meter_of, self.on_end, self.is_deleted
        self._of[model] = streams

    def remove(self, model: str) -> None:
        """Forgets the streams of a model that is served no more; its engines have ended."""
        self._of.pop(model, None)

    def begin(self, opening: Opening, meter: Meter | None = None, is_repeated: bool = False) -> Recording:
        return self._streams_of(opening).begin(opening, meter, is_repeated)

    def may_forget(self, recording: Recording) -> None:
        if recording.opening.model in self._of:
            self._streams_of(recording.opening).may_forget(recording)

    async def find(self, stream_id: str, owner: str) -> Recording | None:
        looked = [streams.find(stream_id, owner) for streams in self._of.values()]
        answers = await asyncio.gather(*looked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, Recording):
                return answer
        for answer in answers:
            if isinstance(answer, BaseException):  # that model's engines may have it
                raise answer
        return None

    def follow(self, recording: Recording) -> Recording:
        return self._streams_of(recording.opening).follow(recording)

    def read(self, recording: Recording) -> Generation:
        return self._streams_of(recording.opening).read(recording)

    async def cancel(self, recording: Recording) -> None:
        await self._streams_of(recording.opening).cancel(recording)

    def _streams_of(self, opening: Opening) -> RecordedStreams:
        streams = self._of.get(opening.model)
        if streams is None:
            refuse("unknown_model", "model", opening.model, tuple(self._of) or "nothing")
        return streams

"""Engines whose output is recorded, and recordings in place of engines. Endpoints answer with them as with any other.

`record` and `replay` change an exchange before its endpoint is called, and the endpoint does not notice.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from manta.cluster.errors import ServingError, error_of, refuse
from manta.cluster.http.exchange.codec import LINES
from manta.cluster.http.exchange.engines import UNMETERED, Generation, GenerationRequest, Meter
from manta.cluster.http.exchange.exchange import Exchange, GenerationExchange, Identity, new_stream_id
from manta.cluster.http.exchange.recordings import Opening, Recording, Streams
from manta.cluster.http.exchange.reply import EventIds
from manta.cluster.http.exchange.state import AppState, Route
from manta.structured.constraint import ConstraintSpec
from manta.structured.refusals import Refusal

RESUMABLE = "x-resumable-s"
"""Header of a request for a stream that can be resumed: the seconds for which it goes on while nobody reads it."""
MIN_UNREAD_S = 1.0
"""Least value of that header. Ingresses tell each other less often than several times a second that a stream is read.
"""
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
STREAM_ID = b"x-stream-id"
"""Header of the answer, with the stream's id."""


class RecordedEngines:
    """Engines that record the output of one request, the body of which is `body`. `exchange` is the request's, with the
    id of a stream. `refusal` says why the request cannot be recorded, if it cannot. `model` is the name of the engines'
    model.
    """

    def __init__(
        self,
        streams: Streams,
        exchange: GenerationExchange,
        body: bytes,
        unread_s: float,
        refusal: Refusal | None = None,
        model: str = "",
    ) -> None:
        self.body = body
        """Body from which the answer is written again."""
        self.before: Callable[[Opening], Awaitable[None]] | None = None
        """Called before the request begins. Set for an answer in the background, whose client does not wait for it."""
        self._engines = exchange.engines
        self._streams = streams
        self._exchange = exchange
        self._unread_s = unread_s
        self._model = model
        self._refusal = refusal

    async def resolve(self, spec: ConstraintSpec, client: str = "") -> tuple[ConstraintSpec, list[str]]:
        return await self._engines.resolve(spec, client)

    async def submit(self, request: GenerationRequest, meter: Meter = UNMETERED) -> Generation:
        """Begins a recorded stream and returns its answer. Raises `QueueFull` if there is no room for its recording,
        and `RequestRefused` if an answer that is no stream of events is to be resumable.
        """
        if self._refusal is not None:
            raise error_of(self._refusal)
        opening = self._opening(request)
        if self.before is not None:
            constraint = request.engine.params.constraint
            if constraint is not None:  # the client would not see the engine's refusal
                await self.resolve(constraint, request.engine.client)
            await self.before(opening)
        try:
            recording = self._streams.begin(opening, meter)
        except ServingError as error:
            raise error_of(self._with_way_out(error.refusal)) from error
        self._exchange.reply.headers_out.append((STREAM_ID, opening.stream_id.encode()))
        return self._streams.read(recording)

    def _with_way_out(self, refusal: Refusal) -> Refusal:
        """Returns a refusal that also says how to ask without a recording."""
        way_out = "send no x-resumable-s" if self.before is None else "leave background out"
        return msgspec.structs.replace(refusal, remedy=", or ".join(filter(None, (refusal.remedy, way_out))))

    def _opening(self, request: GenerationRequest) -> Opening:
        exchange, seed = self._exchange, request.engine.params.seed
        return Opening(
            stream_id=exchange.identity.stream_id,
            owner=exchange.caller.owner,
            path=exchange.route,
            body=self.body,
            created=exchange.identity.created,
            unread_s=self._unread_s,
            generation=request,
            seeds=[secrets.randbits(63) if seed is None else seed for _ in request.prompts],
            model=self._model,
        )


class ReplayedEngines:
    """A recording in place of engines: it answers whatever is asked."""

    def __init__(self, streams: Streams, recording: Recording) -> None:
        self._streams = streams
        self._recording = recording

    async def resolve(self, spec: ConstraintSpec, client: str = "") -> tuple[ConstraintSpec, list[str]]:
        return spec, []

    async def submit(self, request: GenerationRequest, meter: Meter = UNMETERED) -> Generation:
        return self._streams.read(self._recording)


def check_resumable(state: AppState, exchange: Exchange) -> float:
    """Returns the value of the header `RESUMABLE`. Raises `RequestRefused` for a wrong one."""
    given, most = exchange.headers[RESUMABLE], state.config.streams.max_unread_s
    unread_s = float(given) if _SECONDS.fullmatch(given) else -1.0
    if not MIN_UNREAD_S <= unread_s <= most:
        bound = f"a number of seconds from {MIN_UNREAD_S:g} to {most:g} (streams.max_unread_s)"
        refuse("wrong_value", RESUMABLE, given[:40], bound, "send for example 60 or 2.5")
    return unread_s


def make_resumable(state: AppState, exchange: Exchange, route: Route, content: bytes, body: Any) -> None:
    """Has the output of a request recorded, because its header asks for it. `body` is the decoded `content`."""
    streams = getattr(body, "stream", False)
    refusal = None
    if not streams or route.media_type == LINES.media_type:
        bound, remedy = ("server-sent events", "use another endpoint") if streams else ("streams", "send stream: true")
        refusal = Refusal("requires", RESUMABLE, bound=bound, remedy=f"{remedy}, or leave the header out")
    record(state, exchange, content, check_resumable(state, exchange), refusal)


def record(
    state: AppState, exchange: GenerationExchange, body: bytes, unread_s: float, refusal: Refusal | None = None
) -> RecordedEngines:
    """Has the output of a request recorded, with events that can be read again."""
    if not exchange.identity.stream_id:
        exchange.identity = Identity(new_stream_id())
    exchange.reply.event_ids = EventIds(exchange.identity.stream_id)
    streams = state.server.streams
    exchange.engines = recorded = RecordedEngines(streams, exchange, body, unread_s, refusal, state.model_name)
    return recorded


def replay(state: AppState, exchange: GenerationExchange, recording: Recording, after: int = -1) -> None:
    """Has the answer of an exchange written from a recording, after the event with number `after`."""
    opening = recording.opening
    exchange.engines = ReplayedEngines(state.server.streams, recording)
    exchange.identity = Identity(opening.stream_id, opening.created)
    exchange.reply.event_ids = EventIds(opening.stream_id, after)
    exchange.caller.use = None  # it was admitted, and whoever runs it charges it

"""Streams that a client reads on after it lost its connection: `GET /v1/streams/ID`, and `Last-Event-ID` anywhere.

The handler that answered the request writes the answer again, from the recorded output instead of the engines'. Events
that the client has are left out.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec

from manta.cluster.errors import refuse
from manta.cluster.http.access.request_admission import decode
from manta.cluster.http.exchange.apart import is_small
from manta.cluster.http.exchange.codec import decode_query
from manta.cluster.http.exchange.exchange import Exchange, response_id
from manta.cluster.http.exchange.recorded_engines import replay
from manta.cluster.http.exchange.recordings import Opening, Recording, last_event
from manta.cluster.http.exchange.state import AppState, Route

RESPONSES_PATH = "/v1/responses"
"""Path whose streams are gone when their response is deleted."""


class StreamQuery(msgspec.Struct):
    starting_after: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    """Number of the last event that the client has. -1 begins with the first event."""


class StreamDeleted(msgspec.Struct):
    id: str
    object: str = "stream"
    deleted: bool = True


async def resume(state: AppState, exchange: Exchange, _: None) -> None:
    """Sends the events of a stream after the one that `starting_after` or `Last-Event-ID` names, and then the rest."""
    after = decode_query(StreamQuery, exchange.incoming.query).starting_after
    last = last_event(exchange.headers)
    if after is None:
        after = last[1] if last is not None and last[0] == exchange.incoming.path_parameter else -1
    await read_on(state, exchange, exchange.incoming.path_parameter, after)


async def delete(state: AppState, exchange: Exchange, _: None) -> StreamDeleted:
    """Ends a stream. What was recorded can be read until its time is over."""
    recording = await found(state, exchange, exchange.incoming.path_parameter)
    await state.server.streams.cancel(recording)
    return StreamDeleted(exchange.incoming.path_parameter)


async def read_on(state: AppState, exchange: Exchange, stream_id: str, after: int) -> None:
    recording = await found(state, exchange, stream_id)
    exchange.reply.error_body = route_of(state, recording).error_body
    await write_again(state, exchange, recording, after)


async def found(state: AppState, exchange: Exchange, stream_id: str) -> Recording:
    """Returns a stream of the client. Refuses with 404 with the same words for a stream of another client, and for
    that of a deleted response.
    """
    recording = await state.server.streams.find(stream_id, exchange.caller.owner)
    if recording is None or await is_deleted(state, recording.opening):
        refuse("unknown_stream", "", stream_id)
    return recording


async def is_deleted(state: AppState, opening: Opening) -> bool:
    """Returns whether the response that a stream makes was deleted."""
    kept = state.server.responses
    if kept is None or opening.path != RESPONSES_PATH:
        return False
    return await asyncio.to_thread(kept.is_deleted, opening.owner, response_id(opening.stream_id))


def route_of(state: AppState, recording: Recording) -> Route:
    """Returns the route that answered the request of a recording."""
    return state.server.routes[recording.opening.path]


async def write_again(
    state: AppState, exchange: Exchange, recording: Recording, after: int = -1, streams: bool = True
) -> None:
    """Has the route that answered a request answer it again, from its recording: as a stream, or as a whole. Refuses
    with 404 if its model is served no more.
    """
    async with state.models.named(recording.opening.model).in_use(exchange) as served:
        route = route_of(served, recording)
        assert route.body is not None
        exchange.is_small = is_small(recording.opening.body)
        body: Any = await served.apart(exchange, decode, route.body, recording.opening.body, served.config.body)
        replay(served, exchange, recording, after)
        await route.handler(served, exchange, msgspec.structs.replace(body, stream=streams))

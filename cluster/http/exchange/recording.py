"""Begins recorded streams, and writes the answer of a recorded stream again for a client that came back."""

from __future__ import annotations

import re
import secrets

from manta.cluster.errors import refuse
from manta.cluster.http.exchange.codec import LINES, StreamForm
from manta.cluster.http.exchange.engines import Generation, GenerationRequest
from manta.cluster.http.exchange.exchange import Exchange, GenerationExchange
from manta.cluster.http.exchange.identity import Identity, new_stream_id
from manta.cluster.http.exchange.recordings import Opening, Resumable
from manta.cluster.http.exchange.state import AppState

RESUMABLE = "x-resumable-s"
"""Header of a request for a stream that can be resumed: the seconds for which it goes on while nobody reads it."""
MIN_UNREAD_S = 1.0
"""Least value of that header. Ingresses tell each other less often than several times a second that a stream is read.
"""
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
STREAM_ID = b"x-stream-id"
"""Header of the answer, with the stream's id."""


def make_resumable(exchange: Exchange, body: bytes, max_unread_s: float) -> None:
    """Has the output of a request recorded if its header asks for it. Raises `RequestRefused` for a wrong value."""
    given = exchange.headers.get(RESUMABLE)
    if given is None:
        return
    unread_s = float(given) if _SECONDS.fullmatch(given) else -1.0
    if not MIN_UNREAD_S <= unread_s <= max_unread_s:
        bounds = f"from {MIN_UNREAD_S:g} to {max_unread_s:g} (streams.max_unread_s)"
        refuse(RESUMABLE, f"{RESUMABLE} is {given[:40]!r} and must be a number of seconds {bounds}, such as 60 or 2.5")
    exchange.identity = Identity(new_stream_id())
    exchange.resumable = Resumable(body, unread_s)


def check_resumable(exchange: GenerationExchange, streams: bool, form: StreamForm) -> None:
    """Raises `RequestRefused` if an answer that is not a stream of events is to be resumable."""
    if exchange.resumable is None or exchange.resumable.is_in_background:
        return
    if not streams or form is LINES:
        what = "server-sent events; use another endpoint" if streams else "streams; send stream: true"
        refuse(RESUMABLE, f"{RESUMABLE} is for {what}, or leave the header out")


async def record(
    state: AppState, exchange: GenerationExchange, resumable: Resumable, request: GenerationRequest
) -> Generation:
    """Begins a recorded stream and returns its answer. Raises `QueueFull` if there is no room for its recording."""
    identity = exchange.identity
    seeds = [secrets.randbits(63) for _ in request.prompts]
    if request.params.seed is not None:
        seeds = [request.params.seed] * len(request.prompts)
    opening = Opening(
        stream_id=identity.stream_id,
        owner=exchange.owner,
        path=exchange.route,
        body=resumable.body,
        created=identity.created,
        unread_s=resumable.unread_s,
        generation=request,
        seeds=seeds,
    )
    if resumable.before is not None:
        await resumable.before(opening)
    exchange.headers_out.append((STREAM_ID, identity.stream_id.encode()))
    return state.streams.read(state.streams.begin(opening))

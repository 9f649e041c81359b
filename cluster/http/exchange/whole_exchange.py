"""An exchange without a client: the endpoints' functions answer it whole, and it keeps the answer.

Batches answer their lines with it, and recorded answers are written with it when no client asks for them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from manta.cluster.http.exchange.caller import Caller
from manta.cluster.http.exchange.codec import EVENTS, StreamForm
from manta.cluster.http.exchange.engines import Generation, GenerationEngines
from manta.cluster.http.exchange.identity import Identity
from manta.cluster.http.exchange.remembered import Remembered
from manta.cluster.http.exchange.reply import EventIds

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class WholeReply:
    """A `GenerationReply` that keeps the answer."""

    def __init__(self) -> None:
        self.headers_always: list[tuple[bytes, bytes]] = []
        self.headers_out: list[tuple[bytes, bytes]] = []
        self.event_ids: EventIds | None = None
        self.answer = b""

    async def send_json(self, body: bytes) -> None:
        self.answer = body

    async def stream(self, events: AsyncIterator[bytes], generation: Generation, form: StreamForm = EVENTS) -> None:
        raise AssertionError("this exchange takes whole answers only")


class WholeExchange:
    """A `GenerationExchange` without headers, and with no client that may leave. `sharer` is the name under which the
    request takes turns with others. No rate limit counts it: batches run after all other requests, and a recorded
    request was admitted before it ran.
    """

    traceparent = ""
    span: Span | None = None

    def __init__(self, request_id: str, owner: str, sharer: str, timeout_s: float, engines: GenerationEngines) -> None:
        self.request_id = request_id
        self.route = ""
        self.caller = Caller(sharer, owner=owner)
        self.reply = WholeReply()
        self.engines = engines
        self.identity = Identity()
        self.remembered: Remembered | None = None
        self.remaining_s = timeout_s
        self.headers: dict[str, str] = {}

    def hand_over(self) -> None:
        pass

    def note(self, generation: Generation) -> None:
        pass

"""An exchange without a client: the endpoints' functions answer it whole, and it keeps the answer.

Batches answer their lines with it, and recorded answers are written with it when no client asks for them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from manta.cluster.http.exchange.codec import EVENTS, StreamForm
from manta.cluster.http.exchange.engines import Generation
from manta.cluster.http.exchange.identity import Identity
from manta.cluster.http.exchange.recordings import Replay, Resumable
from manta.cluster.http.exchange.remembered import Remembered

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class WholeExchange:
    """A `GenerationExchange` that keeps the answer. It has no headers, and no client that may leave. `sharer` is the
    name under which the request takes turns with others.
    """

    client = ""
    """Empty, because no API key comes with the request; the key was checked when the request was stored."""
    traceparent = ""
    span: Span | None = None

    def __init__(self, request_id: str, owner: str, sharer: str, timeout_s: float) -> None:
        self.request_id = request_id
        self.owner = owner
        self.sharer = sharer
        self.remaining_s = timeout_s
        self.headers: dict[str, str] = {}
        self.headers_out: list[tuple[bytes, bytes]] = []
        self.identity = Identity()
        self.resumable: Resumable | None = None
        self.replay: Replay | None = None
        self.remembered: Remembered | None = None
        self.route = ""
        self.answer = b""

    def hand_over(self) -> None:
        pass

    async def send_json(self, body: bytes) -> None:
        self.answer = body

    async def stream(self, events: AsyncIterator[bytes], generation: Generation, form: StreamForm = EVENTS) -> None:
        raise AssertionError("this exchange takes whole answers only")

    def admit(self, num_prompt_tokens: int) -> None:
        """Admits every request: batches have no rate limit, because they run after all other requests, and a recorded
        request was admitted before it ran.
        """

    def note(self, generation: Generation) -> None:
        pass

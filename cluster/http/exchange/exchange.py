"""One request and its answer. The application makes one exchange for each HTTP request.

Lines of batches, and recorded answers that no client asked for, have another kind
(`cluster/http/exchange/whole_exchange.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Protocol

from manta.cluster.config import ServeConfig
from manta.cluster.http.access.addresses import network_of
from manta.cluster.http.exchange.caller import Caller
from manta.cluster.http.exchange.codec import EVENTS, StreamForm
from manta.cluster.http.exchange.engines import Generation, GenerationEngines
from manta.cluster.http.exchange.identity import Identity
from manta.cluster.http.exchange.incoming import BodyRoom, Incoming, Receive, Scope
from manta.cluster.http.exchange.preparation import Preparation
from manta.cluster.http.exchange.remembered import Remembered
from manta.cluster.http.exchange.reply import EventIds, Reply, Send
from manta.cluster.telemetry.exporting import traceparent_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class GenerationReply(Protocol):
    """The part of a reply that a generation needs."""

    headers_always: list[tuple[bytes, bytes]]
    headers_out: list[tuple[bytes, bytes]]
    event_ids: EventIds | None

    async def send_json(self, body: bytes) -> None: ...

    async def stream(self, events: AsyncIterator[bytes], generation: Generation, form: StreamForm = EVENTS) -> None: ...


class GenerationExchange(Protocol):
    """The part of an exchange that a generation needs."""

    route: str
    """Path of the route, as in the table of routes."""
    caller: Caller
    identity: Identity
    """Source of the answer's ids."""
    engines: GenerationEngines
    """The engines that answer this request."""
    remembered: Remembered | None
    """Set if the request came on a WebSocket connection, which remembers its latest response."""
    span: Span | None
    """Span of the request; None if it is not traced."""

    @property
    def request_id(self) -> str: ...

    @property
    def reply(self) -> GenerationReply: ...

    @property
    def headers(self) -> dict[str, str]: ...

    @property
    def traceparent(self) -> str: ...

    @property
    def remaining_s(self) -> float:
        """Seconds until the request's deadline, at least 0."""
        ...

    def hand_over(self) -> None:
        """Hands the request and its deadline over to the engines."""
        ...

    def note(self, generation: Generation) -> None:
        """Notes the token counts of a generation that is over."""
        ...


class Exchange:
    """One HTTP request and its answer. `returns_id` says whether the answer has an x-request-id."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        config: ServeConfig,
        room: BodyRoom,
        engines: GenerationEngines,
        returns_id: bool,
    ) -> None:
        self.incoming = Incoming(scope, receive, config, room)
        self.caller = Caller(network_of((scope.get("client") or ("",))[0]))
        self.reply = Reply(send, config, self.request_id, returns_id)
        self.reply.on_start = self.hand_over  # from then on the client's own pace is timed
        self.engines = engines
        self.identity = Identity()
        self.route = ""
        """Path of the route, as in the table of routes."""
        self.remembered: Remembered | None = None
        self.span: Span | None = None
        self.notes: dict[str, Any] = {}
        """Token counts of the generation, for the log."""
        self.preparation: Preparation | None = None
        """Place among the requests that are prepared; set before the handler is called."""
        self._begun = time.perf_counter()

    @property
    def request_id(self) -> str:
        return self.incoming.request_id

    @property
    def headers(self) -> dict[str, str]:
        return self.incoming.headers

    @property
    def remaining_s(self) -> float:
        assert self.preparation is not None
        return self.preparation.remaining_s

    def hand_over(self) -> None:
        if self.preparation is not None:
            self.preparation.end()

    @property
    def traceparent(self) -> str:
        """W3C's `traceparent` of the request's span; empty if it is not traced."""
        return "" if self.span is None else traceparent_of(self.span)

    # ---- the request log -----------------------------------------------------------------------------------------

    def note(self, generation: Generation) -> None:
        """Adds the token counts of a generation to the log line, and its output tokens to the key's rate limit."""
        usages = generation.usages
        self.notes = {
            "choices": generation.num_choices,
            "prompt_tokens": sum(usage.num_prompt_tokens for usage in usages),
            "output_tokens": sum(usage.num_output_tokens for usage in usages),
        }
        self.caller.charge(self.notes["output_tokens"])

    def log_line(self) -> str:
        seconds = time.perf_counter() - self._begun
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "request_id": self.request_id,
            **({"client": self.caller.key} if self.caller.key else {}),
            "path": self.incoming.url_path,
            "status": self.reply.status,
            "seconds": round(seconds, 4),
            **self.notes,
        }
        return json.dumps(entry)

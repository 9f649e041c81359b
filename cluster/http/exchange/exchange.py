"""One request and its answer: who asks, which engines answer, and how the answer is sent.

The application makes an `Exchange` for each HTTP request. Lines of batches, and recorded answers that no client asked
for, are a `GenerationExchange` each.
"""

from __future__ import annotations

import random
import re
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from manta.cluster.chat.reader import UNPREDICTABLE
from manta.cluster.config import ServeConfig
from manta.cluster.http.access.addresses import network_of
from manta.cluster.http.access.request_admission import Caller, Preparation
from manta.cluster.http.exchange.engines import Generation, GenerationEngines
from manta.cluster.http.exchange.incoming import Incoming, Receive, Scope
from manta.cluster.http.exchange.remembered import Remembered
from manta.cluster.http.exchange.reply import GenerationReply, Reply, Send
from manta.cluster.protocol.error_bodies import answer_of
from manta.cluster.protocol.foreign_fields import MAX_NAMES
from manta.cluster.telemetry.exporting import traceparent_of
from manta.cluster.telemetry.request_log import log_request
from manta.structured.client_shares import ClientShares
from manta.structured.refusals import Refusal, sentence

MAX_REASON = 200
"""Most characters of a refusal in the log."""
PROMPT_FIELDS = re.compile(r"(messages|prompt|input|instructions|system|suffix)\b")
"""Fields whose values are the client's own texts."""

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class Identity:
    """Draws the ids of one answer. `stream_id` is that of its recording; empty if nothing records it."""

    def __init__(self, stream_id: str = "", created: int | None = None) -> None:
        self.stream_id = stream_id
        self.created = int(time.time()) if created is None else created
        """Time of creation, in seconds since 1970."""
        self.source: random.Random = random.Random(stream_id) if stream_id else UNPREDICTABLE
        """Source of all ids: with a `stream_id`, which is a secret, the same calls draw the same ids."""
        self.response_id = response_id(stream_id)
        """Id of the answer, if it is a response."""

    def new_id(self, prefix: str, num_bytes: int = 12) -> str:
        return f"{prefix}{self.source.randbytes(num_bytes).hex()}"


def new_stream_id() -> str:
    """Returns a new id. It begins with the time, so that later ids are greater, and nobody can guess its 96 random
    bits.
    """
    return f"strm_{time.time_ns() // 1000:014x}{secrets.token_hex(12)}"


def response_id(stream_id: str) -> str:
    """Returns the id of a response. It is that of its stream, so that whoever has the one finds the other. A response
    without a stream gets an id of its own.
    """
    return f"resp_{(stream_id or new_stream_id()).removeprefix('strm_')}"


class GenerationExchange:
    """The part of an exchange that a generation needs. By itself it has no headers, no deadline that passes, and no
    client that may leave.
    """

    def __init__(
        self,
        request_id: str,
        headers: dict[str, str],
        caller: Caller,
        engines: GenerationEngines,
        reply: GenerationReply,
        remaining_s: float,
    ) -> None:
        self.request_id = request_id
        self.headers = headers
        """Headers of the request, with names in lower case."""
        self.caller = caller
        self.engines = engines
        """The engines that answer this request."""
        self.reply = reply
        self.route = ""
        """Path of the route, as in the table of routes."""
        self.identity = Identity()
        """Source of the answer's ids."""
        self.is_small = True
        """Whether work that grows with the body may be done at once; see `AppState.apart`."""
        self.remembered: Remembered | None = None
        """Set if the request came on a WebSocket connection, which remembers its latest response."""
        self.adapter = ""
        """Name of the adapter that computes the answer; empty for the model alone."""
        self.adapter_key = ""
        """Its key (`AdapterKey.text`)."""
        self.span: Span | None = None
        """Span of the request; None if it is not traced."""
        self._remaining_s = remaining_s

    @property
    def remaining_s(self) -> float:
        """Seconds until the request's deadline, at least 0."""
        return self._remaining_s

    @property
    def traceparent(self) -> str:
        """W3C's `traceparent` of the request's span; empty if it is not traced."""
        return "" if self.span is None else traceparent_of(self.span)

    def hand_over(self) -> None:
        """Hands the request and its deadline over to the engines."""

    def note(self, generation: Generation) -> None:
        """Notes the token counts of a generation that is over."""

    def note_texts(self, num_texts: int, num_tokens: int) -> None:
        """Notes how many texts were pooled."""


class Exchange(GenerationExchange):
    """One HTTP request and its answer. `returns_id` says whether the answer has an x-request-id."""

    reply: Reply

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        config: ServeConfig,
        room: ClientShares,
        engines: GenerationEngines,
        returns_id: bool,
    ) -> None:
        self.incoming = asked = Incoming(scope, receive, config, room)
        caller = Caller(network_of((scope.get("client") or ("",))[0]))
        reply = Reply(send, config, asked.request_id, returns_id)
        reply.on_start = self.hand_over  # from then on the client's own pace is timed
        super().__init__(asked.request_id, asked.headers, caller, engines, reply, config.request_timeout_s)
        self.notes: dict[str, Any] = {}
        """The model, if there are several, and token counts of the generation, for the log."""
        self.preparation: Preparation | None = None
        """Place among the requests that are prepared; set before the handler is called."""
        self._begun = time.perf_counter()

    @property
    def remaining_s(self) -> float:
        assert self.preparation is not None
        return self.preparation.remaining_s

    def hand_over(self) -> None:
        if self.preparation is not None:
            self.preparation.end()

    # ---- the request log -----------------------------------------------------------------------------------------

    def note(self, generation: Generation) -> None:
        """Adds the token counts of a generation to the log line."""
        usages = generation.usages
        self.notes |= {
            "choices": generation.num_choices,
            "prompt_tokens": sum(usage.num_prompt_tokens for usage in usages),
            "output_tokens": sum(usage.num_output_tokens for usage in usages),
        }

    def note_texts(self, num_texts: int, num_tokens: int) -> None:
        """Adds the counts of texts that were pooled to the log line."""
        self.notes |= {"texts": num_texts, "prompt_tokens": num_tokens}

    def log(self, num_others: int | None = None) -> None:
        """Writes the line of this request, which has ended. It stands for `num_others` others without a line."""
        log_request(
            self.request_id,
            self.incoming.url_path,
            client=self.caller.key or None,
            adapter=self.adapter or None,
            adapter_key=self.adapter_key or None,
            status=self.reply.status,
            seconds=round(time.perf_counter() - self._begun, 4),
            others=num_others,
            **self.notes,
            **_reason(self.reply.refusal),
            ignored=_names(self.reply.ignored),
            not_enforced=_names(self.reply.not_enforced),
        )


def _names(names: Sequence[str]) -> list[str] | None:
    """Returns names within the bounds of a log line; None if there are none."""
    return [name[:MAX_REASON] for name in names[:MAX_NAMES]] or None


def _reason(refusal: Refusal | None) -> dict[str, Any]:
    """Returns the fields of the log line that say why a request was not served. Values of the prompt are left out."""
    if refusal is None:
        return {}
    if PROMPT_FIELDS.match(refusal.field):
        refusal = msgspec.structs.replace(refusal, value=None if refusal.unit == "" else refusal.value, cause="")
    return {"param": refusal.field, "code": answer_of(refusal).code, "message": sentence(refusal)[:MAX_REASON]}

"""Limits of the HTTP application on its connections, bodies, files, streams, responses and keys: options of
`manta.cluster.config.ServeConfig`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from manta.workers.model_options import Bytes, Count

Seconds = Annotated[float, Meta(gt=0)]


class ListenerLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on connections and request heads, for each ingress that listens itself. Behind Serve's proxies
    (`http_server`) a proxy in front has to set them.
    """

    max_connections: Count = 4096
    """Open connections, and never more than half of the files that the process may open. At the limit the ingress
    closes the connection that has waited longest for a request. If no connection waits, it refuses the new one (HTTP
    503).
    """
    max_connections_per_address: Count = 1024
    """Open connections of one IPv4 address, or of one IPv6 network of 64 bits. All clients behind one proxy share its
    address.
    """
    max_header_bytes: Bytes = 32 * 2**10
    """Size of a request's headers and trailers together. The ingress refuses longer ones (HTTP 431)."""
    header_timeout_s: Seconds = 20.0
    """Seconds in which a request's head must arrive, from its first byte or from the opening of the connection. Then
    the ingress closes the connection (HTTP 408).
    """


class BodyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on one request's body. The ingress refuses a body beyond them (HTTP 400)."""

    max_values: Count = 2**20
    """JSON values in one body. The check counts commas and opening brackets outside strings."""
    max_members: Count = 2**19
    """Lists, objects and members of objects in one body, each of which costs more than a plain value. The check counts
    opening brackets and colons outside strings. The largest conversation, with a bias for each token of the largest
    vocabularies, has two thirds of these.
    """
    max_messages: Count = 2**14
    """Messages or items of one conversation, including their parts and tool calls."""
    max_token_ids: Count = 2**21
    """Different entries of `allowed_token_ids`, `logit_bias` and `stop_token_ids`, multiplied by the number of choices,
    because each prompt becomes an engine request with its own copy, and each choice a sequence that reads them.
    """
    max_logprobs: Count = 2**18
    """Log-probabilities that one answer may hold, alternatives included, at about 70 bytes each. A stream sends those
    of its output as they are drawn, and they do not count.
    """


class BatchLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on `/v1/files` and `/v1/batches`. A client is an API key; without keys all clients are one."""

    max_file_bytes: Bytes = 200 * 2**20
    """Size of one file. The ingress refuses a longer one (HTTP 413). Files are streamed to the storage and never held
    in memory.
    """
    max_files: Count = 1000
    """Files of one client, results of batches included. The next upload is refused (HTTP 400)."""
    max_stored_bytes: Bytes = 10 * 2**30
    """Size of one client's files and results together. Above it, uploads and new batches are refused (HTTP 400), and a
    running batch ends as `failed` with the results that it has. An upload without a Content-Length counts as
    `max_file_bytes`.
    """
    max_batches: Count = 10_000
    """Batches of one client that are kept, ended ones included. The next one is refused (HTTP 400)."""
    max_open_batches: Count = 100
    """Batches of one client that have not ended. The next one is refused (HTTP 400)."""
    keep_s: Seconds = 30 * 86_400.0
    """Seconds after which files, and batches that have ended, are removed."""
    max_in_flight: Count | None = None
    """Lines of all batches that run or wait in the engines at a time. None takes half of the places of all engines.
    Other requests go first, but every running line makes a step longer.
    """


class StreamLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on streams that can be resumed. A client is an API key; without keys it is an address."""

    max_unread_s: Annotated[float, Meta(ge=1)] = 3600.0
    """Longest time, in seconds, for which a stream goes on, and is kept, while nobody reads it. A request that asks for
    more is refused (HTTP 400). An hour is enough for a laptop that was closed and a phone without a network.
    """
    max_client_bytes: Bytes = 128 * 2**20
    """Size of one client's recordings in one ingress: requests and tokens. Above it the next resumable request is
    refused (HTTP 429). Above twice the size, running streams end with an error at their next token: an ingress may have
    to take over as much as it has. About 10,000 short streams.
    """
    max_bytes: Bytes = 512 * 2**20
    """Size of all recordings in one ingress, which clients share. Above its share a client's next resumable request is
    refused (HTTP 429). Above twice the size, running streams of clients above twice their share end with an error. The
    engine that keeps the copies needs about half of it too.
    """


class ResponseLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on stored responses of `/v1/responses`. A client is an API key; without keys all clients are one."""

    keep_s: Seconds = 30 * 86_400.0
    """Seconds after which a response is removed. The default is OpenAI's."""
    max_responses: Count = 10_000
    """Responses of one client that are kept. Above it the oldest are removed."""
    max_stored_bytes: Bytes = 2**30
    """Size of one client's responses. Above it the oldest are removed. Each response holds its whole conversation, so
    that a conversation outlives its first turns.
    """


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one API key. A request beyond its rates is refused (HTTP 429). All ingresses count together."""

    models: tuple[str, ...] | None = None
    """Models that the key may use, by any of their names. Requests for others are answered as if these were not served
    (HTTP 404). None allows all.
    """
    requests_per_minute: Count | None = None
    """Requests a minute that generate, or that ask for vectors or scores. None sets no limit."""
    tokens_per_minute: Count | None = None
    """Tokens of prompts and outputs a minute. None sets no limit. An output counts as it is generated. Until then, as
    many tokens as the request asks for are reserved, but at most an eighth of the limit. What running requests generate
    beyond their reserve is a debt.
    """

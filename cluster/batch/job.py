"""Runs a batch: every line of a file through the HTTP application, without HTTP, and every answer into another file.

A line means what the same body means at its URL, since the same code answers it; a line that fails is a result like any
other. `cluster/cli/batch.py` starts the engines and calls `run`.

Why not Ray Data: it splits the input into blocks, runs a block after a failure again, and fills each engine with one
block at a time; here lines are what is repeated or not, and all engines are kept full from one queue.
"""

from __future__ import annotations

import asyncio
import itertools
import pathlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

import msgspec

from cluster.batch.journal import Journal, Line, read_lines
from cluster.batch.lines import BadLine, BatchRequest, BatchResponse, BatchResult, LineKey, parse, refused
from cluster.http.errors import RETRIED_STATUSES
from cluster.http.exchange import Receive, Scope, Send

WINDOW_LINES = 4096
"""So many lines are read ahead and sorted, so that those with a common prefix run together."""
WINDOW_BYTES = 64 << 20
"""Or as many as this."""
MAX_TRIES = 5
"""Of a line that the engines refuse for now, or fail at."""
RETRY_S = 1.0

Application = Callable[[Scope, Receive, Send], Awaitable[None]]
"""ASGI's."""


class Progress(NamedTuple):
    """What one line added."""

    has_failed: bool
    num_prompt_tokens: int
    num_output_tokens: int


async def run(
    application: Application,
    source: pathlib.Path,
    journal: Journal,
    *,
    num_in_flight: int,
    max_line_bytes: int,
    report: Callable[[Progress], None],
) -> None:
    """Answers every line that the journal has no result of, `num_in_flight` at a time; they end in any order.

    Raises `BatchRefused` if the journal belongs to another input.
    """
    places = asyncio.Semaphore(num_in_flight)
    try:
        with source.open("rb") as lines:
            async with asyncio.TaskGroup() as tasks:
                for key, request in _requests(lines, journal, max_line_bytes):
                    if isinstance(request, BadLine):
                        journal.write(key, refused(key, request))
                        report(Progress(True, 0, 0))
                        continue
                    await places.acquire()
                    task = tasks.create_task(_answer(application, key, request, journal, report))
                    task.add_done_callback(lambda _: places.release())
    except ExceptionGroup as group:
        raise group.exceptions[0] from group


def _requests(lines: BinaryIO, journal: Journal, max_bytes: int) -> Iterator[tuple[LineKey, BatchRequest | BadLine]]:
    """What is still to be done, window by window: bad lines first, then those with a common prefix together."""
    undone = (line for line in read_lines(lines, max_bytes) if not journal.has(line.key))
    for window in _windows(undone):
        good: list[tuple[LineKey, BatchRequest]] = []
        for line in window:
            request = _parsed(line, max_bytes)
            if isinstance(request, BadLine):
                yield line.key, request
            else:
                good.append((line.key, request))
        yield from sorted(good, key=lambda each: each[1].sort_key)


def _windows(lines: Iterator[Line]) -> Iterator[list[Line]]:
    window: list[Line] = []
    num_bytes = 0
    for line in lines:
        window.append(line)
        num_bytes += len(line.text or b"")
        if len(window) >= WINDOW_LINES or num_bytes >= WINDOW_BYTES:
            yield window
            window, num_bytes = [], 0
    if window:
        yield window


def _parsed(line: Line, max_bytes: int) -> BatchRequest | BadLine:
    if line.text is None:
        return BadLine(f"the line has more than {max_bytes} bytes; shorten it, or raise max_body_bytes")
    try:
        request = parse(line.text)
    except BadLine as error:
        return error
    if _streams(request.body):
        return BadLine("a batch has no streams; leave `stream` out of the body", request.custom_id)
    return request


class _Streamed(msgspec.Struct):
    stream: Any = None


def _streams(body: msgspec.Raw) -> bool:
    try:
        return bool(msgspec.json.decode(body, type=_Streamed).stream)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False  # the endpoint says what is wrong with it


async def _answer(
    application: Application, key: LineKey, request: BatchRequest, journal: Journal, report: Callable[[Progress], None]
) -> None:
    for attempt in itertools.count(1):
        response = await ask(application, request, key.id)
        if response.status_code < 500 and response.status_code not in RETRIED_STATUSES:
            break
        if attempt == MAX_TRIES:
            break
        await asyncio.sleep(RETRY_S * attempt)
    journal.write(key, BatchResult(key.id, request.custom_id, response))
    report(_progress(response))


async def ask(application: Application, request: BatchRequest, request_id: str) -> BatchResponse:
    """One request to an ASGI application, and its whole answer."""
    headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
    scope = {"type": "http", "method": request.method, "path": request.url, "headers": headers}
    body = iter([{"type": "http.request", "body": bytes(request.body), "more_body": False}])
    status, answer = 0, bytearray()

    async def receive() -> dict[str, Any]:
        message = next(body, None)
        return message if message is not None else await asyncio.Future()  # this client never leaves

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, answer
        status = message.get("status", status)
        answer += message.get("body", b"")

    await application(scope, receive, send)
    return BatchResponse(status, request_id, msgspec.Raw(bytes(answer)))


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)


def _progress(response: BatchResponse) -> Progress:
    if response.status_code != 200:
        return Progress(True, 0, 0)
    usage = msgspec.json.decode(response.body, type=_Answer).usage
    return Progress(False, usage.prompt_tokens, usage.completion_tokens)

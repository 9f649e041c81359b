"""Runs a batch: sends every line of a file to the endpoint that it names, and writes every answer to another file.

A line means the same as its body does at its URL (`cluster/batch/line_endpoints.py`); a failed line is a result
like any other. `cluster/cli/batch.py` starts the engines and calls `run`; for `/v1/batches`,
`cluster/batch/batch_runner.py` does.

Ray Data does not fit: it splits the input into blocks, repeats a whole block after a failure, and fills each engine
with one block at a time. Here single lines are repeated, and one queue keeps all engines full.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, BinaryIO, NamedTuple, Protocol

import msgspec

from manta.cluster.batch.journal import Line, read_lines
from manta.cluster.batch.line_places import Places
from manta.cluster.batch.lines import BadLine, BatchRequest, BatchResponse, BatchResult, LineKey, parse, refused
from manta.cluster.protocol.error_bodies import RETRIED_STATUSES

WINDOW_LINES = 4096
"""Most lines that are read ahead and sorted, so that lines with a common prefix run together."""
WINDOW_BYTES = 16 << 20
"""Most bytes of lines that are read ahead."""
MAX_TRIES = 5
"""Most tries of a line at which the engines fail, or whose model could not be started."""
PATIENCE_S = 1800.0
"""Seconds for which a line is retried that the engines refuse for now, because others go first or an engine is being
replaced.
"""
RETRY_S, MAX_RETRY_S = 1.0, 10.0
"""Seconds before the second try, and the most before later ones. Each try waits `RETRY_S` longer than the one
before.
"""

Answer = Callable[[BatchRequest, str, str], Coroutine[Any, Any, BatchResponse]]
"""Function that answers a request. The second argument is the request's id, the third one the batch's owner."""
Pace = Callable[[str], Coroutine[Any, Any, None]]
"""Function that waits until the owner of a batch, its argument, may send another line."""
Request = tuple[LineKey, BatchRequest | BadLine]


class LineProgress(NamedTuple):
    """The counts that one line added."""

    has_failed: bool
    num_prompt_tokens: int
    num_output_tokens: int


class Results(Protocol):
    """The store of results, which knows the lines that have one."""

    def has(self, key: LineKey) -> bool: ...

    def write(self, key: LineKey, result: BatchResult) -> None: ...


class _Place:
    """One of a job's places, which is taken when this is made."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._is_taken = True

    def give_back(self) -> None:
        if self._is_taken:
            self._is_taken = False
            self._places.release()

    async def take_again(self) -> None:
        await self._places.acquire()
        self._is_taken = True


class BatchJob(NamedTuple):
    """One batch to run, and how to run it."""

    answer: Answer
    results: Results
    places: Places
    """Limit of concurrent requests; batches that share it take turns. A line that waits for its next try has none."""
    max_line_bytes: int
    report: Callable[[LineProgress], None]
    endpoint: str | None = None
    """The only URL that its lines may name; None if each may name its own."""
    owner: str = ""
    """Owner of the batch, which is that of its API key. The batches of one owner take turns with other clients in the
    engines. Empty for a command's batch.
    """
    pace: Pace | None = None
    """Waits until the owner may send another line. A line that waits takes no place. None waits for nothing."""


async def run(job: BatchJob, source: BinaryIO) -> None:
    """Answers every line of `source` that has no result, in any order.

    Raises `BatchRefused` if the results belong to another input.
    """
    unanswered = asyncio.Semaphore(WINDOW_LINES)
    try:
        async with asyncio.TaskGroup() as tasks:
            async for key, request in _requests(source, job):
                if isinstance(request, BadLine):
                    job.results.write(key, refused(key, request))
                    job.report(LineProgress(True, 0, 0))
                    continue
                if job.pace is not None:
                    await job.pace(job.owner)
                await unanswered.acquire()
                await job.places.acquire()
                place = _Place(job.places)
                task = tasks.create_task(_answer(job, key, request, place))
                task.add_done_callback(functools.partial(_end, place, unanswered))
    except ExceptionGroup as group:
        raise group.exceptions[0] from group


def _end(place: _Place, unanswered: asyncio.Semaphore, _: asyncio.Task[None]) -> None:
    place.give_back()
    unanswered.release()


async def _requests(source: BinaryIO, job: BatchJob) -> AsyncIterator[Request]:
    """Yields the lines without a result, window by window. Each window is read in a thread, because the storage may be
    slow.
    """
    undone = (line for line in read_lines(source, job.max_line_bytes) if not job.results.has(line.key))
    windows = _windows(undone, job)
    while (window := await asyncio.to_thread(next, windows, None)) is not None:
        for request in window:
            yield request


def _windows(lines: Iterator[Line], job: BatchJob) -> Iterator[list[Request]]:
    """Yields windows of lines: bad lines first, then lines with a common prefix together."""
    window: list[Request] = []
    num_bytes = 0
    for line in lines:
        window.append((line.key, _parsed(line, job)))
        num_bytes += len(line.text or b"")
        if len(window) >= WINDOW_LINES or num_bytes >= WINDOW_BYTES:
            yield sorted(window, key=_sort_key)
            window, num_bytes = [], 0
    if window:
        yield sorted(window, key=_sort_key)


def _sort_key(each: Request) -> tuple[str, bytes]:
    return ("", b"") if isinstance(each[1], BadLine) else each[1].sort_key


def _parsed(line: Line, job: BatchJob) -> BatchRequest | BadLine:
    if line.text is None:
        return BadLine(f"the line has more than {job.max_line_bytes} bytes; shorten it, or raise max_body_bytes")
    try:
        request = parse(line.text)
    except BadLine as error:
        return error
    if job.endpoint not in (None, request.url):
        return BadLine(f"url {request.url!r} is not the batch's endpoint, {job.endpoint}", request.custom_id)
    if _streams(request.body):
        return BadLine("a batch has no streams; leave `stream` out of the body", request.custom_id)
    return request


class _Streamed(msgspec.Struct):
    stream: Any = None


def _streams(body: msgspec.Raw) -> bool:
    try:
        return bool(msgspec.json.decode(body, type=_Streamed).stream)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False  # the endpoint reports the error


async def _answer(job: BatchJob, key: LineKey, request: BatchRequest, place: _Place) -> None:
    response = await _tried(job, key, request, place)
    job.results.write(key, BatchResult(key.id, request.custom_id, response))
    job.report(_progress(response))


async def _tried(job: BatchJob, key: LineKey, request: BatchRequest, place: _Place) -> BatchResponse:
    """Returns the first answer that another try would not change, or the last one. Others have the place between two
    tries.
    """
    num_failures, begun, pause_s = 0, time.monotonic(), RETRY_S
    while True:
        response = await job.answer(request, key.id, job.owner)
        if (code := _code(response)) == "adapter_lost":
            return response  # another try would have other values
        if response.status_code in RETRIED_STATUSES and code != "model_failed":
            is_last = time.monotonic() - begun > PATIENCE_S
        else:
            num_failures += 1
            is_last = response.status_code < 500 or num_failures == MAX_TRIES
        if is_last:
            return response
        place.give_back()
        await asyncio.sleep(pause_s)
        await place.take_again()
        pause_s = min(pause_s + RETRY_S, MAX_RETRY_S)


class _Error(msgspec.Struct):
    code: str | None = None


class _Failed(msgspec.Struct):
    error: _Error = msgspec.field(default_factory=_Error)


def _code(response: BatchResponse) -> str | None:
    """Returns the error code of an answer with an error."""
    try:
        return msgspec.json.decode(response.body, type=_Failed).error.code
    except msgspec.DecodeError:  # another shape of error
        return None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Used(msgspec.Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)


def _progress(response: BatchResponse) -> LineProgress:
    if response.status_code != 200:
        return LineProgress(True, 0, 0)
    usage = msgspec.json.decode(response.body, type=_Used).usage
    return LineProgress(False, usage.prompt_tokens, usage.completion_tokens)

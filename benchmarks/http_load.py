"""A closed-loop load generator: each stream sends its next request when the last one has ended.

The generator shares the cores with the server that it measures, so under load it only notes which bytes came when, and
reads the replies when the last one has come. `LoadResult.generator_cores` says what it cost all the same.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import json
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple, cast

from benchmarks.processes import BenchmarkError

LAST_CHUNK = b"\r\n0\r\n\r\n"
"""End of a reply in the chunked encoding. A reply in another encoding ends with its connection."""


class LoadResult(NamedTuple):
    """What the streams saw, together."""

    seconds: float
    num_tokens: int
    ttft: list[float]
    """Seconds from sending a request to its first token."""
    gaps: list[float]
    """Seconds between one event with tokens and the next, in a reply."""
    generator_cores: float
    """CPU time of this process over wall time: 1.0 is one whole core."""


class _Reply(NamedTuple):
    num_tokens: int
    times: list[float]


def run_load(
    port: int,
    model: str,
    prompts: list[list[int]],
    max_tokens: int,
    num_streams: int,
    tls: ssl.SSLContext | None = None,
) -> LoadResult:
    """Sends every prompt to `/v1/completions`, `num_streams` at a time, and reads the replies as they stream.

    With `tls` it speaks HTTPS. Raises `BenchmarkError` where a reply is not 200 or has other than `max_tokens` tokens.
    """
    requests = [_request(port, model, prompt, max_tokens) for prompt in prompts]
    return asyncio.run(_run(port, requests, max_tokens, num_streams, tls))


async def _run(
    port: int, requests: list[bytes], max_tokens: int, num_streams: int, tls: ssl.SSLContext | None
) -> LoadResult:
    waiting = iter(requests)
    recordings: list[_Recording] = []

    async def stream() -> None:
        for request in waiting:
            recordings.append(await _recorded(port, request, tls))

    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(stream() for _ in range(num_streams)))
    seconds = time.perf_counter() - started
    cores = (time.process_time() - cpu) / seconds
    ttft: list[float] = []
    gaps: list[float] = []
    num_tokens = 0
    for recording in recordings:
        reply = recording.reply()
        if reply.num_tokens != max_tokens:
            raise BenchmarkError(f"a reply has {reply.num_tokens} tokens where {max_tokens} were asked for")
        num_tokens += reply.num_tokens
        ttft.append(reply.times[0] - recording.sent)
        gaps.extend(after - before for before, after in itertools.pairwise(reply.times))
    return LoadResult(seconds, num_tokens, ttft, gaps, cores)


def _request(port: int, model: str, prompt: list[int], max_tokens: int) -> bytes:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return _posting(port, "/v1/completions", body)


def _posting(port: int, path: str, body: dict[str, Any]) -> bytes:
    """Returns the bytes of a request on a connection of its own."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def _recorded(port: int, request: bytes, tls: ssl.SSLContext | None) -> _Recording:
    """Sends a request and returns the recording of its whole reply. Raises `BenchmarkError` if it is not 200."""
    recording = _Recording(request)
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: recording, "127.0.0.1", port, ssl=tls)
    await recording.ended
    return recording


class _Recording(asyncio.Protocol):
    """The bytes of one reply, each piece with the time at which it came."""

    def __init__(self, request: bytes) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent = time.perf_counter()
        self._request = request
        self._pieces: list[bytes] = []
        self._times: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._times.append(time.perf_counter())
        self._pieces.append(data)
        if data.endswith(LAST_CHUNK):
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        status = b"".join(self._pieces[:1]).split(b" ", 2)[1:2]
        if self.ended.done():
            return
        if status == [b"200"]:
            self.ended.set_result(None)
        else:
            answer = b"".join(self._pieces).partition(b"\r\n\r\n")[2][:500].decode(errors="replace")
            shown = b"".join(status).decode(errors="replace") or f"nothing ({exc})"
            self.ended.set_exception(BenchmarkError(f"the server answered {shown}: {answer}"))

    def reply(self) -> _Reply:
        """Reads the reply."""
        data, ends = b"".join(self._pieces), list(itertools.accumulate(map(len, self._pieces)))
        times: list[float] = []
        num_tokens, rest = 0, b""
        for end, piece in _body_pieces(data):
            *lines, rest = (rest + piece).split(b"\n")
            carries_tokens = False
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise BenchmarkError(f"the server ended a reply: {event['error']}")
                carries_tokens |= any(choice.get("text") for choice in event.get("choices", ()))
                if event.get("usage"):
                    num_tokens = event["usage"]["completion_tokens"]
            if carries_tokens or (lines and not times):
                times.append(self._times[bisect.bisect_left(ends, end)])
        return _Reply(num_tokens, times)


def _body_pieces(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the pieces of a reply's body, each with the number of the reply's bytes up to its end."""
    head, _, body = data.partition(b"\r\n\r\n")
    place = len(data) - len(body)
    if b"transfer-encoding: chunked" not in head.lower():
        yield len(data), body
        return
    while (end := data.find(b"\r\n", place)) > 0:
        size = int(data[place:end].split(b";")[0], 16)
        place = end + 2 + size + 2
        if not size or place > len(data):
            return
        yield place, data[end + 2 : place - 2]


class Response(NamedTuple):
    """An answer whose head has been read."""

    status: int
    pieces: AsyncIterator[bytes]
    """The body, as it comes."""


@contextlib.asynccontextmanager
async def posted(port: int, path: str, body: dict[str, Any]) -> AsyncIterator[Response]:
    """Sends a JSON body on a connection of its own, which ends with the context."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    try:
        writer.write(_posting(port, path, body))
        header = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        chunked = "transfer-encoding: chunked" in header.lower()
        yield Response(int(header.split(" ", 2)[1]), _chunks(reader) if chunked else _pieces(reader))
    finally:
        writer.close()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Of the chunked encoding."""
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(65536):
        yield piece

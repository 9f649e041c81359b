"""A closed-loop load generator: each stream sends its next request when the last one has ended.

A minimal HTTP/1.1 client on asyncio streams, because the generator shares the cores with the server that it measures: a
general client would cost several times more per event. `LoadResult.generator_cores` says what it cost all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from benchmarks.processes import BenchmarkError


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
    return asyncio.run(_run(port, model, prompts, max_tokens, num_streams, tls))


async def _run(
    port: int, model: str, prompts: list[list[int]], max_tokens: int, num_streams: int, tls: ssl.SSLContext | None
) -> LoadResult:
    waiting = iter(prompts)
    ttft: list[float] = []
    gaps: list[float] = []
    num_tokens = 0

    async def stream() -> None:
        nonlocal num_tokens
        for prompt in waiting:
            sent = time.perf_counter()
            reply = await _request(port, model, prompt, max_tokens, tls)
            if reply.num_tokens != max_tokens:
                raise BenchmarkError(f"a reply has {reply.num_tokens} tokens where {max_tokens} were asked for")
            num_tokens += reply.num_tokens
            ttft.append(reply.times[0] - sent)
            gaps.extend(after - before for before, after in zip(reply.times, reply.times[1:], strict=False))

    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(stream() for _ in range(num_streams)))
    seconds = time.perf_counter() - started
    return LoadResult(seconds, num_tokens, ttft, gaps, (time.process_time() - cpu) / seconds)


async def _request(port: int, model: str, prompt: list[int], max_tokens: int, tls: ssl.SSLContext | None) -> _Reply:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with posted(port, "/v1/completions", body, tls=tls) as response:
        if response.status != 200:
            answer = b"".join([piece async for piece in response.pieces])
            raise BenchmarkError(f"the server answered {response.status}: {answer[:500].decode()}")
        return await _read_events(response.pieces)


class Response(NamedTuple):
    """An answer whose head has been read."""

    status: int
    pieces: AsyncIterator[bytes]
    """The body, as it comes."""


@contextlib.asynccontextmanager
async def posted(
    port: int, path: str, body: dict[str, Any], tls: ssl.SSLContext | None = None
) -> AsyncIterator[Response]:
    """Sends a JSON body on a connection of its own, which ends with the context."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20, ssl=tls)
    try:
        writer.write(head.encode() + data)
        header = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        chunked = "transfer-encoding: chunked" in header.lower()
        yield Response(int(header.split(" ", 2)[1]), _chunks(reader) if chunked else _pieces(reader))
    finally:
        writer.close()


async def _read_events(pieces: AsyncIterator[bytes]) -> _Reply:
    times: list[float] = []
    num_tokens, rest = 0, b""
    async for piece in pieces:
        now = time.perf_counter()
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
            times.append(now)
    return _Reply(num_tokens, times)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Of the chunked encoding."""
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(65536):
        yield piece

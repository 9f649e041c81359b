"""A closed-loop load generator: each stream sends its next request when the last one has ended.

A minimal HTTP/1.1 client on asyncio streams, because the generator shares the cores with the server that it measures: a
general client would cost several times more per event. `LoadResult.generator_cores` says what it cost all the same.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import NamedTuple

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


def run_load(port: int, model: str, prompts: list[list[int]], max_tokens: int, num_streams: int) -> LoadResult:
    """Sends every prompt to `/v1/completions`, `num_streams` at a time, and reads the replies as they stream.

    Raises `BenchmarkError` where a reply is not 200 or has other than `max_tokens` tokens.
    """
    return asyncio.run(_run(port, model, prompts, max_tokens, num_streams))


async def _run(port: int, model: str, prompts: list[list[int]], max_tokens: int, num_streams: int) -> LoadResult:
    waiting = iter(prompts)
    ttft: list[float] = []
    gaps: list[float] = []
    num_tokens = 0

    async def stream() -> None:
        nonlocal num_tokens
        for prompt in waiting:
            sent = time.perf_counter()
            reply = await _request(port, model, prompt, max_tokens)
            if reply.num_tokens != max_tokens:
                raise BenchmarkError(f"a reply has {reply.num_tokens} tokens where {max_tokens} were asked for")
            num_tokens += reply.num_tokens
            ttft.append(reply.times[0] - sent)
            gaps.extend(after - before for before, after in zip(reply.times, reply.times[1:], strict=False))

    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(stream() for _ in range(num_streams)))
    seconds = time.perf_counter() - started
    return LoadResult(seconds, num_tokens, ttft, gaps, (time.process_time() - cpu) / seconds)


async def _request(port: int, model: str, prompt: list[int], max_tokens: int) -> _Reply:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    try:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + data)
        header = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        if " 200 " not in header.split("\r\n", 1)[0]:
            raise BenchmarkError(f"the server answered {header.splitlines()[0]}: {(await reader.read(500)).decode()}")
        return await _read_events(reader, chunked="transfer-encoding: chunked" in header.lower())
    finally:
        writer.close()


async def _read_events(reader: asyncio.StreamReader, chunked: bool) -> _Reply:
    times: list[float] = []
    num_tokens, rest = 0, b""
    while True:
        piece = await (_read_chunk(reader) if chunked else reader.read(65536))
        if not piece:
            return _Reply(num_tokens, times)
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


async def _read_chunk(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readline()).split(b";")[0] or b"0", 16)
    return (await reader.readexactly(size + 2))[:-2] if size else b""

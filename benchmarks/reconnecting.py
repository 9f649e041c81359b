"""`manta bench cluster --parts reconnecting`: many streams that can be resumed, whose clients lose connections.

Two ingresses with one port, and one engine of the tiny model, which keeps the copies. Streams begin at a bounded rate.
Each client breaks its connection after a few events and reads on, from whichever ingress accepts the next connection.
It notes every event that it gets. The same streams without resumability, and without broken connections, run beside it
on a server of their own.

Memory a stream is what the processes have grown by while all streams are kept, over the number of streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import statistics
import sys
import time
from typing import Any, NamedTuple

import psutil

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.http_load import Response, fetched, posted
from benchmarks.processes import BenchmarkError, ServerProcess, Setup, free_port
from benchmarks.soak import weigh
from benchmarks.workloads import PromptSource

NUM_STREAMS = 10_000
NUM_TOKENS = 32
STREAMS_PER_S = 100.0
"""Rate at which streams begin. Beyond what the engine can do, at most `AT_A_TIME` run."""
AT_A_TIME = 256
EVENTS = (1, 12)
"""Least and most events after which a client breaks its connection."""
UNREAD_S = 3600
NUM_PROMPTS = 16
PROMPT, TOKEN_LIMIT = 16, 30_000
"""Tokens of each prompt, and of the tiny model's vocabulary those that are drawn for prompts."""
READ_AGAIN = 50
"""One of so many streams is read a second time as a whole, and must have the same bytes."""
WARM_UP = 2 * AT_A_TIME
"""Streams before the memory is weighed, so that the engine has touched all of `KV_BYTES`."""
KV_BYTES = 1 << 27
"""Size of the KV cache: enough for `AT_A_TIME` streams. Without a prefix cache, each stream takes blocks of its own."""
PATIENCE_S = 600.0

OPTIONS: dict[str, Any] = {
    "num_ingress_replicas": 2,
    "log_requests": False,
    "engine.dtype": "float32",
    "engine.enable_prefix_caching": False,
    "engine.max_num_sequences": AT_A_TIME,
    "streams.max_client_bytes": 1 << 36,
    "streams.max_bytes": 1 << 36,
}


class Events:
    """The events that one client got of its stream."""

    def __init__(self) -> None:
        self.stream_id = ""
        self.numbers: list[int] = []
        self.content: list[bytes] = []
        self.times: list[float] = []
        self.has_ended = False

    @property
    def text(self) -> str:
        """Text of the answer, with the reason of its end."""
        parts = [json.loads(each[6:]) for each in self.content if each.startswith(b"data: {")]
        choices = [choice for part in parts for choice in part["choices"]]
        return "".join(f"{choice['text']}{choice['finish_reason'] or ''}" for choice in choices)

    async def read(self, response: Response, most: int) -> None:
        """Reads so many events at most. Raises `BenchmarkError` for an answer that is no stream."""
        if response.status in (429, 503):
            await asyncio.sleep(0.1)
            return
        rest = b""
        async for piece in response.pieces:
            if response.status != 200:
                raise BenchmarkError(f"the server answered {response.status}: {piece[:500].decode()}")
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events[:most]:
                self._add(event)
            most -= len(events)
            if most <= 0 or self.has_ended:
                return

    def _add(self, event: bytes) -> None:
        first, _, content = event.partition(b"\n")
        if first.startswith(b"id: "):
            stream_id, _, number = first[4:].decode().partition(":")
            self.stream_id = stream_id
            self.numbers.append(int(number))
        else:
            content = event
            self.numbers.append(len(self.numbers))
        self.content.append(content)
        self.times.append(time.perf_counter())
        self.has_ended = content == b"data: [DONE]"


class Outcome(NamedTuple):
    """Counts, pauses and memory of all streams of one server."""

    num_events: int
    num_connections: int
    lost: int
    twice: int
    different: int
    pauses_s: list[float]
    ingress_bytes: float
    """Growth of all ingresses' memory for each stream, as is the engine's."""
    engine_bytes: float


class Load:
    """Streams on one server."""

    def __init__(self, server: ServerProcess, resumes: bool) -> None:
        self._server = server
        self._resumes = resumes
        self._chooser = random.Random(1)
        prompts = PromptSource(TOKEN_LIMIT)(NUM_PROMPTS, PROMPT)
        shared = {"model": server.model_name, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        self._bodies = [{**shared, "prompt": prompt, "stream": True} for prompt in prompts]
        self.num_connections = 0

    async def undisturbed(self) -> list[str]:
        """The text of each prompt's answer."""
        texts = []
        for body in self._bodies:
            events = Events()
            async with posted(self._server.port, "/v1/completions", body) as response:
                await events.read(response, sys.maxsize)
            texts.append(events.text)
        return texts

    async def run(self, num_streams: int) -> list[Events]:
        places = asyncio.Semaphore(AT_A_TIME)
        begun, found = time.perf_counter(), []
        for number in range(num_streams):
            await asyncio.sleep(max(0.0, begun + number / STREAMS_PER_S - time.perf_counter()))
            await places.acquire()
            task = asyncio.ensure_future(self._read(self._bodies[number % NUM_PROMPTS]))
            task.add_done_callback(lambda _: places.release())
            found.append(task)
            if number % 1000 == 999:
                print(f"{number + 1} of {num_streams} streams have begun", file=sys.stderr, flush=True)
        return await asyncio.gather(*found)

    async def _read(self, body: dict[str, Any]) -> Events:
        events, deadline = Events(), time.perf_counter() + PATIENCE_S
        while not events.has_ended:
            if time.perf_counter() > deadline:
                raise BenchmarkError(f"stream {events.stream_id} has not ended after {PATIENCE_S:g} s")
            self.num_connections += 1
            most = self._chooser.randint(*EVENTS) if self._resumes else sys.maxsize
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                async with self._connection(events, body) as response:
                    await events.read(response, most)
        return events

    def _connection(self, events: Events, body: dict[str, Any]) -> contextlib.AbstractAsyncContextManager[Response]:
        port = self._server.port
        if events.stream_id:
            return fetched(port, f"/v1/streams/{events.stream_id}?starting_after={events.numbers[-1]}")
        headers = {"X-Resumable-S": str(UNREAD_S)} if self._resumes else {}
        return posted(port, "/v1/completions", body, headers)

    async def differs(self, events: Events) -> bool:
        """Reads a stream a second time, from its beginning."""
        again = Events()
        async with fetched(self._server.port, f"/v1/streams/{events.stream_id}") as response:
            await again.read(response, sys.maxsize)
        return (again.numbers, again.content) != (events.numbers, events.content)

    def memory(self) -> tuple[int, int]:
        """Bytes of the ingresses and of the engine."""
        by_role = weigh(psutil.Process(self._server.process.pid))
        return tuple(sum(size for role, size in by_role.items() if name in role) for name in ("ingress", "engine"))  # type: ignore[return-value]


async def _measure(server: ServerProcess, resumes: bool, num_streams: int) -> Outcome:
    load = Load(server, resumes)
    expected = await load.undisturbed()
    await load.run(WARM_UP)
    before, load.num_connections = load.memory(), 0
    found = await load.run(num_streams)
    ingress_bytes, engine_bytes = (
        (after - earlier) / num_streams for earlier, after in zip(before, load.memory(), strict=True)
    )
    again = [await load.differs(each) for each in found[::READ_AGAIN]] if resumes else []
    texts = [events.text != expected[number % NUM_PROMPTS] for number, events in enumerate(found)]
    return Outcome(
        sum(len(each.numbers) for each in found),
        load.num_connections,
        sum(max(each.numbers) + 1 - len(set(each.numbers)) for each in found),
        sum(len(each.numbers) - len(set(each.numbers)) for each in found),
        sum(texts) + sum(again),
        [later - earlier for each in found for earlier, later in itertools.pairwise(each.times)],
        ingress_bytes,
        engine_bytes,
    )


def measure(resumes: bool, num_streams: int) -> Outcome:
    """Starts a server, and returns what became of the streams."""
    setup = Setup(kv_cache_bytes=KV_BYTES, max_model_len=128)
    server = ServerProcess("manta", str(benchmark_checkpoint("tiny-llama")), setup, free_port(), OPTIONS)
    try:
        return asyncio.run(_measure(server, resumes, num_streams))
    finally:
        server.stop()


def table(outcomes: list[Outcome], num_streams: int) -> list[str]:
    """Markdown; `outcomes` are with and without resumability."""
    lines = [
        f"| {num_streams:,} streams of {NUM_TOKENS} tokens, at most {STREAMS_PER_S:g}/s | resumable | plain |",
        "| --- | --- | --- |",
    ]

    def row(name: str, figures: list[str]) -> None:
        lines.append(f"| {name} | {' | '.join(figures)} |")

    row("connections", [f"{each.num_connections:,}" for each in outcomes])
    row("events", [f"{each.num_events:,}" for each in outcomes])
    row("events lost, twice; streams different", [f"{each.lost}, {each.twice}; {each.different}" for each in outcomes])
    for share, name in ((50, "p50"), (99, "p99")):
        pauses = [statistics.quantiles(each.pauses_s, n=100)[share - 1] for each in outcomes]
        row(f"pause between events, {name}, ms", [f"{pause * 1e3:.1f}" for pause in pauses])
    row("memory of both ingresses, KiB a stream", [f"{each.ingress_bytes / 1024:.1f}" for each in outcomes])
    row("memory of the engine and its keeper, KiB a stream", [f"{each.engine_bytes / 1024:.1f}" for each in outcomes])
    return lines


def reconnecting(num_streams: int) -> None:
    """Prints the table. Raises `BenchmarkError` if an event was lost or came twice, or a stream differs."""
    outcomes = [measure(resumes, num_streams) for resumes in (True, False)]
    print(*table(outcomes, num_streams), sep="\n", flush=True)
    if any(each.lost or each.twice or each.different for each in outcomes):
        raise BenchmarkError("events were lost or came twice, or streams differ")

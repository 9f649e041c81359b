"""`make fuzz ARGS=--http`: clients against a live server for a time, and what must be left of them in the end: nothing.

Each client's actions follow from the seed and its number; how those of several meet in time does not. A failure is told
with its seed and its connection's transcript.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import NamedTuple

import jsonschema
import psutil

from tests.fuzz.http.clients import ACTIONS, Client, World
from tests.fuzz.http.connection import Closed, connect, request
from tests.fuzz.http.pulse import BOUND_S, GROWTH, Pulse, Seen
from tests.processes import running_below

NUM_CLIENTS = 12
NUM_EXAMPLES = 100
"""A hundred take a quarter of a minute to draw."""
MAX_FAILURES = 5
"""Number of failures that end the campaign."""
SETTLE_S = 600.0
"""Seconds within which the server must be idle after the last client."""
SPARE_FDS = 8
"""File descriptors that a process may have gained without having lost any of the clients' sockets."""
SHOWN_LINES = 40
STARTS = ("manta:rank_rebuilds", "manta:start_seconds", "manta:continuations")
"""Metrics that change where an engine or a rank was started anew, or a request went on elsewhere."""
IDLE = ("manta:num_requests_running", "manta:num_requests_waiting", "manta:kv_cache_usage_perc")


class Failure(NamedTuple):
    """What one client's action found."""

    where: str
    problem: str
    transcript: list[str]

    def __str__(self) -> str:
        shown = self.transcript[:SHOWN_LINES]
        return "\n  ".join([f"{self.where}: {self.problem}", *shown])


class HttpCampaign:
    """Failures and counts so far. `processes` are the server's whose file descriptors are counted; schemathesis
    draws `num_examples` bodies for each path that fit its schema, and as many that do not.
    """

    def __init__(
        self,
        port: int,
        model: str,
        seed: int,
        processes: tuple[psutil.Process, ...] = (),
        num_examples: int = NUM_EXAMPLES,
    ) -> None:
        self.world = World(port, model, seed, num_examples)
        self.failures: list[Failure] = []
        self._processes = processes
        self.seen: Seen | None = None
        """What one more client has seen of the server meanwhile; None before the campaign's end."""
        self._starts: dict[str, float] = {}
        """`STARTS` before the first client."""

    def run(self, seconds: float) -> None:
        asyncio.run(self.run_async(seconds))

    async def run_async(self, seconds: float, num_clients: int = NUM_CLIENTS) -> None:
        """Everything alone first, then all clients, then a look at what is left."""
        await self.world.prepare()
        before, self._starts = self._num_fds(), await self._metrics(STARTS)
        pulse = Pulse(self.world.port, self._processes)
        deadline = time.monotonic() + seconds
        await asyncio.gather(*(self._drive(Client(self.world, number), deadline) for number in range(num_clients)))
        self.seen = await asyncio.to_thread(pulse.stop)
        if self.seen is None:
            self.failures.append(Failure(f"seed {self.world.seed}", "one more client got no answer", []))
        elif self.seen.growth > GROWTH:
            memory = [size >> 20 for size in self.seen.memory_bytes]
            self.failures.append(Failure(f"seed {self.world.seed}", f"the memory in MiB was {memory}", []))
        await self._check_nothing_is_left(before)

    async def _drive(self, client: Client, deadline: float) -> None:
        while time.monotonic() < deadline and len(self.failures) < MAX_FAILURES:
            try:
                await client.act()
            except (AssertionError, jsonschema.ValidationError, ValueError, Closed, OSError, EOFError) as error:
                where = f"seed {self.world.seed}, client {client.number}, action {client.num_actions} {client.action}"
                self.failures.append(Failure(where, f"{type(error).__name__}: {error}", client.transcript))

    async def _check_nothing_is_left(self, before: list[int]) -> None:
        deadline = time.monotonic() + SETTLE_S
        while problems := await self._left_or_silent(before):
            if time.monotonic() > deadline:
                self.failures.append(Failure(f"seed {self.world.seed}, in the end", "; ".join(problems), []))
                return
            await asyncio.sleep(0.2)

    async def _left_or_silent(self, before: list[int]) -> list[str]:
        try:
            return await self._left(before)
        except (OSError, EOFError, Closed) as error:
            return [f"the server does not answer: {type(error).__name__}: {error}"]

    async def _left(self, before: list[int]) -> list[str]:
        if gone := [process.pid for process in self._processes if not process.is_running()]:
            return [f"processes {gone} of the server have ended"]
        found = [f"{name} is {value:g}" for name, value in (await self._metrics(IDLE)).items() if value]
        found += [
            f"{name} was {self._starts[name]:g} and is {value:g}"
            for name, value in (await self._metrics(STARTS)).items()
            if value != self._starts[name]
        ]
        health = json.loads(await self._get("/health"))
        if health != {"status": "ok"}:
            found.append(f"/health says {health}")
        found += [
            f"{process.name()} has {now} file descriptors, and had {then}"
            for process, then, now in zip(self._processes, before, self._num_fds(), strict=True)
            if now > then + SPARE_FDS
        ]
        return found

    async def _metrics(self, names: tuple[str, ...]) -> dict[str, float]:
        """The sum of each metric's series."""
        lines = (await self._get("/metrics")).decode().splitlines()
        return {name: sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for name in names}

    async def _get(self, path: str) -> bytes:
        connection = await connect(self.world.port, [])
        await connection.send(request(path, b"", "GET", connection="close"))
        try:
            return (await connection.answer()).body
        finally:
            connection.close()

    def _num_fds(self) -> list[int]:
        return [process.num_fds() for process in self._processes]

    def table(self) -> str:
        """How often what occurred."""
        others = sorted(set(self.world.counts) - set(ACTIONS))
        rows = [f"{self.world.counts[name]:>9}  {name}" for name in (*ACTIONS, *others)]
        return "\n".join([*rows, f"{len(self.failures):>9}  failures", *self._waits()])

    def _waits(self) -> list[str]:
        if self.seen is None:
            return []
        seen = self.seen
        waits = ", ".join(f"{wait:.3f}" for wait in seen.longest_waits_s)
        return [
            f"One more client asked {seen.num_questions} times, {seen.num_over_bound} times for over {BOUND_S} s;",
            f"its longest waits were {waits} s, and it ran {seen.longest_delay_s:.3f} s late itself.",
            f"The server's memory in MiB: {[size >> 20 for size in seen.memory_bytes[::30]]}",
        ]


def serving_processes(root_pid: int) -> tuple[psutil.Process, ...]:
    """Ingress and engine of the `manta serve` with that process id."""
    return (*running_below(root_pid, "manta:ingress"), *running_below(root_pid, "manta:engine"))

"""Traffic is shifted from one cluster to another, as KubeRay upgrades a RayService step by step.

Nothing here is Kubernetes: the clusters are two servers with a Ray of their own on this machine, and `Gateway` does
what a gateway with weighted backends does. KubeRay's pull request 3166 met a gateway that sent a share of the requests
to a cluster without ready pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from benchmarks.processes import free_port
from tests.patience import PATIENCE_S, wait_until
from tests.serve.fault_streams import Stream, Streams, bodies
from tests.server import Server

pytestmark = [pytest.mark.prove, pytest.mark.timeout(3600)]

NUM_CLIENTS = 32
NUM_REQUESTS = 16
"""Requests that each cluster with a share of the traffic takes before the next step."""
STEPS = (0.25, 0.5, 0.0, 0.5, 1.0)
"""Shares of the new cluster: two steps, a rollback, and the whole way."""
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 19\r\nConnection: close\r\n\r\nno healthy upstream"


class Gateway:
    """Passes each connection on to the old or to the new cluster, and answers 503 if that one takes no connection."""

    def __init__(self, old: int, new: int) -> None:
        self.port = free_port()
        self.share = 0.0
        """Share of the connections that the new cluster gets."""
        self.num_taken = {old: 0, new: 0}
        """Connections by the port of their cluster."""
        self.num_open = {old: 0, new: 0}
        self.num_refused = 0
        self._old, self._new = old, new
        self._owed = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        serving = asyncio.start_server(self._pass_on, "127.0.0.1", self.port, backlog=256)
        asyncio.run_coroutine_threadsafe(serving, self._loop).result(PATIENCE_S)

    def _choose(self) -> int:
        """Returns the port of the cluster whose turn it is."""
        self._owed += self.share
        if self._owed < 1.0:
            return self._old
        self._owed -= 1.0
        return self._new

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = self._choose()
        try:
            answers, requests = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            self.num_refused += 1
            await reader.readuntil(b"\r\n\r\n")
            writer.write(UNAVAILABLE)
            writer.close()
            return
        self.num_taken[port] += 1
        self.num_open[port] += 1
        try:
            await asyncio.gather(_copy(reader, requests), _copy(answers, writer))
        finally:
            self.num_open[port] -= 1

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies bytes until there are no more, or one end is gone."""
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


class Clients:
    """Clients that read one stream after the other until they are told to stop."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._requests = bodies(model)
        self._ended = threading.Event()
        self.read: list[list[Stream]] = [[] for _ in range(NUM_CLIENTS)]
        """The streams of each client."""
        self._threads = [threading.Thread(target=self._go_on, args=[number]) for number in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _go_on(self, number: int) -> None:
        path, body = self._requests[number % len(self._requests)]
        while not self._ended.is_set():
            stream = Stream()
            stream.read(self._url + path, body)
            self.read[number].append(stream)

    def stop(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


@contextlib.contextmanager
def stopped(*begun: Server | Gateway | Clients) -> Iterator[None]:
    try:
        yield
    finally:
        for each in begun:
            each.stop()


def probe(port: int) -> int:
    """Returns the status of a cluster's readiness probe; 0 if nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/-/healthz")
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def num_engines(port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("manta:engines_serving{"))


def test_an_upgrade_by_shifted_traffic_loses_no_stream(record_property: Callable[[str, object], None]) -> None:
    """Two servers take turns, with a rollback in the middle. The old one ends when its last stream has."""
    old, new_port = Server(), free_port()
    gateway = Gateway(old.port, new_port)
    url = f"http://127.0.0.1:{gateway.port}"
    with stopped(gateway, old):
        expected = Streams(url, bodies(old.model)).join()
        assert all(stream.is_complete for stream in expected), [stream.error for stream in expected]

        gateway.share = 0.5  # as in the report: nobody listens there yet
        early = Streams(url, bodies(old.model)).join()
        assert gateway.num_refused > 0
        assert sum(stream.is_complete for stream in early) == len(early) - gateway.num_refused
        gateway.share, gateway.num_refused = 0.0, 0

        clients, statuses, started = Clients(url, old.model), list[int](), list[Server]()
        starting = threading.Thread(target=lambda: started.append(Server("engine.max_num_sequences=64", port=new_port)))
        starting.start()
        with stopped(clients):
            while not statuses or statuses[-1] != 200:
                statuses.append(probe(new_port))
                assert statuses[-1] in (0, 200, 503)
                time.sleep(0.02)
            assert num_engines(new_port) == 1, "it is ready when an engine has loaded"
            starting.join()
            (new,) = started
            with stopped(new):
                for share in STEPS:
                    gateway.share = share
                    wait_for_requests(gateway, *([new_port] if share else []), *([old.port] if share < 1 else []))
                wait_until(lambda: gateway.num_open[old.port] == 0, poll_s=0.1)  # why KubeRay keeps it for a while
                old.stop()
                wait_for_requests(gateway, new_port)
                clients.stop()
    found = [(stream, expected[number % 16]) for number, read in enumerate(clients.read) for stream in read]
    errors = [stream.error for stream, _ in found if stream.error]
    record_property("streams complete", f"{len(found) - len(errors)} of {len(found)}")
    record_property("of them on the new cluster", gateway.num_taken[new_port])
    record_property("pause max, s", round(max(stream.pause_s for stream, _ in found), 2))
    record_property("probes before ready", f"{statuses.count(0)} refused, {statuses.count(503)} with 503")
    assert not errors, errors
    assert gateway.num_refused == 0
    assert all(stream.equals(undisturbed) for stream, undisturbed in found)


def wait_for_requests(gateway: Gateway, *ports: int) -> None:
    """Returns when each of these clusters has taken `NUM_REQUESTS` more connections."""
    wanted = {port: gateway.num_taken[port] + NUM_REQUESTS for port in ports}
    wait_until(lambda: all(gateway.num_taken[port] >= number for port, number in wanted.items()), poll_s=0.05)

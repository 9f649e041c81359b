"""An ingress that Serve told to go: its probes fail, it still takes requests for a while, and its streams end whole."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from manta.cluster.engine.stats import EngineStats
from manta.cluster.errors import Unavailable
from manta.cluster.serve import ingress as ingress_module
from manta.cluster.serve.listening import listener as listener_module
from manta.cluster.serve.requests import engine_client as client_module
from manta.structured.refusals import Refusal
from tests.async_tests import async_test
from tests.local_server import LocalServer, answer, local_server, post, until
from tests.patience import PATIENCE_S


class Peers:
    """What Serve knows of the application; in the place of Serve's status and of its handles."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_removed = False
        self.places = {"draining": ("here", 8000), "elsewhere": ("there", 8000), "of another port": ("here", 8001)}

        async def is_removed() -> bool:
            return self.is_removed

        async def of_peers(ingress: Any, method: str) -> list[tuple[str, tuple[str, int]]]:
            assert method == "own_place"
            return list(self.places.items())

        async def own_place(ingress: Any) -> tuple[str, tuple[str, int]]:
            return "draining", ("here", 8000)

        monkeypatch.setattr(ingress_module, "is_removed", is_removed)
        monkeypatch.setattr(ingress_module.ListeningIngress, "_of_peers", of_peers)
        monkeypatch.setattr(ingress_module.ListeningIngress, "own_place", own_place)
        monkeypatch.setattr(ingress_module, "DRAIN_POLL_S", 0.05)
        monkeypatch.setattr(listener_module, "TICK_S", 0.05)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Peers:
    return Peers(monkeypatch)


NUM_TOKENS = 400


async def begun_stream(server: LocalServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream of more than two seconds on a connection that would stay for further requests. Its head has come."""
    step = server.replica.engine.step

    def slow_step() -> Any:
        time.sleep(0.005)
        return step()

    server.replica.engine.step = slow_step  # type: ignore[method-assign]
    reader, writer = await server.connect()
    body = server.body(max_tokens=NUM_TOKENS, stream=True, stream_options={"include_usage": True})
    writer.write(post(body, connection="keep-alive"))
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def num_tokens_of(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    """Of a stream that is read until the server closes its connection."""
    text = (await asyncio.wait_for(reader.read(-1), PATIENCE_S)).decode()
    writer.close()
    assert "data: [DONE]" in text
    usage = next(line for line in text.splitlines() if '"completion_tokens":' in line)
    return json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"]


async def is_refused(server: LocalServer) -> bool:
    try:
        _, writer = await server.connect()
    except ConnectionError:
        return True
    writer.close()
    return False


@async_test
async def test_readiness_fails_while_streams_finish(peers: Peers) -> None:
    async with local_server(drain_notice_s=600) as server:
        assert await server.get("/-/healthz") == (200, b"success")
        assert (await server.get("/health"))[0] == 200
        stream = await begun_stream(server)
        draining = asyncio.ensure_future(server.ingress.drain())
        await asyncio.sleep(0.1)
        assert await server.get("/-/healthz") == (503, b"This node is being drained.")
        assert (await server.get("/health"))[0] == 503
        reader, writer = await server.connect()
        writer.write(post(server.body(max_tokens=4), connection="keep-alive"))
        assert (await answer(reader, writer))[0] == 200, "its connection ends with the answer, too"
        peers.places["successor"] = ("here", 8000)
        begun = time.monotonic()
        while not await is_refused(server):
            assert time.monotonic() - begun < PATIENCE_S
            await asyncio.sleep(0.05)
        assert not draining.done(), "a stream is still open"
        assert await num_tokens_of(*stream) == NUM_TOKENS
        await asyncio.wait_for(draining, PATIENCE_S)


@async_test
async def test_readiness_waits_for_the_first_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load balancer would send requests to a cluster that still loads. Afterwards requests wait here for an engine
    that died.
    """

    async def none() -> list[EngineStats]:
        return []

    async with local_server() as server:
        with monkeypatch.context() as patch:
            patch.setattr(server.ingress._client, "stats", none)
            assert await server.get("/-/healthz") == (503, b"No engine has loaded yet.")
            patch.setattr(server.ingress._client, "stats", raising)
            assert (await server.get("/-/healthz"))[0] == 503
        assert await server.get("/-/healthz") == (200, b"success")
        monkeypatch.setattr(server.ingress._client, "stats", none)
        assert await server.get("/-/healthz") == (200, b"success")


async def raising() -> list[EngineStats]:
    raise Unavailable(Refusal("unavailable"))


@pytest.mark.parametrize("reason", ["replaced", "removed", "over"])
@async_test
async def test_the_notice_ends_when_nobody_needs_it(peers: Peers, reason: str) -> None:
    async with local_server(drain_notice_s=1 if reason == "over" else 600) as server:
        draining = asyncio.ensure_future(server.ingress.drain())
        await asyncio.sleep(0.1)
        assert not draining.done()
        if reason == "replaced":
            peers.places["successor"] = ("here", 8000)
        peers.is_removed = reason == "removed"
        await asyncio.wait_for(draining, PATIENCE_S)
        assert await is_refused(server)


@async_test
async def test_streams_of_a_deleted_application_end_in_time(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_module, "REMOVED_S", 0.2)
    peers.is_removed = True

    async with local_server() as server:
        reader, writer = await begun_stream(server)
        await asyncio.wait_for(server.ingress.drain(), PATIENCE_S)
        assert not reader.at_eof(), "Serve ends the process now"
        assert not server.engine_is_idle
        writer.close()


@async_test
async def test_requests_without_an_engine_are_answered_at_shutdown(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve tells engines and ingresses to go at once, and would let what comes meanwhile wait for an engine."""
    monkeypatch.setattr(client_module, "REMOVAL_POLL_S", 0.05)

    async with local_server() as server:
        stream = await begun_stream(server)
        client = server.ingress._client
        monkeypatch.setitem(client._replicas.running, "engine", frozenset())
        monkeypatch.setattr(client._waker, "_call", asyncio.Event().wait)
        held = asyncio.ensure_future(server.post(max_tokens=4))
        await until(lambda: client.num_held == 1)
        await asyncio.sleep(0.2)
        assert not held.done(), "an engine may start"
        peers.is_removed = True
        draining = asyncio.ensure_future(server.ingress.drain())
        status, body = await held
        assert status == 503
        assert "the application was ended" in json.loads(body)["error"]["message"]
        assert await num_tokens_of(*stream) == NUM_TOKENS
        await asyncio.wait_for(draining, PATIENCE_S)
        monkeypatch.setattr(server.replica, "model", lambda: asyncio.sleep(600))
        with pytest.raises(Unavailable, match="the application was ended"):
            await client.model()

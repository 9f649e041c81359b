"""One client fills a pool of an ingress, and others are served all the same. Clients are keys or addresses."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from manta.cluster.http.exchange.remembered import RememberedResponses
from tests.async_tests import async_test
from tests.local_server import LocalServer, answer, local_server, post
from tests.patience import PATIENCE_S, until

KEYS = {name: f"the-secret-of-{name}" for name in ("greedy", "modest")}
API_KEYS = tuple(f"{name}:{key}" for name, key in KEYS.items())
MANY = "127.0.0.2"
OTHERS = [f"127.0.0.{number}" for number in range(3, 9)]
ONE = "127.0.0.9"


async def opened(server: LocalServer, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await server.connect(local_addr=(address, 0))


def key_of(name: str) -> list[str]:
    return [f"Authorization: Bearer {KEYS[name]}"]


async def asked(server: LocalServer, address: str, headers: Sequence[str] = (), **fields: Any) -> tuple[int, bytes]:
    reader, writer = await opened(server, address)
    writer.write(post(server.body(**fields), headers=headers))
    return await answer(reader, writer)


async def status_of(reader: asyncio.StreamReader) -> int:
    return int((await asyncio.wait_for(reader.readline(), PATIENCE_S)).split()[1])


@async_test
async def test_bodies_without_their_last_byte_keep_no_other_client_out() -> None:
    """An address sends 32 of them, and later six more addresses do. Each has its share, and so has a newcomer."""
    async with local_server(max_bodies_bytes=64_000) as server:
        whole = post(server.body(max_tokens=2, user="x" * 4000))

        async def hold(address: str, number: int) -> list[asyncio.Task[int]]:
            asking = []
            for _ in range(number):
                reader, writer = await opened(server, address)
                writer.write(whole[:-1])
                held.append(writer)
                asking.append(asyncio.ensure_future(status_of(reader)))
            return asking

        held: list[asyncio.StreamWriter] = []
        many = await hold(MANY, 32)
        await until(lambda: sum(each.done() for each in many) == 21)  # 11 have room in three quarters of the pool
        assert {each.result() for each in many if each.done()} == {503}
        assert (await asked(server, ONE, max_tokens=2, user="x" * 4000))[0] == 200
        others = [await hold(address, 4) for address in OTHERS]
        assert (await asked(server, ONE, max_tokens=2, user="x" * 4000))[0] == 200
        assert all(not all(each.done() for each in asking) for asking in others), "each of them keeps its share"
        for writer in held:
            writer.close()
        await asyncio.gather(*many, *itertools.chain(*others), return_exceptions=True)


@async_test
async def test_a_key_that_sends_half_bodies_keeps_no_other_key_out() -> None:
    async with local_server(max_bodies_bytes=64_000, api_keys=API_KEYS) as server:
        whole = post(server.body(max_tokens=2, user="x" * 4000), headers=key_of("greedy"))
        held = [await opened(server, ONE) for _ in range(32)]
        for _, writer in held:
            writer.write(whole[:-1])
        asking = [asyncio.ensure_future(status_of(reader)) for reader, _ in held]
        await until(lambda: sum(each.done() for each in asking) == 21)
        assert (await asked(server, ONE, key_of("greedy"), max_tokens=2, user="x" * 4000))[0] == 503
        assert (await asked(server, ONE, key_of("modest"), max_tokens=2, user="x" * 4000))[0] == 200
        for _, writer in held:
            writer.close()
        await asyncio.gather(*asking, return_exceptions=True)


@async_test
async def test_slow_uploads_keep_no_other_client_out(tmp_path: pathlib.Path) -> None:
    """Each upload holds a piece of 1 MiB, and an address has room for three of the four."""
    async with local_server(max_bodies_bytes=4 << 20, batch_storage=str(tmp_path / "storage")) as server:
        part = 'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
        file = 'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\n\r\n--b--\r\n'
        form = f"--b\r\n{part}{file}"
        lines = ["POST /v1/files HTTP/1.1", "Host: localhost", "Content-Type: multipart/form-data; boundary=b"]
        whole = "\r\n".join([*lines, f"Content-Length: {len(form)}", "Connection: close", "", form]).encode()
        held = [await opened(server, MANY) for _ in range(8)]
        for _, writer in held:
            writer.write(whole[:-1])
        asking = [asyncio.ensure_future(status_of(reader)) for reader, _ in held]
        await until(lambda: sum(each.done() for each in asking) == 5)
        assert {each.result() for each in asking if each.done()} == {503}
        reader, writer = await opened(server, ONE)
        writer.write(whole)
        assert (await answer(reader, writer))[0] == 200
        for _, writer in held:
            writer.close()
        await asyncio.gather(*asking, return_exceptions=True)


@async_test
async def test_requests_that_wait_keep_no_other_client_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine says what its model is. Of five places the many have four, and the others the rest by turns."""
    async with local_server(max_num_sequences=2, engine_options={"max_num_waiting": 3}) as server:
        knows = asyncio.Event()
        model = server.replica.model

        async def later() -> Any:
            await knows.wait()
            return await model()

        monkeypatch.setattr(server.replica, "model", later)
        many = [asyncio.ensure_future(asked(server, MANY, max_tokens=1)) for _ in range(20)]
        await until(lambda: sum(each.done() for each in many) == 16)
        others = []
        for number, address in enumerate((ONE, OTHERS[0], OTHERS[1])):
            others.append(asyncio.ensure_future(asked(server, address, max_tokens=1)))
            await until(lambda number=number: sum(each.done() for each in many) == 16 + number)  # type: ignore[misc]
        knows.set()
        assert [status for status, _ in await asyncio.gather(*others)] == [200] * 3
        assert sorted(status for status, _ in await asyncio.gather(*many)) == [200] * 2 + [429] * 18


# ---- WebSockets --------------------------------------------------------------------------------------------------


def connecting(server: LocalServer, name: str) -> connect:
    headers = {"Authorization": f"Bearer {KEYS[name]}"}
    return connect(f"ws://127.0.0.1:{server.port}/v1/responses", additional_headers=headers, close_timeout=0.1)


async def responded(client: ClientConnection, **fields: Any) -> dict[str, Any]:
    """Sends a message and returns its last event."""
    await client.send(json.dumps({"type": "response.create", "max_output_tokens": 2, **fields}))
    while True:
        event: dict[str, Any] = json.loads(await asyncio.wait_for(client.recv(), PATIENCE_S))
        if event["type"] in ("response.completed", "response.incomplete", "error"):
            return event


@async_test
async def test_remembered_responses_of_one_key_make_no_other_lose_its_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "manta.cluster.http.websockets.RememberedResponses", functools.partial(RememberedResponses, max_bytes=3000)
    )
    async with local_server(api_keys=API_KEYS) as server, contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(connecting(server, "modest"))
        first = (await responded(client, model=server.model, input="Count."))["response"]
        many = []
        for _ in range(12):
            greedy = await stack.enter_async_context(connecting(server, "greedy"))
            many.append((greedy, await responded(greedy, model=server.model, input="Count. " * 30)))
        previous = {"model": server.model, "input": "On."}
        event = await responded(client, previous_response_id=first["id"], **previous)
        assert event["type"] in ("response.completed", "response.incomplete"), event
        greedy, oldest = many[0]
        event = await responded(greedy, previous_response_id=oldest["response"]["id"], **previous)
        assert event["error"]["code"] == "previous_response_not_found", "it lost its own oldest one"


@async_test
async def test_half_sent_messages_of_one_key_close_no_other_connection() -> None:
    async with (
        local_server(api_keys=API_KEYS, max_body_bytes=8000, max_bodies_bytes=16_000) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        many = [await stack.enter_async_context(connecting(server, "greedy")) for _ in range(6)]
        client = await stack.enter_async_context(connecting(server, "modest"))
        await responded(client, model=server.model, input="Count.")
        for greedy in many:
            await responded(greedy, model=server.model, input="Count.")
        for greedy in many:
            greedy.transport.write(b"\x01\xfe\x0f\xa0\x00\x00\x00\x00" + b"a" * 3500)
        for greedy in many[3:]:
            with pytest.raises(ConnectionClosed):
                await asyncio.wait_for(greedy.recv(), PATIENCE_S)
            assert greedy.close_code == 1013
        event = await responded(client, model=server.model, input="Count.", user="a" * 2000)
        assert event["type"] in ("response.completed", "response.incomplete"), event

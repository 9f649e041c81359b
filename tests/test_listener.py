"""The ingress's own HTTP connections: a port is taken again at once, and an end is noticed."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import httpx
import pytest

from cluster.serve.listener import Listener


def port_with_a_connection_that_its_server_closed() -> int:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            listener.accept()[0].close()
            assert client.recv(1) == b""
    return port


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


async def listening(port: int) -> Listener:
    """Tried for seconds: what another thread forks in this moment may hold the first listener until it execs."""
    deadline = time.monotonic() + 5
    while True:
        listener = Listener(app, "127.0.0.1", port, client_timeout_s=60)
        try:
            await listener.ensure_listening()
            return listener
        except OSError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)


async def answer(port: int) -> str:
    async with httpx.AsyncClient(trust_env=False) as client:
        return (await client.get(f"http://127.0.0.1:{port}/here")).text


def test_a_port_is_taken_again_while_old_connections_linger() -> None:
    port = port_with_a_connection_that_its_server_closed()
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(("127.0.0.1", port))

    async def run() -> str:
        await (await listening(port)).ensure_listening()
        return await answer(port)

    assert asyncio.run(run()) == "/here"


def test_a_port_of_another_is_refused_and_an_end_is_noticed() -> None:
    async def run() -> None:
        port = port_with_a_connection_that_its_server_closed()
        listener = await listening(port)
        with pytest.raises(OSError, match="in use"):
            await Listener(app, "127.0.0.1", port, client_timeout_s=60).ensure_listening()
        listener.should_exit = True
        assert listener._serving is not None
        await listener._serving
        with pytest.raises(RuntimeError, match=f"nothing listens on 127.0.0.1 port {port}"):
            await listener.ensure_listening()

    asyncio.run(run())

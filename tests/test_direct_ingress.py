"""A server that was stopped can be started again on its port at once."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest


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


async def listens(replica: Any, port: int) -> bool:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise NotImplementedError

    from ray.serve.config import HTTPOptions

    options = HTTPOptions(host="127.0.0.1", port=port)
    try:
        task, server = await replica.start_asgi_http_server(
            app, options, event_loop=asyncio.get_running_loop(), enable_so_reuseport=False
        )
    except RuntimeError:
        return False
    server.should_exit = True
    await task
    return True


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, when it is imported
def test_a_port_is_taken_again_while_old_connections_linger(monkeypatch) -> None:
    from ray.serve._private import replica

    from cluster.direct_ingress import reuse_address

    monkeypatch.setattr(replica, "start_asgi_http_server", replica.start_asgi_http_server)  # put back afterwards
    port = port_with_a_connection_that_its_server_closed()
    assert not asyncio.run(listens(replica, port)), "Ray reuses the address by itself now: reuse_address can go"
    reuse_address()
    assert asyncio.run(listens(replica, port))

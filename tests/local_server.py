"""The ingress, an engine and the channel between them in this process: real sockets, and no Ray in between.

Only Serve's handle is another one: what it calls runs here at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import pathlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, cast

import yaml

from benchmarks.processes import free_port
from manta.cluster.config import EngineConfig, ServeConfig, load_config
from manta.cluster.http.access.keys import with_api_keys
from manta.cluster.http.access.prefix_scope import new_secret
from manta.cluster.serve.engine.engine_replica import EngineReplica
from manta.cluster.serve.engine.model_replica import make_replica
from manta.cluster.serve.ingress import ListeningIngress
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S, until
from tests.server import SETTINGS, Client


class Handle:
    """Of replicas in this event loop. Requests go to the first one."""

    app_name = "local"

    def __init__(self, *replicas: Any) -> None:
        self._replicas = replicas

    def __getattr__(self, name: str) -> Any:
        return _Method(getattr(self._replicas[0], name))

    async def shutdown_async(self) -> None:
        pass

    def broadcast(self, name: str, *arguments: Any) -> Any:
        calls = [functools.partial(getattr(replica, name), *arguments) for replica in self._replicas]
        return _Broadcast(asyncio.get_running_loop(), calls)


class _Method:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def remote(self, *arguments: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self._function(*arguments))


class _Broadcast:
    def __init__(self, loop: asyncio.AbstractEventLoop, functions: list[Callable[..., Any]]) -> None:
        self._loop = loop
        self._functions = functions

    def results(self, timeout_s: float, return_exceptions: bool) -> list[Any]:
        async def answers() -> list[Any]:
            return await asyncio.gather(*(each() for each in self._functions), return_exceptions=return_exceptions)

        return asyncio.run_coroutine_threadsafe(answers(), self._loop).result(timeout_s)

    async def results_async(self, timeout_s: float) -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*(each() for each in self._functions)), timeout_s)


class LocalServer:
    """Runs until the context `local_server` ends."""

    def __init__(self, ingress: ListeningIngress, replica: EngineReplica, port: int) -> None:
        self.ingress = ingress
        self.replica = replica
        self.port = port
        self.model = checkpoint("llama").name

    def body(self, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": [5, 9, 17, 30], "temperature": 0, "ignore_eos": True, **fields}

    async def connect(self, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, **options)

    async def connect_without_reading(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Both systems' buffers are small too, so that the server soon notices. Reading starts with
        `resume_reading(writer)`.
        """
        for listening in self.ingress._listener.servers[0].sockets:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=client)
        cast(asyncio.ReadTransport, writer.transport).pause_reading()
        return reader, writer

    async def get(self, path: str) -> tuple[int, bytes]:
        reader, writer = await self.connect()
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        return await answer(reader, writer)

    async def post(self, headers: Sequence[str] = (), **fields: Any) -> tuple[int, bytes]:
        """(status, body) of a completion; `headers` are lines."""
        reader, writer = await self.connect()
        writer.write(post(self.body(**fields), headers=headers))
        return await answer(reader, writer)

    async def metric(self, series: str) -> float:
        """The value of one series, 0 if there is none; `series` is how its line begins, up to a label."""
        _, text = await self.get("/metrics")
        return sum(float(line.split()[-1]) for line in text.decode().splitlines() if line.startswith(series))

    async def num_aborted(self) -> float:
        """Choices."""
        return await self.metric(f'manta:sequences_total{{finished_reason="abort",model_name="{self.model}"')

    @property
    def num_connections(self) -> int:
        return len(self.ingress._listener.server_state.connections)

    @property
    def engine_is_idle(self) -> bool:
        """Nothing runs or waits, and every block is free again."""
        stats = self.replica.engine.stats()
        return stats.num_running == stats.num_waiting == 0 and stats.kv_usage == 0

    async def until_idle(self) -> None:
        """Neither here nor in the engine anything is left of a request."""
        await until(lambda: self.engine_is_idle and not self.ingress._client.runs)
        self.replica.engine.check_integrity()


def resume_reading(writer: asyncio.StreamWriter) -> None:
    """Of a connection from `connect_without_reading`."""
    cast(asyncio.ReadTransport, writer.transport).resume_reading()


def post(body: dict[str, Any], connection: str = "close", headers: Sequence[str] = ()) -> bytes:
    """A whole request for a completion; `headers` are lines."""
    data = json.dumps(body).encode()
    lines = [
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {len(data)}",
        f"Connection: {connection}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + data


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, bytes]:
    """(status, body as it came) once the server has closed the connection."""
    try:
        head, _, body = (await asyncio.wait_for(reader.read(-1), PATIENCE_S)).partition(b"\r\n\r\n")
    finally:
        writer.close()
    return int(head.split()[1]), body


@contextlib.asynccontextmanager
async def local_server(
    max_num_sequences: int = 256, engine_options: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[LocalServer]:
    """`options` are `ServeConfig`'s, `engine_options` those of its `EngineConfig`."""
    defaults: dict[str, Any] = {
        "model": str(checkpoint("llama")),
        "dtype": "float32",
        "kv_cache_bytes": 8 << 20,
        "num_threads": 1,
        "max_num_sequences": max_num_sequences,
    }
    engine = EngineConfig(**{**defaults, **(engine_options or {})})
    async with _serving(ServeConfig(engine=engine, port=free_port(), **options)) as server:
        yield server


@contextlib.asynccontextmanager
async def _serving(config: ServeConfig) -> AsyncIterator[LocalServer]:
    replica = cast(EngineReplica, await asyncio.to_thread(make_replica, config.engine))
    ingress = ListeningIngress(config, Handle(replica), new_secret())
    await ingress.check_health()
    server = LocalServer(ingress, replica, config.port)
    try:
        yield server
    finally:
        ingress._listener.should_exit = True
        assert ingress._listener._serving is not None
        await asyncio.wait_for(ingress._listener._serving, PATIENCE_S)
        for opened in replica._sender.connections.values() if isinstance(replica, EngineReplica) else ():
            (await opened).close()
        await asyncio.to_thread(replica.close)


class ThreadedServer(Client):
    """The same for tests that block, configured as `tests.server.Server` is: what they ask of it needs no Ray."""

    def __init__(self, *settings: str, folder: pathlib.Path | None = None) -> None:
        super().__init__(folder or checkpoint("llama"), free_port())
        given = (f"engine.model={self.folder}", f"port={self.port}", *SETTINGS, *settings)
        overrides = {key: yaml.safe_load(value) for key, _, value in (setting.partition("=") for setting in given)}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = _serving(with_api_keys(load_config(None, overrides)))
        self._run(self._server.__aenter__())

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    def stop(self) -> None:
        self._run(self._server.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

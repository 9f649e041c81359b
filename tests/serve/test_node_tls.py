"""The channel between engine and ingress where Ray's nodes know each other by certificates."""

from __future__ import annotations

import asyncio
import pathlib
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import psutil
import pytest
import trustme
import uvloop

from manta.cluster.engine.request import SequenceOutput
from manta.cluster.serve.channel.token_channel import GO_AHEAD, Address, Connection, OutputReceiver, OutputSender
from tests.patience import PATIENCE_S, until
from tests.processes import running_below
from tests.server import Server

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine in each of the event loops that Serve may use."""
    return asyncio.run if request.param == "asyncio" else uvloop.run


class Node:
    """The files of a node with an authority, as Ray's variables name them."""

    def __init__(self, folder: pathlib.Path, authority: trustme.CA) -> None:
        folder.mkdir()
        names = {"CA_CERT": "authority.pem", "SERVER_CERT": "certificate.pem", "SERVER_KEY": "key.pem"}
        issued = authority.issue_cert("127.0.0.1")
        authority.cert_pem.write_to_path(str(folder / names["CA_CERT"]))
        issued.cert_chain_pems[0].write_to_path(str(folder / names["SERVER_CERT"]))
        issued.private_key_pem.write_to_path(str(folder / names["SERVER_KEY"]))
        self._variables = {"RAY_USE_TLS": "1", **{f"RAY_TLS_{key}": str(folder / each) for key, each in names.items()}}

    def take_effect(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in self._variables.items():
            monkeypatch.setenv(name, value)


class Wire:
    """Passes bytes on between an engine and an ingress, and keeps them."""

    def __init__(self) -> None:
        self.seen = bytearray()

    async def start(self, to: Address) -> Address:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection(to.host, to.port)
            await asyncio.gather(self._pass_on(reader, there[1]), self._pass_on(there[0], writer))

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        return Address("127.0.0.1", server.sockets[0].getsockname()[1], to.secret)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            self.seen += data
            writer.write(data)
        writer.close()


class Ingress:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.receiver = OutputReceiver("127.0.0.1", self._on_outputs, lambda _: None)

    def _on_outputs(self, outputs: list[SequenceOutput], _: Connection) -> None:
        for output in outputs:
            self.tokens += output.token_ids


def engine() -> OutputSender:
    return OutputSender("engine", "node", lambda _: None, lambda _: None)


@pytest.mark.parametrize("is_secured", [True, False])
def test_the_wire_shows_neither_tokens_nor_secret(
    is_secured: bool, run: Run, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_secured:
        Node(tmp_path / "node", trustme.CA()).take_effect(monkeypatch)

    async def main() -> None:
        ingress, wire, sender = Ingress(), Wire(), engine()
        address = await wire.start(await ingress.receiver.start())
        await sender.connect(address)
        for number in range(300):
            sender.send(address, [SequenceOutput("the-request", 0, [number])])
        await until(lambda: ingress.tokens == list(range(300)))
        found = [text in wire.seen for text in (b"the-request", address.secret.encode())]
        assert found == [not is_secured] * 2
        sender.connections[address].result().close()
        await ingress.receiver.close()

    run(main())


def test_engines_without_the_nodes_certificate_are_rejected(
    run: Run, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a node of another authority, nor one without TLS, even if it knows the secret."""
    own, other = Node(tmp_path / "own", trustme.CA()), Node(tmp_path / "other", trustme.CA())

    async def main() -> None:
        own.take_effect(monkeypatch)
        ingress = Ingress()
        address = await ingress.receiver.start()
        other.take_effect(monkeypatch)
        stranger = engine()
        with pytest.raises(OSError, match="certificate verify failed"):
            await stranger.connect(address)
        monkeypatch.setenv("RAY_USE_TLS", "0")
        silent = engine()
        await silent.connect(address)
        silent.send(address, [SequenceOutput("a", 0, [1])])
        await until(lambda: not silent.connections)
        own.take_effect(monkeypatch)
        sender = engine()
        await sender.connect(address)
        sender.send(address, [SequenceOutput("a", 0, [2])])
        await until(lambda: ingress.tokens == [2])
        sender.connections[address].result().close()
        await ingress.receiver.close()

    run(main())


def test_a_tls_engine_refuses_a_plain_ingress(
    run: Run, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path / "node", trustme.CA())

    async def main() -> None:
        ingress = Ingress()
        address = await ingress.receiver.start()
        node.take_effect(monkeypatch)
        monkeypatch.setattr("manta.cluster.serve.channel.token_channel.CONNECT_TIMEOUT_S", 0.5)
        with pytest.raises(OSError):  # noqa: PT011 - a timeout has no words
            await asyncio.wait_for(engine().connect(address), PATIENCE_S)
        await ingress.receiver.close()

    run(main())


@pytest.mark.prove
def test_a_server_whose_ray_uses_tls_answers(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that its processes tell each other is encrypted: the ingress, too, invites engines to a handshake."""
    Node(tmp_path / "node", trustme.CA()).take_effect(monkeypatch)
    server = Server()
    try:
        status, _, body = server.post("/v1/completions", {"model": server.model, "prompt": [5, 6], "max_tokens": 9})
        assert status == 200
        assert body["usage"]["completion_tokens"] == 9
        ingress = running_below(server.process.pid, ":ingress")[0]
        ports = [each.laddr.port for each in ingress.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        assert GO_AHEAD in [first_byte(port) for port in ports]
    finally:
        server.stop()


def first_byte(port: int) -> bytes:
    """Returns the first byte that a port sends to a stranger who says nothing; none if it waits."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(2.0)
        try:
            return connection.recv(1)
        except TimeoutError:
            return b""

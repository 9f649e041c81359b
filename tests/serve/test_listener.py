"""The ingress's own HTTP connections: a port is taken again at once, an end is noticed, and there are bounds for what a
client may send before its request is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from benchmarks.processes import free_port
from manta.cluster.config import ServeConfig
from manta.cluster.serve.listening import listener as listener_module
from manta.cluster.serve.listening import port as port_module
from manta.cluster.serve.listening.connections import Connections
from manta.cluster.serve.listening.listener import Listener
from manta.cluster.serve.listening.port import Port, bound
from manta.cluster.serve_limits import ListenerLimits
from tests.async_tests import async_test
from tests.patience import PATIENCE_S


def port_with_a_connection_that_its_server_closed() -> int:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = free_port()
        listener.bind(("127.0.0.1", port))
        listener.listen()
        with socket.create_connection(("127.0.0.1", port)) as client:
            listener.accept()[0].close()
            assert client.recv(1) == b""
    return port


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


async def listening(port: int) -> Listener:
    """Tries again: what another thread forks in this moment may hold the first listener until it execs."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        listener = Listener(app, ServeConfig(port=port))
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


def test_a_port_with_lingering_connections_is_taken_again() -> None:
    port = port_with_a_connection_that_its_server_closed()
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(("127.0.0.1", port))

    async def run() -> str:
        await (await listening(port)).ensure_listening()
        return await answer(port)

    assert asyncio.run(run()) == "/here"


@async_test
async def test_a_taken_port_is_refused_and_closing_noticed() -> None:
    port = port_with_a_connection_that_its_server_closed()
    listener = await listening(port)
    with pytest.raises(OSError, match="in use"):
        await Listener(app, ServeConfig(port=port)).ensure_listening()
    listener.should_exit = True
    assert listener._serving is not None
    await listener._serving
    with pytest.raises(RuntimeError, match=f"nothing listens on 127.0.0.1 port {port}"):
        await listener.ensure_listening()


def test_a_listener_stopped_before_serving_ends() -> None:
    asyncio.run(Listener(app, ServeConfig(port=free_port())).close())


@pytest.mark.parametrize("num_turns", [0, 2, 3])
@async_test
async def test_clients_connected_before_closing_are_answered(num_turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connected in that turn of the event loop, before or after a listener begins to close in the first."""
    monkeypatch.setattr(listener_module, "TICK_S", 0.05)

    loop, listener = asyncio.get_running_loop(), await listening(free_port())
    client = socket.socket()

    def connect(turns: int) -> None:
        if turns:
            loop.call_soon(connect, turns - 1)
        elif client.connect_ex(("127.0.0.1", listener.config.port)) == 0:
            client.setblocking(False)
            connected.set_result(True)
        else:
            connected.set_result(False)

    connected: asyncio.Future[bool] = loop.create_future()
    loop.call_soon(connect, num_turns)
    closing = asyncio.ensure_future(listener.close())
    if await connected:
        reader, writer = await asyncio.open_connection(sock=client)
        writer.write(b"GET /here HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"/here" in await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
    else:
        client.close()
        assert num_turns
    await asyncio.wait_for(closing, PATIENCE_S)


# ---- what a client may send ----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "LINGER_S", 0.5)
    monkeypatch.setattr(listener_module, "MAX_URL_BYTES", 100)
    monkeypatch.setattr(listener_module, "MAX_HEADERS", 10)


LIMITS = ListenerLimits(max_header_bytes=1000, header_timeout_s=PATIENCE_S)
HEAD = b"POST /here HTTP/1.1\r\nHost: localhost\r\n"


@contextlib.asynccontextmanager
async def limited(limits: ListenerLimits = LIMITS) -> AsyncIterator[int]:
    """The port of a listener."""
    listener = Listener(app, ServeConfig(port=free_port(), listener=limits))
    await listener.ensure_listening()
    yield listener.config.port
    listener.should_exit = True
    assert listener._serving is not None
    await asyncio.wait_for(listener._serving, PATIENCE_S)


async def sent(port: int, *pieces: bytes) -> bytes:
    """What comes back until the server closes the connection, while the pieces are sent one by one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = asyncio.ensure_future(reader.read(-1))
    for piece in pieces:
        if received.done():
            break
        writer.write(piece)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        await asyncio.sleep(0.005)
    try:
        return await asyncio.wait_for(received, PATIENCE_S)
    except ConnectionError:
        return b""
    finally:
        writer.close()


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"
TOO_MUCH = {
    "lines without end": (b"431", "the limits are 10 headers", [HEAD, *[b"a: b\r\n"] * 20]),
    "many bytes of headers": (b"431", "listener.max_header_bytes", [HEAD, *[b"a: " + b"b" * 200 + b"\r\n"] * 8]),
    "a line without end": (b"431", "listener.max_header_bytes", [HEAD, b"a: ", *[b"b" * 200] * 20]),
    "a name without end": (b"431", "listener.max_header_bytes", [HEAD, *[b"b" * 200] * 20]),
    "a URL without end": (b"414", "the limit is 100; shorten it", [b"GET /", *[b"x" * 50] * 10]),
    "a URL at once": (
        b"414",
        "the limit is 100; shorten it",
        [b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"],
    ),
    "half a head": (b"408", "listener.header_timeout_s", [HEAD]),
}


@pytest.mark.parametrize("case", TOO_MUCH)
@async_test
async def test_a_head_has_bounds(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "TICK_S", 0.05)
    status, bound, pieces = TOO_MUCH[case]
    limits = msgspec.structs.replace(LIMITS, header_timeout_s=0.3) if status == b"408" else LIMITS

    async with limited(limits) as port:
        received = await sent(port, *pieces)
        assert received.startswith(b"HTTP/1.1 " + status), received
        message = json.loads(received.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert bound in message
        assert await answer(port) == "/here"


TRAILERS = ([b"0\r\n", *[b"a: b\r\n"] * 100], [b"0\r\na: ", *[b"b" * 200] * 100], [b"0", *[b";x=" + b"y" * 100] * 100])


@pytest.mark.parametrize("trailers", TRAILERS, ids=["lines", "a line", "extensions of a chunk's size"])
@async_test
async def test_what_follows_a_body_has_bounds(trailers: list[bytes]) -> None:
    async with limited() as port:
        assert b"HTTP/1.1 431" in await sent(port, CHUNKED, *trailers)
        assert await answer(port) == "/here"


HEADS = {
    "no Host": (b"400", b"GET / HTTP/1.1\r\n\r\n"),
    "two Hosts": (b"400", b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n"),
    "two Hosts of HTTP/1.0": (b"400", b"GET / HTTP/1.0\r\nHost: a\r\nhost: b\r\n\r\n"),
    "a Host with a user": (b"400", b"GET / HTTP/1.1\r\nHost: a@localhost\r\n\r\n"),
    "a Host with a path": (b"400", b"GET / HTTP/1.1\r\nHost: localhost/a\r\n\r\n"),
    "an address without brackets": (b"400", b"GET / HTTP/1.1\r\nHost: 1234:5678::1:8080\r\n\r\n"),
    "no Host of a handshake": (b"400", b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"),
    "chunks in HTTP/1.0": (b"400", b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"),
    "another coding too": (b"501", HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"),
    "two codings": (b"501", HEAD + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    "chunked last but one": (b"400", HEAD + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n"),
    "chunks and a length": (
        b"400",
        HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
    ),
    "another version": (b"505", b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n"),
}
"""Heads that RFC 9112 refuses, and that servers and proxies have read differently."""
GOOD_HEADS = (
    b"GET /here HTTP/1.0\r\n\r\n",
    b"GET /here HTTP/1.1\r\nHost:\r\nConnection: close\r\n\r\n",
    b"GET /here HTTP/1.1\r\nHost: [::1]:8000\r\nConnection: close\r\n\r\n",
    b"GET /here HTTP/1.1\r\nhOsT: my_host.example:1\r\nConnection: close\r\n\r\n",
    HEAD + b"Connection: close\r\nTransfer-Encoding: Chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
)


@pytest.mark.parametrize("case", HEADS)
@async_test
async def test_a_head_is_read_to_the_letter(case: str) -> None:
    status, head = HEADS[case]
    async with limited() as port:
        received = await sent(port, head + b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert received.startswith(b"HTTP/1.1 " + status), received
        assert b"/smuggled" not in received
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["message"]


@async_test
async def test_good_heads_are_answered() -> None:
    async with limited() as port:
        for head in GOOD_HEADS:
            assert b"/here" in await sent(port, head), head


@async_test
async def test_requests_sent_ahead_have_a_bound() -> None:
    asked = b"GET /here HTTP/1.1\r\nHost: localhost\r\n\r\n"

    async with limited() as port:
        received = await sent(port, asked * 5000)
        assert received.count(b"HTTP/1.1 200") < 100


# ---- how many connections there are --------------------------------------------------------------------------------


@async_test
async def test_half_sent_requests_make_room_for_others() -> None:
    async with limited(ListenerLimits(max_connections=20, max_connections_per_address=10)) as port:
        held = []
        for _ in range(60):
            held.append(await asyncio.open_connection("127.0.0.1", port))
            held[-1][1].write(HEAD)
            await held[-1][1].drain()
        assert await answer(port) == "/here"
        while sum(reader.at_eof() or reader.exception() is not None for reader, _ in held) < 50:
            await asyncio.sleep(0.01)
        for _, writer in held:
            writer.close()


class Guest:
    def __init__(self, address: str, has_all: bool = True) -> None:
        self.address = address
        self.has_all = has_all
        self.gone = False

    def give_way(self) -> bool:
        self.gone = self.has_all
        return self.has_all


def test_the_one_that_rested_longest_gives_way() -> None:
    connections = Connections(max_all=4, max_per_address=2)
    working, resting, reading = Guest("10.0.0.1"), Guest("10.0.0.1"), Guest("10.0.0.2", has_all=False)
    assert all(map(connections.enter, (working, resting, reading)))
    connections.work(working)
    later = Guest("10.0.0.1")
    assert connections.enter(later)
    assert (working.gone, resting.gone, reading.gone) == (False, True, False)
    connections.work(later)
    assert not connections.enter(Guest("10.0.0.1")), "both of this address are at work"
    assert connections.enter(Guest("10.0.0.3"))
    assert connections.enter(Guest("10.0.0.4")), "the one of the third address gives way, for the second still reads"
    assert not reading.gone
    assert len(connections) == 4
    for guest in (working, later, reading):
        connections.leave(guest)
    assert len(connections) == 1


def test_who_has_a_network_of_addresses_counts_once() -> None:
    connections = Connections(max_all=100, max_per_address=2)
    guests = [Guest(f"2001:db8::{index:x}") for index in range(3)]
    for guest in guests[:2]:
        assert connections.enter(guest)
        connections.work(guest)
    assert not connections.enter(guests[2])
    assert connections.enter(Guest("2001:db8:0:1::1"))


# ---- a port that several share -------------------------------------------------------------------------------------


@pytest.fixture
def locks(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(listener_module, "TICK_S", 0.05)


@async_test
async def test_peers_share_a_port_and_whoever_stays_answers(locks: None) -> None:
    number = free_port()

    async def served(name: str) -> Listener:
        async def own_name(scope: Any, receive: Any, send: Any) -> None:
            await app({"path": name}, receive, send)

        listener = Listener(own_name, ServeConfig(port=number), peers="cluster/manta")
        await listener.ensure_listening()
        return listener

    first, second = await served("first"), await served("second")
    answers = {await answer(number) for _ in range(40)}
    assert answers == {"first", "second"}
    await asyncio.wait_for(first.close(), PATIENCE_S)
    assert {await answer(number) for _ in range(10)} == {"second"}
    third = await served("third")
    await asyncio.wait_for(asyncio.gather(second.close(), third.close()), PATIENCE_S)


def test_a_port_is_not_shared_with_strangers(locks: None) -> None:
    """Serve's proxies listen with SO_REUSEPORT, and so do the ingresses of another cluster."""
    with bound("127.0.0.1", free_port(), shared=True) as proxy:
        proxy.listen()
        with pytest.raises(OSError, match="in use by another program"):
            Port("127.0.0.1", proxy.getsockname()[1], "cluster/manta").take()
    number = free_port()
    with Port("127.0.0.1", number, "cluster/manta").take():
        with pytest.raises(OSError, match="in use by another program"):
            Port("127.0.0.1", number, "other cluster/manta").take()
        with pytest.raises(OSError, match="in use by another program"):
            Port("127.0.0.1", number).take()


def test_another_users_lock_folder_is_not_used(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [tmp_path / "tmp", tmp_path / "runtime"]
    for place in places:
        place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(places[0]))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(places[1]))
    name = f"manta-ports-{os.getuid()}"
    (places[0] / name).mkdir()
    (places[0] / name).chmod(0o777)  # as far as a test can be another user
    number = free_port()
    with Port("127.0.0.1", number, "cluster/manta").take():
        assert [path.name.split("-")[0] for path in (places[1] / name).iterdir()] == [str(number)]
        with Port("127.0.0.1", number, "cluster/manta").take():
            pass
    assert not list((places[0] / name).iterdir())


def test_a_port_is_free_after_its_last_peer(locks: None) -> None:
    number = free_port()
    for peers in ("one", "other"):
        port = Port("127.0.0.1", number, peers)
        port.take().close()
        port.give_back()


def test_lock_folders_writable_by_others_are_refused(
    tmp_path: pathlib.Path, locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_module, "OTHER_PLACES", ())
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    (tmp_path / f"manta-ports-{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"manta-ports-{os.getuid()}").chmod(0o777)
    with pytest.raises(OSError, match="is this user's alone; remove one"):
        Port("127.0.0.1", free_port(), "cluster/manta").take()

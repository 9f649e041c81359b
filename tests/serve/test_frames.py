"""WebSocket frames cost the event loop a bounded time each turn and each second, whatever they hold."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from websockets.asyncio.client import connect
from websockets.frames import Frame, Opcode

from benchmarks.processes import free_port
from manta.cluster.config import ServeConfig
from manta.cluster.serve.listening.frame_budget import (
    BURST_S,
    FRAMES_AT_ONCE,
    FRAMES_PER_S,
    Allowance,
    FrameCutter,
)
from manta.cluster.serve.listening.listener import Listener
from tests.async_tests import async_test
from tests.http.test_routes import App
from tests.loop_turns import TurnClock, timed
from tests.patience import PATIENCE_S

TURN_S = 0.05
"""Most processor seconds of one turn of the event loop; a read of empty frames took ten times as long."""
HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
MASK = b"\x80aaaa"
"""End of the head of an empty frame of a client, behind its first byte."""


def test_pieces_have_so_many_frames_wherever_the_bytes_are_cut() -> None:
    generator = random.Random(1)
    lengths = [generator.choice((0, 0, 1, 125, 126, 300, 65_535, 65_536, 70_000)) for _ in range(200)]
    frames = [Frame(Opcode.BINARY, generator.randbytes(length)).serialize(mask=True) for length in lengths]
    begins = {sum(map(len, frames[:number])) for number in range(len(frames))}
    sent = b"".join(frames)
    cutter, unread, position, received = FrameCutter(), bytearray(), 0, 0
    while position < len(sent):
        size = generator.choice((1, 2, 5, 1000, 100_000))
        unread += sent[received : received + size]
        received += size
        most = generator.choice((0, 1, 2, 50))
        length, num_frames = cutter.cut(unread, most)
        assert num_frames == sum(begin in begins for begin in range(position, position + length)) <= most
        assert length == len(unread) or (num_frames == most and position + length in begins)
        position += length
        del unread[:length]


def test_an_allowance_grows_with_time_up_to_its_bound() -> None:
    now = 0.0
    allowance = Allowance(10.0, clock=lambda: now)
    assert allowance.left == 10 * BURST_S
    allowance.take(allowance.left)
    assert (allowance.left, allowance.wait_s(5)) == (0, 0.5)
    now += 0.55
    assert allowance.left == 5
    now += 1000.0
    assert (allowance.left, allowance.wait_s(5)) == (10 * BURST_S, 0.0)


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[int]:
    listener = Listener(App(log_requests=False).app, ServeConfig(port=free_port()))
    await listener.ensure_listening()
    yield listener.config.port
    listener.force_exit = True  # what was sent is not read to its end
    await listener.close()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[int, TurnClock]]:
    with timed(served) as found:
        yield found


FLOODS = {
    "fragments": (b"\x01" + MASK, b"\x00" + MASK),
    "pings": (b"", b"\x89" + MASK),
    "pongs": (b"", b"\x8a" + MASK),
    "messages": (b"", b"\x81" + MASK),
}
"""What comes first, and an empty frame that follows again and again."""


@pytest.mark.parametrize("name", FLOODS)
def test_empty_frames_leave_the_event_loop_free(server: tuple[int, TurnClock], name: str) -> None:
    port, clock = server
    first, frame = FLOODS[name]
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(HANDSHAKE)
        assert b"101" in client.recv(1000)
        clock.reset()
        client.settimeout(0.3)
        begun, num_sent = time.monotonic(), 0
        with contextlib.suppress(TimeoutError, ConnectionError):  # the server reads no more, or ends the connection
            client.sendall(first)
            while num_sent < 100_000_000:
                num_sent += client.send(frame * 10_000)
        seconds = time.monotonic() - begun
        # What systems keep of what was sent is some megabytes
        assert num_sent / len(frame) < 2_000_000 + FRAMES_PER_S * seconds
    assert clock.longest_s < TURN_S


@async_test
async def test_a_message_in_many_frames_is_read_whole() -> None:
    async with served() as port, connect(f"ws://127.0.0.1:{port}/v1/responses", max_size=None) as client:
        body = json.dumps({"type": "response.create", "model": "demo", "input": "a", "user": "a" * 50_000})
        pieces = [body[begin : begin + 25] for begin in range(0, len(body), 25)]
        assert len(pieces) > FRAMES_PER_S * BURST_S
        await client.send(pieces)
        async with asyncio.timeout(PATIENCE_S):
            created = json.loads(await client.recv())
            assert created["type"] == "response.created"
            await client.ping()
    assert FRAMES_AT_ONCE < FRAMES_PER_S

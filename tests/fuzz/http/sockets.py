"""WebSocket clients: messages of all shapes, and frames that RFC 6455 allows and forbids."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.fuzz.http.connection import ANSWER_S, Closed, Connection
from tests.fuzz.http.connection import connect as connect_plainly

PATH = "/v1/responses"
LAST_EVENTS = ("error", "response.completed", "response.incomplete", "response.failed")
HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
_NO_MESSAGE = '{"type": "x"}'
"""A message that is refused, after one that may have no answer of its own."""


async def last_event(port: int, message: bytes, transcript: list[str]) -> dict[str, Any]:
    """Returns the last event of a message on a connection of its own. Raises `Closed` if there is none."""
    transcript.append(f"> {message[:600]!r}")
    async with asyncio.timeout(ANSWER_S), connect(f"ws://127.0.0.1:{port}{PATH}", max_size=None) as client:
        try:
            await client.send(message.decode())
            await client.send(_NO_MESSAGE)
            while (event := json.loads(await client.recv()))["type"] not in LAST_EVENTS:
                pass
        except ConnectionClosed as error:
            raise Closed(repr(error)) from error
    transcript.append(f"< {event}"[:600])
    return event


def status_of(event: dict[str, Any]) -> int:
    """Returns the HTTP status that a last event stands for."""
    return {"error": event.get("status", 500), "response.failed": 500}.get(event["type"], 200)


async def send_frames(port: int, generator: random.Random, transcript: list[str]) -> None:
    """Sends frames of all kinds. The server may answer as it likes, and ends the connection when the client has."""
    connection: Connection = await connect_plainly(port, transcript)
    try:
        await connection.send(HANDSHAKE)
        assert (await connection.some(12)).startswith(b"HTTP/1.1 101")
        await connection.send(b"".join(_frame(generator) for _ in range(generator.choice((1, 3, 50, 3000)))))
        connection.half_close()
        await asyncio.sleep(generator.choice((0, 0.02)))
    except (Closed, OSError):  # the server has ended the connection
        pass
    finally:
        connection.leave()


def _frame(generator: random.Random) -> bytes:
    opcode = generator.choice((0, 0, 1, 1, 2, 9, 10, 10, *range(3, 16)))
    first = opcode | generator.choice((0x80, 0x80, 0)) | generator.choice((0, 0, 0, 0x40, 0x10))
    payload = generator.choice((b"", b"", b"{}", _NO_MESSAGE.encode(), b"\xff" * 125, b"a" * 126, b"b" * 70_000))
    length = len(payload) if generator.random() < 0.95 else 2**40
    masked = 0x80 if generator.random() < 0.95 else 0
    if length < 126:
        head = bytes((first, masked | length))
    elif length < 2**16:
        head = bytes((first, masked | 126)) + length.to_bytes(2)
    else:
        head = bytes((first, masked | 127)) + length.to_bytes(8)
    return head + (bytes(4) if masked else b"") + payload

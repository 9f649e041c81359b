"""One socket to a server, and a transcript of what went over it. General clients would not send what is wrong."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any, NamedTuple

ANSWER_S = 300.0
"""An answer that takes longer is missing: half the time that a request has by default (`request_timeout_s`)."""
SHOWN_BYTES = 600
"""Bytes that the transcript shows of each message."""
SLOW_BUFFER = 4096
"""Bytes that a slow reader's system keeps for it, about."""


class Closed(Exception):
    """The server closed the connection before an answer was whole."""


class Answer(NamedTuple):
    """A whole one; the body without its transfer encoding."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "")


class Connection:
    """Made by `connect`; what is done on it is written to the transcript."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, transcript: list[str]) -> None:
        self._reader = reader
        self._writer = writer
        self._transcript = transcript

    async def send(self, data: bytes) -> None:
        """Raises `Closed` if the server no longer reads."""
        self._note(">", data)
        try:
            self._writer.write(data)
            await self._writer.drain()
        except ConnectionError as error:
            raise Closed(repr(error)) from error

    async def send_slowly(self, data: bytes, piece: int) -> None:
        """A few bytes at a time, each a packet of its own."""
        self._note(f"> {piece} bytes at a time", data)
        for begin in range(0, len(data), piece):
            self._writer.write(data[begin : begin + piece])
            await asyncio.sleep(0)

    def half_close(self) -> None:
        """Nothing more will be sent."""
        self._note("> end", b"")
        self._writer.write_eof()

    async def answer(self, pause_s: float = 0.0) -> Answer:
        """The next one, with a pause before each piece of it. Raises `Closed`, and `TimeoutError` if none comes."""
        received = bytearray()
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._answer(received, pause_s)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            received += getattr(error, "partial", b"")
            raise Closed(f"after {len(received)} bytes of an answer: {error!r}") from error
        finally:
            self._note("<", bytes(received))

    async def _answer(self, received: bytearray, pause_s: float) -> Answer:
        head = await self._reader.readuntil(b"\r\n\r\n")
        received += head
        first, *lines = head.decode("latin-1").rstrip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        start = len(received)
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await self._reader.readline(), 16):
                await asyncio.sleep(pause_s)
                received += (await self._reader.readexactly(size + 2))[:-2]
            await self._reader.readexactly(2)
        else:
            await asyncio.sleep(pause_s)
            received += await self._reader.readexactly(int(headers.get("content-length", 0)))
        return Answer(int(first.split(" ", 2)[1]), headers, bytes(received[start:]))

    async def some(self, num_bytes: int) -> bytes:
        """Up to so many bytes of an answer, as many as came at once."""
        async with asyncio.timeout(ANSWER_S):
            data = await self._reader.read(num_bytes)
        self._note("<", data)
        return data

    async def rest(self) -> bytes:
        """Everything until the server closes the connection."""
        received = b""
        try:
            async with asyncio.timeout(ANSWER_S):
                while data := await self._reader.read(65536):
                    received += data
        except ConnectionError:
            pass
        self._note("<", received)
        return received

    def leave(self) -> None:
        """At once, whatever is under way."""
        self._note("left", b"")
        self._writer.transport.abort()

    def close(self) -> None:
        self._writer.close()

    def _note(self, what: str, data: bytes) -> None:
        more = f" ... {len(data)} bytes" if len(data) > SHOWN_BYTES else ""
        self._transcript.append(f"{what} {data[:SHOWN_BYTES]!r}{more}")


async def connect(port: int, transcript: list[str], slow: bool = False) -> Connection:
    """With `slow` neither system keeps much of what is not read."""
    if not slow:
        return Connection(*await asyncio.open_connection("127.0.0.1", port, limit=2**20), transcript)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    return Connection(*await asyncio.open_connection(sock=client, limit=SLOW_BUFFER), transcript)


def encoded(body: Any) -> bytes:
    """As JSON, with everything but ASCII escaped: lone surrogates too."""
    return json.dumps(body).encode()


def request(path: str, body: bytes, method: str = "POST", **headers: Any) -> bytes:
    """A whole one, with the body's length unless `headers` have another."""
    fields = {"host": "localhost", "content-type": "application/json", "content-length": len(body)}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}" for name, value in fields.items() if value is not None]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode() + body


def chunked(path: str, pieces: list[bytes]) -> bytes:
    """A whole request in the chunked encoding."""
    head = request(path, b"", content_length=None, transfer_encoding="chunked")
    return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece) + b"0\r\n\r\n"

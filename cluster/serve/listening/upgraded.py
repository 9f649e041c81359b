"""WebSocket connections of the listener: uvicorn's protocol with bounds on clients that send or take too slowly.

`cluster/serve/listening/listener.py` accepts a connection and reads its handshake; from then on it is one of these. It
counts as before in `Connections`, where it rests while the application answers no message on it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from manta.cluster.http.access.addresses import network_of
from manta.cluster.http.websockets import REST
from manta.cluster.serve.listening.connections import Connections
from manta.cluster.serve.listening.frame_budget import FRAMES_AT_ONCE, FRAMES_PER_S, Allowance, FrameCutter
from manta.structured.client_shares import ClientShares

POLICY, TOO_BIG, TRY_LATER = 1008, 1009, 1013
"""Codes with which connections are closed, from the registry of RFC 6455."""
MAX_WIRE_RATIO = 2
"""Most bytes of an unfinished message with the heads of its frames, as a multiple of `max_body_bytes`. uvicorn bounds
the text alone, and keeps an object for each frame.
"""
MAX_LINE_BYTES = 8000
"""Longest line of a handshake. The `websockets` library refuses longer ones without an answer that says why."""


def handshake_fault(
    method: bytes, http_version: str, url: bytes, headers: list[tuple[bytes, bytes]]
) -> tuple[int, str] | None:
    """Returns status and message of the refusal of a handshake that RFC 6455 does not allow; None if it may go on.

    The `websockets` library would refuse it too, but not in OpenAI's format.
    """
    given = dict(headers)
    if method != b"GET" or http_version != "1.1":
        return 400, f"a WebSocket connection begins with a GET over HTTP/1.1, not {method.decode()} over {http_version}"
    version = given.get(b"sec-websocket-version", b"")
    if version != b"13":
        return 400, f"Sec-WebSocket-Version is {version[:20].decode('latin-1')!r} and must be '13'"
    if len(given.get(b"sec-websocket-key", b"")) != 24:
        return 400, "Sec-WebSocket-Key must be 16 bytes in base64, which are 24 characters"
    longest = max(len(url), *(len(name) + len(value) for name, value in headers))
    if longest > MAX_LINE_BYTES:
        return 431, f"a line of the handshake has {longest} bytes and the limit is {MAX_LINE_BYTES}"
    return None


class WebSocketConnection(WebSocketsSansIOProtocol):
    """An open WebSocket connection. Clients share `unfinished`, the bytes of messages that have not come whole."""

    _rests = True
    """Whether no message is being answered."""
    _ends = False
    """Whether the server stops when the connection rests."""
    _sharer = ""
    """Name of the client, as the application tells it; before that its address."""
    _begun = 0.0
    """Time at which the unfinished message began to arrive."""
    _num_unsent = 0
    """Bytes that the client had not taken at the last check."""

    def __init__(self, others: Connections, unfinished: ClientShares, **options: Any) -> None:
        super().__init__(**options)
        self._others = others
        self._unfinished = unfinished
        self._room = unfinished.hold("")
        """Room of the bytes that have come since the last whole message."""
        self._moved = time.monotonic()
        self._cutter = FrameCutter()
        self._unread = bytearray()
        """Bytes that wait until the client may send further frames."""
        self._reading_on: asyncio.TimerHandle | None = None
        """Timer that reads on in the bytes that wait."""

    # ---- coming and going ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._sharer = network_of(self.address)
        self._others.enter(self)
        self._others.work(self)  # until the application has accepted it
        self._allowances = (Allowance(FRAMES_PER_S), self._others.frames_of(self))

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.leave(self)
        self._unread.clear()
        self._room.give_back()
        super().connection_lost(exc)

    def give_way(self) -> bool:
        if self.transport.get_write_buffer_size():
            return False
        self._close(TRY_LATER, "other clients need the connection; open a new one")
        return True

    def shutdown(self) -> None:
        """Ends the connection, if a message is being answered as soon as that has ended."""
        if self._rests or not self.handshake_complete:
            super().shutdown()
        self._ends = True

    def _close(self, code: int, reason: str) -> None:
        """Ends the connection from this side, whatever the application does."""
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code})
        if self.handshake_complete and not self.close_sent:
            self.conn.send_close(code, reason)
            self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.transport.close()

    # ---- reading ---------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if not self.handshake_initiated:
            super().data_received(data)
            return
        if not self._room.amount:
            self._begin_message()
        has_room = self._room.take(len(data))
        self._unread += data
        if self._reading_on is None:
            self._read_on()
        self._pause_while_unread()
        if self.close_sent:
            return
        if not has_room and self._is_unfinished:
            self._close_unfinished()
        elif self._room.amount > MAX_WIRE_RATIO * self.config.ws_max_size:
            self._close(TOO_BIG, "a message came in too many pieces; send each message whole")

    def _begin_message(self) -> None:
        self._begun = time.monotonic()
        self._room = self._unfinished.hold(self._sharer, self._close_unfinished)

    def _read_on(self) -> None:
        """Has as many frames parsed as the client may send now, and comes back for the rest."""
        self._reading_on = None
        num_frames = min(FRAMES_AT_ONCE, *(allowance.left for allowance in self._allowances))
        length, num_frames = self._cutter.cut(self._unread, num_frames)
        for allowance in self._allowances:
            allowance.take(num_frames)
        piece = bytes(self._unread[:length])
        del self._unread[:length]
        if piece:
            super().data_received(piece)
        if self.transport.is_closing():
            self._unread.clear()
        elif self._unread:
            pause_s = max(allowance.wait_s(FRAMES_AT_ONCE) for allowance in self._allowances)
            self._reading_on = self.loop.call_later(pause_s, self._read_on)
        elif not self.read_paused:
            self.transport.resume_reading()

    def _pause_while_unread(self) -> None:
        if self._unread:
            self.transport.pause_reading()

    async def receive(self) -> Any:
        message = await super().receive()
        self._pause_while_unread()  # uvicorn reads on when the application has taken the last message
        return message

    def _close_unfinished(self) -> None:
        self._close(TRY_LATER, "too many bytes of your messages are being received (max_bodies_bytes)")

    def handle_events(self) -> None:
        super().handle_events()
        if not self._is_within_message:
            self._room.give_back()
            if self._unread:
                self._begin_message()
                self._room.add(len(self._unread))

    @property
    def _is_unfinished(self) -> bool:
        """Whether a part of a message has come, or waits."""
        return self._is_within_message or bool(self._unread)

    @property
    def _is_within_message(self) -> bool:
        return bool(self.frames or self.conn.reader.buffer)

    def send_receive_event_to_app(self) -> None:
        super().send_receive_event_to_app()
        self._rests = False
        self._others.work(self)

    # ---- writing ---------------------------------------------------------------------------------------------------

    async def send(self, message: Any) -> None:
        if message["type"] != REST:
            await super().send(message)
            return
        self._rests, self._sharer = True, message["client"]
        self._others.rest(self)
        if self._ends:
            super().shutdown()

    async def run_asgi(self) -> None:
        cast(dict[str, Any], self.scope["extensions"])[REST] = {}
        await super().run_asgi()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._moved = time.monotonic()

    def look(self, timeout_s: float) -> None:
        """Ends the connection if the client has taken nothing for `timeout_s`, or if its message has not come whole
        within that time. The listener calls it every second.
        """
        num_unsent = self.transport.get_write_buffer_size()
        if not num_unsent >= self._num_unsent > 0:
            self._moved = time.monotonic()
        self._num_unsent = num_unsent
        if time.monotonic() - self._moved > timeout_s:
            self.transport.abort()
        elif self._room.amount and time.monotonic() - self._begun > timeout_s and not self.close_sent:
            self._close(POLICY, f"a message did not come whole within {timeout_s:g} s (client_timeout_s)")

"""Takes HTTP connections in the ingress replica itself, without Serve's proxy in between; used on one machine.

The proxy pulls every streamed event over as a Ray object of its own: at 20 steps a second that costs 0.8 ms of CPU an
event in the two processes, half a core at 32 streams, against 0.1 ms without it; and it is a process that wakes 160
times a second when there is nothing to do. `cluster/serve/app.py` decides when.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

KEEP_ALIVE_S = 90
"""An idle connection is kept for so long; what Serve's proxy does."""
PATIENCE_S = 2.0
"""How long a port that is taken is tried again."""
TICK_S = 1.0
"""How often the date of the answers is set, and slow clients and the end are looked for."""


class Connection(HttpToolsProtocol):
    """uvicorn's, which also ends if its client holds it up."""

    _num_unsent = 0
    """Bytes that the client had not taken when it was looked at last."""
    _answered: RequestResponseCycle | None = None
    """The request whose turn it is."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._moved = time.monotonic()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        """uvicorn tells the request that was read last, and others may have been sent before the first was answered."""
        if self._answered is not None:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        """What was written has been taken, however much was written since."""
        super().resume_writing()
        self._moved = time.monotonic()

    def look(self, timeout_s: float) -> None:
        """Called now and then. Aborts if for `timeout_s` the client has taken nothing of what was written, or has
        not sent the head of a request whole; how long a connection rests between two requests is uvicorn's to bound.
        """
        num_unsent = self.transport.get_write_buffer_size()
        answers = self.cycle is not None and not self.cycle.response_complete
        held_up = num_unsent >= self._num_unsent > 0 or not (answers or self.timeout_keep_alive_task)
        self._num_unsent = num_unsent
        if not held_up:
            self._moved = time.monotonic()
        elif time.monotonic() - self._moved > timeout_s:
            self.transport.abort()


class Listener(uvicorn.Server):
    """Serves an ASGI application in the running event loop. `client_timeout_s` is the configuration's."""

    def __init__(self, app: Any, host: str, port: int, client_timeout_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                interface="asgi3",
                http=Connection,
                lifespan="off",
                access_log=False,
                log_config=None,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self._client_timeout_s = client_timeout_s
        self._serving: asyncio.Task[None] | None = None

    async def ensure_listening(self) -> None:
        """Begins at the first call; raises `OSError` if the port is taken, `RuntimeError` if it has ended."""
        if self._serving is None:
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what clients send wrongly is no news here
            self._serving = asyncio.ensure_future(self.serve([await self._bound()]))
        while not self.started and not self._serving.done():
            await asyncio.sleep(0.01)
        if self._serving.done():
            raise RuntimeError(f"nothing listens on {self.config.host} port {self.config.port} any more")

    async def _bound(self) -> socket.socket:
        """Somebody's outgoing connection may have the port by chance for a moment, or a fork until its exec."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return bound(self.config.host, self.config.port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)

    async def main_loop(self) -> None:
        """uvicorn's own wakes ten times a second."""
        while not await self.on_tick(0):
            for connection in cast(list[Connection], list(self.server_state.connections)):
                connection.look(self._client_timeout_s)
            await asyncio.sleep(TICK_S)


def bound(host: str, port: int) -> socket.socket:
    """The address is reused, so that a server can start again at once while connections to the last one linger.

    Raises `OSError` with a message for the person who chose the port.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use by another program; stop it, or choose another port with --port"
        else:
            message = f"cannot listen on {host} port {port}: {error.strerror or error} (--host, --port)"
        raise OSError(error.errno, message) from error
    return listening

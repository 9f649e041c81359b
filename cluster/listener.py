"""Takes HTTP connections in the ingress replica itself, without Serve's proxy in between; used on one machine.

The proxy pulls every streamed event over as a Ray object of its own: at 20 steps a second that costs 0.8 ms of CPU an
event in the two processes, half a core at 32 streams, against 0.1 ms without it; and it is a process that wakes 160
times a second when there is nothing to do. `cluster/serve_app.py` decides when.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from typing import Any

import uvicorn

KEEP_ALIVE_S = 90
"""An idle connection is kept for so long; what Serve's proxy does."""
PATIENCE_S = 2.0
"""How long a port that is taken is tried again."""
TICK_S = 1.0
"""How often the date of the answers is set and the end is looked for."""


class Listener(uvicorn.Server):
    """Serves an ASGI application in the running event loop."""

    def __init__(self, app: Any, host: str, port: int) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                interface="asgi3",
                lifespan="off",
                access_log=False,
                log_config=None,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def ensure_listening(self) -> None:
        """Begins at the first call; raises `OSError` where the port is taken, `RuntimeError` where it has ended."""
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
            await asyncio.sleep(TICK_S)


def bound(host: str, port: int) -> socket.socket:
    """The address is reused, so that a server can start again at once while connections to the last one linger.

    Raises `OSError` with a sentence for whoever chose the port.
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

"""Accepts HTTP connections in the ingress replica itself, without Serve's proxy in between.

The proxy fetches every streamed event as a Ray object of its own. At 20 steps a second that costs 0.8 ms of CPU per
event in the two processes, half a core at 32 streams, against 0.1 ms without the proxy. The proxy also wakes 160 times
a second when idle. `cluster/serve/app.py` decides which of the two accepts connections.

This module bounds what a client may send before its request is known (`ListenerLimits`): connections, the bytes of a
head and the time for it. A refusal is an answer in OpenAI's format.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import socket
import time
from typing import Any, NoReturn, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from manta.cluster.config import ServeConfig
from manta.cluster.protocol.error_bodies import connection_error_body
from manta.cluster.serve.listening.connections import Connections, within_file_limit
from manta.cluster.serve.listening.heads import head_fault
from manta.cluster.serve.listening.port import Port
from manta.cluster.serve.listening.tls import Certificate, Handshake, TlsServer
from manta.cluster.serve.listening.upgraded import WebSocketConnection, handshake_fault
from manta.cluster.serve_limits import ListenerLimits
from manta.structured.client_shares import ClientShares

KEEP_ALIVE_S = 90
"""Seconds for which an idle connection is kept, as Serve's proxy does."""
PATIENCE_S = 2.0
"""Seconds for which binding a taken port is retried."""
TICK_S = 1.0
"""Seconds between two checks for slow clients and for the shutdown; the date header is updated as often."""
MAX_URL_BYTES = 8192
"""Longest URL, in bytes; nginx has the same default."""
MAX_HEADERS = 100
"""Most headers and trailers of a request; Apache has the same default."""
MAX_SENT_AHEAD = 32
"""Requests that a client may pipeline before the first is answered; each costs some kilobytes."""
BACKLOG = 256
"""Connections that may wait to be accepted. Up to as many are accepted in one turn of the event loop, at 0.1 ms each,
during which no stream advances.
"""
ARRIVAL_S = 0.5
"""Seconds that the request of a client may take to arrive when the client was accepted just before the port closed."""
LINGER_S = 1.0
"""Seconds for which a refused client's further bytes are read and dropped, because a reset would destroy the answer."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection with `limits`. It also ends if its client stalls it."""

    _num_unsent = 0
    """Bytes that the client had not taken at the last check."""
    _answered: RequestResponseCycle | None = None
    """Request that is being answered."""
    _num_headers = 0
    """Headers of the request that is being read, including trailers."""
    _num_header_bytes = 0
    _num_unread = 0
    """Bytes since the parser last completed a head or a message or found a piece of a body. The parser itself keeps an
    unfinished line without a bound.
    """
    _found = False
    """Whether the latest bytes completed such a part."""
    _in_head = True
    """Whether headers are being read, as opposed to the trailers after a body."""
    _refused = False

    def __init__(
        self, limits: ListenerLimits, others: Connections, handshake: Handshake | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._limits = limits
        self._others = others
        self._handshake = handshake

    # ---- coming and going --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._moved = time.monotonic()
        self.address = self.client[0] if self.client else ""
        if not self._others.enter(self, self._handshake):
            self._refuse(503, f"{len(self._others)} connections are open and all are at work; retry later")

    def connection_lost(self, exc: Exception | None) -> None:
        """Notifies the request that is being answered as well. uvicorn notifies only the request that was read last,
        which differs if the client pipelines.
        """
        self._others.leave(self)
        if self._answered is not None:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        """Replaces this connection by a WebSocket connection, in the same place."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._refuse(400, "a handshake for a WebSocket connection was sent ahead")
            return
        fault = handshake_fault(self.scope["method"].encode(), self.scope["http_version"], self.url, self.headers)
        if fault is not None:
            self._refuse(*fault)
            return
        self._others.leave(self)
        super().handle_websocket_upgrade()

    def give_way(self) -> bool:
        if self.transport.get_write_buffer_size():
            return False
        self.transport.abort()
        return True

    def _refuse(self, status: int, message: str) -> None:
        """Ends the connection with an error answer. If another answer is under way, it aborts instead, because the
        client would read the error as part of that answer.
        """
        self._refused = True
        self._others.work(self)
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = connection_error_body(status, message)
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        if status == 503:  # there are too many connections already
            self.transport.close()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.abort)

    # ---- reading ---------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._found = False
        super().data_received(data)
        self._num_unread = 0 if self._found else self._num_unread + len(data)
        if self._num_unread > MAX_URL_BYTES + self._limits.max_header_bytes and not self._refused:
            self._refuse(431, self._too_much(f"an unfinished head of {self._num_unread} bytes"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_headers = self._num_header_bytes = 0
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        num_bytes = len(self.url) + len(url)
        if num_bytes > MAX_URL_BYTES:
            self._stop(414, f"the URL has {num_bytes} bytes or more and the limit is {MAX_URL_BYTES}; shorten it")
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._num_header_bytes += len(name) + len(value)
        if self._num_headers > MAX_HEADERS:
            self._stop(431, self._too_much(f"{self._num_headers} headers"))
        if self._num_header_bytes > self._limits.max_header_bytes:
            self._stop(431, self._too_much(f"{self._num_header_bytes} bytes of headers"))
        if self._in_head:  # trailers are not used
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._found, self._in_head = True, False
        self._others.work(self)
        fault = head_fault(self.parser.get_http_version(), self.headers)
        if fault is not None:
            self._stop(*fault)
        if len(self.pipeline) >= MAX_SENT_AHEAD:
            self._stop(429, f"more than {MAX_SENT_AHEAD} requests were sent ahead")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._found = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._found = True
        super().on_message_complete()

    def _too_much(self, what: str) -> str:
        bounds = f"{MAX_HEADERS} headers and {self._limits.max_header_bytes} bytes (listener.max_header_bytes)"
        return f"{what}: the limits are {bounds}"

    def _stop(self, status: int, message: str) -> NoReturn:
        """Refuses the request from a parser callback, and raises to end the parsing."""
        self._refuse(status, message)
        raise _Stopped

    def send_400_response(self, msg: str) -> None:
        """Refuses the request with 400. uvicorn calls it whenever parsing ends with an error."""
        if not self._refused:
            self._refuse(400, msg)

    # ---- answering -------------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:
            self._others.rest(self)

    def resume_writing(self) -> None:
        """Records that the client has taken bytes, however many were written since."""
        super().resume_writing()
        self._moved = time.monotonic()

    def look(self, timeout_s: float) -> None:
        """Aborts if the client has taken nothing for `timeout_s`, and refuses a head that is incomplete after
        `header_timeout_s`.

        It is called every `TICK_S`. uvicorn itself bounds how long a connection rests between two requests.
        """
        num_unsent = self.transport.get_write_buffer_size()
        answers = self.cycle is not None and not self.cycle.response_complete
        takes_nothing = num_unsent >= self._num_unsent > 0
        in_head = not (answers or self.timeout_keep_alive_task)
        self._num_unsent = num_unsent
        seconds = time.monotonic() - self._moved
        if self._refused:
            return
        if not (takes_nothing or in_head):
            self._moved = time.monotonic()
        elif takes_nothing and seconds > timeout_s:
            self.transport.abort()
        elif in_head and seconds > self._limits.header_timeout_s:
            self._end_head()

    def _end_head(self) -> None:
        if not self._num_unread:  # a client that connected ahead of its request
            self.transport.close()
            return
        bound = f"{self._limits.header_timeout_s:g} s (listener.header_timeout_s)"
        self._refuse(408, f"the head of the request did not come whole within {bound}")


class _Stopped(Exception):
    """Ends the parsing of a refused request."""


class Listener(uvicorn.Server):
    """Serves an ASGI application in the running event loop. With `peers` it shares the port with the ingresses of that
    name.
    """

    def __init__(self, app: Any, config: ServeConfig, peers: str | None = None) -> None:
        limits = config.listener
        self._others = others = Connections(
            within_file_limit(limits.max_connections), limits.max_connections_per_address
        )
        unfinished = ClientShares(config.max_bodies_bytes)
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                interface="asgi3",
                http=functools.partial(Connection, limits, others),  # type: ignore[arg-type]
                ws=functools.partial(WebSocketConnection, others, unfinished),  # type: ignore[arg-type]
                ws_max_size=config.max_body_bytes,
                ws_per_message_deflate=False,  # events are short, and each compressor takes 100 kB
                backlog=BACKLOG,
                lifespan="off",
                access_log=False,
                log_config=None,
                proxy_headers=bool(config.trusted_proxies),
                forwarded_allow_ips=list(config.trusted_proxies),
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self._client_timeout_s = config.client_timeout_s
        self._limits = limits
        self._certificate = Certificate.of(config)
        self._tls: TlsServer | None = None
        self._port = Port(config.host, config.port, peers)
        self._listening: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None

    async def ensure_listening(self) -> None:
        """Starts listening at the first call. Raises `OSError` if the port is taken, and `RuntimeError` if the server
        has ended.
        """
        if self._serving is None:
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # clients' errors need no log line
            self._listening = await self._bound()
            self._serving = asyncio.ensure_future(self.serve([self._listening]))
        while not self.started and not self._serving.done():
            await asyncio.sleep(0.01)
        if self._serving.done():
            raise RuntimeError(f"nothing listens on {self.config.host} port {self.config.port} any more")

    async def close(self) -> None:
        """Stops accepting, closes resting connections, and returns when running requests have ended."""
        if self.started:
            await self._stop_accepting()
        self.should_exit = True
        if self._serving is not None:
            await self._serving

    async def _stop_accepting(self) -> None:
        waiting = self._accept_all()
        for server in self.servers:
            server.close()
        self._port.give_back()
        for connected in waiting:
            if self._tls is not None:
                self._tls.secure(connected)
            else:
                await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connected)
        await asyncio.sleep(ARRIVAL_S)

    def _protocol(self, handshake: Handshake | None = None) -> asyncio.Protocol:
        """Makes the protocol of a connection that asyncio's server did not accept, as uvicorn does for the others."""
        return self.config.http_protocol_class(
            config=self.config,  # type: ignore[call-arg]
            server_state=self.server_state,
            app_state=self.lifespan.state,
            handshake=handshake,
        )

    def _accept_all(self) -> list[socket.socket]:
        """Accepts the clients that wait in the backlog, because closing the port would reset their connections."""
        assert self._listening is not None
        found: list[socket.socket] = []
        with contextlib.suppress(OSError):  # the backlog is empty
            while True:
                found.append(self._listening.accept()[0])
                found[-1].setblocking(False)
        return found

    async def _bound(self) -> socket.socket:
        """Binds the port, with retries: for a moment an outgoing connection may hold it, or a forked process before its
        exec.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._port.take()
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Replaces uvicorn's server with a TLS server if there is a certificate."""
        if self._certificate is None:
            await super().startup(sockets)
            return
        assert self._listening is not None
        timeout_s = self._limits.header_timeout_s
        self._tls = TlsServer(self._listening, self._certificate, self._others, self._protocol, timeout_s, BACKLOG)
        self.servers = [cast(Any, self._tls)]
        self.started = True

    async def main_loop(self) -> None:
        """Replaces uvicorn's loop, which wakes ten times a second."""
        while not await self.on_tick(0):
            for connection in cast(list[Connection | WebSocketConnection], list(self.server_state.connections)):
                connection.look(self._client_timeout_s)
            if self._certificate is not None:
                self._certificate.refresh()
            await asyncio.sleep(TICK_S)

"""TLS in the listener: the certificate, which may be renewed under load, and a server that performs the handshakes.

A connection counts against the listener's bounds from the moment it is accepted. asyncio's own TLS servers report a
connection only after its handshake, so clients that open connections and stay silent would hold a file descriptor each.
"""

from __future__ import annotations

import asyncio
import errno
import pathlib
import socket
import ssl
from collections.abc import Callable

from manta.cluster.config import ServeConfig
from manta.cluster.serve.listening.connections import Connections
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

NO_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""Errors that accepting raises while the system has no room for another connection."""
NO_FILES_PAUSE_S = 1.0
"""Seconds until accepting is retried after such an error, as in asyncio."""


class Certificate:
    """A certificate chain and its key, both in PEM files. Raises `ValueError` if they cannot be used."""

    def __init__(self, certificate: str, key: str) -> None:
        self._paths = pathlib.Path(certificate).expanduser(), pathlib.Path(key).expanduser()
        self._seen = self._stamps()
        self.context = self._load()
        """TLS context for new connections; established ones keep theirs."""

    @classmethod
    def of(cls, config: ServeConfig) -> Certificate | None:
        """Returns the certificate of a configuration; None if it has none."""
        if config.tls_certificate is None or config.tls_key is None:
            return None
        return cls(config.tls_certificate, config.tls_key)

    def refresh(self) -> None:
        """Loads the files again if they have changed.

        The two files are renewed one after the other. Until both match, new connections get the earlier certificate.
        """
        stamps = self._stamps()
        if stamps == self._seen:
            return
        self._seen = stamps
        try:
            self.context = self._load()
        except ValueError as error:
            logger.warning("the certificate in use stays: %s", error)
        else:
            logger.warning("the certificate in %s was loaded again", self._paths[0])

    def _load(self) -> ssl.SSLContext:
        certificate, key = self._paths
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(certificate, key, password=_no_password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ValueError(f"tls_key {key} is not the key of tls_certificate {certificate}") from error
            raise ValueError(
                f"tls_certificate {certificate} and tls_key {key} are no PEM files of a certificate and its key "
                f"({error.reason or error})"
            ) from error
        except OSError as error:
            raise ValueError(f"cannot read tls_certificate {certificate} or tls_key {key}: {error.strerror}") from error
        return context

    def _stamps(self) -> tuple[object, ...]:
        """Returns values that change when a file is written or replaced."""
        found: list[object] = []
        for path in self._paths:
            try:
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, status.st_ino))
            except OSError:
                found.append(None)
        return tuple(found)


def _no_password() -> str:
    raise ValueError("tls_key is encrypted; give a key without a password, readable for the server's user only")


class Handshake:
    """A connection that was accepted and is not secured yet. In `Connections` it rests, and gives way at a bound."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.task: asyncio.Task[None] | None = None

    def give_way(self) -> bool:
        """Ends the connection silently, because before the handshake the client cannot be told why."""
        if self.task is not None:
            self.task.cancel()
        return True


class TlsServer:
    """Accepts connections, at most `backlog` per turn of the event loop, and performs their handshakes within
    `timeout_s`.

    `make` returns the protocol of a secured connection, which replaces its handshake in `others`. uvicorn uses this
    server in place of `asyncio.Server`.
    """

    def __init__(
        self,
        listening: socket.socket,
        certificate: Certificate,
        others: Connections,
        make: Callable[[Handshake], asyncio.Protocol],
        timeout_s: float,
        backlog: int,
    ) -> None:
        self._listening = listening
        self._certificate = certificate
        self._others = others
        self._make = make
        self._timeout_s = timeout_s
        self._backlog = backlog
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        listening.setblocking(False)
        listening.listen(backlog)
        self._loop.add_reader(listening, self._accept_all)

    def close(self) -> None:
        """Stops accepting. Handshakes go on."""
        if self._listening.fileno() >= 0:
            self._loop.remove_reader(self._listening)
            self._listening.close()

    async def wait_closed(self) -> None:
        """Cancels the handshakes that are still under way, and waits until their tasks have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def secure(self, accepted: socket.socket) -> None:
        """Starts the handshake of a connection, or closes the connection if there is no room for it."""
        accepted.setblocking(False)
        try:
            handshake = Handshake(str(accepted.getpeername()[0]))
        except OSError:  # the client has left
            accepted.close()
            return
        if not self._others.enter(handshake):
            accepted.close()
            return
        handshake.task = self._loop.create_task(self._shake_hands(handshake, accepted))
        self._tasks.add(handshake.task)
        handshake.task.add_done_callback(self._tasks.discard)

    def _accept_all(self) -> None:
        try:
            for _ in range(self._backlog):
                self.secure(self._listening.accept()[0])
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            pass  # the backlog is empty
        except OSError as error:
            if error.errno not in NO_FILES:
                raise
            self._loop.remove_reader(self._listening)
            self._loop.call_later(NO_FILES_PAUSE_S, self._accept_again)

    def _accept_again(self) -> None:
        if self._listening.fileno() >= 0:
            self._loop.add_reader(self._listening, self._accept_all)

    async def _shake_hands(self, handshake: Handshake, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make(handshake),
                accepted,
                ssl=self._certificate.context,
                ssl_handshake_timeout=self._timeout_s,
            )
        except (OSError, TimeoutError):  # the client left, or offers no acceptable TLS
            pass
        finally:
            self._others.leave(handshake)

"""TLS in the listener: the certificate, which may be renewed under load, and the handshake of each connection.

A connection counts in the listener's bounds while it shakes hands, which asyncio's own TLS servers do not offer: a
client that opens connections and says nothing would otherwise hold a file descriptor each.
"""

from __future__ import annotations

import asyncio
import logging
import pathlib
import ssl
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar, cast

from cluster.config import ServeConfig
from cluster.serve.listening.connections import Connections

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Certificate:
    """A certificate chain and its key, both in PEM files. Raises `ValueError` if they cannot be used."""

    def __init__(self, certificate: str, key: str) -> None:
        self._paths = pathlib.Path(certificate).expanduser(), pathlib.Path(key).expanduser()
        self._seen = self._stamps()
        self.handshakes: set[Handshake] = set()
        """The handshakes that are under way."""
        self.context = self._load()
        """The context of connections that begin now; established ones keep theirs."""

    @classmethod
    def of(cls, config: ServeConfig) -> Certificate | None:
        """Returns the certificate of a configuration; None if it has none."""
        if config.tls_certificate is None or config.tls_key is None:
            return None
        return cls(config.tls_certificate, config.tls_key)

    def refresh(self) -> None:
        """Loads the files again if they have changed.

        Whoever renews them writes one after the other; until both fit, new connections get the earlier certificate.
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

    def end_handshakes(self) -> None:
        """Ends the connections that shake hands. In uvloop one whose client has gone would wait until its deadline."""
        for handshake in list(self.handshakes):
            handshake.give_way()

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


class Handshake(asyncio.Protocol):
    """A connection until its handshake is done; then the protocol that `make` returns takes it over.

    It rests in `others` like a connection without a request, has `timeout_s` for the handshake, and gives way to others
    at a bound. Without TLS there is no way to tell the client why.
    """

    def __init__(
        self, certificate: Certificate, timeout_s: float, others: Connections, make: Callable[[], asyncio.Protocol]
    ) -> None:
        self.address = ""
        self._certificate = certificate
        self._timeout_s = timeout_s
        self._others = others
        self._make = make
        self._early = bytearray()
        """Decrypted bytes that came with the end of the handshake."""
        self._is_lost = False
        certificate.handshakes.add(self)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        if not self._others.enter(self):
            self._certificate.handshakes.discard(self)
            self._transport.abort()
            return
        handshake = asyncio.get_running_loop().start_tls(
            self._transport,
            self,
            self._certificate.context,
            server_side=True,
            ssl_handshake_timeout=self._timeout_s,
        )
        # Up to its first wait at once: then TLS's protocol is the transport's. uvloop reads from a connection as soon
        # as this method returns, whether or not reading is paused.
        waits_for = handshake.send(None)
        self._task = asyncio.ensure_future(
            self._shake_hands(self._transport, cast(Any, _continued(handshake, waits_for)))
        )

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._others.leave(self)

    def give_way(self) -> bool:
        if self._transport is not None:
            self._transport.abort()
        return True

    async def _shake_hands(
        self, transport: asyncio.Transport, handshake: Coroutine[Any, Any, asyncio.Transport | None]
    ) -> None:
        try:
            secured = await handshake
        except (OSError, ssl.SSLError, TimeoutError):  # the client's fault: it left, or speaks no TLS that is taken
            transport.abort()
            return
        finally:
            self._others.leave(self)
            self._certificate.handshakes.discard(self)
        if secured is None or self._is_lost:
            transport.abort()
            return
        protocol = self._make()
        secured.set_protocol(protocol)
        protocol.connection_made(secured)
        if self._early:
            protocol.data_received(bytes(self._early))


@types.coroutine
def _continued(coroutine: Coroutine[Any, Any, Result], waits_for: Any) -> Generator[Any, Any, Result]:
    """Returns an awaitable for a coroutine that has run up to its first wait, which is for `waits_for`."""
    yield waits_for
    return (yield from coroutine)

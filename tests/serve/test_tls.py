"""HTTPS in the listener: certificates, their renewal under load, and connections that do not shake hands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import trustme
import uvloop
import websockets

from manta.cluster.cli.refusal import Refusal
from manta.cluster.cli.server import connect, no_server
from manta.cluster.config import load_config
from manta.cluster.serve.app import build
from manta.cluster.serve.listening import listener as listener_module
from manta.cluster.serve.listening.tls import Certificate
from manta.cluster.serve_limits import ListenerLimits
from tests.local_server import LocalServer, answer, local_server, post
from tests.patience import PATIENCE_S, until

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine in each of the event loops that Serve may use."""
    return asyncio.run if request.param == "asyncio" else uvloop.run


class Authority:
    """Issues certificates for localhost into two files."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._issuer = trustme.CA()
        self.certificate, self.key = folder / "certificate.pem", folder / "key.pem"
        self.root = folder / "root.pem"
        self._issuer.cert_pem.write_to_path(str(self.root))
        self.issue()

    def issue(self, writes_key: bool = True) -> None:
        issued = self._issuer.issue_cert("localhost", "127.0.0.1")
        issued.cert_chain_pems[0].write_to_path(str(self.certificate))
        if writes_key:
            issued.private_key_pem.write_to_path(str(self.key))

    @property
    def options(self) -> dict[str, str]:
        return {"tls_certificate": str(self.certificate), "tls_key": str(self.key)}

    def client(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.root))


@pytest.fixture
def authority(tmp_path: pathlib.Path) -> Authority:
    return Authority(tmp_path)


async def secured(server: LocalServer, authority: Authority) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(
        "127.0.0.1", server.port, ssl=authority.client(), server_hostname="localhost", limit=2**20
    )


def serial(writer: asyncio.StreamWriter) -> str:
    """The number of the certificate that the server showed."""
    return str(writer.get_extra_info("peercert")["serialNumber"])


def test_https_answers_equal_http_answers(run: Run, authority: Authority) -> None:
    async def main() -> None:
        async with local_server() as plain, local_server(**authority.options) as server:
            for fields in ({"max_tokens": 9}, {"max_tokens": 40, "stream": True}, {"max_tokens": 3, "n": 4, "seed": 1}):
                reader, writer = await secured(server, authority)
                # With the end of the handshake already: the first bytes come before the connection knows of it.
                writer.write(post(server.body(**fields)))
                status, sent = await answer(reader, writer)
                expected_status, expected = await plain.post(**fields)
                assert status == expected_status == 200
                assert texts(sent) == texts(expected)
            status, sent = await https_get(server, authority, "/")
            assert (status, json.loads(sent)["example"].count(f"https://localhost:{server.port}/v1")) == (200, 1)
            with pytest.raises(IndexError):  # plain HTTP gets no answer
                await server.get("/health")
            await server.until_idle()

    run(main())


def test_a_websocket_opens_over_tls(run: Run, authority: Authority) -> None:
    async def main() -> None:
        async with local_server(**authority.options) as server:
            url = f"wss://localhost:{server.port}/v1/responses"
            async with websockets.connect(url, ssl=authority.client(), host="127.0.0.1") as client:
                await client.send(json.dumps({"type": "response.create", "model": server.model}))
                event = json.loads(await asyncio.wait_for(client.recv(), PATIENCE_S))
                assert (event["type"], event["error"]["param"]) == ("error", "input")
            await until(lambda: server.num_connections == 0)

    run(main())


async def https_get(server: LocalServer, authority: Authority, path: str) -> tuple[int, bytes]:
    reader, writer = await secured(server, authority)
    host = f"Host: localhost:{server.port}\r\nAccept: application/json\r\nConnection: close"
    writer.write(f"GET {path} HTTP/1.1\r\n{host}\r\n\r\n".encode())
    return await answer(reader, writer)


def texts(sent: bytes) -> list[str]:
    """The texts of an answer, be it whole or a stream."""
    if sent.lstrip().startswith(b"{"):
        return [choice["text"] for choice in json.loads(sent)["choices"]]
    lines = [line[6:] for line in sent.split(b"\n") if line.startswith(b"data: {")]
    return ["".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])]


def test_a_renewed_certificate_ends_no_stream(
    run: Run, authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener_module, "TICK_S", 0.02)

    async def main() -> None:
        async with local_server(**authority.options) as server:
            expected = await stream(server, authority)
            running = [asyncio.ensure_future(stream(server, authority)) for _ in range(8)]
            _, first = await secured(server, authority)
            for _ in range(5):
                before = await shown(server, authority)
                authority.issue(writes_key=False)  # as when one file is written and the other one not yet
                await until(lambda: "is not the key of tls_certificate" in caplog.text)
                assert await shown(server, authority) == before
                caplog.clear()
                authority.issue()
                async with asyncio.timeout(PATIENCE_S):
                    while await shown(server, authority) == before:
                        await asyncio.sleep(0.01)
            assert {tuple(each) for each in await asyncio.gather(*running)} == {tuple(expected)}
            first.close()
            await server.until_idle()

    run(main())


async def stream(server: LocalServer, authority: Authority) -> list[str]:
    reader, writer = await secured(server, authority)
    writer.write(post(server.body(max_tokens=300, stream=True)))
    status, sent = await answer(reader, writer)
    assert status == 200
    assert sent.rstrip().endswith(b"data: [DONE]\n\n0") or b"data: [DONE]" in sent
    return texts(sent)


async def shown(server: LocalServer, authority: Authority) -> str:
    _, writer = await secured(server, authority)
    try:
        return serial(writer)
    finally:
        writer.close()


def test_connections_without_handshake_count_and_yield(run: Run, authority: Authority) -> None:
    limits = ListenerLimits(max_connections=6, header_timeout_s=600)

    async def main() -> None:
        async with local_server(listener=limits, **authority.options) as server:
            silent = [await server.connect() for _ in range(12)]
            ended = [asyncio.ensure_future(reader.read()) for reader, _ in silent[:6]]
            assert await asyncio.wait_for(asyncio.gather(*ended), PATIENCE_S) == [b""] * 6
            assert (await https_get(server, authority, "/health"))[0] == 200
            for _, writer in silent:
                writer.close()

    run(main())


def test_handshakes_have_a_deadline_and_reject_nonsense(run: Run, authority: Authority) -> None:
    limits = ListenerLimits(header_timeout_s=0.3)

    async def main() -> None:
        async with local_server(listener=limits, **authority.options) as server:
            for sent in (b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 1000):
                reader, writer = await server.connect()
                writer.write(sent)
                with contextlib.suppress(ConnectionError):
                    received = await asyncio.wait_for(reader.read(), PATIENCE_S)
                    assert b"HTTP" not in received
                writer.close()
            assert (await https_get(server, authority, "/health"))[0] == 200
            await until(lambda: not server.ingress._listener._others._all.guests)

    run(main())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda authority: authority.key.write_text("no key"), "are no PEM files of a certificate and its key"),
        (lambda authority: authority.certificate.write_text(""), "are no PEM files"),
        (lambda authority: authority.certificate.unlink(), "cannot read tls_certificate .*: No such file"),
        (lambda authority: authority.issue(writes_key=False), "key.pem is not the key of tls_certificate"),
    ],
)
def test_an_unusable_certificate_is_refused_in_words(
    spoil: Callable[[Authority], object], message: str, authority: Authority
) -> None:
    config = load_config(None, authority.options)
    spoil(authority)
    with pytest.raises(ValueError, match=message):
        Certificate.of(config)
    with pytest.raises(ValueError, match="tls_key is missing"):
        load_config(None, {"tls_certificate": "a.pem"})
    with pytest.raises(ValueError, match="http_server is proxy"):
        load_config(None, {**authority.options, "http_server": "proxy"})
    with pytest.raises(ValueError, match="set http_server: listener"):
        build(dict(authority.options))


def test_a_command_names_the_untrusted_certificate(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with local_server(**authority.options) as server:
            url = f"https://localhost:{server.port}"
            found = await asyncio.to_thread(ask, url)
            assert f"the certificate of {url} is not trusted (" in found
            assert "SSL_CERT_FILE" in found
            monkeypatch.setenv("SSL_CERT_FILE", str(authority.root))
            assert await asyncio.to_thread(ask, url) == "200"

    asyncio.run(main())


def ask(url: str) -> str:
    client, base = connect(url)
    try:
        with client:
            return str(client.get("/health").status_code)
    except Exception as error:
        refusal = no_server(base, error)
        assert isinstance(refusal, Refusal)
        return str(refusal)

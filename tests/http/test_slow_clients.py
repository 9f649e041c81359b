"""Clients that read late or never, send slowly, or leave in the middle: over real sockets, with small limits."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from manta.cluster.http.exchange import incoming
from manta.cluster.serve.listening import listener
from manta.cluster.serve.requests import prompt_run
from manta.cluster.serve_limits import ListenerLimits
from tests.async_tests import async_test
from tests.local_server import LocalServer, answer, local_server, post, resume_reading, until
from tests.patience import PATIENCE_S

QUICK_HEADS = ListenerLimits(header_timeout_s=0.5)
PROMPTS = [[5, 9, 17, 30], [6, 7], [40, 41, 42]]


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "TICK_S", 0.05)


def events(body: bytes) -> list[dict]:
    """Of a stream sent in chunks; without its `[DONE]`."""
    data, rest = b"", body
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        data, rest = data + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    found = [event.removeprefix(b"data: ") for event in data.split(b"\n\n") if event]
    return [json.loads(event) for event in found if event != b"[DONE]"]


# ---- reading -------------------------------------------------------------------------------------------------------


@async_test
async def test_a_late_reader_gets_every_prompt_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt has ended long before its last frame is read, and the others still run."""
    monkeypatch.setattr(prompt_run, "LAST_FRAME_TIMEOUT_S", 0.05)

    async with local_server(max_num_sequences=1) as server:
        fields = {"prompt": PROMPTS, "max_tokens": 300, "logprobs": 3}
        _, whole = await server.post(**fields)
        reader, writer = await server.connect_without_reading()
        writer.write(post(server.body(**fields, stream=True)))
        await until(lambda: not server.engine_is_idle)
        await until(lambda: server.engine_is_idle)
        resume_reading(writer)
        status, body = await answer(reader, writer)
        assert status == 200
        assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), body[-200:]
        texts = ["", "", ""]
        for event in events(body):
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert texts == [choice["text"] for choice in json.loads(whole)["choices"]]


@async_test
async def test_a_stream_with_a_full_buffer_is_aborted() -> None:
    async with local_server(client_buffer_bytes=20_000) as server:
        reader, writer = await server.connect_without_reading()
        writer.write(post(server.body(prompt=PROMPTS, max_tokens=500, n=2, temperature=1, stream=True)))
        await until(lambda: len(server.ingress._client.runs) > 0)
        await server.until_idle()
        assert await server.num_aborted() == 6
        resume_reading(writer)
        status, body = await answer(reader, writer)
        *texts, failure = events(body)
        assert status == 200
        assert failure["error"]["code"] == "client_too_slow"
        assert "the limit is 20000" in failure["error"]["message"]
        assert "client_buffer_bytes" in failure["error"]["message"]
        assert sum(len(json.dumps(event)) for event in texts) > 20_000, "what was there is sent"


@async_test
async def test_simultaneous_events_make_no_slow_client() -> None:
    """Each step brings more than the buffer may hold."""
    async with local_server(client_buffer_bytes=1000) as server:
        status, body = await server.post(prompt=PROMPTS, max_tokens=50, n=8, temperature=1, stream=True)
        assert status == 200
        assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), body[-200:]
        assert await server.num_aborted() == 0


@pytest.mark.parametrize("stream", [True, False])
@async_test
async def test_a_client_that_never_reads_is_dropped(stream: bool) -> None:
    async with local_server(client_timeout_s=0.5) as server:
        _, writer = await server.connect_without_reading()
        fields = {"max_tokens": 500, "logprobs": 5, "prompt": PROMPTS * (20 if stream else 1)}
        writer.write(post(server.body(**fields, stream=stream)))
        await until(lambda: server.num_connections == 1)
        await until(lambda: server.num_connections == 0)
        await server.until_idle()
        assert (await server.num_aborted() > 0) == stream
        writer.close()


@async_test
async def test_a_steady_reader_is_not_too_slow() -> None:
    """Its answer takes it several times as long as it may take nothing at all."""
    async with local_server(client_timeout_s=2.0) as server:
        reader, writer = await server.connect_without_reading()
        writer.write(post(server.body(prompt=PROMPTS, max_tokens=300, logprobs=5, stream=True)))
        resume_reading(writer)
        received = b""
        while piece := await reader.read(4000):
            received += piece
            await asyncio.sleep(0.05)
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


# ---- sending -------------------------------------------------------------------------------------------------------


@async_test
async def test_an_incomplete_request_is_ended_in_time() -> None:
    async with local_server(client_timeout_s=0.5, listener=QUICK_HEADS) as server:
        whole = post(server.body(max_tokens=2))
        head = whole.index(b"\r\n\r\n") + 4
        reader, writer = await server.connect()
        writer.write(whole[: head + 3])
        status, body = await answer(reader, writer)
        assert (status, json.loads(body)["error"]["code"]) == (408, "client_too_slow")
        assert "3 bytes of the body came within 0.5 s" in json.loads(body)["error"]["message"]
        reader, writer = await server.connect()
        assert await asyncio.wait_for(reader.read(-1), PATIENCE_S) == b""
        writer.close()
        for part in (whole[:1], whole[: head - 1]):
            reader, writer = await server.connect()
            writer.write(part)
            status, body = await answer(reader, writer)
            assert status == 408
            assert "within 0.5 s (listener.header_timeout_s)" in json.loads(body)["error"]["message"]
        await until(lambda: server.num_connections == 0)


def test_an_endless_head_gains_no_time_per_byte() -> None:
    async def run() -> None:
        async with local_server(listener=QUICK_HEADS) as server:
            reader, writer = await server.connect()
            writer.write(post(server.body(max_tokens=2), connection="keep-alive"))
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")  # it may rest now, but not begin and never end
            writer.write(b"POST / HTTP/1.1\r\n")
            ended = asyncio.ensure_future(reader.read(-1))
            while not ended.done() and not writer.is_closing():
                writer.write(b"x: y\r\n")
                await asyncio.sleep(0.05)
            await until(lambda: server.num_connections == 0)

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


async def whole_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """(status, body) as soon as both have come: behind them the connection may break."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    assert length is not None
    return int(head.split()[1]), await reader.readexactly(int(length[1]))


@async_test
async def test_a_body_that_comes_too_slowly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming, "SLOW_START_S", 0.3)

    async with local_server(min_body_bytes_per_s=100) as server:
        whole = post(server.body(max_tokens=2, user="x" * 1000))
        head = whole.index(b"\r\n\r\n") + 4
        # The first bytes of the good one pay for 9 s. Then so many come each tenth of a second.
        for num_first, num_bytes, expected in ((900, 40, 200), (0, 2, 408)):
            reader, writer = await server.connect()
            writer.write(whole[: head + num_first])
            received = asyncio.ensure_future(whole_answer(reader))
            for begin in range(head + num_first, len(whole), num_bytes):
                writer.write(whole[begin : begin + num_bytes])
                await asyncio.sleep(0.1)
                if received.done():
                    break
            status, body = await received
            assert status == expected
            writer.close()
        assert "the limit is 100; send it faster, or lower min_body_bytes_per_s" in json.loads(body)["error"]["message"]


@async_test
async def test_bodies_of_slow_senders_together_have_a_bound() -> None:
    async with local_server(max_bodies_bytes=20_000) as server:
        whole = post(server.body(max_tokens=2, user="x" * 4000))
        held = [await server.connect() for _ in range(3)]
        for _, writer in held:
            writer.write(whole[:-1])
        room = server.ingress._app._room
        await until(lambda: room.total > 12_000)
        reader, writer = await server.connect()
        writer.write(whole)
        status, body = await answer(reader, writer)
        assert (status, json.loads(body)["error"]["code"]) == (503, "too_many_bodies")
        assert "the limit is 15000; retry later, or raise max_bodies_bytes" in json.loads(body)["error"]["message"]
        for reader, writer in held:
            writer.write(whole[-1:])
            assert (await answer(reader, writer))[0] == 200
        assert room.total == 0
        assert (await server.post(max_tokens=2))[0] == 200


@async_test
async def test_slow_bodies_are_served_and_endless_ones_refused() -> None:
    async with local_server(max_body_bytes=1000, client_timeout_s=5) as server:
        reader, writer = await server.connect()
        for byte in post(server.body(max_tokens=2)):
            writer.write(bytes([byte]))
            await writer.drain()
        assert (await answer(reader, writer))[0] == 200

        reader, writer = await server.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        sent = 0
        while not reader._buffer and sent < 100:  # type: ignore[attr-defined]
            writer.write(b"200\r\n" + b" " * 512 + b"\r\n")
            sent += 1
            await asyncio.sleep(0.01)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        assert head.startswith(b"HTTP/1.1 413")
        assert 16_000 < sent * 512 < 40_000
        writer.close()
        await server.until_idle()


# ---- leaving -------------------------------------------------------------------------------------------------------


async def leave(server: LocalServer, num_bytes: int, stream: bool) -> None:
    """Asks for six choices, and leaves after so many bytes of the answer."""
    reader, writer = await server.connect()
    writer.write(post(server.body(prompt=PROMPTS, n=2, temperature=1, max_tokens=500, stream=stream)))
    await writer.drain()
    if num_bytes:
        await asyncio.wait_for(reader.readexactly(num_bytes), PATIENCE_S)
    writer.transport.abort()


@async_test
async def test_leaving_a_stream_anywhere_leaves_nothing_behind() -> None:
    async with local_server() as server:
        for num_bytes in (0, 1, 300, 1000, 5000, 20_000, 80_000):
            await leave(server, num_bytes, stream=True)
            await server.until_idle()
        await asyncio.gather(*(leave(server, 100 * number, stream=True) for number in range(20)))
        await leave(server, 0, stream=False)
        await server.until_idle()
        assert await server.num_aborted() > 0
        assert (await server.post(max_tokens=2))[0] == 200


@pytest.mark.parametrize("stream", [True, False])
@async_test
async def test_a_client_that_closes_its_half_has_left(stream: bool) -> None:
    async with local_server() as server:
        reader, writer = await server.connect()
        writer.write(post(server.body(max_tokens=500, stream=stream)))
        await until(lambda: len(server.ingress._client.runs) > 0)
        writer.write_eof()
        await asyncio.wait_for(reader.read(-1), PATIENCE_S)
        await server.until_idle()
        assert await server.num_aborted() == 1
        writer.close()


@async_test
async def test_pipelined_requests_are_answered_in_turn() -> None:
    async with local_server() as server:
        reader, writer = await server.connect()
        ahead = post(server.body(max_tokens=2), connection="keep-alive")
        writer.write(ahead + ahead + post(server.body(max_tokens=2)))
        received = await asyncio.wait_for(reader.read(-1), PATIENCE_S)
        assert received.count(b"HTTP/1.1 200 OK") == 3
        assert await server.num_aborted() == 0
        writer.close()

        reader, writer = await server.connect()
        long = post(server.body(max_tokens=500, stream=True), connection="keep-alive")
        writer.write(long + long)
        await reader.readexactly(100)
        writer.transport.abort()
        await server.until_idle()
        assert await server.num_aborted() == 1, "it went on for nobody"

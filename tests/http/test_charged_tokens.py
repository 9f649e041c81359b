"""A key's rate limit counts what the engine generates for it, however its requests end, and many that begin at once."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from websockets.asyncio.client import connect

from manta.cluster.http.access.rate_limits import RateLimits
from manta.cluster.serve.channel.token_channel import Connection
from manta.cluster.serve_limits import KeyLimits
from tests.async_tests import async_test
from tests.local_server import LocalServer, local_server
from tests.patience import PATIENCE_S, until

KEY = "a-secret-of-the-test"
LIMIT = 100_000
NUM_PROMPT_TOKENS = 4
PROBE = NUM_PROMPT_TOKENS + 1
"""Tokens of a probe: its prompt and its output."""


class Ledger:
    """What the engine of a server generated, and what the key was charged."""

    def __init__(self, server: LocalServer, limit: int = LIMIT) -> None:
        self.server = server
        self.num_generated = 0
        self._left = limit
        step = server.replica.engine.step

        def counted_step() -> Any:
            outputs = step()
            self.num_generated += sum(len(output.token_ids) for output in outputs)
            return outputs

        server.replica.engine.step = counted_step  # type: ignore[method-assign]

    async def new(self) -> int:
        """Returns the tokens that were charged, or are reserved, since the last call. Asks by a request of its own."""
        status, headers, _ = await ask(self.server, max_tokens=1)
        assert status == 200
        left = int(headers["x-ratelimit-remaining-tokens"])
        await self.server.until_idle()
        taken, self._left = self._left - left - PROBE, left
        self.num_generated -= 1
        return taken


def head(path: str, length: int, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {KEY}", f"Content-Length: {length}"]
    return "\r\n".join([*lines, "Connection: close", *headers, "", ""]).encode()


async def begin(
    server: LocalServer, *headers: str, path: str = "/v1/completions", **fields: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await server.connect()
    body = json.dumps(server.body(**fields) if path == "/v1/completions" else {"model": server.model, **fields})
    writer.write(head(path, len(body), *headers) + body.encode())
    return reader, writer


async def ask(server: LocalServer, *headers: str, **fields: Any) -> tuple[int, dict[str, str], bytes]:
    """Returns status, headers and body of the answer."""
    reader, writer = await begin(server, *headers, **fields)
    first, _, body = (await asyncio.wait_for(reader.read(), PATIENCE_S)).partition(b"\r\n\r\n")
    writer.close()
    status, *lines = first.decode().split("\r\n")
    return int(status.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


async def status_of(reader: asyncio.StreamReader) -> int:
    return int((await asyncio.wait_for(reader.readline(), PATIENCE_S)).split()[1])


async def num_events(reader: asyncio.StreamReader, most: int) -> int:
    """Reads events of a stream, each of which has a token or more, and returns their number."""
    found = 0
    while found < most and (line := await asyncio.wait_for(reader.readline(), PATIENCE_S)):
        found += line.startswith(b"data: {")
    return found


@contextlib.asynccontextmanager
async def serving(monkeypatch: pytest.MonkeyPatch, limit: int = LIMIT, **options: Any) -> AsyncIterator[Ledger]:
    """A server whose limits never refill, so that what is left says what was taken."""
    name = "manta.cluster.http.access.request_admission.RateLimits"
    monkeypatch.setattr(name, functools.partial(RateLimits, clock=lambda: 0.0))
    limits = {"team": KeyLimits(tokens_per_minute=limit)}
    async with local_server(api_keys=(f"team:{KEY}",), key_limits=limits, **options) as server:
        yield Ledger(server, limit)


# ---- each way to end ---------------------------------------------------------------------------------------------


@async_test
async def test_whole_and_streamed_answers_are_charged_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as ledger:
        _, _, body = await ask(ledger.server, max_tokens=40)
        stop = json.loads(body)["choices"][0]["text"][20:24]
        await ledger.new()
        for fields in ({"max_tokens": 30}, {"max_tokens": 20, "n": 3}, {"max_tokens": 40, "stop": stop}):
            for streaming in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
                ledger.num_generated = 0
                _, _, body = await ask(ledger.server, **fields, **streaming)
                taken = await ledger.new() - NUM_PROMPT_TOKENS
                assert f'"completion_tokens":{taken},' in body.decode(), (fields, streaming)
                assert 0 < taken <= ledger.num_generated
                assert taken == ledger.num_generated or "stop" in fields, "only tokens after a stop string do not count"


@async_test
async def test_closed_requests_are_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, engine_options={"max_num_batched_tokens": 64}) as ledger:
        ledger.num_generated = 0
        reader, writer = await begin(ledger.server, max_tokens=400, stream=True)
        received = await num_events(reader, 15)
        writer.close()
        await ledger.server.until_idle()
        taken = await ledger.new() - NUM_PROMPT_TOKENS
        assert received <= taken <= ledger.num_generated < 400

        ledger.num_generated = 0
        reader, writer = await begin(ledger.server, max_tokens=400)
        await until(lambda: ledger.num_generated > 10)
        await ledger.server.post([f"Authorization: Bearer {KEY}"], max_tokens=1)  # its tokens came after the others'
        writer.close()
        await ledger.server.until_idle()
        taken = await ledger.new() - NUM_PROMPT_TOKENS - PROBE
        assert 10 < taken < ledger.num_generated <= 401


@pytest.mark.parametrize("stream", [False, True])
@async_test
async def test_requests_that_end_at_their_deadline_are_charged(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    async with serving(monkeypatch, request_timeout_s=0.4) as ledger:
        while True:  # a busy machine may generate nothing before the deadline
            ledger.num_generated, n = 0, 16
            status, _, body = await ask(ledger.server, max_tokens=450, n=n, stream=stream)
            await ledger.server.until_idle()
            taken = await ledger.new() - NUM_PROMPT_TOKENS
            assert taken == ledger.num_generated
            if 0 < taken < n * 450:
                assert status == 408 or b"request_timeout_s" in body
                return


@async_test
async def test_a_cancelled_message_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as ledger:
        url, keys = f"ws://127.0.0.1:{ledger.server.port}/v1/responses", {"Authorization": f"Bearer {KEY}"}
        async with connect(url, additional_headers=keys) as client:
            given = {"type": "response.create", "input": "Count.", "max_output_tokens": 400}
            await client.send(json.dumps({"model": ledger.server.model, "temperature": 0, **given}))
            num_deltas = 0
            while num_deltas < 5:
                event = json.loads(await asyncio.wait_for(client.recv(), PATIENCE_S))
                num_deltas += event["type"].endswith(".delta")
            await client.send(json.dumps({"type": "response.cancel"}))
            while event["type"] != "error":
                event = json.loads(await asyncio.wait_for(client.recv(), PATIENCE_S))
        await ledger.server.until_idle()
        assert num_deltas < await ledger.new() <= ledger.num_generated + 100, "the prompt has fewer than 100 tokens"


@async_test
async def test_background_responses_are_charged(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """They are charged whether or not somebody reads them, and whether they end or are cancelled."""
    async with serving(monkeypatch, batch_storage=str(tmp_path / "storage")) as ledger:
        given = {"path": "/v1/responses", "input": "Count.", "temperature": 0, "background": True}
        _, _, body = await ask(ledger.server, max_output_tokens=1, **given)
        await ledger.server.until_idle()
        num_prompt = await ledger.new() - 1
        for num_tokens, cancels in ((30, False), (450, True)):
            ledger.num_generated = 0
            _, _, body = await ask(ledger.server, max_output_tokens=num_tokens, **given)
            if cancels:
                await until(lambda: ledger.num_generated > 10)
                status, _, _ = await ask(ledger.server, path=f"/v1/responses/{json.loads(body)['id']}/cancel")
                assert status == 200
            await until(lambda: ledger.num_generated > 0)
            await ledger.server.until_idle()
            taken = await ledger.new() - num_prompt
            assert 0 < taken <= ledger.num_generated
            assert cancels or taken == ledger.num_generated


@async_test
async def test_a_recorded_stream_that_nobody_follows_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as ledger:
        ledger.num_generated = 0
        reader, writer = await begin(ledger.server, "X-Resumable-S: 1", max_tokens=450, stream=True)
        received = await num_events(reader, 5)
        writer.close()
        await ledger.server.until_idle()
        taken = await ledger.new() - NUM_PROMPT_TOKENS
        assert received <= taken <= ledger.num_generated


@async_test
async def test_a_request_that_loses_its_engine_is_charged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on with the tokens that had arrived; those that were lost on the way are generated again."""
    async with serving(monkeypatch) as ledger:
        connections, send = set(), Connection.send

        def noted(connection: Connection, message: object) -> None:
            connections.add(connection)
            send(connection, message)

        monkeypatch.setattr(Connection, "send", noted)
        for stream in (False, True):
            reader, writer = await begin(ledger.server, max_tokens=200, stream=stream)
            await until(lambda: ledger.num_generated > 20)
            for connection in connections:
                connection.close()
            assert await status_of(reader) == 200
            assert b"error" not in await asyncio.wait_for(reader.read(), PATIENCE_S)
            writer.close()
            await ledger.server.until_idle()
            assert await ledger.new() == NUM_PROMPT_TOKENS + 200
            ledger.num_generated = 0


@async_test
async def test_a_refused_request_keeps_no_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine refuses a token id that only it knows to be wrong, after the request was admitted."""
    async with serving(monkeypatch) as ledger:
        status, _, _ = await ask(ledger.server, prompt=[10**6] * NUM_PROMPT_TOKENS, max_tokens=100)
        assert status == 400
        assert await ledger.new() == NUM_PROMPT_TOKENS


# ---- many requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_tokens", "num_admitted"),
    [
        (40, 600 // (NUM_PROMPT_TOKENS + 40)),  # all of an output is reserved
        (200, 600 // (NUM_PROMPT_TOKENS + 600 // 8)),  # an eighth of the limit is reserved
    ],
)
@async_test
async def test_streams_that_begin_at_once_share_the_limit(
    monkeypatch: pytest.MonkeyPatch, max_tokens: int, num_admitted: int
) -> None:
    """Outputs of at most an eighth of the limit never exceed it. Of longer ones, at most eight run at once."""
    async with serving(monkeypatch, limit=600) as ledger:
        opened = [await begin(ledger.server, stream=True, max_tokens=max_tokens) for _ in range(100)]
        statuses = [await status_of(reader) for reader, _ in opened]
        assert statuses.count(200) == num_admitted
        assert statuses.count(429) == 100 - num_admitted
        for reader, writer in opened:
            await asyncio.wait_for(reader.read(), PATIENCE_S)
            writer.close()
        await ledger.server.until_idle()
        assert ledger.num_generated == num_admitted * max_tokens, "a running stream is not cut"
        assert max_tokens > 600 // 8 or num_admitted * (NUM_PROMPT_TOKENS + max_tokens) <= 600


@async_test
async def test_closing_streams_early_does_not_evade_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch, limit=600) as ledger:
        num_received = num_admitted = 0
        for _ in range(100):
            reader, writer = await begin(ledger.server, max_tokens=450, stream=True)
            status = await status_of(reader)
            if status == 429:
                break
            num_admitted += 1
            num_received += await num_events(reader, 5)
            writer.close()
            await ledger.server.until_idle()
        writer.close()
        assert status == 429
        assert num_received + NUM_PROMPT_TOKENS * num_admitted <= 600

"""Whatever an ingress awaits for a client has that client's deadline, ends when the client leaves, and counts in a
bound; and nothing else in the ingress waits for an engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import pathlib
import re
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from manta.cluster.config import ServeConfig
from manta.cluster.http.app import HttpApp
from manta.cluster.http.exchange import prompts
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.http.exchange.state import Route
from manta.cluster.http.routes import ROUTES
from manta.cluster.serve.channel.token_channel import Address, Connection, RequestResult
from manta.cluster.serve.requests import prompt_run
from manta.cluster.storage.file_records import FileRecords, Upload
from manta.structured.refusals import Refusal
from manta.workers.model_info import ModelInfo
from tests.http.test_routes import RepeatingEngines
from tests.local_server import LocalServer, answer, local_server, post, until
from tests.patience import PATIENCE_S

LIMIT = 4
"""Requests of one client that the server of most tests here may hold. It holds one more of others."""
OPTIONS: dict[str, Any] = {"max_num_sequences": 2, "engine_options": {"max_num_waiting": LIMIT - 1}}


class Unanswered:
    """A question that no engine answers. Counts who asks, and who was cancelled."""

    def __init__(self) -> None:
        self.num_asked = self.num_cancelled = 0

    async def __call__(self, *_: Any, **__: Any) -> Any:
        self.num_asked += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "the model": ("model", {}),
    "a constraint": ("resolve", {"structured_outputs": {"regex": "[a-z]+", "loose": True}}),
    "a place in an engine": ("generate", {}),
    "a place in an engine, streamed": ("generate", {"stream": True}),
}
"""Calls to an engine that a completion waits for: the replica's method, and the fields that make a request call it."""


def silence(server: LocalServer, method: str, patch: pytest.MonkeyPatch) -> Unanswered:
    unanswered = Unanswered()
    patch.setattr(server.replica, method, unanswered)
    return unanswered


def num_held(server: LocalServer) -> int:
    """Requests that the ingress has anything of."""
    return server.ingress._app.admission.num_prepared + len(server.ingress._client.runs)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


@pytest.mark.parametrize("what", QUESTIONS)
def test_nobody_waits_for_a_departed_client(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, fields = QUESTIONS[what]

    async def test() -> None:
        async with local_server(**OPTIONS) as server:
            unanswered = silence(server, method, monkeypatch)
            writers = []
            for _ in range(LIMIT):
                _, writer = await server.connect()
                writer.write(post(server.body(**fields)))
                writers.append(writer)
            await until(lambda: num_held(server) == LIMIT and unanswered.num_asked > 0)
            for writer in writers:
                writer.close()
            await until(lambda: num_held(server) == 0)
            if method != "model":  # that is one question for all
                await until(lambda: unanswered.num_cancelled == unanswered.num_asked == LIMIT)

    run(test)


@pytest.mark.parametrize("what", QUESTIONS)
def test_a_request_that_waits_ends_at_its_deadline(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, fields = QUESTIONS[what]
    monkeypatch.setattr(prompt_run, "GRACE_S", 0.0)

    async def test() -> None:
        async with local_server(request_timeout_s=0.3, **OPTIONS) as server:
            silence(server, method, monkeypatch)
            status, body = await server.post(**fields)
            assert status == 408, body
            error = json.loads(body)["error"]
            assert error["type"] == "timeout_error"
            assert "request_timeout_s" in error["message"]
            await until(lambda: num_held(server) == 0)

    run(test)


@pytest.mark.parametrize("what", ["the model", "a constraint"])
def test_no_more_than_the_limit_wait(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty requests, of which an ingress that may hold four refuses all but four at once."""
    method, fields = QUESTIONS[what]

    async def test() -> None:
        async with local_server(**OPTIONS) as server:
            silence(server, method, monkeypatch)
            asking = [asyncio.ensure_future(server.post(**fields)) for _ in range(50)]
            await until(lambda: sum(each.done() for each in asking) == 50 - LIMIT)
            for each in asking:
                if each.done():
                    status, body = each.result()
                    assert status == 429
                    assert f"the limit is {LIMIT}" in json.loads(body)["error"]["message"]
                else:
                    each.cancel()
            status, _ = await server.get("/metrics")
            assert status == 200, "what says how the server is needs no place"
            await until(lambda: num_held(server) == 0)

    run(test)


def test_one_question_about_the_model_serves_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        async with local_server() as server:
            model, num_asked = server.replica.model, 0

            async def failing_at_first() -> ModelInfo:
                nonlocal num_asked
                num_asked += 1
                await asyncio.sleep(0.05)
                if num_asked == 1:
                    raise RuntimeError("it died")
                return await model()

            monkeypatch.setattr(server.replica, "model", failing_at_first)
            statuses = [status for status, _ in await asyncio.gather(*(server.post(max_tokens=1) for _ in range(5)))]
            assert statuses == [500] * 5
            assert num_asked == 1
            assert (await server.post(max_tokens=1))[0] == 200
            assert (await server.post(max_tokens=1))[0] == 200
            assert num_asked == 2

    run(test)


# ---- engines that cannot connect back ------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("code", [errno.EHOSTUNREACH, errno.EMFILE, errno.ECONNREFUSED, errno.ETIMEDOUT, None])
def test_an_engine_that_cannot_connect_is_called_less(code: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    error = TimeoutError() if code is None else OSError(code, "cannot connect")
    monkeypatch.setattr(prompt_run, "GRACE_S", 0.0)

    async def test() -> None:
        async with local_server(request_timeout_s=1.0) as server:
            times: list[float] = []

            async def connect(_: Address) -> None:
                times.append(time.monotonic())
                raise error

            monkeypatch.setattr(server.replica._sender, "connect", connect)
            status, body = await server.post(stream=True)
            assert status == 408
            assert "request_timeout_s" in json.loads(body)["error"]["message"]
            assert 1 <= len(times) <= 5, "0.1 s, 0.2 s, 0.4 s and 0.8 s lie between calls"
            await until(lambda: num_held(server) == 0)
            assert not server.ingress._client._replicas.routed

    run(test)


def test_a_request_continues_after_the_engine_reconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with local_server() as server:
            expected = (await server.post(max_tokens=5))[1]
            connect, num_calls = server.replica._sender.connect, 0

            async def failing_at_first(address: Address) -> None:
                nonlocal num_calls
                num_calls += 1
                if num_calls < 4:
                    raise OSError(errno.EHOSTUNREACH, "No route to host")
                await connect(address)

            monkeypatch.setattr(server.replica._sender, "connect", failing_at_first)
            status, body = await server.post(max_tokens=5)
            assert status == 200
            assert json.loads(body)["choices"] == json.loads(expected)["choices"]

    run(test)


def test_a_request_on_a_breaking_connection_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes it, and says so into a connection that is broken already. Nobody waits for lost frames."""
    monkeypatch.setattr(prompt_run, "LAST_FRAME_TIMEOUT_S", 3600.0)

    async def test() -> None:
        async with local_server() as server:
            assert (await server.post(max_tokens=1))[0] == 200
            (opened,) = server.replica._sender.connections.values()
            connection = await opened
            send = Connection.send
            Connection.send = lambda _, message: None  # type: ignore[method-assign]
            asking = asyncio.ensure_future(server.post(max_tokens=400))
            await until(lambda: len(server.replica._calls) == 1)
            Connection.send = send  # type: ignore[method-assign]
            connection.close()
            assert (await asking)[0] == 200
            await server.until_idle()

    run(test)


def test_a_refused_request_leaves_nothing_behind() -> None:
    async def test() -> None:
        async with local_server() as server:
            client, routed = server.ingress._client, server.ingress._client._replicas.routed

            async def refused(request: Any, _: Address) -> RequestResult:
                routed[request.request_id] = "engine"  # as Serve's router does
                return RequestResult(refusal=Refusal("context_length", "prompt", 9, 8, unit="tokens"))

            server.replica.generate = refused  # type: ignore[method-assign]
            assert (await server.post())[0] == 400
            assert not routed
            assert not client.runs

    run(test)


@pytest.mark.parametrize("count", [3])
def test_texts_awaiting_the_tokeniser_leave_with_clients(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with local_server() as server:
            unanswered = Unanswered()
            monkeypatch.setattr(prompts, "_tokenised", unanswered)
            writers = []
            for _ in range(count):
                _, writer = await server.connect()
                writer.write(post(server.body(prompt="a word " * 3000)))
                writers.append(writer)
            await until(lambda: unanswered.num_asked == count)
            for writer in writers:
                writer.close()
            await until(lambda: num_held(server) == 0 and unanswered.num_cancelled == count)

    run(test)


# ---- every route ---------------------------------------------------------------------------------------------------

PLAIN_ROUTES = [route for route in ROUTES if route.form is None]
"""An upload is received by its handler, under the deadlines of a body (`tests/http/test_slow_clients.py`), into a
storage that has the request's time (`test_an_unresponsive_storage_ends_an_upload`).
"""


@pytest.mark.axes_in_turns
@pytest.mark.parametrize("end", ["leaves", "waits"])
@pytest.mark.parametrize("route", PLAIN_ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_an_endless_handler_ends_with_client_or_deadline(route: Route, end: str) -> None:
    """Whatever a handler awaits: here it is nothing that ever comes."""

    async def test() -> None:
        begun, cancelled = asyncio.Event(), asyncio.Event()

        async def handler(*_: Any) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        plain = dataclasses.replace(route, handler=handler, body=None)
        config = ServeConfig(request_timeout_s=0.05 if end == "waits" else 3600.0, log_requests=False)
        engines: Any = RepeatingEngines()
        app = HttpApp(config, None, engines, Metrics("m"), routes=[plain])
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        path = re.sub(r"\{\w+\}", "x", route.path)
        scope = {"type": "http", "method": route.method, "path": path, "headers": [(b"host", b"localhost")]}
        answering = asyncio.ensure_future(app(scope, messages.get, send))
        await begun.wait()
        if end == "leaves":
            messages.put_nowait({"type": "http.disconnect"})
            with pytest.raises(asyncio.CancelledError):
                await answering
            assert not sent
        else:
            await answering
            assert sent[0]["status"] == 408
        await cancelled.wait()
        assert app.admission.num_prepared == 0

    run(test)


@pytest.mark.parametrize("method", ["begin_upload", "commit"])
def test_an_unresponsive_storage_ends_an_upload(
    method: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    kind = FileRecords if method == "begin_upload" else Upload
    monkeypatch.setattr(kind, method, lambda *_: answers.wait())

    async def test() -> None:
        async with local_server(request_timeout_s=0.5, batch_storage=str(tmp_path)) as server:
            reader, writer = await server.connect()
            form = 'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
            form += 'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n'
            body = f"--x\r\n{form}--x--\r\n"
            head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            head += f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write((head + body).encode())
            status, sent = await answer(reader, writer)
            assert status == 503, sent
            assert "request_timeout_s" in json.loads(sent)["error"]["message"]
            answers.set()

    try:
        run(test)
    finally:
        answers.set()

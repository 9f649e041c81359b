"""Failures of the channel between engine and ingress: each ends its own requests, and none is remembered."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from manta.cluster.engine.request import EngineRequest, SequenceOutput
from manta.cluster.handshake import listen
from manta.cluster.serve.channel import token_channel
from manta.cluster.serve.channel.token_channel import (
    BEAT_S,
    Address,
    Connection,
    Control,
    EngineFailed,
    Frame,
    OutputReceiver,
    OutputSender,
    RequestResult,
    has_died,
)
from manta.cluster.serve.requests import prompt_run
from manta.cluster.serve.routing.replicas import HUNG_BEATS, SILENT_BEATS
from manta.cluster.serve.starting.start_failure import InWords
from manta.structured.frames import frame
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import StepInput
from tests.async_tests import async_test
from tests.engine_parts import device_of
from tests.local_server import local_server, post, until
from tests.patience import PATIENCE_S

resource = pytest.importorskip("resource")


@contextlib.contextmanager
def no_file_descriptors() -> Iterator[None]:
    """No file or socket can be opened, also when another thread closes one meanwhile."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class Ends:
    """Both ends of the channel, and what arrives."""

    def __init__(self) -> None:
        self.outputs: list[SequenceOutput] = []
        self.lost: list[Address] = []
        self.receiver = OutputReceiver("127.0.0.1", self._on_outputs, lambda _: None)
        self.sender = OutputSender("engine", "node", self._on_control, self.lost.append)

    def _on_outputs(self, outputs: list[SequenceOutput], _: Connection) -> None:
        self.outputs += outputs

    def _on_control(self, control: Control) -> None:
        raise AssertionError(f"nobody sent {control}")

    async def check(self, address: Address) -> None:
        """What is sent arrives."""
        self.sender.send(address, [SequenceOutput("a", 0, [len(self.outputs)])])
        expected = len(self.outputs) + 1
        await until(lambda: len(self.outputs) == expected)

    def close(self, address: Address) -> None:
        self.sender.connections[address].result().close()


@async_test
async def test_an_ingress_that_could_not_listen_tries_again() -> None:
    ends = Ends()
    with no_file_descriptors(), pytest.raises(OSError, match="Too many open files"):
        await ends.receiver.start()
    address = await ends.receiver.start()
    assert await ends.receiver.start() == address, "it listens once"
    await ends.sender.connect(address)
    await ends.check(address)
    ends.close(address)


@async_test
async def test_a_dead_ingress_is_told_from_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of this process holds the port, and is stopped, goes on and is killed. A living ingress loses nothing."""
    listening, address = listen("127.0.0.1")
    with listening:
        child = subprocess.Popen(["sleep", "600"], pass_fds=[listening.fileno()])
    monkeypatch.setattr(token_channel, "PROBE_S", 0.05)
    for sent in (signal.SIGSTOP, signal.SIGCONT):
        child.send_signal(sent)
        assert not await has_died(address)
    monkeypatch.setattr(token_channel, "PROBE_S", PATIENCE_S)
    asking = asyncio.ensure_future(has_died(address))
    await asyncio.sleep(0)
    child.kill()
    assert await asking
    child.wait()
    ends = Ends()
    address = await ends.receiver.start()
    await ends.sender.connect(address)
    monkeypatch.setattr(token_channel, "PROBE_S", 0.05)
    assert not await has_died(address)
    await ends.check(address)
    ends.close(address)


@async_test
async def test_requests_that_find_no_descriptor_fail_alone() -> None:
    async with local_server() as server:
        reader, writer = await server.connect()  # before it becomes impossible

        async def ask() -> tuple[bytes, dict]:
            writer.write(post(server.body(max_tokens=2), connection="keep-alive"))
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0])
            return head.split()[1], json.loads(await reader.readexactly(length))

        server.ingress._client._receiver._server = None  # as before its first request
        with no_file_descriptors():
            status, body = await ask()
            assert status in (b"500", b"503")
            assert "Too many open files" in body["error"]["message"]
            with pytest.raises(InWords, match="Too many open files"):
                await server.ingress.check_health()
        assert (await ask())[0] == b"200"
        await server.ingress.check_health()
        writer.close()
        await server.until_idle()


@async_test
async def test_an_engine_of_another_version_sends_tokens() -> None:
    """An older one's first frame has no more than secret and name, a newer one's may have fields that nobody knows."""
    found: list[tuple[str, str, str]] = []
    ends = Ends()
    ends.receiver._on_connected = lambda each: found.append((each.replica, each.node, each.stream_format))
    address = await ends.receiver.start()
    for hello in (["older"], ["newer", "a node", "another format", "9.9", "a third", 17]):
        _, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(frame(msgspec.msgpack.encode([address.secret, *hello])))
        writer.write(frame(msgspec.msgpack.encode(Frame([SequenceOutput("a", 0, [1])]))))
        await until(lambda: bool(ends.outputs))
        ends.outputs.clear()
        writer.close()
    assert found == [("older", "", ""), ("newer", "a node", "another format")]


@async_test
async def test_an_unreadable_message_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    """At either end, which goes on and says so."""
    ends = Ends()
    address = await ends.receiver.start()
    await ends.sender.connect(address)
    await ends.check(address)
    (connection,) = ends.receiver.connections
    connection.send(["a kind that nobody knows"])
    await until(lambda: ends.lost == [address])
    assert f"the ingress at 127.0.0.1:{address.port} sent a message that cannot be read here" in caplog.text
    await until(lambda: not ends.receiver.connections)
    await ends.sender.connect(address)
    ends.sender.connections[address].result().send(["no outputs"])
    await until(lambda: len(ends.lost) == 2)
    assert "engine engine sent a message that cannot be read here (both are of Manta" in caplog.text
    await ends.sender.connect(address)
    await ends.check(address)
    ends.close(address)


@async_test
async def test_the_oldest_stranger_is_dropped_and_engines_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_channel, "MAX_UNPROVEN", 4)

    ends = Ends()
    address = await ends.receiver.start()
    strangers = [await asyncio.open_connection(address.host, address.port) for _ in range(12)]
    for reader, _ in strangers[:8]:
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    await ends.sender.connect(address)
    await ends.check(address)
    ends.close(address)
    for _, writer in strangers:
        writer.close()
    await ends.receiver.close()


@async_test
async def test_one_failed_connect_keeps_later_connections() -> None:
    ends = Ends()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        address = Address("127.0.0.1", port, "secret")

        async def insist() -> None:
            with pytest.raises(OSError, match=r"refused|Connect call failed"):
                await ends.sender.connect(address)
            closed.listen()
            await ends.sender.connect(address)

        async def once() -> None:
            with pytest.raises(OSError, match=r"refused|Connect call failed"):
                await ends.sender.connect(address)

        await asyncio.gather(insist(), once())
        assert address in ends.sender.connections
        ends.close(address)


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ECONNRESET])
@async_test
async def test_any_connection_error_causes_a_new_connection(number: int) -> None:
    ends = Ends()
    address = await ends.receiver.start()
    await ends.sender.connect(address)
    await ends.check(address)
    # What the transport tells where the network fails.
    ends.sender.connections[address].result()._reader.set_exception(OSError(number, os.strerror(number)))
    await until(lambda: ends.lost == [address])
    await ends.sender.connect(address)
    await ends.check(address)
    ends.close(address)


@async_test
async def test_only_a_stream_without_progress_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with local_server() as server:
        body = server.body(prompt=[5, 6], n=2, temperature=1, seed=3, max_tokens=400)
        status, whole = await server.post(**body)
        assert status == 200
        expected = [choice["text"] for choice in json.loads(whole)["choices"]]
        step, runs = server.replica.engine.step, server.ingress._client.runs

        stands = threading.Event()

        def slow() -> list[SequenceOutput]:
            time.sleep(0.002)
            while stands.is_set():
                time.sleep(0.002)
            return step()

        def are_at(attempt: str) -> bool:
            return bool(runs) and all(
                run.connection and name.endswith(attempt) and (stands.is_set() or run._has_output)
                for name, run in runs.items()
            )

        monkeypatch.setattr(server.replica.engine, "step", slow)
        for num_breaks, first_stuck in ((1, None), (3, 2), (3, 1)):  # attempts before `first_stuck` make progress
            reader, writer = await server.connect()
            writer.write(post({**body, "stream": True}))
            text = await reader.readuntil(b"data: ")
            for number, attempt in enumerate(("", "/1", "/2")[:num_breaks]):
                await until(lambda attempt=attempt: are_at(attempt))  # type: ignore[misc]
                if number + 1 == first_stuck:
                    stands.set()
                for opened in list(server.replica._sender.connections.values()):
                    (await opened).close()
            stands.clear()
            text += await asyncio.wait_for(reader.read(-1), PATIENCE_S)
            assert text.endswith(b"0\r\n\r\n"), "the answer is complete"
            is_given_up = b"3 engine processes died while they ran this request" in text
            assert is_given_up == (first_stuck == 1)
            if not is_given_up:
                assert _texts(text) == expected
            writer.close()
            await server.until_idle()
        assert (await server.post(max_tokens=2))[0] == 200


@async_test
async def test_a_death_before_a_request_begins_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_server() as server:
        body = server.body(prompt=[5, 6], max_tokens=8, structured_outputs={"regex": "[a-z]{40}"})
        status, whole = await server.post(**body)
        assert status == 200
        resolve, runs = server.replica.engine.constraints.resolve, server.ingress._client.runs
        held: list[concurrent.futures.Future[Any]] = []

        def hold(spec: Any, client: str = "") -> concurrent.futures.Future[Any]:
            if not runs:  # the ingress asks for the backend before it begins
                return resolve(spec, client)
            held.append(concurrent.futures.Future())
            resolve(spec, client).add_done_callback(lambda done, held=held[-1]: held.set_result(done.result()))
            return concurrent.futures.Future() if len(held) < 4 else held[-1]

        monkeypatch.setattr(server.replica.engine.constraints, "resolve", hold)
        reader, writer = await server.connect()
        writer.write(post({**body, "stream": True}))
        for number in range(3):
            await until(lambda number=number: len(held) > number)  # type: ignore[misc]
            await until(lambda: all(run.connection for run in runs.values()))
            for opened in list(server.replica._sender.connections.values()):
                (await opened).close()
        text = await reader.readuntil(b"0\r\n\r\n")
        assert b"engine processes died" not in text
        assert _texts(text) == [json.loads(whole)["choices"][0]["text"]]
        writer.close()


def _texts(stream: bytes) -> list[str]:
    """Of each choice, out of a stream of events."""
    texts: dict[int, str] = {}
    for line in stream.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return [text for _, text in sorted(texts.items())]


@async_test
async def test_an_engine_calls_exception_becomes_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_server() as server:

        async def failing(*_: object) -> None:
            raise RayTaskError("generate", "Traceback: a file, a line", KeyError("x"))

        monkeypatch.setattr(server.replica, "generate", failing)
        status, body = await server.post(max_tokens=2)
        assert status == 500
        assert json.loads(body)["error"]["message"].startswith("the engine failed: KeyError: 'x'")
        assert "Traceback" not in body.decode()
        await server.until_idle()


@pytest.mark.parametrize(
    "error",
    [ActorDiedError(), ActorUnavailableError("gone", None), EngineFailed("it ended"), asyncio.CancelledError()],
    ids=lambda error: type(error).__name__,
)
@async_test
async def test_a_call_that_reaches_no_engine_is_repeated(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_server() as server:
        generate, num_calls = server.replica.generate, 0

        async def failing_at_first(*arguments: Any) -> RequestResult:
            nonlocal num_calls
            num_calls += 1
            if num_calls < 4:
                raise error
            return await generate(*arguments)

        monkeypatch.setattr(server.replica, "generate", failing_at_first)
        assert (await server.post(max_tokens=2))[0] == 200
        assert num_calls == 4
        await server.until_idle()


def test_a_stuck_engines_request_ends_after_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_run, "OVERDUE_S", 0.2)
    goes_on = threading.Event()

    async def run() -> None:
        async with local_server(request_timeout_s=0.3) as server:
            step = server.replica.engine.step

            def stuck() -> list[SequenceOutput]:
                goes_on.wait()
                return step()

            monkeypatch.setattr(server.replica.engine, "step", stuck)
            for stream in (False, True):
                status, body = await server.post(max_tokens=500, stream=stream)
                assert status == 408
                assert "request_timeout_s" in json.loads(body)["error"]["message"]
            goes_on.set()
            await server.until_idle()

    try:
        asyncio.run(run())
    finally:
        goes_on.set()


@async_test
async def test_a_client_with_many_requests_blocks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_server() as server:
        begun: list[str] = []

        async def generate(request: EngineRequest, _: Address) -> RequestResult:
            begun.append(request.client)
            return RequestResult()

        monkeypatch.setattr(server.replica, "generate", generate)
        client, address = server.ingress._client, Address("127.0.0.1", 1, "")
        requests = [
            EngineRequest(request_id=str(number), prompt_token_ids=[5], params=SamplingParams(), client=name)
            for number, name in enumerate(["a"] * 50 + ["b"])
        ]
        await asyncio.gather(*(client._call(request, address) for request in requests))
        assert len(begun) == 51
        assert begun.index("b") < 5
        assert not client._call_locks


def test_requests_of_restarting_ranks_move_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    are_there = threading.Event()

    async def run() -> None:
        async with local_server() as server:
            expected = json.loads((await server.post(max_tokens=400))[1])["choices"][0]["text"]
            executor, client = device_of(server.replica.engine), server.ingress._client
            execute, num_steps = executor.execute, 0

            def failing_once(step: StepInput) -> None:
                nonlocal num_steps
                num_steps += 1
                if num_steps == 20:
                    raise RuntimeError("a rank died")
                execute(step)

            monkeypatch.setattr(executor, "execute", failing_once)
            monkeypatch.setattr(executor, "rebuild", are_there.wait)
            asking = asyncio.ensure_future(server.post(max_tokens=400))
            await until(lambda: any(run.connection and run.connection.is_away for run in client.runs.values()))
            await asyncio.sleep((HUNG_BEATS + 1) * BEAT_S)  # it lives, and nobody else is there
            assert [name for name in client.runs if "/" in name] == []
            monkeypatch.setattr(client._replicas, "is_any_good", lambda _: True)
            await until(lambda: any(name.endswith("/1") for name in client.runs))
            are_there.set()
            status, body = await asyncio.wait_for(asking, PATIENCE_S)
            assert (status, json.loads(body)["choices"][0]["text"]) == (200, expected)
            await server.until_idle()

    try:
        asyncio.run(run())
    finally:
        are_there.set()


@async_test
async def test_a_link_that_stands_still_loses_nothing() -> None:
    """Nobody else is there to go on, so its frames are waited for."""
    async with local_server() as server:
        expected = json.loads((await server.post(max_tokens=400))[1])["choices"][0]["text"]
        asking = asyncio.ensure_future(server.post(max_tokens=400))
        runs = server.ingress._client.runs
        await until(lambda: any(run.connection for run in runs.values()))
        connection = next(run.connection for run in runs.values())
        assert connection is not None
        connection._writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep((SILENT_BEATS + 3) * BEAT_S)
        assert [name for name in runs if "/" in name] == []
        connection._writer.transport.resume_reading()  # type: ignore[attr-defined]
        status, body = await asyncio.wait_for(asking, PATIENCE_S)
        assert (status, json.loads(body)["choices"][0]["text"]) == (200, expected)
        await server.until_idle()

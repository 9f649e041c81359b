"""The engine's replica without Ray: what crosses the output channel, and what a lost end means."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from manta.cluster.engine.request import ContinuedChoice, EngineRequest, FinishStatus, SequenceOutput, Usage
from manta.cluster.serve.channel.token_channel import Connection, Control, EngineFailed, EngineHello, OutputReceiver
from manta.cluster.serve.engine import burst, engine_replica, step_thread
from manta.cluster.serve.engine.engine_deployment import DeployedEngine
from manta.cluster.serve.engine.engine_replica import EngineReplica
from manta.cluster.serve.routing import replicas as routing_replicas
from manta.cluster.serve.routing.request_router import EngineRouter
from manta.structured.constraint import ConstraintSpec
from manta.structured.grammar_pool.transport import ThreadTransport
from manta.workers.sampling_params import SamplingParams
from tests.checkpoints import checkpoint, reference_greedy
from tests.patience import PATIENCE_S, until
from tests.replicas import Replicas

PROMPT = [5, 9, 17, 30]


class Ingress:
    """The other end of the channel: keeps what arrives, but signs of life and the word that a request was taken."""

    def __init__(self) -> None:
        self.outputs: list[SequenceOutput] = []
        self.num_frames = 0
        self.connection: Connection | None = None
        self._news = asyncio.Event()
        self.receiver = OutputReceiver("127.0.0.1", self._on_outputs, lambda _: None)

    def _on_outputs(self, outputs: list[SequenceOutput], connection: Connection) -> None:
        news = [output for output in outputs if output.token_ids or output.finish is not None]
        self.outputs += news
        self.num_frames += bool(news)
        self.connection = connection
        if self.outputs:
            self._news.set()

    async def first(self) -> Connection:
        await asyncio.wait_for(self._news.wait(), PATIENCE_S)
        assert self.connection is not None
        return self.connection


def request(name: str, num_tokens: int = 400) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return EngineRequest(request_id=name, prompt_token_ids=PROMPT, params=params)


async def until_idle(replica: EngineReplica) -> None:
    """Nothing runs or waits, and every block is free again."""

    def idle() -> bool:
        stats = replica.engine.stats()
        return stats.num_running == stats.num_waiting == 0 and stats.kv_usage == 0

    await until(idle)


@pytest.mark.parametrize("hold_s", [60.0, 0.0])
def test_ends_of_whole_answers_are_batched_under_load(
    hold_s: float, monkeypatch: pytest.MonkeyPatch, new_replica: Replicas
) -> None:
    """Two of 12 run at a time; what is held comes once the last two have places."""
    monkeypatch.setattr(step_thread, "HOLD_S", hold_s)

    async def scenario() -> int:
        replica, ingress = new_replica(max_num_sequences=2), Ingress()
        address = await ingress.receiver.start()
        requests = [msgspec.structs.replace(request(name, 8), reads_whole=True) for name in "abcdefghijkl"]
        results = await replica.generate_group(requests, address)
        assert [result.finish for result in results] == [FinishStatus.FINISHED_LENGTH] * 12
        await until(lambda: sum(len(output.token_ids) for output in ingress.outputs) == 12 * 8)
        await until_idle(replica)
        return ingress.num_frames

    num_frames = asyncio.run(scenario())
    assert num_frames <= 6 if hold_s else num_frames >= 12


def test_a_replicas_start_counts_its_processs_age(monkeypatch: pytest.MonkeyPatch, new_replica: Replicas) -> None:
    """What a start takes decides which requests are held for the next one."""
    began = time.time()
    replica = new_replica()
    assert asyncio.run(replica.start_seconds()) <= time.time() - began
    age_s = time.time() - psutil.Process().create_time()
    assert DeployedEngine.seconds_before() == pytest.approx(age_s, abs=5.0)  # the boot's time is known to a second


@pytest.mark.parametrize("others_serve", [False, True])
def test_an_engine_beside_others_is_ready_when_it_compiles(
    others_serve: bool, monkeypatch: pytest.MonkeyPatch, new_replica: Replicas
) -> None:
    """Streams with constraints may move there at once. An engine that is alone serves others as early as it can."""
    monkeypatch.setattr(engine_replica, "has_siblings", lambda: others_serve)
    assert new_replica().engine.stats().num_constraints_compiled == int(others_serve)


def test_an_engine_beside_others_is_ready_when_it_fills_masks(
    monkeypatch: pytest.MonkeyPatch, new_replica: Replicas
) -> None:
    """Grammar workers in other processes take seconds to start."""
    monkeypatch.setattr(engine_replica, "has_siblings", lambda: True)
    looks = list[bool]()

    def starts_late(_: object) -> bool:
        looks.append(True)
        return len(looks) > 20

    monkeypatch.setattr(ThreadTransport, "is_ready", starts_late)
    new_replica()
    assert len(looks) > 20


def test_held_results_are_sent_before_shutdown(monkeypatch: pytest.MonkeyPatch, new_replica: Replicas) -> None:
    monkeypatch.setattr(step_thread, "HOLD_S", 60.0)

    async def scenario() -> None:
        replica, ingress = new_replica(max_num_sequences=1), Ingress()
        address = await ingress.receiver.start()
        short, long = (
            msgspec.structs.replace(request(name, n), reads_whole=True) for name, n in (("a", 2), ("b", 400))
        )
        first = asyncio.ensure_future(replica.generate(short, address))
        others = [msgspec.structs.replace(long, request_id=name) for name in "bc"]
        rest = asyncio.ensure_future(replica.generate_group(others, address))
        await until(lambda: bool(replica._thread._held.results))
        assert not first.done()

        def fail() -> None:
            raise ValueError("a bug")

        replica._thread._inbox.put(fail)
        assert (await first).finish is FinishStatus.FINISHED_LENGTH
        with pytest.raises(EngineFailed, match="a bug"):
            await rest
        await ingress.first()
        assert sum(len(output.token_ids) for output in ingress.outputs if output.request_id == "a") == 2

    asyncio.run(scenario())


def test_tokens_use_the_channel_results_the_call(new_replica: Replicas) -> None:
    async def scenario() -> None:
        replica, ingress = new_replica(), Ingress()
        address = await ingress.receiver.start()
        results = await asyncio.gather(*(replica.generate(request(name, 24), address) for name in "ab"))
        await until(lambda: sum(output.finish is not None for output in ingress.outputs) == 2)
        expected = reference_greedy(checkpoint("llama"), PROMPT, 24)
        for name, result in zip("ab", results, strict=True):
            deltas = [output for output in ingress.outputs if output.request_id == name]
            assert [token for delta in deltas for token in delta.token_ids] == expected
            assert result.finish is FinishStatus.FINISHED_LENGTH
            assert result.usage is not None
            assert result.usage.num_output_tokens == 24

    asyncio.run(scenario())


def test_an_engine_tells_what_a_continued_request_waited_for(new_replica: Replicas) -> None:
    """Its first tokens say so. Other outputs say nothing."""
    choice = ContinuedChoice(0, reference_greedy(checkpoint("llama"), PROMPT, 4), Usage(len(PROMPT), 4, 0))
    moved = msgspec.structs.replace(request("moved", 8), continued=[choice])

    async def scenario() -> None:
        replica, ingress = new_replica(max_num_sequences=1), Ingress()
        address = await ingress.receiver.start()
        running = asyncio.ensure_future(replica.generate(request("new"), address))
        await ingress.first()
        began = time.monotonic()
        await replica.generate(moved, address)
        seconds = time.monotonic() - began
        await running
        await until(lambda: sum(output.finish is not None for output in ingress.outputs) == 2)
        first, *others = sorted(ingress.outputs, key=lambda output: output.waits is None)
        assert first.request_id == "moved"
        assert [output.waits for output in others] == [None] * len(others)
        assert first.waits is not None
        waited = msgspec.structs.astuple(first.waits)
        assert min(waited) >= 0
        assert sum(waited) <= seconds
        assert first.waits.queue_s == max(waited), "it waited for the only place"

    asyncio.run(scenario())


def test_a_constraints_time_counts_against_its_request(monkeypatch, new_replica: Replicas) -> None:
    async def scenario() -> None:
        replica, ingress = new_replica(), Ingress()
        address = await ingress.receiver.start()
        resolve = replica.engine.constraints.resolve

        def slow(*arguments):
            time.sleep(0.3)
            return resolve(*arguments)

        monkeypatch.setattr(replica.engine.constraints, "resolve", slow)
        asked = request("late")
        params = msgspec.structs.replace(asked.params, constraint=ConstraintSpec(kind="regex", text="[a-z]{500}"))
        result = await replica.generate(msgspec.structs.replace(asked, params=params, deadline_s=0.25), address)
        assert result.finish is FinishStatus.FINISHED_ABORTED
        assert result.usage is not None
        assert result.usage.num_output_tokens == 0

    asyncio.run(scenario())


def test_an_engine_that_requests_wait_for_makes_what_constraints_need_later(monkeypatch, new_replica: Replicas) -> None:
    """When the first one comes, or when nothing runs at a check of its health after the first request. Serve checks it
    before that one has come, and a start of the compiler would hold it up.
    """

    async def scenario() -> None:
        replica, ingress = new_replica(is_awaited=True), Ingress()
        address = await ingress.receiver.start()
        for _ in range(3):
            await replica.check_health()
        assert not replica.engine.stats().constraints.num_compilers
        step, may_go = replica.engine.step, threading.Event()
        monkeypatch.setattr(replica.engine, "step", lambda: (may_go.wait(PATIENCE_S), step())[1])
        running = asyncio.ensure_future(replica.generate(request("plain", 3), address))
        await until(lambda: replica.engine.has_unfinished)
        await replica.check_health()
        may_go.set()
        assert not replica.engine.stats().constraints.num_compilers
        assert (await running).finish is FinishStatus.FINISHED_LENGTH
        await replica.check_health()
        assert replica.engine.stats().constraints.num_compilers
        unasked = new_replica(is_awaited=True)
        for _ in range(2 + engine_replica.QUIET_CHECKS):
            await unasked.check_health()
        assert unasked.engine.stats().constraints.num_compilers, "its client has left"
        other = new_replica(is_awaited=True)
        spec = ConstraintSpec(kind="regex", text="[a-z]{3}")
        asked = request("constrained", 3)
        asked = msgspec.structs.replace(asked, params=msgspec.structs.replace(asked.params, constraint=spec))
        assert (await other.generate(asked, address)).finish is not FinishStatus.FINISHED_ABORTED

    asyncio.run(scenario())


def test_a_burst_is_prefilled_together(monkeypatch, new_replica: Replicas) -> None:
    """The first request of a burst wakes the engine; those that follow while it waits share its first step."""
    monkeypatch.setattr(burst, "LIMIT_S", 5.0)

    class Burst(burst.Burst):
        def __init__(self, quiet_seconds: float) -> None:
            super().__init__()
            self.quiet_seconds = quiet_seconds

        def gather(self, inbox: queue.SimpleQueue[Callable[[], None]], step_seconds: float) -> None:
            super().gather(inbox, 5.0)  # the tiny model's steps are not worth it

    async def scenario() -> None:
        replica, ingress = new_replica(), Ingress()
        address = await ingress.receiver.start()
        steps: list[int] = []
        idle = threading.Event()
        step = replica.engine.step

        def watched() -> list[SequenceOutput]:
            was_idle = not replica.engine.has_unfinished
            outputs = step()
            steps.append(len(outputs))
            if was_idle and any(steps):
                idle.set()  # after the first request the thread sleeps next
            return outputs

        monkeypatch.setattr(replica.engine, "step", watched)
        await replica.generate(request("before", 2), address)
        assert await asyncio.to_thread(idle.wait, PATIENCE_S)
        steps.clear()
        replica._thread._burst = Burst(1.0)
        started = time.monotonic()
        await asyncio.gather(*(replica.generate(request(name, 2), address) for name in "abcdefgh"))
        assert steps[:2] == [8, 8]
        assert time.monotonic() - started >= 1.0, "it waited until nothing more came"

    asyncio.run(scenario())


def test_every_kind_of_end_frees_the_request(new_replica: Replicas) -> None:
    async def scenario() -> None:
        replica, ingress = new_replica(), Ingress()
        address = await ingress.receiver.start()

        cancelled = asyncio.ensure_future(replica.generate(request("cancelled"), address))
        connection = await ingress.first()
        cancelled.cancel()
        await until_idle(replica)

        stopped = asyncio.ensure_future(replica.generate(request("stopped"), address))
        await until(lambda: ingress.outputs[-1].request_id == "stopped")
        connection.send(Control("stopped", 0, 1))
        result = await asyncio.wait_for(stopped, PATIENCE_S)
        assert result.finish is FinishStatus.FINISHED_STOPPED
        assert result.usage is not None
        assert result.usage.num_output_tokens == 1
        await until_idle(replica)

        lost = asyncio.ensure_future(replica.generate(request("lost"), address))
        await until(lambda: ingress.outputs[-1].request_id == "lost")
        connection.close()
        with pytest.raises(asyncio.CancelledError):  # an exception would block Ray's event loop for a dead caller
            await asyncio.wait_for(lost, PATIENCE_S)
        await until_idle(replica)
        replica.engine.check_integrity()

    asyncio.run(scenario())


def test_a_dead_step_loop_reports_unhealthy(monkeypatch, new_replica: Replicas) -> None:
    async def scenario() -> None:
        replica, ingress = new_replica(), Ingress()
        address = await ingress.receiver.start()
        await replica.check_health()
        assert (await replica.stats()).alive
        running = asyncio.ensure_future(replica.generate(request("running"), address))
        await ingress.first()

        def broken() -> list[SequenceOutput]:
            raise RuntimeError("the scheduler is broken")

        monkeypatch.setattr(replica.engine, "step", broken)
        for call in (running, replica.generate(request("later"), address)):
            with pytest.raises(RuntimeError, match="the scheduler is broken"):
                await asyncio.wait_for(call, PATIENCE_S)
        with pytest.raises(RuntimeError, match="the scheduler is broken"):
            await replica.check_health()
        assert not (await replica.stats()).alive

    asyncio.run(scenario())


def test_a_connection_without_the_secret_cannot_push_tokens() -> None:
    async def scenario() -> None:
        ingress = Ingress()
        address = await ingress.receiver.start()
        reader, writer = await asyncio.open_connection(address.host, address.port)
        connection = Connection(reader, writer)
        connection.send(EngineHello("guess", "engine"))
        connection.send([SequenceOutput("a", 0, [1])])
        assert await asyncio.wait_for(reader.read(1), PATIENCE_S) == b"", "the ingress hangs up"
        writer.close()
        assert ingress.outputs == []

    asyncio.run(scenario())


def test_the_wait_for_a_burst_is_learned() -> None:
    waits = burst.Burst()
    inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def wake(gathered: int, missed: int) -> float:
        for _ in range(gathered):
            inbox.put(lambda: None)
        waits.gather(inbox, step_seconds=10.0)
        waits.learn(missed)
        waits.learn(5)  # what comes during later steps is no part of it
        return waits.quiet_seconds

    assert [wake(0, 1) for _ in range(4)] == [0.002, 0.004, 0.008, 0.008]  # bursts that come apart
    assert wake(3, 0) == 0.008  # one that does not
    assert [wake(0, 0) for _ in range(4)] == [0.004, 0.002, 0.001, 0.001]  # lone requests


def test_a_failed_routing_choice_is_left_to_serve(caplog: pytest.LogCaptureFixture) -> None:
    """Serve drops a request for which a router raises, and its caller would wait until the deadline."""
    router = EngineRouter.__new__(EngineRouter)
    router._deployment, router._listed, router._by_name = "engine", [], {}
    router._known = routing_replicas.Replicas()
    replicas: list[Any] = [SimpleNamespace(replica_id=None)]  # of which no name can be had
    assert asyncio.run(router.choose_replicas(replicas)) == [replicas]
    assert "no engine could be chosen" in caplog.text

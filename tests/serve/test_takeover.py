"""A stream's way from one engine to another: what begins it, and what is recorded of it.

The ingress's client and the channel are the real ones, in one event loop. Engines are scripted, and `Handle` does what
Serve's router does. A broken connection, a word of the engine, or a failed call begins a takeover by itself: all pauses
of those cases last an hour.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import msgspec
import pytest
from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentID, ReplicaID

from manta.cluster.engine.request import EngineRequest, FinishStatus, SequenceOutput, Usage, Waits
from manta.cluster.errors import Unavailable
from manta.cluster.http.exchange.engines import GenerationRequest
from manta.cluster.http.exchange.metrics import TAKEOVER_PHASES, Metrics
from manta.cluster.serve.channel.token_channel import (
    Address,
    Control,
    EngineHello,
    Frame,
    RequestResult,
    Run,
    request_format,
)
from manta.cluster.serve.requests.engine_client import EngineClient
from manta.cluster.serve.requests.run_watch import REMOVAL_POLL_S
from manta.cluster.serve.requests.submission import Submission
from manta.cluster.serve.requests.takeover import Takeover, TakeoverTimes
from manta.cluster.serve.routing.replicas import ChosenReplica, Replicas, known_replicas
from manta.cluster.serve.routing.request_router import UnaryReplica
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.constraint import ConstraintSpec
from manta.structured.frames import frame, receive_frame
from manta.workers.sampling_params import SamplingParams
from tests.async_tests import async_test
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S, until
from tests.telemetry.captured_log import events, request_log

NEVER = TakeoverTimes(look_s=3600.0, retry_s=3600.0, most_retry_s=3600.0)
LOOKING = TakeoverTimes(look_s=0.05, retry_s=3600.0, most_retry_s=3600.0)
BEAT_S = 0.01
"""Seconds between two heartbeats of a scripted engine."""


class Engine:
    """An engine that sends what a test says."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self.asked: list[EngineRequest] = []
        self.is_silent = False
        self.is_cut_off = False
        self._world = world
        self._writer: asyncio.StreamWriter | None = None

    async def generate(self, request: EngineRequest, address: Address) -> RequestResult:
        self._world.call()
        if self._world.num_frozen:
            self._world.num_frozen -= 1
            self.is_silent = True
            return await asyncio.Future()
        await self.connect(address)
        self._take(request)
        return await asyncio.Future()  # it is cancelled with the call

    async def hold(self, chosen: ChosenReplica, address: Address) -> None:
        assert chosen.name == self.name

    def _take(self, request: EngineRequest) -> None:
        self.asked.append(request)
        self._world.order.append(self)
        self._send(Frame([SequenceOutput(request.request_id, 0, [])]))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Takes requests that come over the channel."""
        decoder = msgspec.msgpack.Decoder(Control | Run)
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                message = decoder.decode(await receive_frame(reader, 2**20))
                if isinstance(message, Run):
                    try:
                        self._world.call()
                    except ActorDiedError:
                        self.die()
                        return
                    self._take(message.request)

    async def resolve(self, spec: ConstraintSpec, client: str) -> tuple[ConstraintSpec, list[str]]:
        self._world.call()
        await asyncio.sleep(self._world.answer_s)
        return spec, [self.name]

    async def connect(self, address: Address) -> None:
        if self.is_cut_off:
            raise OSError("no route to host")
        if self._writer is None:
            reader, self._writer = await asyncio.open_connection(address.host, address.port)
            hello = EngineHello(address.secret, self.name)
            if self._world.uses_channel:
                hello.request_format = request_format()
                self._reading = asyncio.ensure_future(self._read(reader))
            self._send(hello)

    def _send(self, message: object) -> None:
        assert self._writer is not None
        self._writer.write(frame(msgspec.msgpack.encode(message)))

    def draw(self, token_id: int, finish: FinishStatus | None = None, waits: Waits | None = None) -> None:
        """Sends a token of the last request."""
        usage = None if finish is None else Usage(2, 2, 0)
        name = self.asked[-1].request_id
        self._send(Frame([SequenceOutput(name, 0, [token_id], finish=finish, usage=usage, waits=waits)]))

    def beat(self) -> None:
        if self._writer is not None and not self.is_silent:
            self._send(Frame([]))

    def die(self) -> None:
        """Ends the connection, as the system does when the process dies. Ray has not noticed yet."""
        assert self._writer is not None
        self._writer.close()
        self._writer = None

    def go_away(self) -> None:
        """Says that it restarts its ranks."""
        self._send(Frame([], is_away=True))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Handle:
    """Serve's handle: it calls the engine that the router chooses."""

    def __init__(self, world: World, application: str) -> None:
        self.app_name = application
        self._world = world

    @property
    def generate(self) -> Method:
        return Method(self._generate)

    @property
    def hold(self) -> Method:
        return Method(lambda chosen, address: self._world.engines[chosen.name].hold(chosen, address))

    @property
    def resolve(self) -> Method:
        return Method(lambda *arguments: self._world.engines[self._world.known.pick("engine")].resolve(*arguments))

    def broadcast(self, method: str, *arguments: Any) -> Broadcast:
        asked = self._world.engines.values() if method == "connect" else ()
        return Broadcast([engine.connect(*arguments) for engine in asked])

    def _generate(self, request: EngineRequest, address: Address) -> Coroutine[Any, Any, RequestResult]:
        self._world.num_serve_calls += 1
        replica, (placed,) = self._world.known.place([request], "engine", 0)
        return self._world.engines[replica].generate(placed, address)


class Method:
    def __init__(self, call: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._call = call

    def remote(self, *arguments: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self._call(*arguments))


class Broadcast:
    """A call of all engines, which answer no other questions than that to connect."""

    def __init__(self, calls: list[Coroutine[Any, Any, None]]) -> None:
        self._calls = calls

    async def results_async(self, timeout_s: float) -> None:
        for failure in await asyncio.gather(*self._calls, return_exceptions=True):
            if failure is not None:
                raise failure

    def results(self, timeout_s: float, return_exceptions: bool) -> list[Any]:
        return []


class World:
    """Two engines, and one stream before them. If it `uses_channel`, requests come over the channel."""

    def __init__(
        self,
        application: str,
        times: TakeoverTimes,
        is_removed: Callable[[], Awaitable[bool]] | None = None,
        uses_channel: bool = False,
    ) -> None:
        self.uses_channel = uses_channel
        self.num_serve_calls = 0
        """Requests that came through Serve."""
        self.known: Replicas = known_replicas(application)
        self.known.block_sizes["engine"] = 0
        self.engines = {name: Engine(name, self) for name in ("first", "second")}
        self.known.set_running("engine", self.engines)
        self.num_failures = 0
        """Calls that are still to reach no engine."""
        self.num_frozen = 0
        """Requests whose engine is still to freeze before it acknowledges them."""
        self.num_calls = 0
        self.answer_s = 0.0
        """Seconds that an engine takes to answer a question."""
        self.order: list[Engine] = []
        """The engine of each request that reached one."""
        self.metrics = Metrics("m")
        ends = {} if is_removed is None else {"is_removed": is_removed}
        self.client = EngineClient(
            Handle(self, application), Tokenizer(checkpoint("llama")), "127.0.0.1", self.metrics, times=times, **ends
        )

    def call(self) -> None:
        """Counts a call, which may reach no engine."""
        self.num_calls += 1
        if self.num_failures:
            self.num_failures -= 1
            raise ActorDiedError

    async def asked(self, num_requests: int = 1) -> Engine:
        """Returns the engine of the last request, once so many have reached one."""
        await until(lambda: len(self.order) == num_requests)
        return self.order[-1]

    @contextlib.asynccontextmanager
    async def submitted(self) -> AsyncIterator[Submission]:
        """A stream of two tokens."""
        beating = asyncio.ensure_future(self._beat())
        if self.uses_channel:
            await self.client.until_greeted()
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        asked = EngineRequest(request_id="stream-0123abcd", prompt_token_ids=[], params=params, deadline_s=PATIENCE_S)
        submission = await self.client.submit(GenerationRequest(prompts=[[5, 6]], engine=asked))
        try:
            yield submission
        finally:
            submission.close()
            beating.cancel()
            for each in self.engines.values():
                each.close()
            await self.client.close()

    async def stream(self, lose: Callable[[World, Engine], None] | None) -> list[int]:
        """Returns the tokens of a stream whose engine is lost after the first one, or before it without `lose`."""
        found: list[int] = []
        async with self.submitted() as submission:
            arriving = aiter(submission)
            if lose is not None:
                engine = await self.asked()
                engine.draw(7)
                found += (await anext(arriving)).token_ids
                lose(self, engine)
            other = await self.asked(1 if lose is None else 2)
            if lose is None:
                other.draw(7)
                found += (await anext(arriving)).token_ids
            else:
                assert other.asked[0].continued is not None
                assert [each.token_ids for each in other.asked[0].continued] == [[7]]
            other.draw(8, FinishStatus.FINISHED_LENGTH)
            async for event in arriving:
                found += event.token_ids
        return found

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            for engine in self.engines.values():
                engine.beat()

    def num_takeovers(self) -> dict[str, float]:
        """Returns the number of takeovers that `/metrics` shows, by phase."""
        samples = (sample for family in self.metrics.own() for sample in family.samples)
        return {
            sample.labels["phase"]: sample.value for sample in samples if sample.name == "manta:takeover_seconds_count"
        }


def fall_silent(world: World, engine: Engine) -> None:
    engine.is_silent = True


def tell_to_end(world: World, engine: Engine) -> None:
    """Does what Serve does in an update."""
    world.known.set_running("engine", world.engines.keys() - {engine.name})


LOSSES: dict[str, tuple[Callable[[World, Engine], None] | None, TakeoverTimes]] = {
    "connection": (lambda world, engine: engine.die(), NEVER),
    "away": (lambda world, engine: engine.go_away(), NEVER),
    "unreached": (None, NEVER),
    "silent": (fall_silent, LOOKING),
    "ending": (tell_to_end, LOOKING),
}
"""Maps each recorded cause to how the engine is lost, and to the times of the ingress."""


@pytest.mark.parametrize("uses_channel", [False, True])
@pytest.mark.parametrize("cause", LOSSES)
@async_test
async def test_a_lost_engine_is_left_for_another_one(cause: str, uses_channel: bool) -> None:
    lose, times = LOSSES[cause]
    with request_log() as lines:
        world = World(f"takeover {cause} {uses_channel}", times, uses_channel=uses_channel)
        world.num_failures = int(lose is None)
        assert await world.stream(lose) == [7, 8]
    if uses_channel:  # Serve finds the other one, or the same one, if an engine is not connected
        assert world.num_serve_calls == (cause in ("connection", "unreached"))
    assert world.num_takeovers() == dict.fromkeys(TAKEOVER_PHASES, 1)
    (continued,), (resumed,) = events(lines, "continued"), events(lines, "resumed")
    assert continued["cause"] == resumed["cause"] == cause
    assert (resumed["request_id"], resumed["calls"]) == ("stream", 1)
    assert all(resumed[f"{phase}_s"] >= 0 for phase in TAKEOVER_PHASES)


@async_test
async def test_a_request_leaves_an_engine_that_freezes_before_it_acknowledges() -> None:
    """The engine's process lives and its connections are open."""
    with request_log() as lines:
        world = World("takeover frozen", LOOKING)
        world.num_frozen = 1
        assert await world.stream(None) == [7, 8]
    assert [each["cause"] for each in events(lines, "continued")] == ["silent"]


@pytest.mark.parametrize("waits", [None, Waits(0.0625, 0.125, 0.03125)])
def test_the_phases_of_a_pause_add_up_to_it(waits: Waits | None) -> None:
    """What an engine tells of its own part, by its own clock, fills no more than that part."""
    now = time.monotonic()
    takeover = Takeover("connection", heard=now - 4.0, noticed=now - 3.0, taken=now - 1.0)
    seconds = takeover.seconds(waits)
    assert tuple(seconds) == TAKEOVER_PHASES
    assert sum(seconds.values()) == pytest.approx(time.monotonic() - takeover.heard, abs=0.5)
    assert (seconds["notice"], seconds["place"]) == pytest.approx((1.0, 2.0))
    told = (0.0, 0.0) if waits is None else (waits.prepare_s, waits.queue_s)
    assert (seconds["prepare"], seconds["queue"]) == told
    assert seconds["compute" if waits is None else "deliver"] > 0.7
    takeover.taken = time.monotonic()
    assert sum(takeover.seconds(waits).values()) < 4.5, "the engine had begun before the ingress heard of it"


@async_test
async def test_calls_that_reach_nobody_again_and_again_are_not_repeated_at_once() -> None:
    """The second one waits for its pause, so that a failing cluster is not flooded."""
    world = World("takeover in vain", NEVER)
    world.num_failures = 100
    async with world.submitted():
        await until(lambda: world.num_calls == 2)
        await asyncio.sleep(0.05)
        assert world.num_calls == 2


@async_test
async def test_another_engine_answers_what_a_dying_one_was_asked() -> None:
    """A request with a constraint asks an engine before it begins."""
    spec = ConstraintSpec(kind="regex", text="a")
    world = World("takeover question", TakeoverTimes(retry_s=0.001))
    world.num_failures = 2
    resolved, (name,) = await world.client.resolve(spec)
    assert (resolved, world.num_calls) == (spec, 3)
    assert name in world.engines
    world.num_failures = 100
    with pytest.raises(Unavailable):
        await world.client.resolve(spec)
    await world.client.close()


@async_test
async def test_requests_end_with_their_application_and_questions_wait_while_it_lives() -> None:
    async def is_removed() -> bool:
        return True

    world = World("takeover ended", LOOKING, is_removed)
    world.answer_s = 1.2 * REMOVAL_POLL_S
    _, (name,) = await world.client.resolve(ConstraintSpec(kind="regex", text="a"))
    assert name in world.engines
    world.known.set_running("engine", [])
    async with world.submitted() as submission:
        with pytest.raises(Unavailable, match="the application was ended"):
            await anext(aiter(submission))


@async_test
async def test_an_engine_that_cannot_connect_is_counted_and_asked_again() -> None:
    """An ingress that knows nothing of its cache would route by load alone, and nobody would notice."""
    world = World("takeover unconnected", NEVER)

    def num_unconnected() -> float:
        samples = (sample for family in world.metrics.own() for sample in family.samples)
        (found,) = (sample.value for sample in samples if sample.name == "manta:engines_unconnected")
        return found

    cut_off = world.engines["second"]
    cut_off.is_cut_off = True
    assert num_unconnected() == 0, "no engine has had time to connect"
    await world.client.until_greeted()
    await until(lambda: num_unconnected() == 1)
    await world.client.until_greeted()
    assert num_unconnected() == 1
    cut_off.is_cut_off = False
    await world.client.until_greeted()
    await until(lambda: num_unconnected() == 0)
    for engine in world.engines.values():
        engine.close()
    await world.client.close()


class Actor:
    """An engine's actor, as Serve's router asks it."""

    def __init__(self) -> None:
        self.get_num_ongoing_requests = self

    def remote(self) -> asyncio.Future[int]:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        answer.set_result(3)
        return answer


@async_test
async def test_serve_asks_no_connected_engine_for_its_queue() -> None:
    identity = ReplicaID("abc", DeploymentID(name="engine", app_name="takeover queue"))
    known, actor = known_replicas("takeover queue"), Actor()
    fields: dict[str, Any] = {"replica_id": identity, "multiplexed_model_ids": [], "is_cross_language": False}
    info: Any = types.SimpleNamespace(**fields, get_actor_handle=lambda: actor)
    replica, name = UnaryReplica(info), identity.to_full_id_str()

    async def length() -> int:
        return await replica.get_queue_len(deadline_s=1.0)

    assert await length() == 3
    known.connected(name)
    known.connected(name)  # before the end of the earlier connection is noticed
    known.disconnected(name)
    assert await length() == 0
    known.disconnected(name)
    assert await length() == 3

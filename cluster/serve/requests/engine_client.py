"""The engines as one ingress calls them, and the channel that carries their tokens.

Requests of a lost engine continue on another one (`prompt_run.py`): if its connection breaks, or if `run_watch.py`
finds it silent or told to end. Implements `manta.cluster.http.exchange.engines.Engines`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
from ray.exceptions import RayActorError

from manta.cluster.config import EngineConfig
from manta.cluster.engine.pooling_request import PoolingRequest, PoolingResult
from manta.cluster.engine.request import EngineRequest, SequenceOutput
from manta.cluster.engine.stats import STANDBY, EngineStats
from manta.cluster.errors import ServingError, Unavailable, error_of
from manta.cluster.http.exchange.engines import UNMETERED, GenerationRequest, Meter
from manta.cluster.http.exchange.metrics import Metrics, RequestMetrics
from manta.cluster.serve.adapters.adapter_directory import AdapterDirectory
from manta.cluster.serve.channel.keeping import FromKeeper
from manta.cluster.serve.channel.token_channel import (
    Address,
    Connection,
    Control,
    OutputReceiver,
    RequestResult,
)
from manta.cluster.serve.requests.channel_calls import ChannelCalls
from manta.cluster.serve.requests.pooling_calls import MAX_ATTEMPTS, lost_again_and_again, pool
from manta.cluster.serve.requests.prompt_run import Call, PromptRun
from manta.cluster.serve.requests.run_watch import REMOVAL_POLL_S, RunWatch, gone
from manta.cluster.serve.requests.submission import Submission
from manta.cluster.serve.requests.takeover import USUAL_TIMES, TakeoverTimes
from manta.cluster.serve.requests.turn_budget import TurnBudget
from manta.cluster.serve.routing import replicas
from manta.cluster.serve.routing.replicas import ChosenReplica
from manta.cluster.serve.routing.reports import Report
from manta.cluster.serve.scaling.waking import Waker
from manta.cluster.serve.starting.start_failure import in_words
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.constraint import ConstraintSpec
from manta.structured.refusals import Refusal
from manta.structured.visible_logs import logger_of
from manta.workers.model_info import ModelInfo

logger = logger_of(__name__)

ENGINE = "engine"
"""Name of the deployment of all engines but the standbys."""

ANSWER_TIMEOUT_S = 3.0
"""Longest time, in seconds, that replicas get to answer with their statistics; all are asked at once."""
ADAPTER_TIMEOUT_S = 300.0
"""Longest time, in seconds, that engines get to read an adapter from a slow disk."""
MOVED_A_TURN = 16
"""Calls of streams that pause which start in a turn of the event loop; each takes half a millisecond."""


async def _never() -> bool:
    """Returns False, for engines that outlive their client."""
    return False


async def answer_of(call: Any) -> Any:
    """Returns the result of a call through a handle, and cancels the call when the caller is cancelled.

    Raises `ConnectionError` if the replica has cancelled the call, because its connection to this process broke.
    """
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            call.cancel()
            raise
        raise ConnectionError("the engine has lost its connection to this process") from None


class EngineQuestions:
    """The handles of the engines and of those that serve while no other engine can. Up to `max_held` requests wait for
    an engine to start if none runs. `is_removed` finds out whether the engines are gone for good; then no request
    waits.
    """

    def __init__(
        self,
        engine: Any,
        standby: Any,
        max_held: int,
        is_removed: Callable[[], Awaitable[bool]],
        times: TakeoverTimes,
    ) -> None:
        self.times = times
        self._handles = {ENGINE: engine} if standby is None else {ENGINE: engine, STANDBY: standby}
        self.application = str(getattr(engine, "app_name", ""))
        """Name of the application with the engines; empty for a stand-in that calls replicas in its own process."""
        self._replicas = replicas.known_replicas(self.application)
        self._is_removed = is_removed
        self._waker = Waker(self.is_asleep, lambda: self.serving.start_seconds.remote(), max_held)

    @property
    def num_engine_nodes(self) -> int:
        """Number of nodes that run engines, as far as Serve has told."""
        return len(frozenset().union(*self._replicas.nodes.values()))

    @property
    def replicas_running(self) -> frozenset[str]:
        """Names of the engine replicas that run, as far as Serve has told."""
        return frozenset().union(*self._replicas.running.values())

    @property
    def num_unconnected(self) -> int:
        """Number of running engines without a connection to this process while others have one. Nothing is known of
        their caches. Engines that pool connect to nobody.
        """
        running = self.replicas_running
        num_connected = sum(map(self._replicas.is_connected, running))
        return len(running) - num_connected if num_connected else 0

    def is_asleep(self) -> bool:
        """Returns whether Serve has said that no engine runs."""
        return ENGINE in self._replicas.running and not any(self._replicas.running.values())

    @property
    def serving(self) -> Any:
        """The handle of the deployment that serves now."""
        return self._handles[self.serving_name]

    @property
    def serving_name(self) -> str:
        """Name of that deployment."""
        known = self._replicas
        needs_standby = ENGINE in known.running and not known.is_any_good(ENGINE) and known.is_any_good(STANDBY)
        return STANDBY if needs_standby else ENGINE

    @property
    def num_held(self) -> int:
        """Requests that wait here for an engine to start."""
        return self._waker.num_held

    def hold_at_most(self, max_held: int) -> None:
        """Changes the number of requests that may wait here for an engine to start."""
        self._waker.hold_at_most(max_held)

    def is_any_good(self) -> bool:
        """Returns whether some replica can take requests."""
        return any(map(self._replicas.is_any_good, self._handles))

    async def are_gone(self) -> bool:
        """Returns whether no engine runs and none will. Serve itself would let calls wait for the engines that it has
        ended.
        """
        if not self.is_asleep():
            return False
        try:
            return await self._is_removed()
        except Exception as error:  # the controller may be restarting, and Ray raises many types
            logger.info("Serve does not say whether the application is to end: %s", in_words(error))
            return False

    async def resolve(self, spec: ConstraintSpec, client: str = "") -> tuple[ConstraintSpec, list[str]]:
        """Returns the constraint with its backend, and the keywords that the backend does not enforce.

        Raises `RequestRefused` if no backend can enforce the constraint, and `QueueFull` if too many constraints wait.
        """
        try:
            return await self._answer(lambda: self.serving.resolve.remote(spec, client))
        except ServingError as error:  # Ray raises a copy whose text is a whole traceback
            raise error_of(error.refusal) from error

    async def model(self) -> ModelInfo:
        return await self._answer(lambda: self.serving.model.remote())

    async def _answer(self, ask: Callable[[], Any]) -> Any:
        """Returns an engine's answer to a call that any engine can answer. If an engine is lost meanwhile, another one
        is asked. Raises `Unavailable` if the engines are gone for good, or if several were lost in a row.
        """
        for attempt in range(MAX_ATTEMPTS):
            try:
                return await self._one_answer(ask())
            except (RayActorError, ConnectionError) as error:
                logger.warning("an engine was lost while it was asked: %s", in_words(error))
            await asyncio.sleep(self.times.retry_s * 2**attempt)  # until Serve's router knows that it is dead
        raise lost_again_and_again()

    async def _one_answer(self, response: Any) -> Any:
        """Returns the answer to one call. Raises `Unavailable` if the engines are gone for good."""
        call = asyncio.ensure_future(answer_of(response))
        try:
            while not (await asyncio.wait([call], timeout=REMOVAL_POLL_S))[0]:
                if await self.are_gone():
                    raise gone()
            return call.result()
        finally:
            call.cancel()

    async def stats(self) -> list[EngineStats]:
        """Returns the statistics of every replica that answers; an empty list if Serve runs none.

        Raises `Unavailable` if replicas run and none answers.
        """
        if self.is_asleep():
            return []
        found = await self._ask_all("stats")
        stats = [each for each in found if isinstance(each, EngineStats)]
        if not stats:
            reasons = sorted({type(error).__name__ for error in found})
            cause = f"no engine answers: {', '.join(reasons) or 'there is none'}"
            raise Unavailable(Refusal("unavailable", cause=cause))
        starts = [sum(each.service.start_seconds.values()) for each in stats if each.service is not None]
        if starts:
            self._waker.measured(max(starts))
        return stats

    async def drop_kept(self, hashes: list[bytes]) -> None:
        if not self.is_asleep():
            await self._ask_all("drop_kept", hashes)

    async def read_adapter(self, path: str, wakes: bool) -> list[Any]:
        """Makes every replica read the adapter in a folder. If none runs, it waits for one to start if it `wakes`.
        Returns for each the `LoadedAdapter`, the `Refusal`, or the exception.
        """
        if self.is_asleep():
            if not wakes:
                return []
            await self._waker.wait(ADAPTER_TIMEOUT_S, "")
        return await self._ask_all("read_adapter", path, timeout_s=ADAPTER_TIMEOUT_S)

    async def uses_adapter(self, digest: str) -> bool:
        """Returns whether a request of a living engine has the adapter with these values. One that does not answer in
        time may have such a request.
        """
        if self.is_asleep():
            return False
        answers = await self._ask_all("uses_adapter", digest)
        return any(each is True or isinstance(each, TimeoutError) for each in answers)

    async def _ask_all(self, method: str, *arguments: object, timeout_s: float = ANSWER_TIMEOUT_S) -> list[Any]:
        """Returns the answers or exceptions of all replicas."""
        asked = (self._answers(handle.broadcast(method, *arguments), timeout_s) for handle in self._handles.values())
        return list(itertools.chain.from_iterable(await asyncio.gather(*asked)))

    async def _answers(self, answers: Any, timeout_s: float) -> list[Any]:
        try:  # in a thread, because awaiting would turn one silent replica into an error of all
            return await asyncio.to_thread(answers.results, timeout_s=timeout_s, return_exceptions=True)
        except Exception as error:
            return [error]


class Keepers(Protocol):
    """The part of an ingress that talks to the keepers of recordings. `Copies` implements it."""

    def connected(self, connection: Connection) -> None: ...

    def lost(self, connection: Connection) -> None: ...

    def receive(self, message: FromKeeper, connection: Connection) -> None: ...


class EngineClient(EngineQuestions):
    """Sends requests to engines. Owns the output channel of one ingress, and knows which run waits for which request.

    `engine` and `standby` are handles; see `EngineQuestions`, also for `max_held` and `is_removed`. `host` is the
    address at which engines reach this machine.
    """

    def __init__(
        self,
        engine: Any,
        tokenizer: Tokenizer,
        host: str,
        metrics: Metrics,
        standby: Any = None,
        max_held: int = EngineConfig().max_num_waiting,
        is_removed: Callable[[], Awaitable[bool]] = _never,
        times: TakeoverTimes = USUAL_TIMES,
    ) -> None:
        super().__init__(engine, standby, max_held, is_removed, times)
        self.tokenizer = tokenizer
        self.metrics = metrics
        metrics.engines_unconnected.set_function(lambda: self.num_unconnected)
        self.runs: dict[str, PromptRun] = {}
        self.suspects = asyncio.Lock()
        self.loaded_adapters: AdapterDirectory | None = None
        """The adapters that operators load; None if the configuration lets nobody load any. Its owner sets it."""
        self.keepers: Keepers | None = None
        """Those who talk to the keepers in the engines' processes, over the same connections; None for nobody."""
        self._greeting: asyncio.Task[None] | None = None
        self._measuring: asyncio.Task[None] | None = None
        """Asks engines that were greeted how long their starts took."""
        self._greeted: dict[str, frozenset[str]] = {}
        """Replicas that were told of this ingress, by deployment."""
        self.over_channel = ChannelCalls(self._replicas, self._hold)
        self._receiver = OutputReceiver(
            host,
            self._on_outputs,
            self._on_lost,
            self._on_report,
            self._on_kept,
            self._on_connected,
            self.over_channel.returned,
        )
        self._ending: set[asyncio.Task[None]] = set()
        self._call_locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        """Locks of clients whose calls are being started."""
        self._moving = TurnBudget(MOVED_A_TURN)
        """Calls of streams that pause. One a turn would take seconds, because turns are long when many streams move."""
        self._watch = RunWatch(self.runs, self, self._replicas, times.look_s, self._greet_new)

    async def submit(self, request: GenerationRequest, meter: Meter = UNMETERED) -> Submission:
        return Submission(self, request, meter)

    def measure(self, num_choices: int) -> RequestMetrics:
        return RequestMetrics(self.metrics, num_choices)

    async def pool(self, request: PoolingRequest) -> PoolingResult:
        return await pool(self, self._replicas, request, self.times)

    async def pool_once(self, request: PoolingRequest) -> PoolingResult:
        return await answer_of(self.serving.pool.remote(request))

    async def until_awake(self, deadline_s: float, client: str) -> float:
        return deadline_s if not self.is_asleep() else await self._waker.wait(deadline_s, client)

    async def check_reachable(self) -> None:
        if self.loaded_adapters is not None:
            await self.loaded_adapters.follow()
        await self._listen()
        needs_greeting = self._greeting is None or self.num_unconnected > 0
        self._greet_new(needs_greeting)

    async def until_greeted(self) -> None:
        """Waits until every replica that answers has connected."""
        await self.check_reachable()
        if self._greeting is not None:
            await asyncio.shield(self._greeting)

    async def close(self) -> None:
        """Closes the connections to the engines, after the calls of ended requests have returned. For a process that
        goes on.
        """
        if self._ending:
            await asyncio.wait(self._ending)
        await self._waker.close()
        await self._receiver.close()

    def _greet_new(self, needs_greeting: bool = False) -> None:
        """Greets the replicas if there are new ones or with `needs_greeting`, unless a greeting is under way."""
        is_free = self._greeting is None or self._greeting.done()
        if is_free and (needs_greeting or self._greeted != self._replicas.running):
            self._greeting = asyncio.ensure_future(self._greet())

    async def _greet(self) -> None:
        """Makes every replica connect, so that it reports its cache. Serve names a deployment's replicas only after a
        call to the deployment.
        """
        try:
            address = await self._listen()
        except Unavailable:
            return  # the next request meets it again
        greeted = dict(self._replicas.running)
        for name, handle in self._handles.items():
            try:
                await handle.broadcast("connect", address).results_async(timeout_s=ANSWER_TIMEOUT_S)
            except Exception as error:  # whatever it is, their first request meets it again
                logger.info("not every %s answers: %s", name, in_words(error))
        self._greeted = greeted
        if self._measuring is None or self._measuring.done():
            self._measuring = asyncio.ensure_future(self._measure_starts())

    async def _measure_starts(self) -> None:
        """Learns how long a start takes, for requests that wait for one."""
        with contextlib.suppress(ServingError):  # no engine runs yet
            await self.stats()

    async def _listen(self) -> Address:
        """Returns the address to which engines send tokens.

        Raises `Unavailable` if this ingress cannot listen for them just now.
        """
        try:
            return await self._receiver.start()
        except OSError as error:
            cause = f"the ingress cannot listen for engines: {in_words(error)}"
            raise Unavailable(Refusal("unavailable", cause=cause, remedy="retry")) from error

    def call(self, run: PromptRun, request: EngineRequest, pause_s: float) -> Call:
        # Each call runs in a context of its own. Serve identifies an HTTP request by its context: it would treat calls
        # of one request as retries of one call, and forget all but one of those that wait for a replica.
        return asyncio.get_running_loop().create_task(run.call(request, pause_s), context=contextvars.Context())

    async def generate(self, request: EngineRequest) -> RequestResult:
        """Runs a request by one call that stays open until it ends: over the channel, or through Serve, which asks
        `EngineRouter` for the replica.

        Raises `Unavailable` if no engine is available in time.
        """
        address, left_s = await self._ready(request)
        return await self._call(msgspec.structs.replace(request, deadline_s=left_s), address)

    async def _ready(self, request: EngineRequest) -> tuple[Address, float]:
        """Waits for an engine. Returns the address for the request's tokens and the seconds left of its deadline."""
        address = await self._listen()
        assert request.deadline_s is not None
        self._watch.begin()
        if not self.is_asleep():
            return address, request.deadline_s
        return address, await self._waker.wait(request.deadline_s, request.client, is_new=request.continued is None)

    async def _call(self, request: EngineRequest, address: Address) -> RequestResult:
        # Each client starts one call per turn of the event loop: 1,000 started at once would block it for half a second
        if request.continued is None:
            async with self._call_locks.setdefault(request.client, asyncio.Lock()):
                await asyncio.sleep(0)
        else:
            await self._moving.take(request.client)
        result = await self.over_channel.generate(request, self.serving_name)
        return await answer_of(self.serving.generate.remote(request, address)) if result is None else result

    async def _hold(self, chosen: ChosenReplica) -> None:
        running = self._replicas.running.items()
        deployment = next((name for name, replicas in running if chosen.name in replicas), None)
        if deployment is None:
            raise LookupError(f"{chosen.name} runs no more")
        address = await self._receiver.start()
        await answer_of(self._handles[deployment].hold.remote(chosen, address))

    def cancel_later(self, call: Any) -> None:
        self._ending.add(call)
        call.add_done_callback(self._ending.discard)
        call.add_done_callback(lambda task: task.cancelled() or task.exception())
        asyncio.get_running_loop().call_later(1.0, call.cancel)

    # ---- who is there --------------------------------------------------------------------------------------------

    def replica_sent_to(self, request_id: str) -> str | None:
        return self._replicas.routed.get(request_id)

    def forget_sent(self, request_id: str) -> None:
        self._replicas.routed.pop(request_id, None)

    def cannot_reach(self, request_id: str) -> bool:
        replica = self.replica_sent_to(request_id)
        if replica is None:
            return False
        self._replicas.avoid(replica)
        return self.is_any_good()

    def note_output(self, request_id: str) -> None:
        self._replicas.placement.has_output(request_id)

    def note_end(self, request_id: str) -> None:
        self._replicas.placement.end(request_id)

    def _on_outputs(self, outputs: list[SequenceOutput], connection: Connection) -> None:
        has_gone_away = connection.is_away and self._replicas.is_good(connection.replica)
        self._replicas.hear(connection.replica, connection.is_away)
        for output in outputs:
            run = self.runs.get(output.request_id)
            if run is not None:
                run.receive(output, connection)
            elif output.finish is None and not self.over_channel.is_open(output.request_id):
                connection.send(Control(output.request_id))  # it was given up before an engine had it
        if has_gone_away:
            self._watch.move()

    def _on_report(self, report: Report, connection: Connection) -> None:
        self._replicas.placement.report(connection.replica, report)

    def _on_kept(self, message: FromKeeper, connection: Connection) -> None:
        if self.keepers is not None:
            self.keepers.receive(message, connection)

    def _on_connected(self, connection: Connection) -> None:
        self._replicas.connected(connection.replica)
        self.over_channel.connected(connection)
        if self.keepers is not None:
            self.keepers.connected(connection)

    def _on_lost(self, connection: Connection) -> None:
        if self.keepers is not None:
            self.keepers.lost(connection)
        self._replicas.disconnected(connection.replica)
        self._replicas.avoid(connection.replica)
        self._replicas.placement.lose(connection.replica)
        for run in list(self.runs.values()):
            if run.connection is connection:
                run.lose("connection")
        self.over_channel.lost(connection)

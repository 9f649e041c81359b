"""The engine as a Serve deployment: asyncio methods answer remote calls, and one thread runs the engine's steps.

The event loop and the step thread share one inbox. Requests, stop strings and aborts enter it and are taken between two
steps. After each step, every ingress with new output gets one frame over `cluster/serve/streams/token_channel.py`. A
`generate` call stays open until the last choice of its request ends, so that Serve's request counts, routing, draining
and cancellation are right.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from manta.cluster.config import AutoscalingOptions, EngineConfig
from manta.cluster.engine.ranks.claims import TPU, gpu_environment, gpus_each, own_cpus, tpus_each
from manta.cluster.engine.request import EngineRequest, SequenceOutput, Usage
from manta.cluster.engine.stats import EngineStats, ServiceStats
from manta.cluster.errors import QueueFull, RequestRefused
from manta.cluster.serve.routing.replicas import own_name, own_node
from manta.cluster.serve.routing.reports import CacheReporter
from manta.cluster.serve.routing.request_router import EngineRouter
from manta.cluster.serve.scaling.autoscaling import autoscaling_config
from manta.cluster.serve.scaling.meter import LoadMeter
from manta.cluster.serve.starting.replica_process import REPLICA_ENVIRONMENT, ReplicaProcess
from manta.cluster.serve.starting.start_failure import told_in_words
from manta.cluster.serve.streams.burst import Burst
from manta.cluster.serve.streams.gathering import Gathering
from manta.cluster.serve.streams.keeper import Keeper
from manta.cluster.serve.streams.packed import Packed
from manta.cluster.serve.streams.token_channel import (
    BEAT_S,
    Address,
    Control,
    EngineFailed,
    OutputSender,
    RequestResult,
)
from manta.cluster.telemetry.engine_watch import EngineWatch
from manta.structured.constraint import ConstraintSpec, Resolved
from manta.workers.model_info import ModelInfo
from manta.workers.phases import Phases

logger = logging.getLogger(__name__)


HOLD_S = 0.1
"""Longest time, in seconds, for which outputs of requests that are read whole are held back while other requests wait
for admission. Waking an ingress for each output costs it more than a step spends on that output.
"""

IMPORTS, ENGINE, WARM_UP, FIRST_HEALTH = "imports", "engine", "warm_up", "first_health"
"""Phases of a start, in this order:

- importing torch and the engine,
- building the engine (such as starting ranks), apart from loading the model, whose phases `ModelInfo` names,
- the warm-up, which compiles,
- the wait for Serve's first health check.

The phase `process` (Python and Ray's worker) precedes them.
"""


class _Call:
    """One `generate_group` call, which ends with the last of its requests. Only the event loop changes it."""

    def __init__(self, requests: list[EngineRequest], address: Address) -> None:
        self.address = address
        self.open = dict(enumerate(requests))
        """Requests without a result, by their index in the call."""
        self.results = [RequestResult()] * len(requests)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.arrived = time.monotonic()
        self.arrived_ns = time.time_ns()
        """Time of arrival, in nanoseconds since 1970."""


class _Running(msgspec.Struct):
    """A request that the engine has, and the call that waits for its result."""

    request: EngineRequest
    call: _Call
    place: int
    """Index in the call."""
    num_open: int
    """Choices that have not ended."""
    usages: list[Usage] = []
    """Usage of each choice that has ended."""
    gathering: Gathering | None = None
    """Holds back the output of a request that is read whole; None for a stream."""


class _News(msgspec.Struct):
    """Outputs and results of steps that the event loop has not been told of."""

    frames: dict[Address, list[SequenceOutput]] = {}
    results: list[tuple[_Running, RequestResult]] = []
    """Results of requests that have ended or were refused."""
    since: float | None = None
    """Time of the oldest output here, on `time.monotonic`'s clock; None if there is none."""


class EngineReplica:
    """One model replica. Its constructor loads the model, so Serve counts the replica as ready only when it can serve.

    With `is_alone` there is no other replica to choose, so ingresses are not told which blocks the prefix cache holds.
    """

    def __init__(self, config: EngineConfig, is_alone: bool = False) -> None:
        with told_in_words():
            self._start(config, is_alone)

    @staticmethod
    def seconds_before() -> float:
        """Returns the seconds that this replica's process ran before the constructor; 0 if the process is shared."""
        return 0.0

    def _start(self, config: EngineConfig, is_alone: bool) -> None:
        self._phases = Phases(process=self.seconds_before())
        from manta.cluster.engine.engine import (
            Engine,  # a process that only deploys this class needs none of these imports
        )

        self._phases.end(IMPORTS)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.engine = Engine(config, has_messages=lambda: not self._inbox.empty())
        self._phases.end(ENGINE)
        self._phases.split(ENGINE, self.engine.model.load_phases)
        self._meter = LoadMeter()
        self._running: dict[str, _Running] = {}
        """Running requests by id. Only the step thread reads and changes it."""
        self._held = _News()
        """Outputs and results of requests that are read whole, held back for up to `HOLD_S`."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._node = ray.util.get_node_ip_address()
        blocks = self.engine.scheduler.blocks
        self._reporter = CacheReporter(lambda: blocks.num_free * blocks.block_size)
        if not is_alone:
            blocks.on_change = self._reporter.note
        self._sender = OutputSender(
            own_name(),
            own_node(),
            self._on_control,
            self._on_lost_ingress,
            self._reporter.take,
            is_away=lambda: self.engine.is_rebuilding,
            on_keep=lambda address, message: self._keeper.receive(address, message),
        )
        self._keeper = Keeper(self._sender.send_kept)
        self._calls: set[_Call] = set()
        """Calls of `generate` and `generate_group` that have not returned. Only the event loop uses it."""
        self._beating: asyncio.Task[None] | None = None
        self._failure: str | None = None
        self._step_seconds = 0.0
        """Seconds that the last step with work took."""
        self._burst = Burst()
        self._watch = EngineWatch(own_name())
        self._is_open = True
        self._thread = threading.Thread(target=self._step_loop, name="engine", daemon=True)
        self._thread.start()
        try:
            self.engine.warm_up()
        except RequestRefused as error:  # a model without a tokenizer.json serves everything else
            logger.warning("%s", error)
        self._phases.end(WARM_UP)

    def close(self) -> None:
        """Ends the step loop, even while requests run, and the grammar service's processes. Serve ends the process
        instead.
        """

        def end() -> None:
            self._is_open = False

        self._inbox.put(end)
        self._thread.join()
        self.engine.constraints.close()

    # ---- remote calls --------------------------------------------------------------------------------------------

    async def generate(self, request: EngineRequest, address: Address) -> RequestResult:
        """Runs a request to its end and returns its result; its outputs go to `address`. An empty first output
        acknowledges the request at once, and another one says that its constraint is compiled and its run begins.
        Cancelling the call aborts the request. Raises `EngineFailed` if the engine has failed or fails meanwhile.
        """
        (result,) = await self.generate_group([request], address)
        return result

    async def generate_group(self, requests: list[EngineRequest], address: Address) -> list[RequestResult]:
        """Runs several requests as `generate` does, and returns when the last one has ended or was refused. One call
        for many requests is cheaper, because a call costs more than everything else that is done for a request.
        """
        self._loop = asyncio.get_running_loop()
        if self._failure is not None:
            raise EngineFailed(self._failure)
        await self._sender.connect(address)
        self._sender.send(address, [_acknowledgement(request) for request in requests])
        call = _Call(requests, address)
        self._calls.add(call)
        if self._beating is None:
            self._beating = asyncio.ensure_future(self._beat())
        try:
            return await self._results_of(call)
        finally:
            self._calls.discard(call)

    async def _beat(self) -> None:
        """Sends heartbeats while a call is open, and until the ingresses know that the engine has rebuilt its ranks."""
        is_away = False
        while self._calls or is_away:
            await asyncio.sleep(BEAT_S)
            is_away = self.engine.is_rebuilding
            self._sender.beat()
        self._beating = None

    async def _results_of(self, call: _Call) -> list[RequestResult]:
        """Adds a call's requests to the engine and returns their results. Requests with a constraint each get a task,
        because the constraint may have to be compiled.
        """
        plain: list[_Running] = []
        constrained: list[_Running] = []
        for place, request in call.open.items():
            self._reporter.begin(call.address, request)
            running = _Running(request, call, place, len(request.continued or ()) or request.params.n)
            if request.reads_whole:
                running.gathering = Gathering()
            (plain if request.params.constraint is None else constrained).append(running)
        if plain:
            self._inbox.put(lambda: self._add_all(plain))
        try:
            await asyncio.gather(call.ended, *map(self._add_resolved, constrained))
            return Packed(RequestResult, call.results)
        finally:
            while call.open:
                _, request = call.open.popitem()
                self._inbox.put(functools.partial(self._abort, request.request_id))
                self._reporter.end(call.address, request)

    async def _add_resolved(self, running: _Running) -> None:
        spec = running.request.params.constraint
        assert spec is not None
        try:
            constraint = await asyncio.wrap_future(self.engine.resolve(spec, running.request.client))
        except RequestRefused as error:
            self._end(running, RequestResult(refused=str(error), param=error.param))
        except QueueFull as error:
            self._end(running, self._full(error))
        else:
            self._sender.send(running.call.address, [_acknowledgement(running.request)])
            self._inbox.put(lambda: self._add(running, constraint))

    def _end(self, running: _Running, result: RequestResult) -> None:
        call = running.call
        request = call.open.pop(running.place, None)
        if request is None:  # the call is over
            return
        self._reporter.end(call.address, request)
        call.results[running.place] = result
        if not call.open and not call.ended.done():
            call.ended.set_result(None)

    async def connect(self, address: Address) -> None:
        """Tells an ingress of this engine's cache and load before it sends the first request."""
        self._loop = asyncio.get_running_loop()
        await self._sender.connect(address)
        self._sender.send(address, [])

    async def resolve(self, spec: ConstraintSpec, client: str = "") -> tuple[ConstraintSpec, list[str]]:
        """Returns the constraint with its backend, and the keywords that the backend does not enforce. Raises
        `RequestRefused` and `QueueFull`.
        """
        resolved = await asyncio.wrap_future(self.engine.resolve(spec, client))
        return resolved.spec, resolved.not_enforced

    async def model(self) -> ModelInfo:
        return self.engine.model

    async def stats(self) -> EngineStats:
        service = ServiceStats(
            replica=own_name(),
            node=self._node,
            start_seconds=self._phases.seconds,
            waiting_tokens=self._meter.waiting_tokens,
            ttft_s=self._meter.ttft_s,
            requests_per_s=self._meter.requests_per_s,
        )
        stats = msgspec.structs.replace(self.engine.stats(), service=service)
        return stats if self._failure is None else msgspec.structs.replace(stats, alive=False)

    async def start_seconds(self) -> float:
        """Returns the seconds from the start of the process to the first health check."""
        return sum(self._phases.seconds.values())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the load that `cluster/serve/scaling/decision.py` reads. Serve calls it."""
        stats = self.engine.stats()
        return {
            "num_sequences": stats.num_running + stats.num_waiting,
            "kv_usage": stats.kv_usage,
            "waiting_tokens": self._meter.waiting_tokens,
            "ttft_s": self._meter.ttft_s,
        }

    async def check_health(self) -> None:
        """Raises `RuntimeError` if the engine has failed; Serve calls it, and then replaces the replica."""
        if self._failure is not None:
            raise RuntimeError(self._failure)
        if FIRST_HEALTH not in self._phases.seconds:
            self._phases.end(FIRST_HEALTH)
            print(start_line(self._phases.seconds), flush=True)
        if self.engine.config.num_ranks > 1:
            self._inbox.put(self.engine.check_ranks)

    def _on_control(self, control: Control) -> None:
        if control.index is None:
            self._inbox.put(lambda: self._abort(control.request_id))
        else:
            self._inbox.put(lambda: self._finish(control))

    def _on_lost_ingress(self, address: Address) -> None:
        """Cancels the calls of an ingress whose connection broke, which aborts their requests.

        A living ingress calls again at once. Otherwise a request that arrived just before the break would wait in vain
        for frames that were sent into the broken connection.
        """
        self._reporter.forget(address)
        self._keeper.lose(address)
        for call in self._calls:
            if call.address == address:
                call.ended.cancel()

    # ---- the step thread -----------------------------------------------------------------------------------------

    def _step_loop(self) -> None:
        try:
            while True:
                self._take_inbox()
                if not self._is_open:
                    return
                idle = not self.engine.has_unfinished
                started, begun_ns = time.monotonic(), time.time_ns()
                outputs = self.engine.step()  # without work it checks that no block has leaked
                self._watch.stepped(begun_ns, outputs, self.engine.scheduler)
                self._deliver(outputs)
                if idle:
                    self._inbox.get()()  # blocks until a message arrives
                    self._burst.gather(self._inbox, self._step_seconds)
                else:
                    self._step_seconds = time.monotonic() - started
                    self._burst.learn(self._inbox.qsize())
        except Exception as error:  # the engine failed twice, or has a bug: a half-working engine must not go on
            logger.exception("the step loop ended")
            self._die(f"the step loop ended: {type(error).__name__}: {error}")

    def _take_inbox(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()()

    def _add_all(self, plain: list[_Running]) -> None:
        for running in plain:
            self._add(running, None)

    def _add(self, running: _Running, constraint: Resolved | None) -> None:
        if self._failure is not None:
            self._fail([running])
            return
        if running.place not in running.call.open:  # the call ended while the constraint was resolved
            return
        request = _with_time_left(running.request, running.call.arrived)
        try:
            # A request that an engine admitted before is not refused for a full queue.
            self.engine.add_request(request, constraint, queue_is_bounded=request.continued is None)
        except RequestRefused as error:
            self._tell(_News(results=[(running, RequestResult(refused=str(error), param=error.param))]))
        except QueueFull as error:
            self._tell(_News(results=[(running, self._full(error))]))
        else:
            self._running[request.request_id] = running
            self._watch.added(request, running.call.arrived_ns)
            self._meter.arrived(request.request_id, len(request.prompt_token_ids))

    def _full(self, error: QueueFull) -> RequestResult:
        return RequestResult(queue_full=str(error), retry_after_s=self._meter.retry_after_s(self.engine.num_waiting))

    def _finish(self, control: Control) -> None:
        assert control.index is not None
        self._end_choices(self.engine.finish(control.request_id, control.index, control.num_kept_tokens))

    def _abort(self, request_id: str) -> None:
        self._end_choices(self.engine.abort(request_id))

    def _end_choices(self, ended: list[SequenceOutput]) -> None:
        news = _News()
        for output in ended:
            self._note_end(output, news)
        self._tell(news)
        self._tell_held()

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        """Sends one frame to each ingress with new output, then the results of the requests that ended."""
        now, news = time.monotonic(), _News()
        for output in outputs:
            running = self._running[output.request_id]
            if output.token_ids:
                self._meter.has_first_token(output.request_id)
            if running.gathering is None:
                news.frames.setdefault(running.call.address, []).append(output)
            elif running.gathering.add(output):
                self._held.frames.setdefault(running.call.address, []).append(output)
                self._held.since = self._held.since or now
        for output in outputs:
            if output.finish is not None:
                self._note_end(output, news)
        self._tell(news)
        if self._held.since is not None and (now >= self._held.since + HOLD_S or not self.engine.num_waiting):
            self._tell_held()

    def _note_end(self, output: SequenceOutput, news: _News) -> None:
        """Records the end of one choice. With the last choice the request gets its result, in `news` or, if it is read
        whole, in `_held`.
        """
        running = self._running.get(output.request_id)
        if running is None:
            return
        running.num_open -= 1
        usage = output.usage
        assert usage is not None
        running.usages.append(usage)
        self._watch.choice_ended(output)
        if not running.num_open:
            del self._running[output.request_id]
            self._meter.ended(output.request_id)
            usage = Usage.of_choices(usage.num_prompt_tokens, running.usages)
            self._watch.ended(output.request_id, output, usage)
            news = news if running.gathering is None else self._held
            news.results.append((running, RequestResult(finish=output.finish, usage=usage)))

    def _tell_held(self) -> None:
        self._tell(self._held)
        self._held = _News()

    def _tell(self, news: _News) -> None:
        """Hands outputs and results to the event loop in one call, because each wake-up of the loop costs a system
        call.
        """
        if news.frames or news.results:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._send, news)

    def _send(self, news: _News) -> None:
        for address, outputs in news.frames.items():
            self._reporter.note_outputs(address, outputs)
            self._sender.send(address, outputs)
        for running, result in news.results:
            self._end(running, result)

    def _fail(self, lost: list[_Running]) -> None:
        def set_exceptions() -> None:
            for running in lost:
                if not running.call.ended.done():
                    running.call.ended.set_exception(EngineFailed(self._failure))

        if lost:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(set_exceptions)

    def _die(self, reason: str) -> None:
        """Fails every open and later call with `reason`. Serve's health check then replaces this replica."""
        self._failure = reason
        self._tell_held()
        self._fail(list(self._running.values()))
        self._running.clear()
        while self._is_open:
            with contextlib.suppress(Exception):  # the engine's own state may be broken
                self._inbox.get()()


class DeployedEngine(ReplicaProcess, EngineReplica):
    """The class that Serve deploys."""


def start_line(seconds: dict[str, float]) -> str:
    """Returns a line for the log: how long the start and each of its phases took."""
    parts = ", ".join(f"{name} {each:.2f}" for name, each in seconds.items())
    return f"the engine started in {sum(seconds.values()):.2f} s: {parts}"


def _acknowledgement(request: EngineRequest) -> SequenceOutput:
    return SequenceOutput(request.request_id, 0, [])


def _with_time_left(request: EngineRequest, arrived: float) -> EngineRequest:
    """Returns the request with the time that is left of its deadline, which counts from the arrival of its call."""
    if request.deadline_s is None:
        return request
    left_s = max(0.0, request.deadline_s - (time.monotonic() - arrived))
    return msgspec.structs.replace(request, deadline_s=left_s)


def engine_deployment(
    config: EngineConfig,
    num_replicas: int,
    name: str = "engine",
    autoscaling: AutoscalingOptions | None = None,
    is_alone: bool = False,
) -> Any:
    """Returns the Serve deployment of the engines; bind it with the configuration, which must hold `num_threads`, and
    with `is_alone`. `is_alone` says that there is never more than one replica. With `autoscaling` the number of
    replicas follows the load.
    """
    return serve.deployment(
        DeployedEngine,
        name=name,
        num_replicas=num_replicas if autoscaling is None else None,
        autoscaling_config=None if autoscaling is None else autoscaling_config(autoscaling, config),
        # The engine's own queue limit refuses requests (429), so Serve must not hold any back before.
        max_ongoing_requests=config.max_num_sequences + config.max_num_waiting + 1024,
        health_check_period_s=1,  # Serve notices a dead replica within this time and starts another one
        health_check_timeout_s=5,  # a hung replica fails three checks in a row and is replaced after 18 s
        request_router_config=RequestRouterConfig(
            request_router_class=EngineRouter,  # type: ignore[arg-type]
            request_router_kwargs={
                "deployment": name,
                "block_size": config.block_size if config.enable_prefix_caching and not is_alone else 0,
            },
        ),
        ray_actor_options={
            "num_cpus": own_cpus(config),
            "num_gpus": gpus_each(config) if config.num_ranks == 1 else 0,
            "resources": {TPU: tpus_each(config)} if config.num_ranks == 1 and tpus_each(config) else {},
            "runtime_env": {
                "env_vars": {
                    **REPLICA_ENVIRONMENT,
                    **gpu_environment(config),
                    # torch reads both variables when it loads OpenMP. Ray gives an actor one thread unless told
                    # otherwise.
                    "OMP_NUM_THREADS": str(config.num_threads),
                    # torch's threads would spin long after each operation and keep the kernels' threads from the cores.
                    "GOMP_SPINCOUNT": "1000",
                }
            },
        },
    )

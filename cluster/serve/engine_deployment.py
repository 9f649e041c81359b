"""The engine as a Serve deployment: asyncio methods for remote calls, and a thread in which the engine alone steps.

The event loop and the step loop share nothing but an inbox: requests, stop strings and aborts go in between two steps;
deltas come out once a step and ingress over `cluster/serve/streams/token_channel.py`. One `generate` call stays open as
long as its request runs, to the end of the last of its choices, so that Serve's counts, routing, draining and
cancellation mean what they say.
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

from cluster.config import AutoscalingOptions, EngineConfig
from cluster.engine.ranks.claims import TPU, gpu_environment, gpus_each, own_cpus, tpus_each
from cluster.engine.request import EngineRequest, SequenceOutput, Usage
from cluster.engine.stats import EngineStats, ServiceStats
from cluster.errors import QueueFull, RequestRefused
from cluster.serve.routing.replicas import own_name
from cluster.serve.routing.reports import CacheReporter
from cluster.serve.routing.request_router import EngineRouter
from cluster.serve.scaling.autoscaling import autoscaling_config
from cluster.serve.scaling.meter import LoadMeter
from cluster.serve.starting.replica_process import REPLICA_ENVIRONMENT, ReplicaProcess
from cluster.serve.starting.start_failure import told_in_words
from cluster.serve.streams.burst import Burst
from cluster.serve.streams.gathering import Gathering
from cluster.serve.streams.packed import Packed
from cluster.serve.streams.token_channel import BEAT_S, Address, Control, EngineFailed, OutputSender, RequestResult
from cluster.telemetry.engine_watch import EngineWatch
from structured.constraint import ConstraintSpec, Resolved
from workers.model_info import ModelInfo
from workers.phases import Phases

logger = logging.getLogger(__name__)


HOLD_S = 0.1
"""News of requests that nobody reads before their end wait so long for others like them, while more requests wait for a
place: each time an ingress is woken costs it more than what a step has for it.
"""

IMPORTS, ENGINE, WARM_UP, FIRST_HEALTH = "imports", "engine", "warm_up", "first_health"
"""Phases of a start, after `process` (Python and Ray's worker) and beside those of `ModelInfo`: torch; of the engine
what loading the model is not, such as the start of ranks; compilers; until Serve knows.
"""


class _Call:
    """One of `generate_group`, which ends with the last of its requests. Only the event loop changes it."""

    def __init__(self, requests: list[EngineRequest], address: Address) -> None:
        self.address = address
        self.open = dict(enumerate(requests))
        """Requests without a result, by their place."""
        self.results = [RequestResult()] * len(requests)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.arrived = time.monotonic()
        self.arrived_ns = time.time_ns()
        """Since 1970."""


class _Running(msgspec.Struct):
    request: EngineRequest
    call: _Call
    place: int
    """In the call."""
    num_open: int
    """Choices that have not ended."""
    usages: list[Usage] = []
    """Of the choices that have ended."""
    gathering: Gathering | None = None
    """Of a request whose output nobody reads before its end."""


class _News(msgspec.Struct):
    """What steps brought, until the event loop is told."""

    frames: dict[Address, list[SequenceOutput]] = {}
    results: list[tuple[_Running, RequestResult]] = []
    """Of requests that have ended or never ran."""
    since: float | None = None
    """When the first of it came; None if there is nothing."""


class EngineReplica:
    """One model replica. Its constructor loads the model, so that Serve calls it ready when it is.

    If `is_alone`, ingresses have no other one to choose, and are not told which blocks its prefix cache has.
    """

    def __init__(self, config: EngineConfig, is_alone: bool = False) -> None:
        with told_in_words():
            self._start(config, is_alone)

    @staticmethod
    def seconds_before() -> float:
        """Returns how long the process has been there for this replica alone: not at all, if it shares it."""
        return 0.0

    def _start(self, config: EngineConfig, is_alone: bool) -> None:
        self._phases = Phases(process=self.seconds_before())
        from cluster.engine.engine import Engine  # whoever only deploys this class needs none of what it imports

        self._phases.end(IMPORTS)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.engine = Engine(config, has_messages=lambda: not self._inbox.empty())
        self._phases.end(ENGINE)
        self._phases.split(ENGINE, self.engine.model.load_phases)
        self._meter = LoadMeter()
        self._running: dict[str, _Running] = {}
        """Read and changed by the step thread only."""
        self._held = _News()
        """Of requests that are read whole."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._node = ray.util.get_node_ip_address()
        blocks = self.engine.scheduler.blocks
        self._reporter = CacheReporter(lambda: blocks.num_free * blocks.block_size)
        if not is_alone:
            blocks.on_change = self._reporter.note
        self._sender = OutputSender(
            own_name(),
            self._on_control,
            self._on_lost_ingress,
            self._reporter.take,
            is_away=lambda: self.engine.is_rebuilding,
        )
        self._calls: set[_Call] = set()
        """Calls of `generate` and `generate_group` that have not returned. Used in the event loop only."""
        self._beating: asyncio.Task[None] | None = None
        self._failure: str | None = None
        self._step_seconds = 0.0
        """What the last step with work took."""
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
        """Ends the step loop, whatever runs, and the grammar service's processes. Serve ends the process instead."""

        def end() -> None:
            self._is_open = False

        self._inbox.put(end)
        self._thread.join()
        self.engine.constraints.close()

    # ---- remote calls --------------------------------------------------------------------------------------------

    async def generate(self, request: EngineRequest, address: Address) -> RequestResult:
        """Runs a request to its end; its deltas go to `address`, the first of them, which holds nothing, at once.
        Cancelling the call aborts the request. Raises `EngineFailed` where the engine has ended, or ends over it.
        """
        (result,) = await self.generate_group([request], address)
        return result

    async def generate_group(self, requests: list[EngineRequest], address: Address) -> list[RequestResult]:
        """As `generate`, to the end of the last one: also what is refused is known then. For whoever has many requests,
        for a call costs more than all else that is done for one.
        """
        self._loop = asyncio.get_running_loop()
        if self._failure is not None:
            raise EngineFailed(self._failure)
        await self._sender.connect(address)
        self._sender.send(address, [SequenceOutput(request.request_id, 0, []) for request in requests])
        call = _Call(requests, address)
        self._calls.add(call)
        if self._beating is None:
            self._beating = asyncio.ensure_future(self._beat())
        try:
            return await self._results_of(call)
        finally:
            self._calls.discard(call)

    async def _beat(self) -> None:
        """Signs of life while something runs, and until it is told that ranks which were lost are back."""
        is_away = False
        while self._calls or is_away:
            await asyncio.sleep(BEAT_S)
            is_away = self.engine.is_rebuilding
            self._sender.beat()
        self._beating = None

    async def _results_of(self, call: _Call) -> list[RequestResult]:
        """Only requests with a constraint, which may have to be compiled, have a task."""
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
        """The constraint with its backend, and the keywords that it does not enforce. Raises `RequestRefused` and
        `QueueFull`.
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
        """That its start took, from its process's first moment."""
        return sum(self._phases.seconds.values())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve; read by `cluster/serve/scaling/decision.py`."""
        stats = self.engine.stats()
        return {
            "num_sequences": stats.num_running + stats.num_waiting,
            "kv_usage": stats.kv_usage,
            "waiting_tokens": self._meter.waiting_tokens,
            "ttft_s": self._meter.ttft_s,
        }

    async def check_health(self) -> None:
        """Called by Serve, which replaces a replica that raises here."""
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
        """Fails the calls of an ingress whose connection broke, which aborts their requests.

        An ingress that lives calls again at once. One whose request came just before the break would wait in vain for
        frames that were sent into the broken connection.
        """
        self._reporter.forget(address)
        for call in self._calls:
            if call.address == address and not call.ended.done():
                call.ended.set_exception(ConnectionError("the connection to the ingress broke"))

    # ---- the step thread -----------------------------------------------------------------------------------------

    def _step_loop(self) -> None:
        try:
            while True:
                self._take_inbox()
                if not self._is_open:
                    return
                idle = not self.engine.has_unfinished
                started, begun_ns = time.monotonic(), time.time_ns()
                outputs = self.engine.step()  # without work it checks that no block is lost
                self._watch.stepped(begun_ns, outputs, self.engine.scheduler)
                self._deliver(outputs)
                if idle:
                    self._inbox.get()()  # sleeps until something comes
                    self._burst.gather(self._inbox, self._step_seconds)
                else:
                    self._step_seconds = time.monotonic() - started
                    self._burst.learn(self._inbox.qsize())
        except Exception as error:  # an engine that failed twice, or a bug: nothing may go on half alive
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
            # One that was admitted once is not refused for a full queue.
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
        """One frame for each ingress with news, then the results of what ended."""
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
        """Of one choice; with the last one the request has a result, for `news` or for what is held."""
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
        """In one turn of the event loop, since to wake it costs a system call."""
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
        """Makes every open call raise, later ones too; then Serve's health check replaces this replica."""
        self._failure = reason
        self._tell_held()
        self._fail(list(self._running.values()))
        self._running.clear()
        while self._is_open:
            with contextlib.suppress(Exception):  # the engine's own state may be what broke
                self._inbox.get()()


class DeployedEngine(ReplicaProcess, EngineReplica):
    """The class that Serve runs."""


def start_line(seconds: dict[str, float]) -> str:
    """How long a start took, and which part of it what."""
    parts = ", ".join(f"{name} {each:.2f}" for name, each in seconds.items())
    return f"the engine started in {sum(seconds.values()):.2f} s: {parts}"


def _with_time_left(request: EngineRequest, arrived: float) -> EngineRequest:
    """Its deadline counts from its arrival: what its constraint and the step under way took is gone."""
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
    """The Serve deployment; bind it with the configuration, which says how many threads the model has, and with
    `is_alone`: there is never more than one replica. With `autoscaling` there are as many replicas as that says.
    """
    return serve.deployment(
        DeployedEngine,
        name=name,
        num_replicas=num_replicas if autoscaling is None else None,
        autoscaling_config=None if autoscaling is None else autoscaling_config(autoscaling, config),
        # The engine's own queue limit refuses (429): Serve must not hold requests back before it sees them.
        max_ongoing_requests=config.max_num_sequences + config.max_num_waiting + 1024,
        health_check_period_s=1,  # Serve learns so of a death, and starts another replica
        health_check_timeout_s=5,  # three times in a row: one that hangs is replaced after 18 s
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
                    # Both are read when torch loads its OpenMP. Ray gives an actor one thread unless told otherwise.
                    "OMP_NUM_THREADS": str(config.num_threads),
                    # torch's threads, which spin for long after each operation, would keep the kernels' from the cores.
                    "GOMP_SPINCOUNT": "1000",
                }
            },
        },
    )

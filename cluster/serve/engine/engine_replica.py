"""One model replica: asyncio methods answer remote calls, and a thread of its own runs the engine's steps.

Everything here runs on the event loop (`step_thread.py` has the thread). After each step, every ingress with new output
gets one frame over the token channel. Requests come over that channel too, once an ingress is connected. A `hold` call
stays open while they run, so that Serve does not end the replica under them.
"""

from __future__ import annotations

import asyncio
import queue
import time
from typing import TYPE_CHECKING

import msgspec
import ray

from manta.cluster.config import EngineConfig
from manta.cluster.engine.adapter_table import LoadedAdapter
from manta.cluster.engine.executors.deadline import STEP_HANGS
from manta.cluster.engine.ranks.siblings import has_siblings
from manta.cluster.engine.request import EngineRequest, SequenceOutput
from manta.cluster.engine.stats import EngineStats
from manta.cluster.errors import Overdue, QueueFull, RequestRefused, refuse
from manta.cluster.serve.adapters import adapter_registry
from manta.cluster.serve.channel.packed import Packed
from manta.cluster.serve.channel.token_channel import (
    BEAT_S,
    Address,
    Control,
    EngineFailed,
    OutputSender,
    RequestResult,
    has_died,
)
from manta.cluster.serve.engine.channel_requests import ChannelRequests
from manta.cluster.serve.engine.meter import LoadMeter
from manta.cluster.serve.engine.step_thread import Inbox, News, Running, StepThread
from manta.cluster.serve.recorded.keeper import Keeper
from manta.cluster.serve.routing.replicas import ChosenReplica, own_application, own_name, own_node
from manta.cluster.serve.routing.reports import CacheReporter
from manta.cluster.serve.starting.start_failure import told_in_words
from manta.structured.constraint import ConstraintSpec, Resolved
from manta.structured.low_priority import call_aside
from manta.structured.refusals import Refusal
from manta.structured.visible_logs import logger_of
from manta.structured.visible_text import say
from manta.workers.adapter_key import keys_of
from manta.workers.model_info import ModelInfo
from manta.workers.phases import Phases
from manta.workers.ranks.rank_worker import ReadAdapter

if TYPE_CHECKING:
    from manta.cluster.serve.engine.replica_adapters import ReplicaAdapters  # it imports torch

logger = logger_of(__name__)

IMPORTS, ENGINE, WARM_UP, FIRST_HEALTH = "imports", "engine", "warm_up", "first_health"
"""Phases of a start, in this order:

- importing torch and the engine,
- building the engine (such as starting ranks), apart from loading the model, whose phases `ModelInfo` names,
- the warm-up, which compiles,
- the wait for Serve's first health check.

The phase `process` (Python and Ray's worker) precedes them.
"""


FIRST_CONSTRAINT = ConstraintSpec(kind="regex", text="a")
"""A constraint that is compiled at once, when the compiler has started."""
CONSTRAINTS_START_S = 30.0
"""Seconds that the compiler of constraints and the grammar workers may take to start before the engine serves without
them.
"""
QUIET_CHECKS = 10
"""Checks of its health, about a second apart, in which an engine that requests wait for prepares no constraints before
its first request. Serve makes the first two within milliseconds, and what begins then would hold that request up.
"""
START_POLL_S = 0.02
"""Seconds between two looks whether a grammar worker has started."""
ROOM_POLL_S = 0.05
"""Seconds between two attempts to hold an adapter while those of running requests leave no room for it."""


class _Call:
    """One `generate_group` call, which ends with the last of its requests."""

    def __init__(self, requests: list[EngineRequest], address: Address) -> None:
        self.address = address
        self.open = dict(enumerate(requests))
        """Requests without a result, by their index in the call."""
        self.results = [RequestResult()] * len(requests)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class EngineReplica:
    """One model replica. Its constructor loads the model, so Serve counts the replica as ready only when it can serve.

    With `is_alone` there is no other replica to choose, so ingresses are not told which blocks the prefix cache holds.
    With `is_awaited` requests wait for the start already. What constraints need is then made when the first constraint
    comes, or when nothing runs after the first request: for a large vocabulary it keeps the interpreter busy for a
    second.
    """

    def __init__(
        self, config: EngineConfig, is_alone: bool = False, seconds_before: float = 0.0, is_awaited: bool = False
    ) -> None:
        """`seconds_before` are those that this replica's process ran before the constructor; 0 if it is shared."""
        with told_in_words():
            self._start(config, is_alone, seconds_before, is_awaited)

    def _start(self, config: EngineConfig, is_alone: bool, seconds_before: float, is_awaited: bool) -> None:
        self._phases = Phases(process=seconds_before)
        if has_siblings():  # which need the cores for the streams that they have, and for those that a dead one had
            call_aside(lambda: _import_engine(config))
        else:
            _import_engine(config)
        from manta.cluster.engine.engine import Engine

        self._phases.end(IMPORTS)
        inbox: Inbox = queue.SimpleQueue()
        self.engine = Engine(config, has_messages=lambda: not inbox.empty())
        self._phases.end(ENGINE)
        self._phases.split(ENGINE, self.engine.model.load_phases)
        self._meter = LoadMeter()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._node = ray.util.get_node_ip_address()
        blocks = self.engine.scheduler.blocks
        self._reporter = CacheReporter(
            lambda: blocks.num_free * blocks.block_size // len(blocks.groups),
            are_borders=blocks.resumes_at_borders,
            held_adapters=lambda: self.engine.adapters.digests,
        )
        if not is_alone:
            blocks.report_to(self._reporter.note)
        self._thread = StepThread(self.engine, inbox, self._meter, own_name(), self._tell)
        self._sender = OutputSender(
            own_name(),
            own_node(),
            self._on_control,
            self._on_lost_ingress,
            self._reporter.take,
            is_away=lambda: self.engine.is_away,
            on_keep=lambda address, message: self._keeper.receive(address, message),
            on_request=lambda address, request: self._from_channel.begin(request, address),
        )
        self._from_channel = ChannelRequests(self._run, self._sender.send)
        self._keeper = Keeper(self._sender.send_kept, has_died=has_died)
        self._adapters: ReplicaAdapters | None = None
        """The adapters that operators load; None if they load none."""
        if config.adapter_roots:
            from manta.cluster.serve.engine.replica_adapters import ReplicaAdapters

            registry = adapter_registry.open_registry(own_application(), config.model)
            self._adapters = ReplicaAdapters(config, self.engine, self._thread, registry)
            self._adapters.start()
        self._turn = asyncio.Lock()
        """Lock of the request that has its adapter read and held."""
        self._lacks_room = False
        """Whether that adapter waits for room."""
        self._calls: set[_Call] = set()
        """Calls of `generate` and `generate_group` that have not returned."""
        self._beating: asyncio.Task[None] | None = None
        self._is_warm = False
        self._num_quiet_checks = QUIET_CHECKS
        """Checks of health that are left until constraints are prepared although no request has come."""
        if not is_awaited:
            self._warm_up(has_siblings())
        self._phases.end(WARM_UP)

    def _warm_up(self, others_serve: bool) -> None:
        """Starts the compiler of constraints and the grammar workers. If `others_serve`, waits until constraints are
        compiled and masks filled, because this engine may get the streams of one that ends, and nobody waits for this
        one.
        """
        self._is_warm = True
        constraints, deadline = self.engine.constraints, time.monotonic() + CONSTRAINTS_START_S
        try:
            self.engine.warm_up()
            if others_serve:
                constraints.resolve(FIRST_CONSTRAINT, "").result(CONSTRAINTS_START_S)
                while not self._thread.call(constraints.can_fill).result():
                    if time.monotonic() > deadline:
                        raise TimeoutError
                    time.sleep(START_POLL_S)
        except RequestRefused as error:  # a model without a tokenizer.json serves everything else
            logger.warning("%s", error)
        except TimeoutError:
            logger.warning("what constraints need has not started within %.0f s", CONSTRAINTS_START_S)

    def close(self) -> None:
        """Ends the step thread, even while requests run, and the grammar service's processes. Serve ends the process
        instead.
        """
        self._thread.close()
        self.engine.constraints.close()
        if self._adapters is not None:
            self._adapters.close()

    # ---- remote calls --------------------------------------------------------------------------------------------

    async def generate(self, request: EngineRequest, address: Address) -> RequestResult:
        """Runs a request to its end and returns its result; its outputs go to `address`. An empty first output
        acknowledges the request at once, and another one says that its constraint is compiled and its run begins.
        Cancelling the call aborts the request. Raises `EngineFailed` if the engine has failed or fails meanwhile.
        """
        (result,) = await self._run([request], address)
        return result

    async def generate_group(self, requests: list[EngineRequest], address: Address) -> list[RequestResult]:
        """Runs several requests as `generate` does, and returns when the last one has ended or was refused. One call
        for many requests is cheaper, because a call costs more than everything else that is done for a request.
        """
        return Packed(RequestResult, await self._run(requests, address))

    async def _run(self, requests: list[EngineRequest], address: Address) -> list[RequestResult]:
        self._loop = asyncio.get_running_loop()
        self._num_quiet_checks = 0
        if self._thread.failure is not None:
            raise EngineFailed(self._thread.failure)
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

    async def hold(self, chosen: ChosenReplica, address: Address) -> None:
        """Returns once no request that came over the channel of an ingress runs here any more. Serve does not end a
        replica that answers a call, before its grace period is over. Raises `LookupError` if the call was for another
        replica, which runs no more.
        """
        if chosen.name != (own_name() or chosen.name):
            raise LookupError(f"{chosen.name} runs no more")
        await self._from_channel.until_none(address)

    def _on_control(self, control: Control) -> None:
        if control.index is not None or not self._from_channel.cancel(control.request_id):
            self._thread.finish(control)

    async def _beat(self) -> None:
        """Sends heartbeats while a call is open, and until the ingresses know that the engine completes steps again."""
        is_away = False
        while self._calls or is_away:
            await asyncio.sleep(BEAT_S)
            is_away = self.engine.is_away
            self._sender.beat()
        self._beating = None

    async def _results_of(self, call: _Call) -> list[RequestResult]:
        """Adds a call's requests to the engine and returns their results. Requests with a constraint or an adapter each
        get a task, because the constraint may have to be compiled, and the adapter to be read.
        """
        plain: list[Running] = []
        waiting: list[Running] = []
        for place, request in call.open.items():
            self._reporter.begin(call.address, request)
            running = Running.of(request, call.address, (call, place))
            is_adapted = bool(request.adapter) and self._adapters is not None
            (waiting if request.params.is_masked or is_adapted else plain).append(running)
        if plain:
            self._thread.add(plain)
        try:
            await asyncio.gather(call.ended, *map(self._prepare, waiting))
            return call.results
        finally:
            while call.open:
                _, request = call.open.popitem()
                self._thread.abort(request.request_id)
                self._reporter.end(call.address, request)

    async def _prepare(self, running: Running) -> None:
        """Adds a request when its constraint is compiled and its adapter is held."""
        call, place = running.key
        try:
            constraint = await self._resolved(running.request)
            if place not in call.open:  # the call ended meanwhile
                return
            if constraint is not None:
                self._sender.send(running.address, [_acknowledgement(running.request)])
            if self._adapters is None or not running.request.adapter:
                self._thread.add([running], constraint)
            else:
                await self._add_adapted(self._adapters, running, constraint)
        except (RequestRefused, QueueFull, Overdue) as error:
            self._end(running, self._thread.refusal(error))

    async def _resolved(self, request: EngineRequest) -> Resolved | None:
        """Returns the request's constraint, compiled; None if it has none."""
        if not request.params.is_masked:
            return None
        prepared = self.engine.constraints.prepare(request.params, request.client)
        assert prepared is not None
        return await asyncio.wrap_future(prepared)

    async def _add_adapted(self, adapters: ReplicaAdapters, running: Running, constraint: Resolved | None) -> None:
        """Adds a request with an adapter, which is read first if the engine does not hold it. Such requests take turns,
        so that one adapter is in memory beside those that are held. While these leave no room for it, it waits until
        its deadline, and later requests with adapters wait behind it. Otherwise requests with one adapter could keep
        out another one for ever.
        """
        request = running.request = adapters.with_values(running.request)
        if not self._lacks_room and await asyncio.wrap_future(self._thread.add_held(running, constraint)):
            return
        ends = None if request.deadline_s is None else running.arrived + request.deadline_s
        try:
            async with asyncio.timeout(None if ends is None else max(0.0, ends - time.monotonic())), self._turn:
                await self._hold_and_add(adapters, running, constraint)
        except TimeoutError:
            self._thread.abort(request.request_id)
            refuse("deadline", place="request_timeout_s", cause="its adapter had no room in time")

    async def _hold_and_add(self, adapters: ReplicaAdapters, running: Running, constraint: Resolved | None) -> None:
        adapter: ReadAdapter | None = None
        call, place = running.key
        try:
            while place in call.open:  # else the call ended meanwhile
                try:
                    if await asyncio.wrap_future(self._thread.add_held(running, constraint, adapter)):
                        return
                    if adapter is None:
                        running.request, adapter = await adapters.find_for(running.request)
                        continue
                    self._lacks_room = True
                except ConnectionError as error:  # a rank has died; its successor reads the adapter again
                    if self._thread.failure is not None:
                        raise EngineFailed(self._thread.failure) from error
                    adapter = None
                    self._thread.check_ranks()
                await asyncio.sleep(ROOM_POLL_S)
        finally:
            self._lacks_room = False

    def _end(self, running: Running, result: RequestResult) -> None:
        call, place = running.key
        request = call.open.pop(place, None)
        if request is None:  # the call is over
            return
        self._reporter.end(call.address, request)
        call.results[place] = result
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
        resolved = await asyncio.wrap_future(self.engine.constraints.resolve(spec, client))
        return resolved.spec, resolved.not_enforced

    async def model(self) -> ModelInfo:
        return self.engine.model

    async def stats(self) -> EngineStats:
        service = self._meter.service(own_name(), self._node, self._phases.seconds, self.engine.config)
        stats = msgspec.structs.replace(self.engine.stats(), service=service)
        return stats if self._thread.failure is None else msgspec.structs.replace(stats, alive=False)

    async def read_adapter(self, path: str) -> LoadedAdapter | Refusal:
        """Reads the adapter in a folder, for requests that name its values. Returns why if it cannot be served."""
        assert self._adapters is not None, "the configuration names folders"
        return await self._adapters.read(path)

    async def uses_adapter(self, digest: str) -> bool:
        """Returns whether a request that has not ended has the adapter with these values."""
        return digest in self._used_adapters()

    def _used_adapters(self) -> frozenset[str]:
        requests = [request for call in self._calls for request in call.open.values() if request.adapter]
        return frozenset(key.digest for request in requests for key in keys_of(request.adapter))

    async def drop_kept(self, hashes: list[bytes]) -> None:
        """Removes blocks from the prefix store."""
        self._thread.drop_kept(hashes)

    async def start_seconds(self) -> float:
        """Returns the seconds from the start of the process to the first health check."""
        return sum(self._phases.seconds.values())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the load of this replica. Serve calls it."""
        return self._meter.load(self.engine.stats())

    async def check_health(self) -> None:
        """Raises `RuntimeError` if the engine has failed or hangs. Serve calls it, and then replaces the replica."""
        if self._thread.failure is not None:
            raise RuntimeError(self._thread.failure)
        if self.engine.is_hung:
            raise RuntimeError(STEP_HANGS)
        if FIRST_HEALTH not in self._phases.seconds:
            self._phases.end(FIRST_HEALTH)
            say("{}", start_line(self._phases.seconds), flush=True)
        elif not self._is_warm and not self._calls:
            self._num_quiet_checks -= 1
            if self._num_quiet_checks < 0:
                self._warm_up(others_serve=False)
        if self.engine.config.num_ranks > 1:
            self._thread.check_ranks()
        if self._adapters is not None:
            self._adapters.follow(self._used_adapters())

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

    # ---- what the step thread tells ------------------------------------------------------------------------------

    def _tell(self, news: News) -> None:
        """Hands news to the event loop in one call, because each wake-up of the loop costs a system call. The step
        thread calls it.
        """
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._take, news)

    def _take(self, news: News) -> None:
        for address, outputs in news.frames.items():
            self._reporter.note_outputs(address, outputs)
            self._sender.send(address, outputs)
        for running, result in news.results:
            self._end(running, result)
        for running in news.lost:
            call, _ = running.key
            if not call.ended.done():
                call.ended.set_exception(EngineFailed(self._thread.failure))


def _import_engine(config: EngineConfig) -> None:
    """Imports what an engine needs, which takes seconds. A process that only deploys this class needs none of it."""
    import manta.cluster.engine.engine

    if config.num_ranks == 1:  # else the model runs in other processes
        import manta.cluster.engine.executors.worker_factory  # noqa: F401


def start_line(seconds: dict[str, float]) -> str:
    """Returns a line for the log: how long the start and each of its phases took."""
    parts = ", ".join(f"{name} {each:.2f}" for name, each in seconds.items())
    return f"the engine started in {sum(seconds.values()):.2f} s: {parts}"


def _acknowledgement(request: EngineRequest) -> SequenceOutput:
    return SequenceOutput(request.request_id, 0, [])

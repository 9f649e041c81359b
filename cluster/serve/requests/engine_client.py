"""The engines as one ingress calls them, and the channel that carries their tokens.

Requests of a lost engine continue on another one (`prompt_run.py`): if its connection breaks, if it is silent, or if
Serve ends it (`run_watch.py`). Implements `manta.cluster.http.exchange.engines.Engines`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from manta.cluster.config import EngineConfig
from manta.cluster.engine.request import EngineRequest, SequenceOutput
from manta.cluster.errors import ServingError, Unavailable
from manta.cluster.http.exchange.engines import GenerationRequest
from manta.cluster.http.exchange.metrics import Metrics, RequestMetrics
from manta.cluster.serve.channel.keeping import FromKeeper
from manta.cluster.serve.channel.token_channel import (
    Address,
    Connection,
    Control,
    OutputReceiver,
    RequestResult,
)
from manta.cluster.serve.requests.engine_questions import ANSWER_TIMEOUT_S, EngineQuestions, answer_of
from manta.cluster.serve.requests.prompt_run import Call, PromptRun
from manta.cluster.serve.requests.run_watch import RunWatch
from manta.cluster.serve.requests.submission import Submission
from manta.cluster.serve.routing.reports import Report
from manta.cluster.serve.starting.start_failure import in_words
from manta.cluster.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


async def _never() -> bool:
    """Returns False, for engines that outlive their client."""
    return False


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
    ) -> None:
        super().__init__(engine, standby, max_held, is_removed)
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.runs: dict[str, PromptRun] = {}
        self.suspects = asyncio.Lock()
        self.keepers: Keepers | None = None
        """Those who talk to the keepers in the engines' processes, over the same connections; None for nobody."""
        self._greeting: asyncio.Task[None] | None = None
        self._greeted: dict[str, frozenset[str]] = {}
        """Replicas that were told of this ingress, by deployment."""
        self._receiver = OutputReceiver(
            host, self._on_outputs, self._on_lost, self._on_report, self._on_kept, self._on_connected
        )
        self._ending: set[asyncio.Task[None]] = set()
        self._call_locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        """Locks of clients whose calls are being started."""
        self._watch = RunWatch(self.runs, self, self._replicas)

    async def submit(self, request: GenerationRequest) -> Submission:
        return Submission(self, request)

    def measure(self, num_choices: int) -> RequestMetrics:
        return RequestMetrics(self.metrics, num_choices)

    async def check_reachable(self) -> None:
        address = await self._listen()
        if self._greeting is None or (self._greeting.done() and self._greeted != self._replicas.running):
            self._greeting = asyncio.ensure_future(self._greet(address))

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

    async def _greet(self, address: Address) -> None:
        """Makes every replica connect, so that it reports its cache and how long its start took. Serve names a
        deployment's replicas only after a call to the deployment.
        """
        greeted = dict(self._replicas.running)
        for name, handle in self._handles.items():
            try:
                await handle.broadcast("connect", address).results_async(timeout_s=ANSWER_TIMEOUT_S)
            except Exception as error:  # whatever it is, their first request meets it again
                logger.info("not every %s answers: %s", name, in_words(error))
        with contextlib.suppress(ServingError):  # no engine runs yet
            await self.stats()
        self._greeted = greeted

    async def _listen(self) -> Address:
        """Returns the address to which engines send tokens.

        Raises `Unavailable` if this ingress cannot listen for them just now.
        """
        try:
            return await self._receiver.start()
        except OSError as error:
            raise Unavailable(f"the ingress cannot listen for engines: {in_words(error)}; retry") from error

    def call(self, run: PromptRun, request: EngineRequest, pause_s: float) -> Call:
        # Each call runs in a context of its own. Serve identifies an HTTP request by its context: it would treat calls
        # of one request as retries of one call, and forget all but one of those that wait for a replica.
        return asyncio.get_running_loop().create_task(run.call(request, pause_s), context=contextvars.Context())

    async def generate(self, request: EngineRequest) -> RequestResult:
        """Runs a request by one Serve call that stays open until it ends. Serve asks `EngineRouter` for the replica.

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
        return address, await self._waker.wait(request.deadline_s, is_new=request.continued is None)

    async def _call(self, request: EngineRequest, address: Address) -> RequestResult:
        # Each client starts one call per turn of the event loop: 1,000 started at once would block it for half a second
        async with self._call_locks.setdefault(request.client, asyncio.Lock()):
            await asyncio.sleep(0)
        return await answer_of(self.serving.generate.remote(request, address))

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

    def note_output(self, request_id: str) -> None:
        self._replicas.placement.has_output(request_id)

    def note_end(self, request_id: str) -> None:
        self._replicas.placement.end(request_id)

    def _on_outputs(self, outputs: list[SequenceOutput], connection: Connection) -> None:
        self._replicas.hear(connection.replica, connection.is_away)
        for output in outputs:
            run = self.runs.get(output.request_id)
            if run is not None:
                run.receive(output, connection)
            elif output.finish is None:  # it was given up before an engine had it, in a call of several
                connection.send(Control(output.request_id))

    def _on_report(self, report: Report, connection: Connection) -> None:
        self._replicas.placement.report(connection.replica, report)

    def _on_kept(self, message: FromKeeper, connection: Connection) -> None:
        if self.keepers is not None:
            self.keepers.receive(message, connection)

    def _on_connected(self, connection: Connection) -> None:
        if self.keepers is not None:
            self.keepers.connected(connection)

    def _on_lost(self, connection: Connection) -> None:
        if self.keepers is not None:
            self.keepers.lost(connection)
        self._replicas.avoid(connection.replica)
        self._replicas.placement.lose(connection.replica)
        for run in list(self.runs.values()):
            if run.connection is connection:
                run.lose()

"""The thread that runs an engine's steps, and everything that only this thread touches.

Others put messages into its inbox, which it takes between two steps: requests, stop strings and aborts. It tells them
`News`: the outputs and results of a step, or of a failure.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from manta.cluster.engine.request import EngineRequest, SequenceOutput, Usage
from manta.cluster.errors import QueueFull, RequestRefused, ServingError
from manta.cluster.serve.channel.token_channel import Address, Control, RequestResult
from manta.cluster.serve.engine.burst import Burst
from manta.cluster.serve.engine.continued_waits import ContinuedWaits
from manta.cluster.serve.engine.meter import LoadMeter
from manta.cluster.serve.requests.gathering import Gathering
from manta.cluster.telemetry.engine_watch import EngineWatch
from manta.structured.constraint import Resolved
from manta.structured.visible_logs import logger_of
from manta.workers.ranks.rank_worker import ReadAdapter

if TYPE_CHECKING:
    from manta.cluster.engine.engine import Engine  # it imports torch

logger = logger_of(__name__)

T = TypeVar("T")

HOLD_S = 0.1
"""Longest time, in seconds, for which outputs of requests that are read whole are held back while other requests wait
for admission. Waking an ingress for each output costs it more than a step spends on that output.
"""


Inbox = queue.SimpleQueue[Callable[[], None]]


class Running(msgspec.Struct):
    """A request that the engine has or is to get. The thread changes it; those who made it read only `key`."""

    request: EngineRequest
    address: Address
    """Ingress that gets the outputs."""
    key: Any
    """Names the request to those who get its result."""
    arrived: float
    """Time of arrival, on `time.monotonic`'s clock."""
    arrived_ns: int
    """Time of arrival, in nanoseconds since 1970."""
    num_open: int
    """Choices that have not ended."""
    usages: list[Usage] = []
    """Usage of each choice that has ended."""
    gathering: Gathering | None = None
    """Holds back the output of a request that is read whole; None for a stream."""

    @classmethod
    def of(cls, request: EngineRequest, address: Address, key: Any) -> Running:
        """Returns a request that arrives now."""
        num_open = len(request.continued or ()) or request.params.n
        running = cls(request, address, key, time.monotonic(), time.time_ns(), num_open)
        running.gathering = Gathering() if request.reads_whole else None
        return running


class News(msgspec.Struct):
    """Results of the thread that nobody was told of yet."""

    frames: dict[Address, list[SequenceOutput]] = {}
    """Outputs for each ingress."""
    results: list[tuple[Running, RequestResult]] = []
    """Results of requests that have ended or were refused."""
    lost: list[Running] = []
    """Requests that end because the engine has failed."""
    since: float | None = None
    """Time of the oldest output here, on `time.monotonic`'s clock; None if there is none."""


class StepThread:
    """The step thread of an engine, which takes its messages from `inbox`. `tell` is called in the thread."""

    def __init__(self, engine: Engine, inbox: Inbox, meter: LoadMeter, name: str, tell: Callable[[News], None]) -> None:
        self.failure: str | None = None
        """Reason why the thread runs no more steps; the thread sets it once."""
        self._engine = engine
        self._inbox = inbox
        self._meter = meter
        self._tell_others = tell
        self._running: dict[str, Running] = {}
        """Running requests by id."""
        self._held = News()
        """Outputs and results of requests that are read whole, held back for up to `HOLD_S`."""
        self._step_seconds = 0.0
        """Seconds that the last step with work took."""
        self._burst = Burst()
        self._watch = EngineWatch(name)
        self._waits = ContinuedWaits()
        self._is_open = True
        self._thread = threading.Thread(target=self._step_loop, name="engine", daemon=True)
        self._thread.start()

    # ---- called in other threads ---------------------------------------------------------------------------------

    def add(self, added: Sequence[Running], constraint: Resolved | None = None) -> None:
        """Has requests run, all with the same constraint."""

        def add_all() -> None:
            for running in added:
                self._add(running, constraint)

        self._inbox.put(add_all)

    def add_held(
        self, running: Running, constraint: Resolved | None = None, adapter: ReadAdapter | None = None
    ) -> Future[bool]:
        """Has a request run with its adapter: with `adapter`, which the engine then holds, or with the one that it
        holds. The result is False if there is no room for it, or if it is not held.
        """

        def add() -> bool:
            adapters = self._engine.adapters
            is_held = running.request.adapter in adapters if adapter is None else adapters.hold(adapter)
            if is_held:
                self._add(running, constraint)
            return is_held

        return self.call(add)

    def finish(self, control: Control) -> None:
        """Ends a choice at a stop string, or a whole request."""
        self._inbox.put(lambda: self._finish(control))

    def abort(self, request_id: str) -> None:
        self.finish(Control(request_id))

    def check_ranks(self) -> None:
        self._inbox.put(self._engine.check_ranks)

    def drop_kept(self, hashes: list[bytes]) -> None:
        self._inbox.put(lambda: self._engine.drop_kept(hashes))

    def call(self, function: Callable[..., T], *arguments: object) -> Future[T]:
        """Calls a function between two steps, unless the result is cancelled before."""
        called: Future[T] = Future()

        def run() -> None:
            if not called.set_running_or_notify_cancel():
                return
            try:
                result = function(*arguments)
            except Exception as error:
                called.set_exception(error)
            else:
                called.set_result(result)

        self._inbox.put(run)
        return called

    def refusal(self, error: ServingError) -> RequestResult:
        """Returns the result of a request that the engine does not take."""
        if not isinstance(error, QueueFull):
            return RequestResult(refusal=error.refusal)
        return RequestResult(refusal=self._meter.with_retry(error.refusal, self._engine.num_waiting))

    def close(self) -> None:
        """Ends the thread, even while requests run."""

        def end() -> None:
            self._is_open = False

        self._inbox.put(end)
        self._thread.join()

    # ---- called in the thread ------------------------------------------------------------------------------------

    def _step_loop(self) -> None:
        try:
            while True:
                self._take_inbox()
                if not self._is_open:
                    return
                idle = not self._engine.has_unfinished
                started, begun_ns = time.monotonic(), time.time_ns()
                outputs = self._engine.step()  # without work it checks that no block has leaked
                self._watch.stepped(begun_ns, outputs, self._engine.scheduler)
                self._waits.stepped(started, time.monotonic(), outputs, self._engine.scheduler.running)
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

    def _add(self, running: Running, constraint: Resolved | None) -> None:
        if self.failure is not None:
            self._tell(News(lost=[running]))
            return
        request = _with_time_left(running.request, running.arrived)
        try:
            # A request that an engine admitted before is not refused for a full queue.
            self._engine.add_request(request, constraint, queue_is_bounded=request.continued is None)
        except (RequestRefused, QueueFull) as error:
            self._tell(News(results=[(running, self.refusal(error))]))
        else:
            self._running[request.request_id] = running
            self._watch.added(request, running.arrived_ns)
            if request.continued is not None:
                self._waits.added(request.request_id, running.arrived, time.monotonic())
            self._meter.arrived(request.request_id, len(request.prompt_token_ids))

    def _finish(self, control: Control) -> None:
        if control.index is None:
            ended = self._engine.abort(control.request_id)
        else:
            ended = self._engine.finish(control.request_id, control.index, control.num_kept_tokens)
        news = News()
        for output in ended:
            self._note_end(output, news)
        self._tell(news)
        self._tell_held()

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        """Sends one frame to each ingress with new output, then the results of the requests that ended."""
        now, news = time.monotonic(), News()
        for output in outputs:
            running = self._running[output.request_id]
            if output.token_ids:
                self._meter.has_first_token(output.request_id)
            if running.gathering is None:
                news.frames.setdefault(running.address, []).append(output)
            elif running.gathering.add(output):
                self._held.frames.setdefault(running.address, []).append(output)
                self._held.since = self._held.since or now
        for output in outputs:
            if output.finish is not None:
                self._note_end(output, news)
        self._tell(news)
        if self._held.since is not None and (now >= self._held.since + HOLD_S or not self._engine.num_waiting):
            self._tell_held()

    def _note_end(self, output: SequenceOutput, news: News) -> None:
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
            self._waits.ended(output.request_id)
            self._meter.ended(output.request_id)
            usage = Usage.of_choices(usage.num_prompt_tokens, running.usages)
            self._watch.ended(output.request_id, output, usage)
            news = news if running.gathering is None else self._held
            news.results.append((running, RequestResult(finish=output.finish, usage=usage)))

    def _tell_held(self) -> None:
        self._tell(self._held)
        self._held = News()

    def _tell(self, news: News) -> None:
        if news.frames or news.results or news.lost:
            self._tell_others(news)

    def _die(self, reason: str) -> None:
        """Fails every running and later request with `reason`."""
        self.failure = reason
        self._tell_held()
        self._tell(News(lost=list(self._running.values())))
        self._running.clear()
        while self._is_open:
            with contextlib.suppress(Exception):  # the engine's own state may be broken
                self._inbox.get()()


def _with_time_left(request: EngineRequest, arrived: float) -> EngineRequest:
    """Returns the request with the time that is left of its deadline, which counts from the arrival of its call."""
    if request.deadline_s is None:
        return request
    left_s = max(0.0, request.deadline_s - (time.monotonic() - arrived))
    return msgspec.structs.replace(request, deadline_s=left_s)

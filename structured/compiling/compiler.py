"""Compiles constraints before their requests are admitted: in processes of lowest priority, within a budget, and for
clients in turns.

Requests that wait for equal constraints share one compilation. Any thread may call `Compiler.resolve`. Compiled
grammars stay in an LRU cache with a bound in bytes; refusals stay for a while.
`structured/compiling/compile_process.py` has the processes.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import msgspec

from manta.structured.compiling.compile_process import Answer, CompileProcess, ForkServer
from manta.structured.constraint import (
    ConstraintError,
    ConstraintLimits,
    ConstraintSpec,
    JsonObjects,
    Resolved,
    check_form,
    check_size,
)
from manta.structured.fair_queue import FairQueue, QueueFullError
from manta.structured.lru import ByteLRU
from manta.structured.refusals import QueueFull, Refusal
from manta.structured.visible_logs import logger_of
from manta.structured.vocabulary import Vocabulary

logger = logger_of(__name__)

ENTRY_BYTES = 600
"""Bytes that an entry of either cache holds besides its texts: structs, digests, lengths, hash tables."""


class CompilerBounds(NamedTuple):
    """Bounds on what a compiler remembers, and for how long."""

    cache_bytes: int = 32 * 2**20
    """Most bytes of compiled constraints that are kept: room for 7,000 schemas of the usual size."""
    refusal_bytes: int = 4 * 2**20
    """Most bytes of refusals that are remembered; that is room for 7,000."""
    refusal_seconds: float = 60.0
    """Lifetime of a remembered refusal."""
    retry_seconds: float = 10.0
    """Delay before another start if a process did not start, even if no constraint asks for it."""


class CompilerFailed(RuntimeError):
    """A constraint could not be compiled, but not because of the constraint: no process starts, or the compiler
    failed.
    """


class _Supervisor:
    """Keeps one compile process running: replaces it when it is gone. Used by one thread."""

    def __init__(self, server: ForkServer, limits: ConstraintLimits) -> None:
        self._server = server
        self._limits = limits
        self._process: CompileProcess | None = None
        self.has_failed = False
        """Whether the last start of a process failed."""

    def start(self) -> None:
        """Starts a process if none lives. If that fails, `has_failed` is True and the log says why."""
        if self._process is not None and self._process.is_alive:
            return
        self.kill()
        try:
            self._process = CompileProcess(self._server, self._limits)
        except Exception:
            logger.exception("the grammar compiler does not start")
            self._server.close()  # it may hang: the next start makes a new one
        self.has_failed = self._process is None

    def compile(self, spec: ConstraintSpec, is_wanted: Callable[[], bool]) -> Answer | None:
        """None if nobody wants the answer any more. Raises `CompilerFailed` if no process starts."""
        self.start()
        if self._process is None:
            raise CompilerFailed("the grammar compiler does not start; the server's log says why")
        return self._process.compile(spec, is_wanted)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()


class _Job:
    """A constraint that is to be compiled, and those who wait for it: each with a future of its own, so that one who
    gives up cancels only that.
    """

    def __init__(self, spec: ConstraintSpec, waiter: Future[Resolved]) -> None:
        self.spec = spec
        self.waiters = [waiter]

    def is_wanted(self) -> bool:
        """Whether somebody still waits."""
        return any(not waiter.cancelled() for waiter in self.waiters)

    def end(self, result: Resolved | Exception) -> None:
        for waiter in self.waiters:
            if not waiter.set_running_or_notify_cancel():
                continue
            if isinstance(result, Exception):
                waiter.set_exception(result)
            else:
                waiter.set_result(result)


class Compiler:
    """Compiles up to `num_processes` constraints at a time; others wait in a queue that clients share fairly."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        limits: ConstraintLimits,
        num_processes: int = 2,
        bounds: CompilerBounds = CompilerBounds(),  # noqa: B008
        objects: JsonObjects = JsonObjects(),  # noqa: B008
    ) -> None:
        self._limits = limits
        self._bounds = bounds
        self._server = ForkServer(vocabulary, limits, objects)
        self._lock = threading.Lock()
        self._queue: FairQueue[_Job] = FairQueue(num_processes, limits.max_waiting)
        self._jobs: dict[bytes, _Job] = {}
        """Constraints that wait or are being compiled. `_key` makes the keys of all three tables."""
        self.cache: ByteLRU[bytes, Resolved] = ByteLRU(bounds.cache_bytes)
        self.refusals: ByteLRU[bytes, _Known] = ByteLRU(bounds.refusal_bytes)
        self.num_compiled = 0
        self._supervisors = [_Supervisor(self._server, limits) for _ in range(num_processes)]
        self._threads = [
            threading.Thread(target=self._serve, args=(supervisor,), name=f"compiler-{index}", daemon=True)
            for index, supervisor in enumerate(self._supervisors)
        ]
        self._num_serving = num_processes
        """Threads that have not ended."""
        for thread in self._threads:
            thread.start()

    @property
    def num_processes(self) -> int:
        """Compile processes that there should be."""
        return len(self._supervisors)

    @property
    def num_alive(self) -> int:
        """Compile processes, without those whose last start failed."""
        return sum(not supervisor.has_failed for supervisor in self._supervisors)

    def resolve(self, spec: ConstraintSpec, client: str = "") -> Future[Resolved]:
        """Resolves to the compiled constraint, for `client`. The future raises `ConstraintError` if the constraint is
        refused, `QueueFull` if too many wait, and `CompilerFailed` if it could not be compiled for another reason.
        If all futures of a constraint are cancelled, it is not compiled, or no longer.
        """
        future: Future[Resolved] = Future()
        try:
            check_form(spec)
            check_size(spec, self._limits)
        except ConstraintError as error:
            future.set_exception(error)
            return future
        key = _key(spec)
        with self._lock:
            if (known := self.cache.get(key)) is not None:
                future.set_result(known)
            elif (refusal := self.refusals.get(key)) is not None and refusal.until > time.monotonic():
                future.set_exception(ConstraintError(refusal.refusal))
            elif (job := self._jobs.get(key)) is not None:
                job.waiters.append(future)
            else:
                self._enqueue(_Job(spec, future), client)
        return future

    def _enqueue(self, job: _Job, client: str) -> None:
        try:
            self._queue.put(client, job)
        except QueueFullError as error:
            unit, remedy = "constraints wait to be compiled", "retry later, or raise constraints.max_waiting"
            job.end(QueueFull(Refusal("queue_full", "", error.num_waiting, error.bound, remedy, unit=unit)))
        else:
            self._jobs[_key(job.spec)] = job

    def _serve(self, supervisor: _Supervisor) -> None:
        supervisor.start()  # the backends are loaded before anybody asks
        while (taken := self._next(supervisor)) is not None:
            client, job = taken
            try:
                while not self._forget_unwanted(job):
                    answer = supervisor.compile(job.spec, job.is_wanted)
                    if answer is not None:
                        self._settle(job, answer)
                        break
            except Exception as error:  # whatever it is costs this constraint alone: later ones need this thread
                if not isinstance(error, CompilerFailed):
                    logger.exception("the grammar compiler failed")
                    supervisor.kill()
                self._fail(job, error)
            self._queue.done(client)
        supervisor.kill()
        with self._lock:
            self._num_serving -= 1
            is_last = not self._num_serving
        if is_last:  # the others may still start a process by it
            self._server.close()

    def _next(self, supervisor: _Supervisor) -> tuple[str, _Job] | None:
        """The next (client, constraint); None after `close`. If the last start of a process failed, tries another one
        every `retry_seconds` until a constraint comes.
        """
        while True:
            try:
                return self._queue.take(self._bounds.retry_seconds if supervisor.has_failed else None)
            except TimeoutError:
                supervisor.start()

    def _forget_unwanted(self, job: _Job) -> bool:
        """Forgets a constraint for which nobody waits any more, and says whether it did."""
        with self._lock:
            wanted = job.is_wanted()
            if not wanted:
                del self._jobs[_key(job.spec)]
        return not wanted

    def _settle(self, job: _Job, answer: Answer) -> None:
        """Remembers what a constraint was compiled to, or why it was refused, and tells those who wait."""
        key, outcome = _key(job.spec), answer.outcome
        with self._lock:
            del self._jobs[key]
            self.num_compiled += 1
            if isinstance(outcome, Resolved):
                # An engine is asked for a loose constraint twice: to resolve it, and for what it was resolved to.
                for each in {key, _key(outcome.spec)} if job.spec.loose else {key}:
                    self.cache.put(each, outcome, _num_bytes(outcome))
            else:
                known = _Known(time.monotonic() + self._bounds.refusal_seconds, outcome.refusal)
                self.refusals.put(key, known, ENTRY_BYTES + len(msgspec.msgpack.encode(outcome.refusal)))
        job.end(outcome)

    def _fail(self, job: _Job, error: Exception) -> None:
        """Tells those who wait, and remembers nothing: another try may do better."""
        with self._lock:
            self._jobs.pop(_key(job.spec), None)
        failure = CompilerFailed(f"the grammar compiler failed: {type(error).__name__}: {error}")
        job.end(error if isinstance(error, CompilerFailed) else failure)

    def close(self) -> None:
        """Ends the processes once all that waits is compiled."""
        self._queue.close()


class _Known(NamedTuple):
    until: float
    """Time on the monotonic clock, in seconds."""
    refusal: Refusal


def _key(spec: ConstraintSpec) -> bytes:
    """A digest, so that the caches need not hold a constraint's text, which may have a megabyte."""
    return hashlib.sha256(msgspec.msgpack.encode(spec)).digest()


def _num_bytes(resolved: Resolved) -> int:
    """Returns the memory of a cache entry, in bytes."""
    return ENTRY_BYTES + sum(map(sys.getsizeof, (resolved.spec.text, resolved.compiled, *resolved.not_enforced)))

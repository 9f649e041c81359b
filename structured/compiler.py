"""Proves constraints before they are admitted: in processes of lowest priority, within a budget, once for all waiters.

`Compiler.resolve` may be called from any thread. Compiled grammars stay in an LRU by bytes, refusals for a while.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future

import msgspec

from structured.compile_process import NICENESS, REPLACEMENT_NICENESS, Answer, Setup
from structured.constraint import ConstraintError, ConstraintLimits, ConstraintSpec, Resolved, check_size
from structured.frames import read_frame, write_frame
from structured.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

CACHE_BYTES = 256 * 2**20
REFUSAL_SECONDS = 60.0
"""How long a refusal is remembered."""
IDLE_SECONDS = 0.2
"""A compilation that the machine's idle time has not served within this goes on at low instead of idle priority: where
steps keep every core busy it would run into its budget without having run.
"""
START_SECONDS = 120.0
"""Within which a compile process must have loaded its backends, on a machine with no time for it."""


class _Process:
    """One compile process; used by one thread."""

    def __init__(self, vocabulary: Vocabulary, limits: ConstraintLimits, niceness: int) -> None:
        self._limits = limits
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "structured.compile_process", str(niceness)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self.pid = self._process.pid
        self._decoder = msgspec.msgpack.Decoder(Answer)
        try:
            self._ask(msgspec.msgpack.encode(Setup(vocabulary, limits)), START_SECONDS)
        except (TimeoutError, EOFError) as error:
            self.kill()
            raise RuntimeError(f"the grammar compiler did not start within {START_SECONDS:g} s") from error

    def compile(self, spec: ConstraintSpec) -> Answer:
        """Kills the process where the budget is over; then and where it dies the answer is an error."""
        try:
            return self._ask(msgspec.msgpack.encode(spec), self._limits.compile_seconds)
        except TimeoutError:
            seconds = self._limits.compile_seconds
            error = f"{spec.kind}: compiling took longer than {seconds:g} s; simplify the constraint"
        except EOFError:
            error = f"{spec.kind}: compiling it ended the compiler; simplify the constraint"
        self.kill()
        return Answer(error=error)

    def _ask(self, frame: bytes, seconds: float) -> Answer:
        """Raises `TimeoutError` where no answer came in time, `EOFError` where the process is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            write_frame(self._process.stdin, frame)
        except OSError as error:
            raise EOFError from error
        stdout = [self._process.stdout]
        if not select.select(stdout, [], [], min(IDLE_SECONDS, seconds))[0]:
            self._set_policy(os.SCHED_OTHER)
            if not select.select(stdout, [], [], max(0.0, seconds - IDLE_SECONDS))[0]:
                raise TimeoutError
            self._set_policy(os.SCHED_IDLE)
        answer = read_frame(self._process.stdout)
        if answer is None:
            raise EOFError
        return self._decoder.decode(answer)

    def _set_policy(self, policy: int) -> None:
        """The process is nice beside, and takes a tenth of a step's share at most."""
        with contextlib.suppress(OSError):  # gone, or not allowed to: then it stays as it is
            os.sched_setscheduler(self.pid, policy, os.sched_param(0))

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class Compiler:
    """`num_processes` constraints at a time; a slow one holds back only those behind it."""

    def __init__(self, vocabulary: Vocabulary, limits: ConstraintLimits, num_processes: int = 2) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[ConstraintSpec | None] = queue.SimpleQueue()
        self._pending: dict[ConstraintSpec, Future[Resolved]] = {}
        self._cache: OrderedDict[ConstraintSpec, Resolved] = OrderedDict()
        self._cached_bytes = 0
        self._refusals: dict[ConstraintSpec, tuple[float, str]] = {}
        self.num_compiled = 0
        self._threads = [
            threading.Thread(target=self._serve, name=f"compiler-{index}", daemon=True)
            for index in range(num_processes)
        ]
        for thread in self._threads:
            thread.start()

    def resolve(self, spec: ConstraintSpec) -> Future[Resolved]:
        """The future holds a `ConstraintError` where the constraint is refused."""
        future: Future[Resolved] = Future()
        try:
            check_size(spec, self._limits)
        except ConstraintError as error:
            future.set_exception(error)
            return future
        with self._lock:
            known = self._cache.get(spec)
            if known is not None:
                self._cache.move_to_end(spec)
                future.set_result(known)
                return future
            refusal = self._refusals.get(spec)
            if refusal is not None and refusal[0] > time.monotonic():
                future.set_exception(ConstraintError(refusal[1]))
                return future
            pending = self._pending.get(spec)
            if pending is None:
                pending = self._pending[spec] = Future()
                self._queue.put(spec)
            # A future of its own for each waiter: one that gives up cancels nobody else's.
            pending.add_done_callback(lambda done: _copy(done, future))
        return future

    def _serve(self) -> None:
        process: _Process | None = None
        niceness = NICENESS
        while True:
            try:
                if process is None or not process.is_alive:
                    process = _Process(self._vocabulary, self._limits, niceness)
                    niceness = REPLACEMENT_NICENESS
            except (RuntimeError, OSError):
                logger.exception("the grammar compiler does not start")
                process = None
                time.sleep(1)
            spec = self._queue.get()
            if spec is None:
                break
            answer = Answer(error="the grammar compiler does not start") if process is None else process.compile(spec)
            self._settle(spec, answer)
        if process is not None:
            process.kill()

    def _settle(self, spec: ConstraintSpec, answer: Answer) -> None:
        with self._lock:
            pending = self._pending.pop(spec)
            self.num_compiled += 1
            if answer.resolved is not None:
                self._remember(spec, answer.resolved)
            else:
                now = time.monotonic()
                self._refusals = {key: value for key, value in self._refusals.items() if value[0] > now}
                self._refusals[spec] = (now + REFUSAL_SECONDS, answer.error or "")
        if answer.resolved is not None:
            pending.set_result(answer.resolved)
        else:
            pending.set_exception(ConstraintError(answer.error or ""))

    def _remember(self, spec: ConstraintSpec, resolved: Resolved) -> None:
        self._cache[spec] = resolved
        self._cached_bytes += _num_bytes(resolved)
        while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= _num_bytes(oldest)

    def close(self) -> None:
        """Ends the processes once what they compile is done."""
        for _ in self._threads:
            self._queue.put(None)


def _num_bytes(resolved: Resolved) -> int:
    return len(resolved.compiled) + 4 * len(resolved.spec.text)


def _copy(done: Future[Resolved], target: Future[Resolved]) -> None:
    if not target.set_running_or_notify_cancel():
        return
    error = done.exception()
    if error is not None:
        target.set_exception(error)
    else:
        target.set_result(done.result())

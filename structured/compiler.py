"""Compiles constraints before their requests are admitted: in processes of lowest priority, within a budget.

Requests that wait for equal constraints share one compilation. Any thread may call `Compiler.resolve`. Compiled
grammars stay in an LRU cache with a bound in bytes; refusals stay for a while.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from typing import NamedTuple

import msgspec

from structured.compile_process import WALL_FACTOR, Answer, Setup, Started, needs_too_much_memory
from structured.constraint import ConstraintError, ConstraintLimits, ConstraintSpec, Resolved, check_form, check_size
from structured.frames import read_frame, write_frame
from structured.lru import ByteLRU
from structured.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

CACHE_BYTES = 64 * 2**20
"""Most bytes of compiled constraints that are kept."""
REFUSAL_BYTES = 16 * 2**20
"""Most bytes of refusals that are remembered, including the refused constraints."""
ENTRY_BYTES = 600
"""What an entry of either cache holds besides its texts: structs, lengths, hash tables."""
REFUSAL_SECONDS = 60.0
"""How long a refusal is remembered."""
IDLE_SECONDS = 0.2
"""A compilation that is not done after this time goes on at low instead of idle priority. At idle priority it might not
run at all if steps keep every core busy.
"""
START_SECONDS = 120.0
"""A compile process must have loaded its backends within this time, even on a busy machine."""
RETRY_SECONDS = 10.0
"""If a process did not start, another start is tried after this time, even if no constraint asks for it."""
LEAST_WAIT_SECONDS = 0.01
"""Least time between two looks at how long a process has computed."""
MEMORY_LOOK_SECONDS = 0.05
"""If the system does not limit a process's memory, the memory is measured this often."""


class CompilerFailed(RuntimeError):
    """A constraint could not be compiled, but not because of the constraint: no process starts, or the compiler
    failed.
    """


def _forks_well() -> bool:
    """Whether forked processes work. macOS can fork, but its libraries may not be used after a fork."""
    return sys.platform != "darwin" and hasattr(os, "fork") and hasattr(socket, "send_fds")


class _Source:
    """Starts compile processes. A server process forks them; it is started when first needed, and again if it died. If
    forked processes do not work here, each compile process is started by itself. Any thread may call.
    """

    def __init__(self, vocabulary: Vocabulary, limits: ConstraintLimits) -> None:
        self._forks = _forks_well()
        self._setup = msgspec.msgpack.encode(Setup(vocabulary, limits, self._forks))
        self._lock = threading.Lock()
        self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._started: list[subprocess.Popen[bytes]] = []
        """Processes that were not forked."""

    def connect(self) -> socket.socket:
        """Connects with a new compile process. Raises `OSError` if none starts."""
        if not self._forks:
            process, ours = self._start()
            with self._lock:  # `poll` reaps those that have ended
                self._started = [each for each in self._started if each.poll() is None] + [process]
            return ours
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._server is None or self._server[0].poll() is not None:
                self._end_server()
                self._server = self._start()
            socket.send_fds(self._server[1], [b"f"], [theirs.fileno()])
        return ours

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """A process that has loaded the backends."""
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OPENBLAS_NUM_THREADS": "1",  # a process that forks must have a single thread
        }
        command = [sys.executable, "-m", "structured.compile_process"]
        with theirs:
            process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment)
        try:
            with ours.makefile("rwb") as stream:
                write_frame(stream, self._setup)
                if not _comes_within(ours, START_SECONDS):
                    raise TimeoutError(f"the grammar compiler did not start within {START_SECONDS:g} s")
                # A process that does not fork sends `Started` at once. `_Process` must read that, so nothing is read
                # here: this stream reads ahead.
                if self._forks and read_frame(stream) is None:
                    raise ConnectionError("the grammar compiler ended while it started")
            ours.settimeout(START_SECONDS)
        except OSError:
            _end(process, ours)
            raise
        return process, ours

    def _end_server(self) -> None:
        if self._server is not None:
            _end(*self._server)
            self._server = None

    def close(self) -> None:
        """Ends the server; compile processes that it forked go on."""
        with self._lock:
            self._end_server()
            self._started = [each for each in self._started if each.poll() is None]


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


class _Process:
    """One compile process; used by one thread. Raises `OSError` if it does not start."""

    def __init__(self, source: _Source, limits: ConstraintLimits) -> None:
        self._limits = limits
        self._connection = source.connect()
        self._connection.settimeout(START_SECONDS)
        self._stream = self._connection.makefile("rwb")
        self._decoder = msgspec.msgpack.Decoder(Answer)
        first = read_frame(self._stream)
        if first is None:
            raise ConnectionError("the grammar compiler ended while it started")
        started = msgspec.msgpack.decode(first, type=Started)
        self.pid = started.pid
        self._memory = None if started.limits_memory else _MemoryMeter(started.pid)
        self._is_open = True
        # If the process stops while it reads a constraint or writes an answer, that counts as over budget too.
        self._connection.settimeout(limits.compile_seconds)

    def compile(self, spec: ConstraintSpec) -> Answer:
        """Compiles one constraint. If a budget is over the process is killed; if it is killed or dies, the answer is an
        error.
        """
        try:
            return self._ask(msgspec.msgpack.encode(spec), self._limits.compile_seconds)
        except TimeoutError:
            seconds = self._limits.compile_seconds
            error = f"{spec.kind}: compiling took longer than {seconds:g} s; simplify the constraint"
        except (EOFError, OSError):
            error = f"{spec.kind}: compiling it ended the compiler; simplify the constraint"
        except MemoryError:
            self.kill()
            return needs_too_much_memory(spec, self._limits)
        self.kill()
        return Answer(error=error)

    def _ask(self, frame: bytes, seconds: float) -> Answer:
        """Raises `TimeoutError` if no answer came in time, `MemoryError` if the process has grown too much, and
        `EOFError` or `OSError` if it is gone.
        """
        write_frame(self._stream, frame)
        if not self._answers_within(min(IDLE_SECONDS, seconds)):
            self._set_policy("SCHED_OTHER")
            self._await_busy(seconds)
            self._set_policy("SCHED_IDLE")
        answer = read_frame(self._stream)
        if answer is None:
            raise EOFError
        return self._decoder.decode(answer)

    def _await_busy(self, seconds: float) -> None:
        """Waits for an answer until the process has used `seconds` of processor time, or `WALL_FACTOR` times as many by
        the clock. Time that a busy machine gave to other processes does not count against the former.
        """
        begun, used = time.monotonic(), _cpu_seconds(self.pid)
        left = seconds
        while left > 0.0 and not self._answers_within(max(left, LEAST_WAIT_SECONDS)):
            left = min(seconds - (_cpu_seconds(self.pid) - used), WALL_FACTOR * seconds - (time.monotonic() - begun))
        if left <= 0.0:
            raise TimeoutError

    def _answers_within(self, seconds: float) -> bool:
        if self._memory is None:
            return _comes_within(self._connection, seconds)
        deadline = time.monotonic() + seconds
        while not _comes_within(self._connection, min(MEMORY_LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
            if self._memory.growth() > self._limits.compile_memory_bytes:
                raise MemoryError
            if time.monotonic() >= deadline:
                return False
        return True

    def _set_policy(self, name: str) -> None:
        """Switches between idle and normal scheduling. In the latter its niceness leaves it a thirtieth of a busy
        core.
        """
        with contextlib.suppress(AttributeError, OSError):  # not Linux, process gone, or not allowed: nothing changes
            os.sched_setscheduler(self.pid, getattr(os, name), os.sched_param(0))

    @property
    def is_alive(self) -> bool:
        """Whether the process lives: between two answers, only its end makes the connection readable."""
        return self._is_open and not _comes_within(self._connection, 0.0)

    def kill(self) -> None:
        if not self._is_open:
            return
        # A forked process is the server's child, so once it is dead another process may get its id. It lives as long
        # as its end of the connection is open.
        if not self._has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._is_open = False
        with contextlib.suppress(OSError):  # unsent data is lost
            self._stream.close()
        self._connection.close()

    def _has_ended(self) -> bool:
        """Whether its end of the connection is closed; reads past an answer that came too late."""
        self._connection.setblocking(False)
        try:
            while self._connection.recv(4096):
                pass
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True


def _cpu_seconds(pid: int) -> float:
    """Processor time that a process has used; infinite if it is gone."""
    import psutil

    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return float("inf")
    return times.user + times.system


class _MemoryMeter:
    """Measures a process's memory from outside."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._first = self._resident()

    def growth(self) -> int:
        """Bytes that the process has grown by since this was made; not above 0 if it is gone."""
        return self._resident() - self._first

    def _resident(self) -> int:
        import psutil

        try:
            return psutil.Process(self._pid).memory_info().rss
        except psutil.Error:
            return 0


def _comes_within(source: socket.socket, seconds: float) -> bool:
    """Whether something can be read, or the other end closes, within this time."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class _Seat:
    """Holds one compile process and replaces it when it is gone; used by one thread."""

    def __init__(self, source: _Source, limits: ConstraintLimits) -> None:
        self._source = source
        self._limits = limits
        self._process: _Process | None = None
        self.has_failed = False
        """Whether the last start of a process failed."""

    def fill(self) -> None:
        """Starts a process if none lives. If that fails, `has_failed` is True and the log says why."""
        if self._process is not None and self._process.is_alive:
            return
        self.empty()
        try:
            self._process = _Process(self._source, self._limits)
        except Exception:
            logger.exception("the grammar compiler does not start")
            self._source.close()  # the server may hang: the next start makes a new one
        self.has_failed = self._process is None

    def compile(self, spec: ConstraintSpec) -> Answer:
        """Raises `CompilerFailed` if no process starts."""
        self.fill()
        if self._process is None:
            raise CompilerFailed("the grammar compiler does not start; the server's log says why")
        return self._process.compile(spec)

    def empty(self) -> None:
        """Kills the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()


class Compiler:
    """Compiles up to `num_processes` constraints at a time; others wait in a queue until a process is free."""

    def __init__(self, vocabulary: Vocabulary, limits: ConstraintLimits, num_processes: int = 2) -> None:
        self._limits = limits
        self._source = _Source(vocabulary, limits)
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[ConstraintSpec | None] = queue.SimpleQueue()
        self._pending: dict[ConstraintSpec, Future[Resolved]] = {}
        self.cache: ByteLRU[ConstraintSpec, Resolved] = ByteLRU(CACHE_BYTES)
        self._refusals: ByteLRU[ConstraintSpec, _Refusal] = ByteLRU(REFUSAL_BYTES)
        self.num_compiled = 0
        self._seats = [_Seat(self._source, limits) for _ in range(num_processes)]
        self._threads = [
            threading.Thread(target=self._serve, args=(seat,), name=f"compiler-{index}", daemon=True)
            for index, seat in enumerate(self._seats)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_processes(self) -> int:
        """Compile processes that there should be."""
        return len(self._seats)

    @property
    def num_alive(self) -> int:
        """Compile processes whose last start has not failed."""
        return sum(not seat.has_failed for seat in self._seats)

    def resolve(self, spec: ConstraintSpec) -> Future[Resolved]:
        """Resolves to the compiled constraint. The future raises `ConstraintError` if the constraint is refused, and
        `CompilerFailed` if it could not be compiled for another reason.
        """
        future: Future[Resolved] = Future()
        try:
            check_form(spec)
            check_size(spec, self._limits)
        except ConstraintError as error:
            future.set_exception(error)
            return future
        with self._lock:
            known = self.cache.get(spec)
            if known is not None:
                future.set_result(known)
                return future
            refusal = self._refusals.get(spec)
            if refusal is not None and refusal.until > time.monotonic():
                future.set_exception(ConstraintError(refusal.error))
                return future
            pending = self._pending.get(spec)
            if pending is None:
                pending = self._pending[spec] = Future()
                self._queue.put(spec)
            # Each waiter has its own future, so that one that gives up cancels only its own.
            pending.add_done_callback(lambda done: _copy(done, future))
        return future

    def _serve(self, seat: _Seat) -> None:
        seat.fill()  # so that the backends are loaded before the first constraint comes
        while (spec := self._next(seat)) is not None:
            try:
                self._settle(spec, seat.compile(spec))
            except Exception as error:  # only this constraint fails: later ones need this thread
                if not isinstance(error, CompilerFailed):
                    logger.exception("the grammar compiler failed")
                    seat.empty()
                self._fail(spec, error)
        seat.empty()
        self._source.close()

    def _next(self, seat: _Seat) -> ConstraintSpec | None:
        """The next constraint; None at the end. If the last start failed, tries again while no constraint comes."""
        while True:
            try:
                return self._queue.get(timeout=RETRY_SECONDS if seat.has_failed else None)
            except queue.Empty:
                seat.fill()

    def _settle(self, spec: ConstraintSpec, answer: Answer) -> None:
        with self._lock:
            pending = self._pending.pop(spec)
            self.num_compiled += 1
            if answer.resolved is not None:
                self.cache.put(spec, answer.resolved, _num_bytes(spec, answer.resolved))
            else:
                error = answer.error or ""
                refusal = _Refusal(time.monotonic() + REFUSAL_SECONDS, error)
                self._refusals.put(spec, refusal, ENTRY_BYTES + sys.getsizeof(spec.text) + sys.getsizeof(error))
        if answer.resolved is not None:
            pending.set_result(answer.resolved)
        else:
            pending.set_exception(ConstraintError(answer.error or ""))

    def _fail(self, spec: ConstraintSpec, error: Exception) -> None:
        """Hands the error to the waiters. It is not remembered, because the next try may succeed."""
        with self._lock:
            pending = self._pending.pop(spec, None)
        if pending is not None:
            failure = CompilerFailed(f"the grammar compiler failed: {type(error).__name__}: {error}")
            pending.set_exception(error if isinstance(error, CompilerFailed) else failure)

    def close(self) -> None:
        """Ends the processes as soon as they have compiled what is queued."""
        for _ in self._threads:
            self._queue.put(None)


class _Refusal(NamedTuple):
    until: float
    """Time on the monotonic clock, in seconds."""
    error: str


def _num_bytes(spec: ConstraintSpec, resolved: Resolved) -> int:
    """Bytes of memory that an entry of the cache holds."""
    texts = (spec.text, resolved.spec.text, resolved.compiled, *resolved.not_enforced)
    return ENTRY_BYTES + sum(map(sys.getsizeof, texts))


def _copy(done: Future[Resolved], target: Future[Resolved]) -> None:
    if not target.set_running_or_notify_cancel():
        return
    error = done.exception()
    if error is not None:
        target.set_exception(error)
    else:
        target.set_result(done.result())

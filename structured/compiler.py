"""Compiles constraints before their requests are admitted: in processes of lowest priority, within a budget, and for
clients in turns.

Requests that wait for equal constraints share one compilation. Any thread may call `Compiler.resolve`. Compiled
grammars stay in an LRU cache with a bound in bytes; refusals stay for a while.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import msgspec

from structured.compile_process import WALL_FACTOR, Answer, Setup, Started, needs_too_much_memory
from structured.constraint import ConstraintError, ConstraintLimits, ConstraintSpec, Resolved, check_form, check_size
from structured.fair_queue import FairQueue, QueueFullError
from structured.frames import read_frame, write_frame
from structured.lru import ByteLRU
from structured.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

CACHE_BYTES = 32 * 2**20
"""Most bytes of compiled constraints that are kept: room for 7,000 schemas of the usual size."""
REFUSAL_BYTES = 4 * 2**20
"""Most bytes of refusals that are remembered; that is room for 7,000."""
ENTRY_BYTES = 600
"""What an entry of either cache holds besides its texts: structs, digests, lengths, hash tables."""
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
WANTED_LOOK_SECONDS = 0.25
"""How often a seat looks whether somebody still waits for what it compiles."""
MEMORY_LOOK_SECONDS = 0.05
"""If the system does not limit a process's memory, the memory is measured this often."""


class CompilerBusy(RuntimeError):
    """Too many constraints wait for a process; a later try may do better."""


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


class _Unwanted(Exception):
    """Nobody waits for the answer."""


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

    def compile(self, spec: ConstraintSpec, is_wanted: Callable[[], bool]) -> Answer | None:
        """Compiles one constraint. If a budget is over the process is killed; if it is killed or dies, the answer is an
        error. If nobody wants the answer any more, the process is killed too, and the answer is None.
        """
        try:
            return self._ask(msgspec.msgpack.encode(spec), self._limits.compile_seconds, is_wanted)
        except _Unwanted:
            self.kill()
            return None
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

    def _ask(self, frame: bytes, seconds: float, is_wanted: Callable[[], bool]) -> Answer:
        """Raises `TimeoutError` if no answer came in time, `MemoryError` if the process has grown too much, and
        `EOFError` or `OSError` if it is gone, or `_Unwanted`.
        """
        write_frame(self._stream, frame)
        if not self._answers_within(min(IDLE_SECONDS, seconds)):
            self._set_policy("SCHED_OTHER")
            self._await_busy(seconds, is_wanted)
            self._set_policy("SCHED_IDLE")
        answer = read_frame(self._stream)
        if answer is None:
            raise EOFError
        return self._decoder.decode(answer)

    def _await_busy(self, seconds: float, is_wanted: Callable[[], bool]) -> None:
        """Waits for an answer until the process has used `seconds` of processor time, or `WALL_FACTOR` times as many by
        the clock. Time that a busy machine gave to other processes does not count against the former.
        """
        begun, used = time.monotonic(), _cpu_seconds(self.pid)
        left = seconds
        while left > 0.0 and not self._answers_within(min(max(left, LEAST_WAIT_SECONDS), WANTED_LOOK_SECONDS)):
            if not is_wanted():
                raise _Unwanted
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

    def compile(self, spec: ConstraintSpec, is_wanted: Callable[[], bool]) -> Answer | None:
        """None if nobody wants the answer any more. Raises `CompilerFailed` if no process starts."""
        self.fill()
        if self._process is None:
            raise CompilerFailed("the grammar compiler does not start; the server's log says why")
        return self._process.compile(spec, is_wanted)

    def empty(self) -> None:
        """Kills the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()


class _Job:
    """A constraint that is to be compiled, and the futures of those who wait for it."""

    def __init__(self, spec: ConstraintSpec) -> None:
        self.spec = spec
        self.waiters: list[Future[Resolved]] = []

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

    def __init__(self, vocabulary: Vocabulary, limits: ConstraintLimits, num_processes: int = 2) -> None:
        self._limits = limits
        self._source = _Source(vocabulary, limits)
        self._lock = threading.Lock()
        self._queue: FairQueue[_Job] = FairQueue(num_processes, limits.max_waiting)
        self._jobs: dict[bytes, _Job] = {}
        """Those that wait or are being compiled, by `_key`, as everything here."""
        self.cache: ByteLRU[bytes, Resolved] = ByteLRU(CACHE_BYTES)
        self._refusals: ByteLRU[bytes, _Refusal] = ByteLRU(REFUSAL_BYTES)
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

    def resolve(self, spec: ConstraintSpec, client: str = "") -> Future[Resolved]:
        """Resolves to the compiled constraint, for `client`. The future raises `ConstraintError` if the constraint is
        refused, `CompilerBusy` if too many wait, and `CompilerFailed` if it could not be compiled for another reason.
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
            known = self.cache.get(key)
            if known is not None:
                future.set_result(known)
                return future
            refusal = self._refusals.get(key)
            if refusal is not None and refusal.until > time.monotonic():
                future.set_exception(ConstraintError(refusal.error))
                return future
            job = self._jobs.get(key)
            if job is not None:
                # Each waiter has its own future, so that one that gives up cancels only its own.
                job.waiters.append(future)
                return future
            job = _Job(spec)
            job.waiters.append(future)
            try:
                self._queue.put(client, job)
            except QueueFullError as error:
                remedy = "retry later, or raise constraints.max_waiting"
                future.set_exception(CompilerBusy(f"too many constraints are to be compiled: {error}; {remedy}"))
            else:
                self._jobs[key] = job
        return future

    def _serve(self, seat: _Seat) -> None:
        seat.fill()  # the backends are loaded before anybody asks
        while (taken := self._next(seat)) is not None:
            client, job = taken
            try:
                while not self._skips(job):
                    answer = seat.compile(job.spec, job.is_wanted)
                    if answer is not None:
                        self._settle(job, answer)
                        break
            except Exception as error:  # whatever it is costs this constraint alone: later ones need this thread
                if not isinstance(error, CompilerFailed):
                    logger.exception("the grammar compiler failed")
                    seat.empty()
                self._fail(job, error)
            self._queue.done(client)
        seat.empty()
        self._source.close()

    def _next(self, seat: _Seat) -> tuple[str, _Job] | None:
        """The next constraint; None at the end. If the last start failed, tries again while no constraint comes."""
        while True:
            try:
                return self._queue.take(RETRY_SECONDS if seat.has_failed else None)
            except TimeoutError:
                seat.fill()

    def _skips(self, job: _Job) -> bool:
        """Forgets what nobody waits for any more."""
        with self._lock:
            wanted = job.is_wanted()
            if not wanted:
                del self._jobs[_key(job.spec)]
        return not wanted

    def _settle(self, job: _Job, answer: Answer) -> None:
        key, error = _key(job.spec), answer.error or ""
        with self._lock:
            del self._jobs[key]
            self.num_compiled += 1
            if answer.resolved is not None:
                self.cache.put(key, answer.resolved, _num_bytes(answer.resolved))
            else:
                refusal = _Refusal(time.monotonic() + REFUSAL_SECONDS, error)
                self._refusals.put(key, refusal, ENTRY_BYTES + sys.getsizeof(error))
        job.end(ConstraintError(error) if answer.resolved is None else answer.resolved)

    def _fail(self, job: _Job, error: Exception) -> None:
        """Not remembered: another try may do better."""
        with self._lock:
            self._jobs.pop(_key(job.spec), None)
        failure = CompilerFailed(f"the grammar compiler failed: {type(error).__name__}: {error}")
        job.end(error if isinstance(error, CompilerFailed) else failure)

    def close(self) -> None:
        """Ends the processes once what they compile is done."""
        self._queue.close()


class _Refusal(NamedTuple):
    until: float
    """Time on the monotonic clock, in seconds."""
    error: str


def _key(spec: ConstraintSpec) -> bytes:
    """Stands for a constraint, whose text may have a megabyte, where it is remembered."""
    return hashlib.sha256(msgspec.msgpack.encode(spec)).digest()


def _num_bytes(resolved: Resolved) -> int:
    """What an entry of the cache holds."""
    return ENTRY_BYTES + sum(map(sys.getsizeof, (resolved.spec.text, resolved.compiled, *resolved.not_enforced)))

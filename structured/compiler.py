"""Proves constraints before they are admitted: in processes of lowest priority, within a budget, once for all waiters,
and for clients in turns.

`Compiler.resolve` may be called from any thread. Compiled grammars stay in an LRU by bytes, refusals for a while.
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

CACHE_BYTES = 64 * 2**20
"""Of compiled constraints that are kept."""
REFUSAL_BYTES = 4 * 2**20
"""Of refusals that are remembered: 7,000 at most."""
ENTRY_BYTES = 600
"""What an entry of either holds beside its texts: structs, digests, lengths, hash tables."""
REFUSAL_SECONDS = 60.0
"""How long a refusal is remembered."""
IDLE_SECONDS = 0.2
"""A compilation that the machine's idle time has not served within this goes on at low instead of idle priority: where
steps keep every core busy it would run into its budget without having run.
"""
START_SECONDS = 120.0
"""Within which a compile process must have loaded its backends, on a machine with no time for it."""
RETRY_SECONDS = 10.0
"""After which a process that did not start is tried again, though no constraint asks for it."""
LEAST_WAIT_SECONDS = 0.01
"""Between two looks at how long a process has computed."""
WANTED_LOOK_SECONDS = 0.25
"""How often it is asked whether somebody still waits for a compilation under way."""
MEMORY_LOOK_SECONDS = 0.05
"""How often a process is weighed whose memory the system does not limit."""


class CompilerBusy(RuntimeError):
    """Too many constraints wait for a process; a later try may do better."""


class CompilerFailed(RuntimeError):
    """A constraint could not be proven for no fault of its own: there is no process for it, or the compiler failed."""


def _forks_well() -> bool:
    """macOS forks, but its libraries may not be used behind that."""
    return sys.platform != "darwin" and hasattr(os, "fork") and hasattr(socket, "send_fds")


class _Source:
    """Where compile processes come from: a process that forks them, started when first needed and again where it died,
    or, where forking does no good, each by itself. Any thread may ask.
    """

    def __init__(self, vocabulary: Vocabulary, limits: ConstraintLimits) -> None:
        self._forks = _forks_well()
        self._setup = msgspec.msgpack.encode(Setup(vocabulary, limits, self._forks))
        self._lock = threading.Lock()
        self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._started: list[subprocess.Popen[bytes]] = []
        """Processes that were not forked."""

    def connect(self) -> socket.socket:
        """Connects with a new process. Raises `OSError` where none comes."""
        if not self._forks:
            process, ours = self._start()
            with self._lock:  # asking buries those that have ended
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
            "OPENBLAS_NUM_THREADS": "1",  # who forks has no other thread
        }
        command = [sys.executable, "-m", "structured.compile_process"]
        with theirs:
            process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment)
        try:
            with ours.makefile("rwb") as stream:
                write_frame(stream, self._setup)
                if not _comes_within(ours, START_SECONDS):
                    raise TimeoutError(f"the grammar compiler did not start within {START_SECONDS:g} s")
                # What is not forked says `Started` at once: that is `_Process`'s to read, and this stream reads ahead.
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
        """The processes that came from it go on."""
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
    """One compile process; used by one thread. Raises `OSError` where it does not start."""

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
        self._scale = None if started.limits_memory else _Scale(started.pid)
        self._is_open = True
        # A process that stops while it reads a constraint or writes an answer is over its budget too.
        self._connection.settimeout(limits.compile_seconds)

    def compile(self, spec: ConstraintSpec, is_wanted: Callable[[], bool]) -> Answer | None:
        """Kills the process where a budget is over; then and where it dies the answer is an error. Kills it too where
        the answer is no longer wanted; then there is none.
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
        """Raises `TimeoutError` where no answer came in time, `MemoryError` where the process has grown too much,
        `EOFError` or `OSError` where it is gone, `_Unwanted`.
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
        """Waits until the process has computed for `seconds`, not for the time that a busy machine gave to others; the
        clock on the wall ends it at `WALL_FACTOR` times as long.
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
        if self._scale is None:
            return _comes_within(self._connection, seconds)
        deadline = time.monotonic() + seconds
        while not _comes_within(self._connection, min(MEMORY_LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
            if self._scale.growth() > self._limits.compile_memory_bytes:
                raise MemoryError
            if time.monotonic() >= deadline:
                return False
        return True

    def _set_policy(self, name: str) -> None:
        """Beside idle priority the process is nice, and takes a thirtieth of a busy core at most."""
        with contextlib.suppress(AttributeError, OSError):  # not Linux, gone, or not allowed to: it stays as it is
            os.sched_setscheduler(self.pid, getattr(os, name), os.sched_param(0))

    @property
    def is_alive(self) -> bool:
        """Between two answers nothing can be read from it but its end."""
        return self._is_open and not _comes_within(self._connection, 0.0)

    def kill(self) -> None:
        if not self._is_open:
            return
        # Who is forked is the server's child: once it is dead its id may be another's. While it holds its end of the
        # connection it lives.
        if not self._has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._is_open = False
        with contextlib.suppress(OSError):  # what was not sent goes nowhere
            self._stream.close()
        self._connection.close()

    def _has_ended(self) -> bool:
        """Also behind an answer that came too late."""
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
    """That a process has computed for; infinite where it is gone."""
    import psutil

    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return float("inf")
    return times.user + times.system


class _Scale:
    """Weighs a process from outside."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._first = self._resident()

    def growth(self) -> int:
        """Bytes since this was made; nothing where it is gone."""
        return self._resident() - self._first

    def _resident(self) -> int:
        import psutil

        try:
            return psutil.Process(self._pid).memory_info().rss
        except psutil.Error:
            return 0


def _comes_within(source: socket.socket, seconds: float) -> bool:
    """Whether something can be read, or the other end is gone, within that time."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class _Seat:
    """The place of one compile process; used by one thread."""

    def __init__(self, source: _Source, limits: ConstraintLimits) -> None:
        self._source = source
        self._limits = limits
        self._process: _Process | None = None
        self.has_failed = False
        """Whether the last process that was to start did not."""

    def fill(self) -> None:
        """Starts a process where none lives. Where that fails `has_failed` says so, and the log why."""
        if self._process is not None and self._process.is_alive:
            return
        self.empty()
        try:
            self._process = _Process(self._source, self._limits)
        except Exception:
            logger.exception("the grammar compiler does not start")
            self._source.close()  # what processes are forked from may hang
        self.has_failed = self._process is None

    def compile(self, spec: ConstraintSpec, is_wanted: Callable[[], bool]) -> Answer | None:
        """None where nobody wants the answer any more. Raises `CompilerFailed` where there is no process for it."""
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
    """A constraint that is to be proven, and who waits for it."""

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
    """`num_processes` constraints at a time; a slow one holds back only those behind it, and of several clients' none
    holds all the processes.
    """

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
        """Processes that there should be."""
        return len(self._seats)

    @property
    def num_alive(self) -> int:
        """Those that there are, or that are starting."""
        return sum(not seat.has_failed for seat in self._seats)

    def resolve(self, spec: ConstraintSpec, client: str = "") -> Future[Resolved]:
        """The future holds a `ConstraintError` where the constraint is refused, `CompilerBusy` where too many wait,
        `CompilerFailed` where that is no fault of its own. A constraint all of whose futures are cancelled is not
        compiled, or no longer. `client` is whom it is for; they take turns.
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
                # A future of its own for each waiter: one that gives up cancels nobody else's.
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
        """The next constraint, None at the end; while none comes, a process that did not start is tried again."""
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
    """On the monotonic clock, in seconds."""
    error: str


def _key(spec: ConstraintSpec) -> bytes:
    """Stands for a constraint, whose text may have a megabyte, where it is remembered."""
    return hashlib.sha256(msgspec.msgpack.encode(spec)).digest()


def _num_bytes(resolved: Resolved) -> int:
    """What an entry of the cache holds."""
    return ENTRY_BYTES + sum(map(sys.getsizeof, (resolved.spec.text, resolved.compiled, *resolved.not_enforced)))

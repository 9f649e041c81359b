"""Processes that compile grammars and may be killed: each compiles one constraint at a time, at the lowest priority.
Both ends are here: the process, and what its parent, `structured/compiling/compiler.py`, talks to it by.

`python -m manta.structured.compiling.compile_process` is a server that loads the backends once and forks the compile
processes. So a process that replaces a killed one need not load them again while the engine's steps run. The parent
sends the server a `Setup` over the socket that is its standard input, then one socket for each process to fork. A
compile process speaks length-prefixed msgpack frames over its socket: it sends `Started`, then receives each
`ConstraintSpec` and sends an `Answer`. All of them end when the parent does. On a system that cannot fork well there is
no server: each compile process is started by itself and speaks over its standard input.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from manta.structured.constraint import (
    FIELD,
    ConstraintError,
    ConstraintLimits,
    ConstraintSpec,
    JsonObjects,
    Resolved,
    check_limits,
)
from manta.structured.frames import read_frame, write_frame
from manta.structured.refusals import Refusal
from manta.structured.visible_logs import guard_process
from manta.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from manta.structured.backends.choose import Backends

LOADING_NICENESS = 10
"""Niceness while the backends load, as an engine starts at the same time."""
NICENESS = 15
"""Niceness of a compilation that idle priority leaves without time: it then gets a thirtieth of a busy core."""
IDLE_SECONDS = 0.2
"""A compilation that is not done after this time goes on at low instead of idle priority. At idle priority it might not
run at all if steps keep every core busy.
"""
WALL_FACTOR = 3
"""Most wall-clock time of a compilation, as a multiple of its budget: a busy machine gives it less than a core."""
GRACE_SECONDS = 5
"""The parent kills the process when the budget is over. If the parent is gone, the process ends itself this much later.
"""
START_SECONDS = 120.0
"""A compile process must have loaded its backends within this time, even on a busy machine."""
LEAST_WAIT_SECONDS = 0.01
"""Least time between two looks at how long a process has computed."""
WANTED_LOOK_SECONDS = 0.25
"""Interval at which the parent checks whether somebody still waits for what a process compiles."""
MEMORY_LOOK_SECONDS = 0.05
"""Interval at which the parent measures a process's memory, if the system does not limit it."""


class Setup(msgspec.Struct, array_like=True):
    """The parent's first message to a process that it started."""

    vocabulary: Vocabulary
    limits: ConstraintLimits
    objects: JsonObjects
    forks: bool
    """True for a server that forks compile processes, False for a process that compiles itself."""


class Started(msgspec.Struct, array_like=True):
    """A compile process's first message."""

    pid: int
    limits_memory: bool
    """Whether the system limits this process's memory; if not, the parent must watch it."""


class Answer(msgspec.Struct, array_like=True):
    """The answer to one constraint: one of the two fields is set."""

    resolved: Resolved | None = None
    refusal: Refusal | None = None

    @property
    def outcome(self) -> Resolved | ConstraintError:
        """The compiled constraint, or the reason why it is refused."""
        if self.refusal is not None:
            return ConstraintError(self.refusal)
        assert self.resolved is not None
        return self.resolved


def _over_budget(spec: ConstraintSpec, bound: float, unit: str) -> Answer:
    remedy = "simplify the constraint"
    return Answer(refusal=Refusal("over_budget", FIELD, bound=bound, unit=unit, place=spec.kind, remedy=remedy))


def _needs_too_much_memory(spec: ConstraintSpec, limits: ConstraintLimits) -> Answer:
    return _over_budget(spec, limits.compile_memory_bytes, "bytes")


def _failed(spec: ConstraintSpec, cause: str, remedy: str = "") -> Answer:
    return Answer(refusal=Refusal("unfit", FIELD, place=spec.kind, cause=cause, remedy=remedy))


# ---- the process ---------------------------------------------------------------------------------------------------


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; this process ends when the parent does
    os.nice(LOADING_NICENESS)
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a library prints must not become output of the program
    with contextlib.suppress(ConnectionError):  # the parent has ended, so nobody reads the answer
        _run(control)


def _run(control: socket.socket) -> None:
    with control.makefile("rwb") as stream:
        first = read_frame(stream)
        if first is None:
            return
        setup = msgspec.msgpack.decode(first, type=Setup)
        from manta.structured.backends.choose import (
            Backends,  # here, because the parent imports this file without backends
        )

        backends = Backends(setup.vocabulary, setup.objects)
        backends.warm_up()
        if setup.forks:
            write_frame(stream, b"ready")
    if setup.forks:
        _fork_on_request(control, backends, setup.limits)
    else:
        _serve(control, backends, setup.limits)


def _fork_on_request(control: socket.socket, backends: Backends, limits: ConstraintLimits) -> None:
    """Forks a compile process for each socket that comes over `control`, until the parent ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps dead children
    while True:
        try:
            _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        except ConnectionResetError:  # the parent ended without reading what it was sent
            return
        if not descriptors:
            return
        if os.fork() == 0:
            control.close()
            with contextlib.suppress(ConnectionError):  # the same
                _serve(socket.socket(fileno=descriptors[0]), backends, limits)
            os._exit(0)
        os.close(descriptors[0])


def _serve(connection: socket.socket, backends: Backends, limits: ConstraintLimits) -> None:
    """Compiles one constraint after another, until the parent closes the connection."""
    os.nice(NICENESS - LOADING_NICENESS)
    _lower_priority()
    started = Started(os.getpid(), _limit_memory(limits.compile_memory_bytes))
    stream = connection.makefile("rwb")
    write_frame(stream, msgspec.msgpack.encode(started))
    decoder = msgspec.msgpack.Decoder(ConstraintSpec)
    while (frame := read_frame(stream)) is not None:
        signal.alarm(math.ceil(WALL_FACTOR * limits.compile_seconds) + GRACE_SECONDS)
        answer = _compile(backends, decoder.decode(frame), limits)
        signal.alarm(0)
        write_frame(stream, answer)


def _compile(backends: Backends, spec: ConstraintSpec, limits: ConstraintLimits) -> bytes:
    """An `Answer` in msgpack."""
    try:
        check_limits(spec, limits)
        return msgspec.msgpack.encode(Answer(resolved=backends.resolve(spec)))
    except ConstraintError as error:
        answer = Answer(refusal=error.refusal)
    except MemoryError:
        answer = _needs_too_much_memory(spec, limits)
    except Exception as error:  # a backend may raise anything for a strange constraint; the constraint is refused
        answer = _failed(spec, f"{type(error).__name__}: {error}")
    return msgspec.msgpack.encode(answer)


def _lower_priority() -> None:
    """Makes this process run only in time that no other process wants, so that a step never waits for a compilation.
    Linux takes the right to other time for good from ordinary users (sched(7)). Then the niceness alone remains.
    """
    may_come_back: list[bool] = []

    def try_it() -> None:
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or not allowed
            for policy in os.SCHED_IDLE, os.SCHED_OTHER:
                os.sched_setscheduler(0, policy, os.sched_param(0))
            may_come_back.append(True)

    thread = threading.Thread(target=try_it)  # which has a priority of its own
    thread.start()
    thread.join()
    if may_come_back:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _limit_memory(num_bytes: int) -> bool:
    """Returns whether the system enforces the limit. macOS has neither this file nor an enforced limit."""
    try:
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + num_bytes, size + num_bytes))
    except (AttributeError, OSError, ValueError):
        return False
    return True


# ---- its parent ----------------------------------------------------------------------------------------------------


def forks_well() -> bool:
    """Whether forked processes work. macOS can fork, but its libraries may not be used after a fork."""
    return sys.platform != "darwin" and hasattr(os, "fork") and hasattr(socket, "send_fds")


class ForkServer:
    """Starts compile processes. A server process forks them; it is started when first needed, and again if it died. If
    forked processes do not work on this system, each compile process is started by itself. Any thread may call.
    """

    def __init__(self, vocabulary: Vocabulary, limits: ConstraintLimits, objects: JsonObjects) -> None:
        self._forks = forks_well()
        self._setup = msgspec.msgpack.encode(Setup(vocabulary, limits, objects, self._forks))
        self._lock = threading.Lock()
        self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._started: list[subprocess.Popen[bytes]] = []
        """Compile processes that were not forked."""

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
        command = [sys.executable, "-m", "manta.structured.compiling.compile_process"]
        with theirs:
            process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment)
        try:
            with ours.makefile("rwb") as stream:
                write_frame(stream, self._setup)
                if not _comes_within(ours, START_SECONDS):
                    raise TimeoutError(f"the grammar compiler did not start within {START_SECONDS:g} s")
                # A process that does not fork sends `Started` at once. `CompileProcess` must read that, so nothing is
                # read here: this stream reads ahead.
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
    """The answer has no reader any more."""


class CompileProcess:
    """One compile process; used by one thread. Raises `OSError` if it does not start."""

    def __init__(self, server: ForkServer, limits: ConstraintLimits) -> None:
        self._limits = limits
        self._connection = server.connect()
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
        """Compiles one constraint. The answer is None if nobody wants it any more, and an error if a budget is over or
        the process dies; in all three cases the process is killed.
        """
        seconds = self._limits.compile_seconds
        try:
            return self._ask(msgspec.msgpack.encode(spec), seconds, is_wanted)
        except _Unwanted:
            answer = None
        except TimeoutError:
            answer = _over_budget(spec, seconds, "s")
        except (EOFError, OSError):
            answer = _failed(spec, "compiling it ended the compiler", "simplify the constraint")
        except MemoryError:
            answer = _needs_too_much_memory(spec, self._limits)
        self.kill()
        return answer

    def _ask(self, frame: bytes, seconds: float, is_wanted: Callable[[], bool]) -> Answer:
        """Raises `TimeoutError` if no answer came in time, `MemoryError` if the process has grown too much, `EOFError`
        or `OSError` if it is gone, and `_Unwanted`.
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
        """Waits for an answer until the process has used `seconds` of processor time, or until `WALL_FACTOR` times as
        many have passed by the clock. The first bound leaves out the time that a busy machine gives to other processes.
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


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    guard_process()
    main()

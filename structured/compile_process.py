"""Processes that compile grammars and may be killed: one constraint at a time, at the lowest priority.

`python -m structured.compile_process` loads the backends once and forks these processes: what replaces a killed one
need not load them anew, amid everybody's steps. `structured/compiler.py` starts it and sends a `Setup` over the socket
that is its standard input, then a socket of its own for each process to fork. Those speak in length-prefixed msgpack
frames: first `Started`, then specifications in and `Answer`s out. All end when the parent does. Where a system cannot
fork well, each is started by itself and speaks over its standard input.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import socket
import sys
from typing import TYPE_CHECKING

import msgspec

from structured.constraint import ConstraintError, ConstraintLimits, ConstraintSpec, Resolved, check_limits
from structured.frames import read_frame, write_frame
from structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from structured.backends.choose import Backends

LOADING_NICENESS = 10
"""While the backends load, beside an engine that starts."""
NICENESS = 15
"""Of a compilation that the machine's idle time does not serve: a thirtieth of a busy core."""
WALL_FACTOR = 3
"""Times its budget that a compilation may take by the clock on the wall: a busy machine gives it less than a core."""
GRACE_SECONDS = 5
"""After the budget the parent kills; a parent that cannot, because it is gone, has this process end itself."""


MAX_ERROR_LENGTH = 2000
"""Characters; a backend may quote the whole constraint, and more than once."""


class Setup(msgspec.Struct, array_like=True):
    vocabulary: Vocabulary
    limits: ConstraintLimits
    forks: bool
    """False makes a process that compiles itself."""


class Started(msgspec.Struct, array_like=True):
    pid: int
    limits_memory: bool
    """Whether the system does; else whoever asks has to watch it."""


class Answer(msgspec.Struct, array_like=True):
    """Either is set."""

    resolved: Resolved | None = None
    error: str | None = None


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the parent, at whose end this one ends
    os.nice(LOADING_NICENESS)
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a library prints is no output of the program's
    with control.makefile("rwb") as stream:
        first = read_frame(stream)
        if first is None:
            return
        setup = msgspec.msgpack.decode(first, type=Setup)
        from structured.backends.choose import Backends  # the parent reads this file too, and needs no backend

        backends = Backends(setup.vocabulary)
        backends.warm_up()
        if setup.forks:
            write_frame(stream, b"ready")
    if not setup.forks:
        _serve(control, backends, setup.limits)
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the dead
    while True:
        try:
            _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        except ConnectionResetError:  # the parent ended without reading what it was sent
            return
        if not descriptors:
            return
        if os.fork() == 0:
            control.close()
            _serve(socket.socket(fileno=descriptors[0]), backends, setup.limits)
            os._exit(0)
        os.close(descriptors[0])


def _serve(connection: socket.socket, backends: Backends, limits: ConstraintLimits) -> None:
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
        answer = Answer(error=str(error))
    except MemoryError:
        answer = needs_too_much_memory(spec, limits)
    except Exception as error:  # a backend may raise anything at a strange input; it is the input that is refused
        answer = Answer(error=f"{spec.kind}: {type(error).__name__}: {error}")
    assert answer.error is not None
    error_text = answer.error[:MAX_ERROR_LENGTH].encode("utf-8", "backslashreplace").decode()  # half a surrogate pair
    return msgspec.msgpack.encode(Answer(error=error_text))


def needs_too_much_memory(spec: ConstraintSpec, limits: ConstraintLimits) -> Answer:
    return Answer(error=f"{spec.kind}: compiling needs more than {limits.compile_memory_bytes} bytes; simplify it")


def _lower_priority() -> None:
    """Only what nobody else wants: a step never waits for a compilation."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or not allowed to: it is nice, and stays that
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _limit_memory(num_bytes: int) -> bool:
    """Whether the system keeps to it: macOS has neither this file nor a limit that it enforces."""
    try:
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + num_bytes, size + num_bytes))
    except (AttributeError, OSError, ValueError):
        return False
    return True


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    main()

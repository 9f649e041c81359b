"""Processes that compile grammars and may be killed: each compiles one constraint at a time, at the lowest priority.

`python -m structured.compile_process` is a server that loads the backends once and forks the compile processes, so that
the replacement of a killed one need not load them again while the engine's steps run. `structured/compiler.py` starts
the server and sends it a `Setup` over the socket that is its standard input, then one socket for each process to fork.
A compile process speaks length-prefixed msgpack frames over its socket: it sends `Started`, then receives each
`ConstraintSpec` and sends an `Answer`. All of them end when the parent does. On a system that cannot fork well there is
no server: each compile process is started by itself and speaks over its standard input.
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
"""Niceness while the backends load, as an engine starts at the same time."""
NICENESS = 15
"""Niceness of a compilation that idle priority leaves without time: it then gets a thirtieth of a busy core."""
WALL_FACTOR = 3
"""By the clock a compilation may take this many times its budget: a busy machine gives it less than a core."""
GRACE_SECONDS = 5
"""The parent kills the process when the budget is over. If the parent is gone, the process ends itself this much later.
"""


MAX_ERROR_LENGTH = 2000
"""Most characters of an error; a backend may quote the whole constraint, and more than once."""


class Setup(msgspec.Struct, array_like=True):
    vocabulary: Vocabulary
    limits: ConstraintLimits
    forks: bool
    """True for a server that forks compile processes, False for a process that compiles itself."""


class Started(msgspec.Struct, array_like=True):
    pid: int
    limits_memory: bool
    """Whether the system limits this process's memory; if not, the parent must watch it."""


class Answer(msgspec.Struct, array_like=True):
    """The answer to one constraint: one of the two fields is set."""

    resolved: Resolved | None = None
    error: str | None = None


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; this process ends when the parent does
    os.nice(LOADING_NICENESS)
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a library prints must not become output of the program
    with control.makefile("rwb") as stream:
        first = read_frame(stream)
        if first is None:
            return
        setup = msgspec.msgpack.decode(first, type=Setup)
        from structured.backends.choose import Backends  # here, because the parent imports this file without backends

        backends = Backends(setup.vocabulary)
        backends.warm_up()
        if setup.forks:
            write_frame(stream, b"ready")
    if not setup.forks:
        _serve(control, backends, setup.limits)
        return
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
    except Exception as error:  # a backend may raise anything for a strange constraint; the constraint is refused
        answer = Answer(error=f"{spec.kind}: {type(error).__name__}: {error}")
    assert answer.error is not None
    error_text = answer.error[:MAX_ERROR_LENGTH].encode("utf-8", "backslashreplace").decode()  # half a surrogate pair
    return msgspec.msgpack.encode(Answer(error=error_text))


def needs_too_much_memory(spec: ConstraintSpec, limits: ConstraintLimits) -> Answer:
    return Answer(error=f"{spec.kind}: compiling needs more than {limits.compile_memory_bytes} bytes; simplify it")


def _lower_priority() -> None:
    """Runs only in time that no other process wants, so that a step never waits for a compilation."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or not allowed: its niceness remains
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


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    main()

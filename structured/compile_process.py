"""A process that compiles grammars and may be killed: one constraint at a time, at the lowest priority.

`python -m structured.compile_process`, started by `structured/compiler.py`, which speaks with it in length-prefixed
msgpack frames: a `Setup` first, then specifications in and `Answer`s out. It ends when its parent does.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING

import msgspec

from structured.constraint import ConstraintError, ConstraintLimits, ConstraintSpec, Resolved, check_limits
from structured.frames import read_frame, write_frame
from structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from structured.backends.choose import Backends

NICENESS = 10
"""Of a process that starts with its engine, which hardly anything runs beside yet."""
REPLACEMENT_NICENESS = 15
"""Of one that takes the place of a killed one, and loads its backends amid everybody's steps."""
GRACE_SECONDS = 5
"""After the budget the parent kills; a parent that cannot, because it is gone, has this process end itself."""


class Setup(msgspec.Struct, array_like=True):
    vocabulary: Vocabulary
    limits: ConstraintLimits


class Answer(msgspec.Struct, array_like=True):
    """Either is set; the first answer, to the setup, has neither."""

    resolved: Resolved | None = None
    error: str | None = None


def main() -> None:
    os.nice(int(sys.argv[1]))
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get between the frames
    first = read_frame(source)
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=Setup)
    from structured.backends.choose import Backends  # the parent reads this file too, and needs no backend

    backends = Backends(setup.vocabulary)
    backends.warm_up()
    write_frame(sink, msgspec.msgpack.encode(Answer()))
    _lower_priority()
    _limit_memory(setup.limits.compile_memory_bytes)
    decoder = msgspec.msgpack.Decoder(ConstraintSpec)
    while (frame := read_frame(source)) is not None:
        signal.alarm(math.ceil(setup.limits.compile_seconds) + GRACE_SECONDS)
        answer = _compile(backends, decoder.decode(frame), setup.limits)
        signal.alarm(0)
        write_frame(sink, msgspec.msgpack.encode(answer))


def _compile(backends: Backends, spec: ConstraintSpec, limits: ConstraintLimits) -> Answer:
    try:
        check_limits(spec, limits)
        return Answer(resolved=backends.resolve(spec))
    except ConstraintError as error:
        return Answer(error=str(error))
    except MemoryError:
        return Answer(error=f"{spec.kind}: compiling needs more than {limits.compile_memory_bytes} bytes; simplify it")
    except Exception as error:  # a backend may raise anything at a strange input; it is the input that is refused
        return Answer(error=f"{spec.kind}: {type(error).__name__}: {error}")


def _lower_priority() -> None:
    """Only what nobody else wants: a step never waits for a compilation."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):
        os.nice(19)


def _limit_memory(num_bytes: int) -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + num_bytes, size + num_bytes))


if __name__ == "__main__":
    sys.setrecursionlimit(10_000)
    main()

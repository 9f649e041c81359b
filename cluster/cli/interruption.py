"""Ctrl-C and SIGTERM while a command starts Ray: the command ends at once, and so does everything that it started.

Nothing is served yet, so nothing has to end in order. Raising `KeyboardInterrupt` would not do: Ray's own code may
swallow it, or be left between starting a process and remembering it. `manta serve` and `manta batch` use it around
their starts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from cluster import private_folder, process_tree

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """One of `SIGNALS` has come."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


_has_started = False
"""Whether the command has begun to start processes."""


@contextlib.contextmanager
def abandoned_when_interrupted() -> Iterator[None]:
    """A context in which a signal of `SIGNALS` ends this process with 128 plus the signal's number."""
    with _handlers_put_back():
        handle_signals(_abandon)
        yield


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """A context in which SIGTERM raises `KeyboardInterrupt`, as Ctrl-C does."""
    with _handlers_put_back():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        yield


@contextlib.contextmanager
def _handlers_put_back() -> Iterator[None]:
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def handle_signals(handler: Any) -> None:
    """Makes `handler` that of both signals."""
    for number in SIGNALS:
        signal.signal(number, handler)


def raise_interrupted(number: int, _: FrameType | None) -> None:
    """A signal handler. Raises `Interrupted`."""
    raise Interrupted(number)


def note_start() -> None:
    """Says that processes are started from now on: the user is told when they are ended."""
    global _has_started
    _has_started = True
    process_tree.adopt_orphans()


def leave(code: int) -> None:
    """Ends this process with `code` at once. Ray's threads go on until the interpreter has taken down what they use,
    and then crash it.
    """
    with contextlib.suppress(OSError, ValueError):  # nobody reads any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _abandon(number: int, _: FrameType | None) -> None:
    handle_signals(signal.SIG_IGN)
    if _has_started:
        _say("Stopping ...\n")
        process_tree.kill_below()
        private_folder.remove_own()
        _say("Stopped.\n")
    os._exit(128 + number)


def _say(text: str) -> None:
    """Writes past the buffers of `sys.stdout`, which the interrupted code may be using."""
    with contextlib.suppress(OSError):
        os.write(1, text.encode())

"""Ctrl-C and SIGTERM while a command starts Ray: the command and everything that it started end at once.

Nothing is served yet, so nothing has to end in order. Raising `KeyboardInterrupt` would not work, because Ray's own
code may swallow it, or be interrupted between starting a process and recording it. `manta serve` and `manta batch` use
this module around their starts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from manta.cluster import private_folder, process_tree

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """Raised after one of `SIGNALS`."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


_has_started = False
"""Whether the command has begun to start processes."""


@contextlib.contextmanager
def abandoned_when_interrupted() -> Iterator[None]:
    """Makes a signal of `SIGNALS` end this process with 128 plus the signal's number, inside the context."""
    with _handlers_put_back():
        handle_signals(_abandon)
        yield


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM raise `KeyboardInterrupt`, as Ctrl-C does, inside the context."""
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
    """Sets `handler` for both signals."""
    for number in SIGNALS:
        signal.signal(number, handler)


def raise_interrupted(number: int, _: FrameType | None) -> None:
    """Raises `Interrupted`; it is a signal handler."""
    raise Interrupted(number)


def note_start() -> None:
    """Records that processes are started from now on, so that the user is told when they are ended."""
    global _has_started
    _has_started = True
    process_tree.adopt_orphans()


def leave(code: int) -> None:
    """Ends this process with `code` at once. Otherwise Ray's threads would go on while the interpreter tears down what
    they use, and crash it.
    """
    with contextlib.suppress(OSError, ValueError):  # the reader may be gone
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

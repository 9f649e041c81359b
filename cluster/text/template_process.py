"""Renders chat templates in a process of limited memory and time, because a template is a program of a stranger.

`python -m manta.cluster.text.template_process` is the process; `TemplateProcess` starts it and speaks to it in
length-prefixed frames over its standard input. A request is a pickle, which the process alone loads. An answer is one
byte for its kind, then text. What a render may use grows with what the client sent. `cluster/text/chat_template.py`
has the templates themselves and calls this module.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
from typing import Any, NamedTuple

from manta.cluster.text.template_sandbox import Renderer
from manta.structured.frames import read_frame, write_frame

MEMORY_BYTES = 512 * 2**20
"""Address space that the process may take beside its own. Enforced on Linux only."""
LEAST_SECONDS = 2.0
"""Processor time of a render of nothing. Published templates take less than a millisecond for a message."""
SECONDS_PER_BYTE = 1e-5
"""Further processor time for each byte of the conversation: 300 times what published templates take."""
LEAST_TEXT = 2**20
"""Characters that a render of nothing may have."""
TEXT_PER_BYTE = 16
"""Further characters for each byte of the conversation. Templates repeat tools and messages a few times at most."""
WALL_SECONDS = 300.0
"""Time by the clock after which the process counts as lost, for a machine that gives it no processor."""
_REAPED_SECONDS = 5.0
"""Time by the clock within which a process that has closed its end of the connection has ended."""
_TEXT, _REFUSED, _TOO_LONG, _TOO_LARGE = b"t", b"r", b"l", b"m"
"""Kinds of answers: the rendered text, the template's own refusal, and a text or values beyond their bounds."""


class OverBudget(ValueError):
    """A render took more memory, time or characters than it may. The message says what and how much."""


class RenderRefused(ValueError):
    """The template raised an exception; the message is its own."""


class Render(NamedTuple):
    """One request to the process."""

    source: str
    values: dict[str, Any]
    """Variables of the template. They are pickled."""


class _Budget(NamedTuple):
    seconds: float
    characters: int


def _budget(num_bytes: int) -> _Budget:
    return _Budget(LEAST_SECONDS + num_bytes * SECONDS_PER_BYTE, LEAST_TEXT + num_bytes * TEXT_PER_BYTE)


class TemplateProcess:
    """The process that renders the templates of this one. It starts at the first render, and again after one that was
    over its budget. Any thread may call; renders take turns.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def render(self, source: str, values: dict[str, Any]) -> str:
        """Returns what a template makes of `values`.

        Raises `RenderRefused` if the template does not compile or raises anything, `OverBudget`, and `OSError` if no
        process starts.
        """
        try:
            request = pickle.dumps(Render(source, values), pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # whatever a value's own code raises
            raise RenderRefused(f"the template's variables cannot be sent to it: {error}") from error
        with self._lock:
            answer = self._ask(request)
            if answer is None:
                raise OverBudget(self._why_ended(_budget(len(request))))
        kind, text = answer[:1], answer[1:].decode("utf-8", "surrogatepass")
        if kind == _REFUSED:
            raise RenderRefused(text)
        if kind == _TOO_LONG:
            raise OverBudget(f"it makes a text of more than {_budget(len(request)).characters} characters of them")
        if kind == _TOO_LARGE:
            raise OverBudget(_OF_MEMORY)
        return text

    def start(self) -> None:
        """Starts the process, so that the first render need not wait for it. Raises `OSError` if it cannot."""
        with self._lock:
            if self._process is None:
                self._start()

    def close(self) -> None:
        """Ends the process. A later render starts another one."""
        with self._lock:
            self._end()

    def _ask(self, request: bytes) -> bytes | None:
        """Returns None if the process ended instead of answering."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._connection is not None
        try:
            with self._connection.makefile("rwb") as stream:
                write_frame(stream, request)
                return read_frame(stream)
        except OSError:  # it ended while it read, or takes forever
            return None

    def _start(self) -> None:
        self._end()
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-m", "manta.cluster.text.template_process"]
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment)
        ours.settimeout(WALL_SECONDS)
        self._connection = ours

    def _why_ended(self, budget: _Budget) -> str:
        """Returns why the process did not answer, and ends it."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_REAPED_SECONDS)  # one that ended by itself has its own return code
        code = self._process.returncode
        self._end()
        if code is None:
            return f"it takes more than {WALL_SECONDS:g} s"
        return f"it takes more than {budget.seconds:.3g} s of processor time" if code == -signal.SIGPROF else _OF_MEMORY

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


_OF_MEMORY = f"it takes more than {MEMORY_BYTES >> 20} MiB of memory"


# ---- the process -----------------------------------------------------------------------------------------------------


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; this process ends when the parent does
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process even within one long operation
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    renderer = Renderer()
    limit_memory(MEMORY_BYTES)
    stream = connection.makefile("rwb")
    with contextlib.suppress(ConnectionError):
        while (frame := read_frame(stream)) is not None:
            budget = _budget(len(frame))
            signal.setitimer(signal.ITIMER_PROF, budget.seconds)
            answer = _answer(renderer, frame, budget)
            signal.setitimer(signal.ITIMER_PROF, 0)
            write_frame(stream, answer)


def _answer(renderer: Renderer, frame: bytes, budget: _Budget) -> bytes:
    try:
        source, values = pickle.loads(frame)
        text = renderer.render(source, values, budget.characters)
        if text is None:
            return _TOO_LONG
        return _TEXT + text.encode("utf-8", "surrogatepass")
    except MemoryError:
        return _TOO_LARGE
    except Exception as error:  # a template is a program and may raise anything
        reason = str(error) or type(error).__name__
        return _REFUSED + reason[:1000].encode("utf-8", "surrogatepass")


def limit_memory(num_bytes: int) -> None:
    """Lets this process take `num_bytes` beside the memory that it has, where the system can limit it."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + num_bytes, size + num_bytes))


if __name__ == "__main__":
    main()

"""Watches a server that the fuzzer keeps busy: how long another client waits, and how the memory grows.

It has a process of its own, because the fuzzer's is busy drawing bodies. `python -m tests.fuzz.http.pulse PORT PID...`
asks until its input ends, and then writes what it has seen as JSON.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable

import msgspec
import psutil

PERIOD_S = 0.02
"""Seconds between two questions. A wait that is shorter cannot be told from the pause between them."""
BOUND_S = 0.25
"""The longest time for which the server may leave another client waiting, on a machine that does nothing else."""
SAMPLE_S = 10.0
"""Seconds between two looks at the memory."""
MIN_SAMPLES = 30
"""Samples below which nothing is said about the memory's growth: it takes minutes to reach its size."""
GROWTH = 1.1
"""How much more memory than in the second quarter of the campaign may be used in the last one."""
_QUESTION = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Seen(msgspec.Struct):
    """What was seen from the beginning to the end."""

    longest_waits_s: list[float]
    """The longest times from a question to its answer in seconds, the longest first."""
    num_questions: int
    num_over_bound: int
    """Questions that were answered after more than `BOUND_S`."""
    longest_delay_s: float
    """The longest time in seconds by which this process itself ran too late, which tells how busy the machine was."""
    memory_bytes: list[int]
    """Resident memory of the server's processes together, every `SAMPLE_S`."""

    @property
    def growth(self) -> float:
        """Ratio of the last quarter's memory to the second quarter's; 1 for a campaign that is too short to tell, or
        that watches no process.
        """
        quarter = len(self.memory_bytes) // 4
        if len(self.memory_bytes) < MIN_SAMPLES or not self.memory_bytes[0]:
            return 1.0
        return _mean(self.memory_bytes[-quarter:]) / _mean(self.memory_bytes[quarter : 2 * quarter])


class Pulse:
    """Asks the server at `port` until it is stopped; `processes` are those whose memory counts."""

    def __init__(self, port: int, processes: Iterable[psutil.Process]) -> None:
        command = [sys.executable, "-m", __name__, str(port), *(str(process.pid) for process in processes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def stop(self) -> Seen | None:
        """Returns what was seen; None if the process has failed, because the server answered no more."""
        output = self._process.communicate()[0]
        return msgspec.json.decode(output, type=Seen) if self._process.returncode == 0 else None


def _mean(values: list[int]) -> float:
    return sum(values) / len(values)


def _watch(port: int, processes: list[psutil.Process], end: threading.Event) -> Seen:
    """Asks until `end` is set. The server may close the connection, as it may any other; the next question then goes
    over another one.
    """
    seen = Seen([], 0, 0, 0.0, [])
    connection: socket.socket | None = None
    due = started = time.monotonic()
    while not end.is_set():
        if time.monotonic() >= started + SAMPLE_S * len(seen.memory_bytes):
            seen.memory_bytes.append(sum(process.memory_info().rss for process in processes))
        time.sleep(max(0.0, due - time.monotonic()))
        asked = time.monotonic()
        seen.longest_delay_s = max(seen.longest_delay_s, asked - due)
        connection = _ask(port, connection)
        wait = time.monotonic() - asked
        due = max(due + PERIOD_S, asked + wait)
        seen.num_questions += 1
        seen.num_over_bound += wait > BOUND_S
        seen.longest_waits_s = sorted([*seen.longest_waits_s, wait], reverse=True)[:5]
    return seen


def _ask(port: int, connection: socket.socket | None) -> socket.socket:
    """Asks over a connection, or over a new one if there is none or the server has closed it. Returns the one that had
    the answer. Raises `OSError` if a new one gets none.
    """
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.sendall(_QUESTION)
            if connection.recv(65536):
                return connection
        connection.close()
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(_QUESTION)
    if not connection.recv(65536):
        raise ConnectionResetError("the server has closed a new connection")
    return connection


def main() -> None:
    end = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), end.set()), daemon=True).start()
    processes = [psutil.Process(int(pid)) for pid in sys.argv[2:]]
    sys.stdout.buffer.write(msgspec.json.encode(_watch(int(sys.argv[1]), processes, end)))


if __name__ == "__main__":
    main()

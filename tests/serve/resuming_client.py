"""Clients that lose their connections and read on, and a checker of what they recorded, as Jepsen does it.

A client only records: each event's id, its bytes and its time. `check` decides afterwards.
"""

from __future__ import annotations

import dataclasses
import http.client
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tests.patience import PATIENCE_S
from tests.serve.fault_streams import Stream

UNREAD_S = 60.0
ENDS = (b"data: [DONE]", b"event: response.completed", b"event: response.incomplete", b"event: message_stop")
"""Beginnings of last events."""
REFUSAL_PAUSE_S = 0.1
PROXYS_ERROR = b"Internal Server Error"
"""Answer of Serve's proxy where an ingress died over a request."""


class Seen(NamedTuple):
    """An event as it came."""

    number: int
    content: bytes
    """Everything but the id."""
    at: float
    """Time on `time.monotonic`'s clock."""


@dataclasses.dataclass
class History:
    """What one client recorded."""

    path: str
    body: dict[str, Any]
    request_id: str = ""
    """Name of the request in the server's log."""
    stream_id: str = ""
    events: list[Seen] = dataclasses.field(default_factory=list)
    num_connections: int = 0
    attempts: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    """Connections that broke and answers that asked to retry, each with its time on `time.monotonic`'s clock."""
    problems: list[str] = dataclasses.field(default_factory=list)
    """Answers that no client expects."""

    @property
    def has_ended(self) -> bool:
        return bool(self.events) and self.events[-1].content.startswith(ENDS)

    @property
    def pauses_s(self) -> list[float]:
        times = [event.at for event in self.events]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


class ResumingClient:
    """Asks for one stream and reads it to its end over as many connections as it takes, each to one of `ports`."""

    def __init__(self, ports: Sequence[int], path: str, body: dict[str, Any], seed: int, key: str = "") -> None:
        self.history = History(path, body, f"client-{random.getrandbits(64):016x}")
        self._ports = ports
        self._chooser = random.Random(seed)
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._connection: http.client.HTTPConnection | None = None
        self.unread_s = UNREAD_S
        self._deadline = time.monotonic() + PATIENCE_S

    def drop(self) -> None:
        """Breaks the connection, from any thread."""
        connection = self._connection
        if connection is not None and connection.sock is not None:
            connection.sock.close()

    def read(self, cut: Callable[[random.Random], int] = lambda _: 1 << 30) -> History:
        """Reads to the end. `cut` says after how many events each connection is broken."""
        while not self.history.has_ended and not self.history.problems and time.monotonic() < self._deadline:
            try:
                self.read_once(cut(self._chooser))
            except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
                self.history.attempts.append((time.monotonic(), type(error).__name__))
                time.sleep(0.01)  # the connection broke, or a socket was closed under its reader
        return self.history

    def read_once(self, num_events: int) -> None:
        """Reads at most so many events over one connection."""
        try:
            self._read_once(num_events)
        finally:
            if self._connection is not None:
                self._connection.close()

    def _read_once(self, num_events: int) -> None:
        history = self.history
        history.num_connections += 1
        port = self._chooser.choice(self._ports)
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        if not history.stream_id:
            named = {"X-Request-Id": history.request_id, "X-Resumable-S": f"{self.unread_s:g}"}
            headers = {**self._headers, **named}
            self._connection.request("POST", history.path, json.dumps(history.body), headers)
        else:
            last = history.events[-1].number if history.events else -1
            headers = self._headers
            if last >= 0 and self._chooser.random() < 0.5:  # both ways must do the same
                headers = {**headers, "Last-Event-ID": f"{history.stream_id}:{last}"}
                self._connection.request("GET", f"/v1/streams/{history.stream_id}", headers=headers)
            else:
                path = f"/v1/streams/{history.stream_id}?starting_after={last}"
                self._connection.request("GET", path, headers=headers)
        response = self._connection.getresponse()
        content = response.read() if response.status != 200 else b""
        if response.status in (429, 502, 503) or content == PROXYS_ERROR:
            history.attempts.append((time.monotonic(), str(response.status)))
            time.sleep(REFUSAL_PAUSE_S)
            return
        if response.status != 200:
            history.problems.append(f"{response.status}: {content!r}")
            return
        history.stream_id = response.headers.get("x-stream-id") or history.stream_id
        self._read_events(response, num_events)

    def _read_events(self, response: http.client.HTTPResponse, num_events: int) -> None:
        event = b""
        while num_events and (line := response.readline()):
            event += line
            if event.endswith(b"\n\n"):
                self._add(event)
                event = b""
                num_events -= 1

    def _add(self, event: bytes) -> None:
        identity, _, content = event.partition(b"\n")
        if not identity.startswith(b"id: "):
            self.history.problems.append(f"no id: {event!r}")
            return
        number = int(identity.rpartition(b":")[2])
        self.history.events.append(Seen(number, content, time.monotonic()))


class Verdict(NamedTuple):
    """What became of the events of many streams."""

    num_streams: int
    num_events: int
    num_bytes: int
    lost: list[str]
    twice: list[str]
    different: list[str]
    pauses_s: list[float]

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.twice or self.different)


def check(histories: Sequence[History], undisturbed: Sequence[Stream]) -> Verdict:
    """Compares what clients recorded with the same requests' streams that nothing disturbed."""
    lost, twice, different = [], [], []
    for number, (history, expected) in enumerate(zip(histories, undisturbed, strict=True)):
        name = f"stream {number} ({history.stream_id}, {history.path})"
        numbers = [event.number for event in history.events]
        if history.problems:
            lost.append(f"{name}: {history.problems}")
        if sorted(set(numbers)) != list(range(len(set(numbers)))) or not history.has_ended:
            lost.append(f"{name}: events {_gaps(numbers)}, ended: {history.has_ended}")
        if len(set(numbers)) < len(numbers) or numbers != sorted(numbers):
            twice.append(f"{name}: {_gaps(numbers)}")
        if not as_stream(history).equals(expected):
            different.append(f"{name}: {as_stream(history).texts} and not {expected.texts}")
    events = [event for history in histories for event in history.events]
    return Verdict(
        len(histories),
        len(events),
        sum(len(event.content) for event in events),
        lost,
        twice,
        different,
        sorted(pause for history in histories for pause in history.pauses_s),
    )


def _gaps(numbers: list[int]) -> list[tuple[int, int]]:
    return [(a, b) for a, b in itertools.pairwise(numbers) if b != a + 1]


def as_stream(history: History) -> Stream:
    stream = Stream()
    for event in history.events:
        for line in event.content.splitlines():
            if line.startswith(b"data: {"):
                stream.add(json.loads(line.removeprefix(b"data: ")))
    stream.times = [event.at for event in history.events]
    return stream


def read_all(clients: Sequence[ResumingClient], cut: Callable[[random.Random], int]) -> list[History]:
    """Reads all at a time."""
    threads = [threading.Thread(target=client.read, args=[cut]) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [client.history for client in clients]

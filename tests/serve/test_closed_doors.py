"""Attacks of clients, pages and neighbours against a live server, beside which another client reads its stream.

After each the server answers, its processes have not grown, and the stream went on meanwhile. `make test` runs them in
small sizes and looks for a stream that stood still; `make prove` runs the sizes of the review that found them, and
holds the time between two tokens to 2 times the idle server's 99th percentile plus 100 ms.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests.patience import PATIENCE_S
from tests.processes import running_below
from tests.server import Server

PROVE = os.environ.get("MANTA_PROVE") == "1"

VICTIM, ATTACKER = "the-key-of-the-victim", "the-key-of-the-attacker"
MAX_GROWTH_BYTES = 100 * 2**20
"""Largest growth of any process."""
STANDSTILL_S = 3.0
"""A longer gap in a stream is compared with gaps while nobody attacks; what is looked for held streams up for many
seconds.
"""
BUSY_FACTOR = 10.0
"""Times the longest gap while nobody attacks that a stream may stand still: on a busy machine a step may take long."""

READER = """
import http.client, json, sys, time
port, key, model = int(sys.argv[1]), sys.argv[2], sys.argv[3]
body = json.dumps({"model": model, "prompt": [5, 9, 17], "max_tokens": 400, "ignore_eos": True, "stream": True})
while True:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {key}"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    last = None
    while line := answer.readline():
        if line.startswith(b"data: {"):
            now = time.monotonic()
            if last is not None:
                print(now, now - last, flush=True)
            last = now
    connection.close()
"""
"""Reads one stream after the other, and prints when each event came and how long after the one before."""


class Stream:
    """What another client sees, in a process of its own."""

    def __init__(self, server: Server) -> None:
        arguments = [str(server.port), VICTIM, server.model]
        self.process = subprocess.Popen([sys.executable, "-c", READER, *arguments], stdout=subprocess.PIPE, text=True)
        self.gaps: list[tuple[float, float]] = []
        """Time of each event, and seconds since the one before."""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            when, gap = map(float, line.split())
            self.gaps.append((when, gap))

    def between(self, begun: float, ended: float) -> list[float]:
        """Seconds between two events, of those that came in this time."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.gaps or self.gaps[-1][0] < ended:
            assert self.process.poll() is None, "the other client's stream failed"
            assert time.monotonic() < deadline, "the other client's stream stands still"
            time.sleep(0.01)
        return [gap for when, gap in self.gaps if begun <= when <= ended + gap]


class Target:
    def __init__(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MANTA_API_KEYS", f"victim:{VICTIM},attacker:{ATTACKER}")
            self.server = Server("engine.max_num_sequences=16", "request_timeout_s=120")
        self.stream = Stream(self.server)
        self.ask({"max_tokens": 2})
        begun = time.monotonic()
        time.sleep(10 if PROVE else 1)
        gaps = sorted(self.stream.between(begun, time.monotonic()))
        self.idle_p99 = gaps[int(0.99 * len(gaps))]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE_S)

    def ask(self, fields: dict[str, Any], key: str = ATTACKER, path: str = "/v1/completions") -> tuple[int, Any]:
        """(status, decoded answer)."""
        prompt = {} if "messages" in fields else {"prompt": [5, 9, 17]}
        headers = {"Authorization": f"Bearer {key}"}
        status, _, answer = self.server.post(path, {"model": self.server.model, **prompt, **fields}, headers)
        return status, answer

    def send(self, fields: dict[str, Any]) -> socket.socket:
        """A request whose answer nobody has read yet."""
        body = json.dumps({"model": self.server.model, "prompt": [5, 9, 17], **fields}).encode()
        lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", f"Authorization: Bearer {ATTACKER}"]
        sender = self.connect()
        sender.sendall("\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body)
        return sender

    def num_bytes(self) -> dict[int, int]:
        """Of each process of the server, without what they share: Ray bounds its store of objects by itself."""
        found: dict[int, int] = {}
        for process in running_below(self.server.process.pid):
            with contextlib.suppress(psutil.Error):
                if "compile_process" not in " ".join(process.cmdline()):  # forked and ended as constraints come
                    memory = process.memory_info()
                    found[process.pid] = memory.rss - getattr(memory, "shared", 0)
        return found

    def flood(self, first: bytes, piece: bytes, num_bytes: int) -> bytes:
        """Sends pieces until so many bytes went or the server says no; what it answers."""
        with self.connect() as sender:
            sender.settimeout(PATIENCE_S)
            sent = 0
            with contextlib.suppress(ConnectionError):
                sender.sendall(first)
                while sent < num_bytes:
                    sender.sendall(piece)
                    sent += len(piece)
            with contextlib.suppress(ConnectionError):
                return sender.recv(65536)
        return b""

    def quiet_gap(self, seconds: float) -> float:
        """Returns the longest gap of the stream in so many seconds in which nobody attacks."""
        begun = time.monotonic()
        time.sleep(seconds)
        return max(self.stream.between(begun, time.monotonic()), default=0.0)

    def stop(self) -> None:
        self.stream.process.kill()
        self.stream.process.wait()
        self.server.stop()


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    found = Target()
    yield found
    found.stop()


# ---- without a key ---------------------------------------------------------------------------------------------------

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
FLOOD_BYTES = 60_000_000 if PROVE else 6_000_000
LONG_REGEX = 900_000 if PROVE else 60_000
"""Characters of an expression that is read to its end before it is refused."""


def headers_without_end(target: Target) -> None:
    assert target.flood(HEAD, b"a: b\r\n" * 5000, FLOOD_BYTES).startswith(b"HTTP/1.1 431")


def a_header_without_end(target: Target) -> None:
    assert target.flood(HEAD + b"a: ", b"b" * 30_000, FLOOD_BYTES).startswith(b"HTTP/1.1 431")


def a_request_line_without_end(target: Target) -> None:
    assert target.flood(b"GET /", b"a" * 30_000, FLOOD_BYTES).startswith(b"HTTP/1.1 414")


def trailers_without_end(target: Target) -> None:
    chunked = (
        HEAD + b"Authorization: Bearer " + ATTACKER.encode() + b"\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    )
    with target.connect() as sender:
        sent = 0
        with contextlib.suppress(ConnectionError):
            sender.sendall(chunked)
            while sent < FLOOD_BYTES:
                sender.sendall(b"a: b\r\n" * 5000)
                sent += 30_000
        assert sent < FLOOD_BYTES, "all of them were read"


def half_sent_requests(target: Target) -> None:
    """Of one address at most 1,024 stay, and whoever comes then is served."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    num_sent = min(21_000, most - 1000) if PROVE else 1500
    held: list[socket.socket] = []
    try:
        for _ in range(num_sent):
            held.append(target.connect())
            held[-1].sendall(HEAD)
        assert target.server.get("/health")
        time.sleep(0.5)
        num_open = 0
        for sender in held:
            sender.setblocking(False)
            try:
                num_open += sender.recv(1) != b""
            except BlockingIOError:
                num_open += 1
            except ConnectionError:
                pass
        assert num_open <= 1100
    finally:
        for sender in held:
            sender.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))


def a_page_of_another_site(target: Target) -> None:
    body = json.dumps({"model": target.server.model, "prompt": "a", "max_tokens": 1})
    page = {"Content-Type": "text/plain", "Authorization": f"Bearer {ATTACKER}"}
    for headers in (
        {"Host": "evil.example", "Origin": "http://evil.example"},
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "evil.example"},
    ):
        connection = http.client.HTTPConnection("127.0.0.1", target.server.port, timeout=PATIENCE_S)
        connection.request("POST", "/v1/completions", body, page | headers)
        assert connection.getresponse().status == 403, headers
        connection.close()


# ---- with a key ------------------------------------------------------------------------------------------------------


def many_bad_words(target: Target) -> None:
    words = [f"word{number}" for number in range(60_000 if PROVE else 10_000)]
    status, answer = target.ask({"bad_words": words, "max_tokens": 1})
    assert (status, answer["error"]["param"]) == (400, "bad_words")
    status, _ = target.ask({"bad_words": words[:1000], "max_tokens": 1})
    assert status == 200


def long_texts(target: Target) -> None:
    status, answer = target.ask({"prompt": "some words " * (700_000 if PROVE else 100_000), "max_tokens": 1})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert target.ask({"prompt": ["some words " * 700] * (1000 if PROVE else 200), "max_tokens": 1})[0] == 400
    many = {"prompt": ["word " * 40] * (256 if PROVE else 64), "max_tokens": 1}
    assert target.ask(many)[0] == 200


def a_crowd_at_the_front(target: Target) -> None:
    """It may not go before others, and its many requests make one request of another client wait for none of them."""
    long = {"max_tokens": 400, "ignore_eos": True}
    assert target.ask({**long, "priority": -5})[0] == 400
    crowd = [target.send({**long, "prompt": [[7, number] for number in range(100)]}) for _ in range(4 if PROVE else 2)]
    try:
        time.sleep(0.5)
        assert target.ask({"max_tokens": 10, "ignore_eos": True}, key=VICTIM)[0] == 200
        for sender in crowd:
            sender.setblocking(False)
            with pytest.raises(BlockingIOError):
                sender.recv(1)
    finally:
        for sender in crowd:
            sender.close()


def grammars_whose_clients_left(target: Target) -> None:
    """The next client waits no longer than it would alone; a compilation that hangs would take minutes."""
    begun = time.monotonic()
    status, answer = target.ask({"structured_outputs": {"regex": f"b{int(begun)}"}, "max_tokens": 20}, key=VICTIM)
    assert status == 200, answer
    alone_s = time.monotonic() - begun
    for number in range(8):
        text = json.dumps({"at": {"compile": "hang"}, "number": f"{begun} {number}"})
        sender = target.send({"structured_outputs": {"regex": text, "backend": "example"}, "max_tokens": 2})
        threading.Timer(0.5, sender.close).start()
    time.sleep(0.6)
    begun = time.monotonic()
    status, answer = target.ask({"structured_outputs": {"regex": f"a{int(begun)}"}, "max_tokens": 20}, key=VICTIM)
    assert status == 200, answer
    assert time.monotonic() - begun < 20.0 + 20 * alone_s


def too_many_grammars(target: Target) -> None:
    """One client's waiting constraints have a bound, and another's is compiled meanwhile."""
    senders = []
    for number in range(112):
        text = json.dumps({"at": {"compile": "hang"}, "number": f"{time.monotonic()} {number}"})
        senders.append(target.send({"structured_outputs": {"regex": text, "backend": "example"}, "max_tokens": 2}))
    time.sleep(1.0)
    status, _ = target.ask({"structured_outputs": {"regex": f"b{int(time.monotonic())}"}, "max_tokens": 20}, key=VICTIM)
    assert status == 200
    refused = 0
    for sender in senders:
        sender.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            refused += sender.recv(100).startswith(b"HTTP/1.1 429")
        sender.close()
    assert refused >= 10


def refused_expressions(target: Target) -> None:
    def refuse(number: int) -> int:
        return target.ask({"structured_outputs": {"regex": "(" + "a" * LONG_REGEX + str(number)}, "max_tokens": 1})[0]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        # Refused for what it is, or for how many of one client wait
        assert set(pool.map(refuse, range(335 if PROVE else 2))) <= {400, 429}


def products_of_bounded_numbers(target: Target) -> None:
    status, answer = target.ask({"prompt": [[7] * 200] * 40, "prompt_logprobs": 64, "max_tokens": 1})
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")
    assert target.ask({"prompt": [[7]] * 1024, "n": 128, "max_tokens": 1})[0] == 400
    largest = {"prompt": [[7] * 200] * (20 if PROVE else 4), "prompt_logprobs": 64, "max_tokens": 1}
    assert target.ask(largest)[0] == 200


def names_with_control_characters(target: Target) -> None:
    schema = {"type": "object", "properties": {"a\rb": {"type": "array", "uniqueItems": True}}}
    strict = {"name": "a", "schema": schema, "strict": False}
    status, _ = target.ask({"response_format": {"type": "json_schema", "json_schema": strict}, "max_tokens": 2})
    assert status == 200


def a_grammar_of_many_rules(target: Target) -> None:
    names = [f"r{number}" for number in range(9000)]
    grammar = f"start: {' | '.join(names)}\n" + "\n".join(f'{name}: "a"' for name in names)
    status, answer = target.ask({"structured_outputs": {"grammar": grammar}, "max_tokens": 5})
    assert (status, "max_rules" in answer["error"]["message"]) == (400, True)


def bodies_of_many_values(target: Target) -> None:
    """Of four shapes, each as large as a body may be; `tests/http/test_event_loop.py` sends every shape."""
    part = 1 if PROVE else 8
    equal = {"n": 16, "max_tokens": 1, "stop_token_ids": [7] * (1_000_000 // part)}
    assert target.ask(equal)[0] == 200
    item, turn = {"role": "user", "content": "a"}, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    items = {"input": [item] * (120_000 // part)}
    assert target.ask({**items, "max_output_tokens": 1}, path="/v1/responses")[0] == 400
    values = {f"k{number}": 1 for number in range(500_000 // part)}
    assert target.ask({**turn, "chat_template_kwargs": values}, path="/v1/chat/completions")[0] == 400
    text = {"prompt": "some words " * (700_000 // part), "return_token_strs": True}
    assert target.ask(text, path="/tokenize")[0] == 400


def empty_frames(target: Target) -> None:
    lines = ["GET /v1/responses HTTP/1.1", "Host: localhost", f"Authorization: Bearer {ATTACKER}"]
    lines += ["Connection: upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"]
    lines += ["Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "", ""]
    for first, frame in ((b"", b"\x8a\x80aaaa"), (b"", b"\x89\x80aaaa"), (b"\x01\x80aaaa", b"\x00\x80aaaa")):
        with target.connect() as sender, contextlib.suppress(TimeoutError, ConnectionError):
            sender.sendall("\r\n".join(lines).encode() + first)
            sender.settimeout(3.0 if PROVE else 0.3)
            for _ in range(FLOOD_BYTES // 60_000):
                sender.sendall(frame * 10_000)


ATTACKS: tuple[Callable[[Target], None], ...] = (
    headers_without_end,
    a_header_without_end,
    a_request_line_without_end,
    trailers_without_end,
    half_sent_requests,
    a_page_of_another_site,
    many_bad_words,
    long_texts,
    a_crowd_at_the_front,
    grammars_whose_clients_left,
    too_many_grammars,
    refused_expressions,
    products_of_bounded_numbers,
    names_with_control_characters,
    a_grammar_of_many_rules,
    bodies_of_many_values,
    empty_frames,
)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__.replace("_", "-"))
def test_a_door_is_closed(
    target: Target, attack: Callable[[Target], None], record_property: Callable[[str, object], None]
) -> None:
    before, begun = target.num_bytes(), time.monotonic()
    attack(target)
    ended = time.monotonic()
    growth = max(num_bytes - before.get(pid, 0) for pid, num_bytes in target.num_bytes().items())
    longest = max(target.stream.between(begun, ended), default=0.0)
    record_property("longest_gap_ms", round(1000 * longest))
    record_property("idle_p99_ms", round(1000 * target.idle_p99, 1))
    record_property("growth_mb", round(growth / 2**20))
    assert target.ask({"max_tokens": 2}, key=VICTIM)[0] == 200
    assert target.server.get("/health")
    assert growth < MAX_GROWTH_BYTES
    if PROVE:
        assert longest < 2 * target.idle_p99 + 0.1
    elif longest >= STANDSTILL_S:
        assert longest < BUSY_FACTOR * target.quiet_gap(ended - begun)

"""A trace of engines that come and go with the load, for `test_autoscaling.py`.

One server that may have none to three engines, and clients that each stream one request after the other. Few clients,
then many, then few, then none, then one that finds no engine. Every answer is compared with what the same prompt got
before: a request that is lost, cut or changed on the way is a problem. `OPTIONS` sets how soon
engines come and go, much sooner than one would where nodes must start.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.processes import ServerProcess, Setup, free_port

TARGET = 4
"""Requests an engine."""
MAX_ENGINES = 3
FEW, MANY = 2, TARGET * MAX_ENGINES - 1
"""Clients: for one engine, and for three."""
OPTIONS: dict[str, Any] = {
    "engine.dtype": "float32",
    "engine.num_threads": 1,
    "engine.kv_cache_bytes": "64MiB",
    "autoscaling": json.dumps(
        {
            "min_replicas": 0,
            "max_replicas": MAX_ENGINES,
            "target_ongoing_requests": TARGET,
            "target_ttft_s": 30,  # three engines share the cores of one machine here
            "look_back_s": 2,
            "upscale_delay_s": 2,
            "downscale_delay_s": 4,
            "to_zero_delay_s": 4,
        }
    ),
}
LIMIT_S = 120.0
"""Seconds within which the number of engines must be right."""
SAMPLE_S = 0.25


class Sample(NamedTuple):
    """What `/status` said."""

    at: float
    """Seconds since the trace began."""
    num_running: int
    """Engines."""


class Answer(NamedTuple):
    """What one client got."""

    at: float
    """Time of its request, in seconds since the trace began."""
    ttft_s: float
    problem: str | None


class Trace(NamedTuple):
    samples: list[Sample]
    answers: list[Answer]
    marks: list[tuple[float, str]]
    """Times and names of changes."""
    starts: list[dict[str, float]]
    """Seconds of each phase of each engine's start, in the order in which engines were seen."""

    @property
    def problems(self) -> list[str]:
        return [f"asked at {answer.at:.1f} s: {answer.problem}" for answer in self.answers if answer.problem]

    @property
    def counts(self) -> list[int]:
        """Engines that ran, each number that followed another one."""
        return [count for count, _ in itertools.groupby(sample.num_running for sample in self.samples)]

    def between(self, first: str, last: str) -> list[Answer]:
        """To requests that came between two marks."""
        at = {name: seconds for seconds, name in self.marks}
        return [answer for answer in self.answers if at[first] <= answer.at < at[last]]


class Clients:
    """Client `i` asks one request after the other while `i < number`."""

    def __init__(self, url: str, num_tokens: int) -> None:
        self.number = 0
        self.answers: list[Answer] = []
        self.began = time.monotonic()
        self._url = url
        self._num_tokens = num_tokens
        self._texts: dict[int, str] = {}
        """The first answer to each client's prompt."""
        self._lock = threading.Lock()
        self._threads: dict[int, threading.Thread] = {}

    def become(self, number: int) -> None:
        """Those that are too many end with their answers."""
        self.number = number
        for index in range(number):
            thread = self._threads.get(index)
            if thread is None or not thread.is_alive():
                self._threads[index] = threading.Thread(target=self._repeat, args=(index,), daemon=True)
                self._threads[index].start()

    def join(self) -> None:
        for thread in self._threads.values():
            thread.join()

    def _repeat(self, index: int) -> None:
        while index < self.number:
            self.ask(index)

    def ask(self, index: int) -> Answer:
        started = time.monotonic()
        first, text, problem = 0.0, "", None
        try:
            for piece in self._stream(index):
                first = first or time.monotonic()
                text += piece
        except Exception as error:  # whatever it is, the request is lost
            problem = repr(error)
        with self._lock:
            if problem is None and text != self._texts.setdefault(index, text):
                problem = f"another text than before: {text!r}"
            answer = Answer(started - self.began, (first or time.monotonic()) - started, problem)
            self.answers.append(answer)
        return answer

    def _stream(self, index: int) -> Iterator[str]:
        """The text of each event. Raises if the answer is no whole one."""
        body = {
            "model": "bench",
            "prompt": [5 + index] * 16,
            "max_tokens": self._num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/v1/completions", json.dumps(body).encode(), headers)
        finish = None
        with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise RuntimeError(event["error"]["message"])
                    (choice,) = event["choices"]
                    finish = choice["finish_reason"] or finish
                    yield choice["text"]
        if finish != "length":
            raise RuntimeError(f"the stream ended with {finish}")


class Watch:
    """Samples `/status` until it is stopped."""

    def __init__(self, url: str, clients: Clients) -> None:
        self.samples: list[Sample] = []
        self.starts: dict[str, dict[str, float]] = {}
        """Phases of each engine's start."""
        self._url = url
        self._clients = clients
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            with urllib.request.urlopen(f"{self._url}/status", timeout=LIMIT_S) as response:
                status = json.load(response)
            self.starts |= {engine["replica"]: engine["start_seconds"] for engine in status["engines"]}
            (replicas,) = [each["replicas"] for each in status["deployments"] if each["name"] == "engine"]
            at = time.monotonic() - self._clients.began
            self.samples.append(Sample(at, replicas.get("RUNNING", 0)))

    def begin(self) -> None:
        """The trace begins now."""
        self._clients.began = time.monotonic()
        self.samples.clear()

    def until(self, num_engines: int) -> None:
        """So many run. Raises `TimeoutError`."""
        self._until(
            lambda: bool(self.samples) and self.samples[-1].num_running == num_engines, f"{num_engines} engines"
        )

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if not self._thread.is_alive():
                raise RuntimeError("/status does not answer")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not run within {LIMIT_S:.0f} s; last: {self.samples[-1]}")
            time.sleep(SAMPLE_S / 2)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def trace(hold_s: float, num_tokens: int) -> Trace:
    """1, 3, 1, 0, 1 and 0 engines; each load is held for `hold_s` after the engines are as many as they should."""
    setup = Setup(kv_cache_bytes=1 << 26, max_model_len=1024)
    server = ServerProcess("manta", str(benchmark_checkpoint("tiny-llama")), setup, free_port(), OPTIONS)
    try:
        url = f"http://127.0.0.1:{server.port}"
        clients = Clients(url, num_tokens)
        watch = Watch(url, clients)
        watch.until(1)  # the ingress takes requests before its engine does
        watch.begin()
        marks = _step_load(clients, watch, hold_s)
        watch.stop()
        return Trace(watch.samples, sorted(clients.answers), marks, list(watch.starts.values()))
    finally:
        server.stop()


def _step_load(clients: Clients, watch: Watch, hold_s: float) -> list[tuple[float, str]]:
    marks: list[tuple[float, str]] = []
    for name, num_clients, num_engines in (
        ("few", FEW, 1),
        ("many", MANY, MAX_ENGINES),
        ("few again", FEW, 1),
        ("none", 0, 0),
    ):
        marks.append((time.monotonic() - clients.began, name))
        clients.become(num_clients)
        watch.until(num_engines)
        time.sleep(hold_s)
    clients.join()
    marks.append((time.monotonic() - clients.began, "one"))
    clients.ask(0)
    watch.until(0)
    return marks

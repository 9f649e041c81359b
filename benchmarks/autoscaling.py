"""Engines that come and go with the load: `manta bench cluster --parts autoscaling`.

One server that may have none to three engines, and clients that each stream one request after the other. Few clients,
then many, then few, then none, then one that finds no engine. Every answer is compared with what the same prompt got
before: a request that is lost, cut or changed on the way is a problem. The trace is drawn over time; how soon engines
come and go is set by `OPTIONS`, much sooner than one would where nodes must start.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.processes import ROOT, ServerProcess, Setup, free_port

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
HOLD_S = 15.0
"""Seconds for which a load continues after the number of engines is right."""
LIMIT_S = 120.0
"""Seconds within which the number of engines must be right."""
SAMPLE_S = 0.25
RESULTS = ROOT / "benchmarks" / "results"
WIDTH, PANEL, MARGIN = 900, 130, 50
ENGINES, STARTING, REQUESTS, LINE = "#1b6ca8", "#d68910", "#7f8c8d", "#c0392b"


class Sample(NamedTuple):
    """What `/status` said."""

    at: float
    """Seconds since the trace began."""
    num_requests: int
    """Requests under way, as their clients count them."""
    num_running: int
    """Engines; next those that start."""
    num_starting: int


class Answer(NamedTuple):
    """What one client got."""

    at: float
    """Time of its request, in seconds since the trace began."""
    ttft_s: float
    seconds: float
    longest_gap_s: float
    """Longest time between two of its events."""
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

    def markdown(self) -> str:
        rows = [
            "| at, s | | engines | requests | first token p50, s | longest gap, s |",
            "| ---: | --- | ---: | ---: | ---: | ---: |",
        ]
        for (at, name), (end, _) in itertools.pairwise([*self.marks, (self.samples[-1].at + 1, "")]):
            answers = [answer for answer in self.answers if at <= answer.at < end]
            running = [sample.num_running for sample in self.samples if at <= sample.at < end]
            engines = "-".join(map(str, sorted({min(running, default=0), max(running, default=0)})))
            p50 = f"{statistics.median(answer.ttft_s for answer in answers):.2f}" if answers else ""
            gap = f"{max(answer.longest_gap_s for answer in answers):.2f}" if answers else ""
            rows.append(f"| {at:.1f} | {name} | {engines} | {len(answers)} | {p50} | {gap} |")
        verdict = f"{len(self.problems)} requests lost or changed" if self.problems else "no request lost"
        return "\n".join([*rows, "", f"{len(self.answers)} requests, {verdict}.", *self.problems, "", *self._starts()])

    def _starts(self) -> Iterator[str]:
        """A table of them."""
        phases = list(self.starts[0])
        yield f"| engine's start, s | {' | '.join(phases)} | together |"
        yield "| ---: |" + " ---: |" * (len(phases) + 1)
        for number, seconds in enumerate(self.starts, 1):
            cells = [*(f"{seconds[name]:.2f}" for name in phases), f"{sum(seconds.values()):.2f}"]
            yield f"| {number} | {' | '.join(cells)} |"

    def svg(self) -> str:
        """Engines and requests over the seconds, and when each request got its first token."""
        end = self.samples[-1].at
        across = (WIDTH - 2 * MARGIN) / end
        return "\n".join([*_frame(self.marks, end, across), *_panels(self, across), "</svg>"]) + "\n"


def _frame(marks: Sequence[tuple[float, str]], end: float, across: float) -> Iterator[str]:
    height = 3 * (PANEL + MARGIN) + MARGIN
    size = f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    yield f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    for index, (at, name) in enumerate(marks):
        x = MARGIN + at * across
        yield f'<path d="M{x:.1f} 30V{height - MARGIN}" stroke="#cccccc"/>'
        yield f'<text x="{x + 3:.1f}" y="{14 + 13 * (index % 2)}">{name}</text>'
    step = max(10, round(end / 8, -1))
    for number in range(int(end / step) + 1):
        x = MARGIN + number * step * across
        yield f'<text x="{x:.1f}" y="{height - MARGIN + 16}" text-anchor="middle">{number * step:.0f} s</text>'


def _panels(trace: Trace, across: float) -> Iterator[str]:
    samples, answers = trace.samples, trace.answers
    wanted = [(sample.at, float(sample.num_running + sample.num_starting)) for sample in samples]
    running = [(sample.at, float(sample.num_running)) for sample in samples]
    requests = [(sample.at, float(sample.num_requests)) for sample in samples]
    first = [(answer.at, answer.ttft_s) for answer in answers]
    for number, (title, series) in enumerate(
        (
            ("engines that run, and that start", ((wanted, STARTING), (running, ENGINES))),
            ("requests under way", ((requests, REQUESTS),)),
            ("seconds to the first token, by when the request came", ((first, LINE),)),
        )
    ):
        base = (number + 1) * (PANEL + MARGIN)
        top = max((value for points, _ in series for _, value in points), default=0.0) or 1.0
        yield f'<text x="{MARGIN}" y="{base - PANEL - 6}">{title}</text>'
        yield f'<path d="M{MARGIN} {base - PANEL}V{base}H{WIDTH - MARGIN}" fill="none" stroke="black"/>'
        yield f'<text x="{MARGIN - 6}" y="{base - PANEL + 5}" text-anchor="end">{top:.3g}</text>'
        yield f'<text x="{MARGIN - 6}" y="{base}" text-anchor="end">0</text>'
        for points, colour in series:
            places = [(MARGIN + at * across, base - value * PANEL / top) for at, value in points]
            yield from _dots(places, colour) if series[0][0] is first else [_steps(places, colour)]


def _dots(places: Sequence[tuple[float, float]], colour: str) -> Iterator[str]:
    yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}"/>' for x, y in places)


def _steps(places: Sequence[tuple[float, float]], colour: str) -> str:
    path = "".join(f"H{x:.1f}V{y:.1f}" for x, y in places[1:])
    return f'<path d="M{places[0][0]:.1f} {places[0][1]:.1f}{path}" fill="none" stroke="{colour}" stroke-width="2"/>'


class Clients:
    """Client `i` asks one request after the other while `i < number`."""

    def __init__(self, url: str, num_tokens: int) -> None:
        self.number = 0
        self.answers: list[Answer] = []
        self.began = time.monotonic()
        self.num_under_way = 0
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
        with self._lock:
            self.num_under_way += 1
        times, text, problem = [started], "", None
        try:
            for piece in self._stream(index):
                times.append(time.monotonic())
                text += piece
        except Exception as error:  # whatever it is, the request is lost
            problem = repr(error)
        with self._lock:
            self.num_under_way -= 1
            if problem is None and text != self._texts.setdefault(index, text):
                problem = f"another text than before: {text!r}"
            gaps = [later - earlier for earlier, later in itertools.pairwise(times[1:])]
            answer = Answer(
                at=started - self.began,
                ttft_s=(times[1] if len(times) > 1 else time.monotonic()) - started,
                seconds=times[-1] - started,
                longest_gap_s=max(gaps, default=0.0),
                problem=problem,
            )
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
            at, clients = time.monotonic() - self._clients.began, self._clients
            self.samples.append(
                Sample(at, clients.num_under_way, replicas.get("RUNNING", 0), replicas.get("STARTING", 0))
            )

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
        _say(f"{marks[-1][0]:5.1f} s: {name}, {num_clients} clients, until {num_engines} engines run")
        clients.become(num_clients)
        watch.until(num_engines)
        time.sleep(hold_s)
    clients.join()
    marks.append((time.monotonic() - clients.began, "one"))
    _say(f"{marks[-1][0]:5.1f} s: one request, which finds no engine")
    clients.ask(0)
    watch.until(0)
    return marks


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def autoscaling(_rounds: int, num_tokens: int) -> None:
    """Prints the table and draws the plot."""
    found = trace(HOLD_S, num_tokens)
    path = RESULTS / f"autoscaling-{datetime.date.today()}.svg"
    path.write_text(found.svg())
    print(found.markdown(), f"\nDrawn in {os.path.relpath(path, ROOT)}", sep="\n", flush=True)

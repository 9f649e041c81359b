"""`manta top`: of a live server in a terminal and in a pipe, of one that goes away and comes back, and its figures."""

from __future__ import annotations

import http.server
import itertools
import re
import threading
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from benchmarks.processes import free_port
from manta.cluster.cli import __main__ as command_line
from manta.cluster.cli.top import PRINTED_WIDTH, Reading, frame
from manta.cluster.engine.stats import DraftCounts
from manta.cluster.http.endpoints.status import EngineState, Status
from manta.cluster.http.exchange.metrics import Metrics
from tests.engine.test_engine import make_engine
from tests.server import shared_server
from tests.terminal import Terminal

HOME = "\x1b[H"
"""Begins each frame on a terminal."""
CTRL_C = "\x03"


def rows(text: str) -> dict[str, str]:
    """Returns the cells of the first row of each table, by column; cells have no two spaces in a row."""
    found: dict[str, str] = {}
    lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    for columns, cells in itertools.pairwise(lines):
        if columns[0] in ("tokens/s", "constraints", "drafts") and len(columns) == len(cells):
            found |= dict(zip(columns, cells, strict=True))
    return found


def test_a_pipe_gets_one_frame(capsys: pytest.CaptureFixture[str]) -> None:
    server = shared_server()
    choice = {"structured_outputs": {"choice": ["manta ray", "sting ray"]}}
    stopped = threading.Event()

    def ask() -> None:
        number = 0
        while not stopped.is_set():
            number += 1
            body: dict[str, Any] = {"model": server.model, "prompt": [5 + number] * 20, "max_tokens": 8}
            assert server.post("/v1/completions", body | choice)[0] == 200

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        assert command_line.main(["top", "--url", server.url, "--interval", "1"]) == 0
    finally:
        stopped.set()
        asker.join()
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert text.count(f" at {server.url}, for ") == 1
    shown = rows(text)
    assert float(shown["tokens/s"].replace(",", "")) > 0
    assert float(shown["requests/s"]) > 0
    assert re.search(r"\[ *\|* *\] \d+%", text)
    assert shown["compilers"] != "0 of 0"
    assert int(shown["kept"].split()[0]) >= 1


class Relay(http.server.BaseHTTPRequestHandler):
    """Answers what the live server answers."""

    def do_GET(self) -> None:
        data = shared_server().get(self.path).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """A test prints nothing."""


def started_relay(port: int) -> http.server.ThreadingHTTPServer:
    relay = http.server.ThreadingHTTPServer(("127.0.0.1", port), Relay)
    threading.Thread(target=relay.serve_forever, args=(0.05,), daemon=True).start()
    return relay


def stop(relay: http.server.ThreadingHTTPServer) -> None:
    relay.shutdown()
    relay.server_close()


def test_the_terminal_outlives_a_restart_of_the_server() -> None:
    """A relay before the live server goes, because a start takes many seconds."""
    port = free_port()
    relay = started_relay(port)
    terminal = Terminal("top", "--port", str(port), "--interval", "0.2")
    try:
        terminal.wait_for("tokens/s")
        terminal.wait_for(HOME)
        stop(relay)
        terminal.wait_for("Nothing new for ")
        terminal.wait_for(f"no server answers at http://127.0.0.1:{port}")
        assert terminal.process.poll() is None
        relay = started_relay(port)
        while "Nothing new" in (shown := terminal.wait_for(HOME)) or "tokens/s" not in shown:
            pass
        terminal.end(CTRL_C)
    finally:
        terminal.process.kill()
        stop(relay)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["--interval", "0"], "--interval 0 is not between 0.2 and 3600 seconds"),
        (["--interval", "nan"], "--interval nan is not between"),
    ],
)
def test_wrong_flags_and_missing_servers_are_refused(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["top", *flags]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_figures_sum_engines_and_ingresses() -> None:
    """Two ingresses and two engines, read twice within 2 s."""
    idle = make_engine("llama").stats()
    ingresses = [Metrics("m", name) for name in "xy"]
    engines = [
        EngineState(
            replica=name,
            node="[red]10.0.0.1",
            state="running",
            num_running=3,
            num_waiting=2,
            waiting_tokens=900,
            kv_usage=0.5,
            cache_hit_rate=None,
            ttft_s=1.25,
            requests_per_s=3.0,
            start_seconds={},
        )
        for name in "ab"
    ]
    status = Status(version="1", uptime_s=65, num_held=4, engines=engines, deployments=[], nodes=[])

    def read(at: float, tokens: int, drafted: int, accepted: int) -> Reading:
        for ingress in ingresses:
            ingress.generation_tokens.inc(tokens)
        drafts = DraftCounts({"ngram": [drafted, drafted]}, {"ngram": [accepted, 0]})
        stats = [
            msgspec.structs.replace(idle, engine_id=name, drafts=drafts, num_dead_ends=1, num_constraints_compiled=9)
            for name in "ab"
        ]
        text = ingresses[0].render(stats, [ingresses[1].own()]).decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return Reading(at, status, samples)

    def drawn(*readings: Reading | None, problem: str = "") -> str:
        console = Console(width=PRINTED_WIDTH, markup=False, highlight=False)
        with console.capture() as capture:
            console.print(frame("http://h:1", *readings, problem=problem))
        return capture.get()

    before, latest = read(10.0, 100, 10, 5), read(12.0, 700, 40, 20)
    text = drawn(latest, before)
    assert "Manta 1 at http://h:1, for 1 min 5 s" in text
    assert "2 (900 tokens)" in text
    assert "[red]10.0.0.1" in text
    assert f"[{'|' * 10}{' ' * 10}] 50%" in text
    shown = rows(text)
    assert shown == {
        "tokens/s": "700.0",
        "prompt tokens/s": "0.0",
        "requests/s": "0.0",
        "running": "6",
        "waiting": "4",
        "held": "4",
        "preemptions/s": "0.0",
        "constraints": "0 running",
        "compiled/s": "0.0",
        "kept": shown["kept"],
        "compilers": shown["compilers"],
        "late rows/s": "0.0",
        "dead ends": "2",
        "drafts": "ngram",
        "proposed/s": "60.0",
        "accepted/s": "15.0",
        "accepted so far": "25%",
    }
    assert rows(drawn(latest))["tokens/s"] == "-", "one reading has no rates"
    assert rows(drawn(before, latest))["tokens/s"] == "-", "a counter that fell has no rate"
    unknown = latest._replace(status=msgspec.structs.replace(status, engines=[], problem="none is there"), samples=[])
    assert "The engines do not answer: none is there" in drawn(unknown, latest)
    assert rows(drawn(unknown, latest))["tokens/s"] == "-"
    asleep = latest._replace(status=msgspec.structs.replace(status, engines=[]))
    assert "No engine runs; a request starts one." in drawn(asleep, before)
    assert "Nothing new for 3 s" in drawn(latest, before, problem="Nothing new for 3 s")

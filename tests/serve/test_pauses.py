"""The parts of a pause, by what the request log says."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest

from manta.cluster.http.exchange.metrics import TAKEOVER_PHASES
from tests.serve.pauses import Death, by_death, longest_pauses, markdown
from tests.serve.resuming_client import History, Seen

NOW = time.monotonic()
TO_EPOCH = time.time() - NOW


def history(name: str, *seconds: float) -> History:
    """A stream with events so many seconds after `NOW`."""
    found = History("/v1/completions", {}, f"client-{name}", f"strm_{name}")
    found.events = [Seen(number, b"", NOW + each) for number, each in enumerate(seconds)]
    return found


def line(name: str, event: str, at: float, **fields: Any) -> dict[str, Any]:
    when = datetime.fromtimestamp(NOW + at + TO_EPOCH, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"time": when, "request_id": name, "event": event, **fields}


def resumed(name: str, at: float, cause: str, **phases: float) -> dict[str, Any]:
    seconds = {f"{phase}_s": phases.get(phase, 0.0) for phase in TAKEOVER_PHASES}
    return line(name, "resumed", at, cause=cause, calls=1, **seconds)


def test_a_pause_is_explained_by_the_lines_of_its_stream() -> None:
    moved, steady = history("a", 0.0, 1.0, 100.0, 108.0, 109.0), history("b", 0.0, 2.0, 3.0)
    moved.attempts = [(NOW + 50.0, "503"), (NOW + 101.0, "503"), (NOW + 102.0, "RemoteDisconnected")]
    events = [
        resumed("client-a", 30.0, "away", queue=9.0),
        line("strm_a", "adopted", 102.0, seconds=0.5, entries=3),
        resumed("client-a", 106.0, "ingress", place=1.5, prepare=2.0, compute=0.25),
        line("strm_a", "kept", 107.0, seconds=0.75),
        line("client-a", "preempted", 107.5, choice=0),
        resumed("client-b", 106.0, "silent", queue=7.0),
    ]
    deaths = [Death(NOW + at + TO_EPOCH, kind) for at, kind in ((20.0, "rank"), (99.0, "ingress"), (120.0, "engine"))]
    first, second = longest_pauses([steady, moved], events, deaths, 5)
    assert first.request_id == "client-a"
    assert first.seconds == pytest.approx(99.0), "a stream that stood still between two events"
    del moved.events[1]
    moved.events[0] = Seen(0, b"", NOW + 99.9)
    first, second = longest_pauses([steady, moved], events, deaths, 5)
    assert (first.seconds, second.seconds) == pytest.approx((8.0, 2.0))
    expected = {"adopt": 0.5, "place": 1.5, "prepare": 2.0, "compute": 0.25, "keep": 0.75, "rest": 3.0}
    assert {name: seconds for name, seconds in first.parts.items() if seconds} == pytest.approx(expected)
    assert first.after == deaths[1]
    assert first.notes == {
        "takeover (ingress, 1 calls)": 1,
        "preempted": 1,
        "503": 1,
        "RemoteDisconnected": 1,
    }
    assert second.parts["rest"] == pytest.approx(2.0)
    assert second.after is None
    assert "prepare 2.00" in first.words()
    table = markdown([first, second], by_death([steady, moved], deaths))
    assert "| 8.00 | 0.50 | 0.00 | 1.50 | 2.00 | 0.00 | 0.25 | 0.00 | 0.75 | 3.00 | ingress" in table
    assert "| ingress | 1 | 8.00 | 8.00 |" in table
    assert "| engine | 1 | 0.00 | 0.00 |" in table

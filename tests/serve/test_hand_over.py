"""Who leaves which engine when: streams of an engine that was told to end, and of one that is silent now and then."""

from __future__ import annotations

import types
from typing import Any

import msgspec
import pytest

from manta.cluster.engine.request import EngineRequest
from manta.cluster.serve.requests import run_watch
from manta.cluster.serve.requests.run_watch import HAND_OVER_S, LEAST_MOVING, RunWatch
from manta.cluster.serve.routing import replicas
from manta.cluster.serve.routing.replicas import PATIENT_BEATS, SILENT_BEATS, Replicas
from manta.workers.sampling_params import SamplingParams

LOOK_S = 0.15


class Run:
    """A stream on an engine that computes it."""

    def __init__(self, replica: str) -> None:
        self.replica: str | None = replica
        self.connection: Any = types.SimpleNamespace(is_away=False)
        self.is_moving = False
        self.left: list[str] = []
        """Why it left an engine."""

    def go_on(self, cause: str) -> None:
        self.left.append(cause)
        self.replica, self.is_moving = "new", True

    def lose(self, cause: str) -> None:
        self.go_on(cause)


class Hall:
    """Streams on the engine `old`, and the watch over them."""

    def __init__(self, num_runs: int) -> None:
        self.known = Replicas()
        self.known.set_running("engine", ["old", "new"])
        self.known.connected("old")
        self.runs = [Run("old") for _ in range(num_runs)]
        asked: Any = types.SimpleNamespace(is_any_good=lambda: self.known.is_any_good("engine"))
        runs: Any = dict(enumerate(self.runs))
        self.watch = RunWatch(runs, asked, self.known, LOOK_S, lambda: None)

    @property
    def num_left(self) -> int:
        return sum(bool(run.left) for run in self.runs)

    def look(self) -> int:
        """Returns how many streams leave at a look."""
        before = self.num_left
        self.watch.move()
        return self.num_left - before

    def settle(self) -> None:
        """All that moved have output again."""
        for run in self.runs:
            run.is_moving = False


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock, in seconds, which the test sets."""
    clock = [100.0]
    for module in (run_watch, replicas):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


@pytest.mark.usefixtures("now")
def test_streams_leave_an_ending_engine_a_few_at_a_time() -> None:
    hall = Hall(num_runs=10)
    hall.known.connected("new")
    assert hall.look() == 0
    hall.known.set_running("engine", ["new"])
    assert hall.look() == LEAST_MOVING
    assert hall.look() == 1, "the first ones are on their way, and all have to leave in time"
    hall.settle()
    assert hall.look() == LEAST_MOVING
    hall.settle()
    assert hall.look() == 1
    assert [run.left for run in hall.runs] == [["ending"]] * 10


@pytest.mark.usefixtures("now")
def test_however_many_streams_have_left_in_time() -> None:
    hall = Hall(num_runs=1000)
    hall.known.connected("new")
    hall.known.set_running("engine", ["new"])
    num_looks = 0
    while hall.num_left < 1000:
        assert hall.look() > 0
        num_looks += 1
    assert (num_looks - 1) * LOOK_S <= HAND_OVER_S


def test_streams_of_an_ending_engine_wait_for_one_that_connects(now: list[float]) -> None:
    """A moment only: it may never connect. The engine computes them meanwhile."""
    for connects in (True, False):
        hall = Hall(num_runs=2)
        hall.known.set_running("engine", ["new"])
        assert hall.look() == hall.look() == 0
        if connects:
            hall.known.connected("new")
        else:
            now[0] += run_watch.STRANGER_S + 0.1
        assert hall.look() == 2


@pytest.mark.usefixtures("now")
def test_streams_leave_an_ending_engine_that_is_silent_at_once() -> None:
    hall = Hall(num_runs=100)
    hall.known.connected("new")
    hall.known.set_running("engine", ["new"])
    hall.known.avoid("old")
    assert hall.look() == 100


def test_an_engine_that_was_told_to_end_gets_no_request_while_it_computes_others() -> None:
    known = Replicas()
    known.set_running("engine", ["old", "new"])
    known.connected("old")
    known.set_running("engine", ["new"])
    asked = EngineRequest(request_id="a", prompt_token_ids=[5, 6], params=SamplingParams())
    for continued in (None, []):
        placed = {known.place([msgspec.structs.replace(asked, continued=continued)], "engine", 16)[0] for _ in range(9)}
        assert placed == {"new"}


def test_an_engine_that_was_silent_for_a_moment_is_given_more_time(now: list[float]) -> None:
    """A busy machine holds up processes. Streams that left each time would be computed again and again."""
    known = Replicas()
    known.set_running("engine", ["a", "b"])

    def num_beats() -> int:
        """Returns after how many missed heartbeats `a` is left, and lets it be heard again."""
        known.hear("a")
        missed = 0
        while known.is_good("a"):
            known.beat({"a"})
            missed += 1
        return missed

    allowed = [num_beats() - 1 for _ in range(5)]
    assert allowed == [SILENT_BEATS, 2 * SILENT_BEATS, PATIENT_BEATS, PATIENT_BEATS, PATIENT_BEATS]
    assert PATIENT_BEATS < replicas.HUNG_BEATS
    known.hear("a")
    now[0] += replicas.PATIENT_S + 1
    assert num_beats() - 1 == SILENT_BEATS


def test_a_stream_goes_on_at_an_engine_that_has_connected() -> None:
    """Serve would ask another one for its queue first, and a busy process takes its time to answer."""
    asked = EngineRequest(request_id="a", prompt_token_ids=[5, 6], params=SamplingParams(), continued=[])
    known = Replicas()
    known.set_running("engine", ["old", "fresh", "lost"])

    def places() -> set[str]:
        return {known.place([asked], "engine", 16)[0] for _ in range(100)}

    assert places() == {"old", "fresh", "lost"}, "nobody has connected, as when an ingress has just started"
    for replica in ("old", "lost"):
        known.connected(replica)
    known.avoid("lost")
    assert places() == {"old"}
    known.avoid("old")
    assert places() == {"fresh"}, "a stranger is better than one that is silent"

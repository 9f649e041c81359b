"""Streams outlive the engines that serve them: whatever happens to an engine, every stream ends as if nothing had.

A row of the fault table is a test; `make prove` repeats each and writes the figures down.
"""

from __future__ import annotations

import contextlib
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import psutil
import pytest

from tests.conftest import PROVE
from tests.fault_streams import Application, Stream, Streams

pytestmark = pytest.mark.timeout(3600 if PROVE else 300)

NUM_REPETITIONS = 20 if PROVE else 1
MOST_TRIES = 5
"""On a busy machine the streams of one engine may have ended before those of the other one began."""
NUM_EVENTS = 5
"""That every stream has had before the fault."""


@pytest.fixture(scope="module")
def application() -> Iterator[Application]:
    with subprocess.Popen(["sleep", "600"]) as other:
        application = Application()
        yield application
        application.stop()
        assert other.poll() is None, "a Ray of our own took another child of this process with it"
        other.kill()


@pytest.fixture(scope="module")
def undisturbed(application: Application) -> list[Stream]:
    streams = application.start_streams().join()
    assert [stream.error for stream in streams] == [None] * len(streams)
    assert all(stream.is_complete for stream in streams)
    return streams


def kill(which: slice) -> Callable[[Application], list[Stream]]:
    def act(application: Application) -> list[Stream]:
        streams = _begun(application)
        application.signal(signal.SIGKILL, which)
        return streams.join()

    return act


def hang(which: slice) -> Callable[[Application], list[Stream]]:
    def act(application: Application) -> list[Stream]:
        streams = _begun(application)
        victims = application.signal(signal.SIGSTOP, which)
        found = streams.join()
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):  # it was replaced meanwhile
                victim.send_signal(signal.SIGCONT)
        return found

    return act


def _begun(application: Application) -> Streams:
    streams = application.start_streams()
    streams.wait_for_events(NUM_EVENTS)
    return streams


def deploy(**options: Any) -> Callable[[Application], list[Stream]]:
    """Streams start until Serve has done it."""

    def act(application: Application) -> list[Stream]:
        found: list[Stream] = []
        thread = threading.Thread(target=application.deploy, kwargs={"version": str(time.time()), **options})
        thread.start()
        while thread.is_alive():
            found += application.start_streams().join()
        return found

    return act


class Row(NamedTuple):
    """One of the table: how many engines there are, and what is done to them under 16 live streams."""

    num_engines: int
    act: Callable[[Application], list[Stream]]
    num_standbys: int = 0


ROWS = {
    "one of two is killed": Row(2, kill(slice(1))),
    "one of two hangs": Row(2, hang(slice(1))),
    "one of two is told to go": Row(2, deploy(num_replicas=1, version="1")),
    "the only one is killed": Row(1, kill(slice(None))),
}
LONG_ROWS = {
    "both are killed": Row(2, kill(slice(None))),
    "the only one hangs": Row(1, hang(slice(None))),
    "two get a new version": Row(2, deploy(num_replicas=2)),
    "the only one is killed beside a standby": Row(1, kill(slice(None)), num_standbys=1),
}


@pytest.mark.parametrize("name", [*ROWS, *(pytest.param(name, marks=pytest.mark.prove) for name in LONG_ROWS)])
def test_every_stream_ends_as_if_nothing_had_happened_where(
    application: Application, undisturbed: list[Stream], name: str, record_property: Callable[[str, object], None]
) -> None:
    row = (ROWS | LONG_ROWS)[name]
    streams: list[Stream] = []
    pauses: list[float] = []
    for _ in range(NUM_REPETITIONS):
        num_moved = 0
        for _ in range(MOST_TRIES):
            application.deploy(row.num_engines, num_standby_replicas=row.num_standbys)
            before = num_continued(application)
            found = row.act(application)
            num_moved = int(num_continued(application) - before)
            pauses += sorted(stream.pause_s for stream in found)[len(found) - num_moved :]
            streams += found
            application.until_nothing_is_left()
            if num_moved:
                break
        assert num_moved > 0
    expected = undisturbed * (len(streams) // len(undisturbed))
    equal = [stream.equals(other) for stream, other in zip(streams, expected, strict=True)]
    record_property("streams complete", f"{sum(stream.is_complete for stream in streams)} of {len(streams)}")
    record_property("equal", f"{sum(equal)} of {len(streams)}")
    record_property("pause p50, s", round(statistics.median(pauses), 2))
    record_property("pause max, s", round(max(pauses), 2))
    record_property("blocks and sessions left over", 0)
    assert [stream.error for stream in streams if stream.error] == []
    assert all(equal)


def num_continued(application: Application) -> float:
    return application.metrics()["manta:continuations_total"]


@pytest.mark.prove
def test_a_request_that_kills_engines_fails_alone(application: Application, undisturbed: list[Stream]) -> None:
    """It begins last, so that every engine's death happens beside streams."""
    application.deploy(2)
    streams = _begun(application)
    path, body = application.requests[1]
    poison = Stream()
    poison.read(application.url + path, {**body, "logits_processors": [{"name": "poison", "arguments": {"at": 3}}]})
    assert "3 engine processes died while they ran this request, which may be why" in (poison.error or "")
    assert [stream.error for stream in streams.join()] == [None] * len(undisturbed)
    assert all(stream.equals(other) for stream, other in zip(streams.streams, undisturbed, strict=True))
    application.until_nothing_is_left()

"""Streams outlive the engines that serve them: whatever happens to an engine, every stream ends as if nothing had."""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.fault_streams import GO_ON, KILL, STOP, Application, Stream

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def application() -> Iterator[Application]:
    application = Application()
    yield application
    application.stop()


@pytest.fixture(scope="module")
def undisturbed(application: Application) -> list[Stream]:
    streams = application.start_streams().join()
    assert [stream.error for stream in streams] == [None] * len(streams)
    assert all(stream.is_complete for stream in streams)
    return streams


def check(application: Application, streams: list[Stream], undisturbed: list[Stream]) -> None:
    assert [stream.error for stream in streams] == [None] * len(streams)
    for number, (stream, expected) in enumerate(zip(streams, undisturbed, strict=True)):
        assert stream.equals(expected), (number, stream, expected)
    application.until_nothing_is_left()
    pauses = [stream.pause_s for stream in streams]
    print(f"pause p50 {statistics.median(pauses):.2f} s, max {max(pauses):.2f} s")


def num_continued(application: Application) -> float:
    return application.metrics()["manta:continuations_total"]


def test_one_of_two_engines_is_killed(application: Application, undisturbed: list[Stream]) -> None:
    before = num_continued(application)
    streams = application.start_streams()
    streams.wait_for_events(5)
    application.signal(KILL, slice(1))
    check(application, streams.join(), undisturbed)
    assert num_continued(application) > before
    application.until_running(2)


def test_one_of_two_engines_hangs(application: Application, undisturbed: list[Stream]) -> None:
    before = num_continued(application)
    streams = application.start_streams()
    streams.wait_for_events(5)
    (victim,) = application.signal(STOP, slice(1))
    found = streams.join()
    with contextlib.suppress(psutil.NoSuchProcess):  # Serve may have replaced it
        victim.send_signal(GO_ON)
    check(application, found, undisturbed)
    assert num_continued(application) > before


def check_while(application: Application, undisturbed: list[Stream], act: Callable[[], None]) -> None:
    """Streams start until `act` is done and some of them went on elsewhere."""
    before = num_continued(application)
    thread = threading.Thread(target=act)
    thread.start()
    while thread.is_alive():
        check(application, application.start_streams().join(), undisturbed)
    assert num_continued(application) > before


def test_an_engine_that_is_told_to_go_hands_its_streams_over(
    application: Application, undisturbed: list[Stream]
) -> None:
    check_while(application, undisturbed, lambda: application.deploy(1))


def test_the_only_engine_is_killed(application: Application, undisturbed: list[Stream]) -> None:
    application.deploy(1)
    streams = application.start_streams()
    streams.wait_for_events(5)
    application.signal(KILL, slice(None))
    check(application, streams.join(), undisturbed)


@pytest.mark.prove
def test_engines_of_a_new_version_take_the_streams_over(application: Application, undisturbed: list[Stream]) -> None:
    application.deploy(2)
    old = {engine.pid for engine in application.engines()}
    check_while(application, undisturbed, lambda: application.deploy(2, version="2"))
    assert old.isdisjoint(engine.pid for engine in application.engines())

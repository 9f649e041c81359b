"""The table of faults: what is done to an application under 16 live streams, and what must come of them.

A row of the table is a test, which calls `hold`; `make prove` repeats each row and writes its figures down.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import re
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import psutil

from manta.cluster.http.exchange.metrics import TAKEOVER_PHASES
from tests.conftest import PROVE
from tests.patience import PATIENCE_S, wait_until
from tests.serve.fault_streams import ENGINE, GRAMMAR_ACTOR, INGRESS, RANK, Application, Setup, Stream, Streams
from tests.serve.pauses import Death, Pause, longest_pauses
from tests.serve.resuming_client import History, ResumingClient, Verdict, as_stream, check, read_all

NUM_REPETITIONS = 20 if PROVE else 1
MOST_TRIES = 5
"""Number of attempts. On a busy machine the streams may have ended before the fault."""
NUM_EVENTS = 5
"""Number of events of every stream before the fault."""
NUM_SHOWN_TAKEOVERS = 5
"""Number of takeovers whose phases are written down, longest first."""
LONGEST_S = 5.0
"""Longest pause of a stream in seconds, where another engine computes steps when one dies."""
ANOTHER_S, ANEW_S = 1.0, 10.0
"""Median pause in seconds: where another engine is there, and where one, or its ranks, must start."""
STALLED_S = 3.0
"""Median pause in seconds where another engine is there, and a step of the first one hangs: a quick step counts as late
after 2 s.
"""
STOPPED_S = 14.0
"""Seconds for which a process is stopped: longer than an ingress may be silent (`SilenceTimes.silent_s`)."""
BUSY = 3.0
"""A machine with other work may take so many times as long."""

HISTORY_S = float(os.environ.get("MANTA_HISTORY_S", "1200"))
"""Seconds of random faults under 64 clients. `MANTA_HISTORY_S` sets another number, to try the tests."""

Act = Callable[[Application], list[Stream]]
"""Returns all streams that it began, when they have ended."""
Victims = Callable[[Application], list[psutil.Process]]
RecordProperty = Callable[[str, object], None]


def continuations(application: Application) -> float:
    return application.metrics()["manta:continuations_total"]


def rank_rebuilds(application: Application) -> float:
    return application.metrics()["manta:rank_rebuilds_total"]


def grammar_workers_replaced(application: Application) -> float:
    return application.metrics()["manta:grammar_workers_replaced_total"]


def started(title: str, of: int = 1) -> Callable[[Application], float]:
    """When the youngest of `of` processes with a title did, in seconds since 1970. It waits until there are so many."""
    youngest = named(title, slice(-1, None), of)
    return lambda application: youngest(application)[0].create_time()


def adoptions(application: Application) -> float:
    """Number of streams that went on at another ingress."""
    return sum(event["event"] == "adopted" for event in application.events())


class Row(NamedTuple):
    """What runs, what is done to it, and what shows that it was done in time: `witness` grows by it."""

    setup: Setup
    act: Act
    bar_s: float = ANEW_S
    witness: Callable[[Application], float] = continuations


def hold(
    row: Row,
    application: Application,
    undisturbed: list[Stream],
    record_property: RecordProperty,
    num_repetitions: int = NUM_REPETITIONS,
) -> None:
    """Every stream ends as if nothing had happened, in each repetition, and nothing is left over."""
    streams: list[Stream] = []
    pauses: list[float] = []
    before_all = names_of(application.takeovers())
    for _ in range(num_repetitions):
        for _ in range(MOST_TRIES):
            application.deploy(row.setup)
            before = row.witness(application)
            found = row.act(application)
            grown = row.witness(application) - before
            streams += found
            application.until_nothing_is_left()
            if grown > 0:
                break
        assert grown > 0, "the fault came too late each time"
        num_paused = int(grown) if row.witness is continuations else len(found)
        pauses += sorted((stream.pause_s for stream in found), reverse=True)[:num_paused]
    expected = undisturbed * (len(streams) // len(undisturbed))
    equal = [stream.equals(other, row.setup.is_exact) for stream, other in zip(streams, expected, strict=True)]
    half_s = statistics.median(pauses)
    record_property("repetitions", num_repetitions)
    record_property("streams complete", f"{sum(stream.is_complete for stream in streams)} of {len(streams)}")
    record_property("equal", f"{sum(equal)} of {len(streams)}")
    record_property("pause p50, s", f"{half_s:.2f} (bar {row.bar_s:g})")
    record_property("pause max, s", round(max(pauses), 2))
    record_property("blocks and sessions left over", 0)
    record_takeovers([each for each in application.takeovers() if name_of(each) not in before_all], record_property)
    errors = [stream.error for stream in streams if stream.error]
    assert not errors, errors
    assert all(equal), f"{equal.count(False)} of {len(equal)} streams differ"
    if PROVE:
        assert half_s < BUSY * row.bar_s
        assert row.bar_s > STALLED_S or max(pauses) < BUSY * LONGEST_S


def name_of(takeover: dict[str, Any]) -> str:
    """Returns the name of a takeover, an entry of the request log, which no other one has."""
    return str(takeover["engine_request"])


def names_of(takeovers: list[dict[str, Any]]) -> set[str]:
    return set(map(name_of, takeovers))


def record_takeovers(takeovers: list[dict[str, Any]], record_property: RecordProperty) -> None:
    """Writes down how many there were, and the phases of the first ones, which are the longest."""
    record_property("takeovers", len(takeovers))
    for takeover in takeovers[:NUM_SHOWN_TAKEOVERS]:
        phases = ", ".join(f"{phase} {takeover[f'{phase}_s']:.2f}" for phase in TAKEOVER_PHASES)
        record_property(f"takeover {name_of(takeover)}, s", f"{takeover['cause']}: {phases}")


# ---- what is done --------------------------------------------------------------------------------------------------


def begin(application: Application) -> Streams:
    streams = application.start_streams()
    streams.wait_for_events(NUM_EVENTS)
    return streams


def named(title: str, which: slice = slice(None), of: int = 0) -> Victims:
    """Some of the processes with a title, oldest first, once there are `of` of them."""

    def find(application: Application) -> list[psutil.Process]:
        wait_until(lambda: len(application.processes(title)) >= of, poll_s=0.1)
        return application.processes(title)[which]

    return find


def rank(number: int) -> Victims:
    """One of the two ranks of the only engine, by process id: which of them is rank 0 cannot be seen from outside."""

    def find(application: Application) -> list[psutil.Process]:
        deadline = time.monotonic() + 3.0  # an engine finds out at its next step that one is dead
        while len(found := _ranks(application)) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        return sorted(found, key=lambda process: process.pid)[number : number + 1]

    return find


def _ranks(application: Application) -> list[psutil.Process]:
    """Those that the engine is connected to."""
    (engine,) = application.processes(ENGINE)
    ports = {each.laddr.port for each in engine.net_connections() if each.raddr}
    return [
        process
        for process in application.processes(RANK)
        if any(each.raddr and each.raddr.port in ports for each in process.net_connections())
    ]


def kill(*victims: Victims) -> Act:
    def act(application: Application) -> list[Stream]:
        found = [process for find in victims for process in find(application)]  # which takes a while
        streams = begin(application)
        for victim in found:
            victim.kill()
        return streams.join()

    return act


def hang(victims: Victims) -> Act:
    def act(application: Application) -> list[Stream]:
        hung = victims(application)
        streams = begin(application)
        for victim in hung:
            victim.suspend()
        found = streams.join()
        for victim in hung:
            with contextlib.suppress(psutil.NoSuchProcess):  # it was replaced meanwhile
                victim.resume()
        return found

    return act


def deploy(setup: Setup, renews: bool = False) -> Act:
    """Streams start until Serve has done it. With `renews` its version is one that never was."""

    def act(application: Application) -> list[Stream]:
        found: list[Stream] = []
        version = str(time.time()) if renews else setup.version
        thread = threading.Thread(target=application.deploy, args=[msgspec.structs.replace(setup, version=version)])
        thread.start()
        while thread.is_alive():
            found += application.start_streams().join()
        return found

    return act


def poison(application: Application) -> list[Stream]:
    """A request that kills engines begins last, so that every death happens beside streams; it alone fails."""
    streams = begin(application)
    path, body = application.requests[1]
    stream = Stream()
    stream.read(application.url + path, {**body, "logits_processors": [{"name": "poison", "arguments": {"at": 3}}]})
    # Three, or one more if an engine died before its last token had arrived: the next one makes progress by that token.
    assert re.search("[34] engine processes died while they ran this request, which may be why", stream.error or "")
    return streams.join()


def stall(application: Application) -> list[Stream]:
    """A request whose logits processor never returns makes a step of one engine hang. It ends on the other engine."""
    with tempfile.TemporaryDirectory() as folder:
        streams = begin(application)
        path, body = application.requests[1]
        processor = {"name": "stall", "arguments": {"at": 3, "once": f"{folder}/once"}}
        stream = Stream()
        stream.read(application.url + path, {**body, "logits_processors": [processor]})
        assert stream.is_complete, stream.error
        return streams.join()


def kill_ingress(application: Application) -> list[Stream]:
    """Its streams break: their clients ask again until they are answered."""
    first = begin(application)
    (ingress,) = application.processes(INGRESS)
    ingress.kill()
    found, deadline = first.join(), time.monotonic() + PATIENCE_S
    assert any(stream.error for stream in found), "nothing ran any more"
    while any(stream.error for stream in found):
        assert time.monotonic() < deadline, "it is not answered again"
        found = application.start_streams().join()
    for stream, earlier in zip(found, first.streams, strict=True):
        stream.times[:0] = earlier.times
    return found


def resume_after(*victims: Victims) -> Act:
    """Kills processes under streams that can be resumed. Their clients read on."""

    def harm(found: list[psutil.Process]) -> None:
        for victim in found:
            victim.kill()

    return _resume(victims, harm, most_events=1 << 30)


def resume_beside_stopped(*victims: Victims) -> Act:
    """Stops processes for `STOPPED_S` under streams that can be resumed, whose clients often connect anew."""

    def harm(found: list[psutil.Process]) -> None:
        for victim in found:
            victim.suspend()
        time.sleep(STOPPED_S)
        for victim in found:
            victim.resume()

    return _resume(victims, harm, most_events=40)


def _resume(victims: Sequence[Victims], harm: Callable[[list[psutil.Process]], None], most_events: int) -> Act:
    """Harms processes under streams that can be resumed. A client's connection breaks after `most_events` at most."""

    def act(application: Application) -> list[Stream]:
        found = [process for find in victims for process in find(application)]
        clients = [ResumingClient([application.port], *asked, seed) for seed, asked in enumerate(application.requests)]

        def harm_under() -> None:
            wait_until(lambda: all(len(client.history.events) >= NUM_EVENTS for client in clients))
            harm(found)

        harming = threading.Thread(target=harm_under)
        harming.start()
        histories = read_all(clients, lambda chooser: chooser.randint(1, most_events))
        harming.join()
        streams = [as_stream(history) for history in histories]
        verdict = check(histories, streams)
        assert verdict.is_good, [*verdict.lost, *verdict.twice]
        return streams

    return act


Fault = Callable[[random.Random], None]
"""Does harm that the application recovers from, to something that it chooses at random."""


def deaths(application: Application) -> dict[str, Fault]:
    """Deaths of single processes, by kind."""

    def of_one(title: str) -> Fault:
        return lambda chooser: chooser.choice(named(title, of=1)(application)).kill()

    titles = {"ingress": INGRESS, "engine": ENGINE, "grammar actor": GRAMMAR_ACTOR, "rank": RANK}
    return {kind: of_one(title) for kind, title in titles.items()}


class Disturbance(NamedTuple):
    """What came of streams under random faults."""

    verdict: Verdict
    faults: list[Death]
    histories: list[History]

    @property
    def num_faults(self) -> Counter[str]:
        """Number of faults by kind."""
        return Counter(fault.kind for fault in self.faults)


def disturb(
    application: Application,
    setup: Setup,
    undisturbed: list[Stream],
    num_clients: int,
    seconds: float,
    faults: dict[str, Fault],
) -> Disturbance:
    """Does a fault every few seconds, of each kind in turn, under `num_clients` clients. Their connections break at
    random too. The next fault waits until the application has recovered from the one before, ranks included.
    """
    chooser, until = random.Random(1), time.monotonic() + seconds
    done, kinds = list[Death](), itertools.cycle(faults)
    histories: list[list[History]] = [[] for _ in range(num_clients)]

    def keep_reading(number: int) -> None:
        request = application.requests[number % len(application.requests)]
        while time.monotonic() < until:
            client = ResumingClient([application.port], *request, number + 1000 * len(histories[number]))
            histories[number].append(client.read(lambda each: each.randrange(1, 400)))

    threads = [threading.Thread(target=keep_reading, args=[number]) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    while time.monotonic() < until:
        time.sleep(chooser.uniform(1, 5))
        application.until_running(setup.num_engines, setup.num_ingresses)
        application.until_serving(setup.num_engines)
        kind = next(kinds)
        begun = time.time()
        faults[kind](chooser)
        done.append(Death(begun, kind))
    for thread in threads:
        thread.join()
    application.until_running(setup.num_engines, setup.num_ingresses)
    expected = [undisturbed[number % len(undisturbed)] for number, read in enumerate(histories) for _ in read]
    found = [history for read in histories for history in read]
    return Disturbance(check(found, expected), done, found)


def hold_histories(
    application: Application,
    setup: Setup,
    undisturbed: list[Stream],
    faults: dict[str, Fault],
    record_property: RecordProperty,
    longest_s: float = math.inf,
) -> None:
    """64 clients get every byte once, for `HISTORY_S` in which every kind of fault happens. No pause is longer than
    `longest_s` on a machine without other work.
    """
    application.deploy(setup)
    disturbance = disturb(application, setup, undisturbed, 64, HISTORY_S, faults)
    verdict, num_faults = disturbance.verdict, {kind: disturbance.num_faults[kind] for kind in faults}
    p50_s, p99_s = (verdict.pauses_s[int(share * len(verdict.pauses_s))] for share in (0.5, 0.99))
    record_property("faults", num_faults)
    record_property("streams, events, bytes", f"{verdict.num_streams}, {verdict.num_events}, {verdict.num_bytes}")
    record_property("lost, twice, different", f"{len(verdict.lost)}, {len(verdict.twice)}, {len(verdict.different)}")
    record_property("pause p50, p99, max, s", f"{p50_s:.4f}, {p99_s:.3f}, {verdict.pauses_s[-1]:.1f}")
    for number, pause in enumerate(explained(application, disturbance), 1):
        record_property(f"pause {number}", pause.words())
    wrong = [*verdict.lost, *verdict.twice, *verdict.different]
    assert verdict.is_good, "\n".join(
        [f"{verdict.num_streams} streams under {num_faults}, pause p99 {p99_s:.3f} s", *wrong]
    )
    assert all(num_faults.values()), f"not every kind of fault happened: {num_faults}"
    assert verdict.pauses_s[-1] < BUSY * longest_s
    application.until_nothing_is_left()


def explained(application: Application, disturbance: Disturbance) -> list[Pause]:
    """Returns the longest pauses of streams, by their parts."""
    return longest_pauses(disturbance.histories, application.events(), disturbance.faults, count=NUM_SHOWN_TAKEOVERS)


def undisturbed_streams(application: Application) -> list[Stream]:
    streams = application.start_streams().join()
    errors = [stream.error for stream in streams if stream.error]
    assert not errors, errors
    assert all(stream.is_complete for stream in streams)
    return streams

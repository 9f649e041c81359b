"""Streams outlive the engines that serve them: whatever happens to an engine, to its ranks or to what it leans on,
every stream ends as if nothing had. What may happen to nodes is in `tests/test_node_faults.py`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import msgspec
import pytest
from ray import serve

from cluster import own_ray
from tests.conftest import PROVE
from tests.fault_streams import CONTROLLER, ENGINE, GRAMMAR_ACTOR, INGRESS, Application, Setup, Stream
from tests.fault_table import (
    ANOTHER_S,
    Row,
    deploy,
    grammar_workers_replaced,
    hang,
    hold,
    kill,
    kill_ingress,
    named,
    poison,
    rank,
    rank_rebuilds,
    started,
    undisturbed_streams,
)

pytestmark = pytest.mark.timeout(3600 if PROVE else 900)


@pytest.fixture(scope="module")
def application() -> Iterator[Application]:
    with subprocess.Popen(["sleep", "7200"]) as other:
        try:
            own_ray.start()
            yield Application(TWO)
            serve.shutdown()
            own_ray.stop()
            assert other.poll() is None, "a Ray of our own took another child of this process with it"
        finally:
            other.kill()
            own_ray.stop()


@pytest.fixture(scope="module")
def undisturbed(application: Application) -> list[Stream]:
    return undisturbed_streams(application)


TWO, ONE, STANDBY = Setup(), Setup(num_engines=1), Setup(num_engines=1, num_standbys=1)
RANKS = Setup(num_engines=1, options={"tensor_parallel_size": 2})
RANKS_STANDBY = msgspec.structs.replace(RANKS, num_standbys=1)
ACTORS = Setup(num_engines=1, options={"grammar_pool": {"form": "actors"}})
ENGINES, FIRST = named(ENGINE), named(ENGINE, slice(1))

ROWS = {
    "one of two is killed": Row(TWO, kill(FIRST), ANOTHER_S),
    "one of two hangs": Row(TWO, hang(FIRST), ANOTHER_S),
    "one of two is told to go": Row(TWO, deploy(ONE), ANOTHER_S),
    "the only one is killed": Row(ONE, kill(ENGINES)),
}
LONG_ROWS = {
    "both are killed": Row(TWO, kill(ENGINES)),
    "the only one hangs": Row(ONE, hang(ENGINES)),
    "two get a new version": Row(TWO, deploy(TWO, renews=True), ANOTHER_S),
    "the only one is killed beside a standby": Row(STANDBY, kill(ENGINES), ANOTHER_S),
    "a request kills engines": Row(TWO, poison),
    "rank 0 is killed": Row(RANKS, kill(rank(0)), witness=rank_rebuilds),
    "rank 1 is killed": Row(RANKS, kill(rank(1)), witness=rank_rebuilds),
    "rank 0 is killed beside a standby": Row(RANKS_STANDBY, kill(rank(0)), ANOTHER_S),
    "rank 0 hangs": Row(RANKS, hang(rank(0)), witness=rank_rebuilds),
    "rank 1 hangs": Row(RANKS, hang(rank(1)), witness=rank_rebuilds),
    "two of three grammar actors are killed": Row(
        ACTORS, kill(named(GRAMMAR_ACTOR, slice(2), of=3)), ANOTHER_S, grammar_workers_replaced
    ),
    "the controller is killed": Row(TWO, kill(named(CONTROLLER)), ANOTHER_S, started(CONTROLLER)),
    "the controller and the only one are killed": Row(ONE, kill(named(CONTROLLER), ENGINES)),
    "the ingress is killed, and clients ask again": Row(TWO, kill_ingress, witness=started(INGRESS)),
}


@pytest.mark.parametrize("name", [*ROWS, *(pytest.param(name, marks=pytest.mark.prove) for name in LONG_ROWS)])
def test_every_stream_ends_as_if_nothing_had_happened_where(
    application: Application, undisturbed: list[Stream], name: str, record_property: Callable[[str, object], None]
) -> None:
    hold((ROWS | LONG_ROWS)[name], application, undisturbed, record_property)

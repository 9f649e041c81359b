"""`engine.exact` across a failover: of two engines on nodes whose processors have different forms of the kernels, one
is killed. The other continues its streams, which are equal to undisturbed ones to the last bit of each log-probability.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

import psutil
import pytest

from manta.workers.kernels import processor
from tests.serve.fault_streams import ENGINE, Application, Setup, Stream
from tests.serve.fault_table import ANOTHER_S, RecordProperty, Row, hold, kill, named, undisturbed_streams
from tests.serve.test_node_faults import PLACE, Nodes
from tests.workers.cpu_forms import COMPILED

pytest.importorskip("ray")
pytestmark = [pytest.mark.prove, pytest.mark.timeout(3600)]

BEST = COMPILED[0]
OTHER = "avx2" if "avx2" in COMPILED[1:] else "plain"
EXACT = Setup(resources=PLACE, options={"dtype": "bfloat16", "weights": "int8", "exact": True})


def form_of(engine: psutil.Process) -> str:
    """The form that the engine's environment asks for."""
    return engine.environ()[processor.VARIABLE]


@pytest.fixture(scope="module")
def application() -> Iterator[Application]:
    if BEST == OTHER:
        pytest.skip(f"this processor has no form of the kernels but {BEST}")
    nodes = Nodes(forms=(BEST, OTHER))
    yield Application(EXACT)
    nodes.stop()


@pytest.fixture(scope="module")
def undisturbed(application: Application) -> list[Stream]:
    return undisturbed_streams(application)


def test_streams_continue_bit_equal_on_another_processor(
    application: Application, undisturbed: list[Stream], record_property: RecordProperty
) -> None:
    """The oldest engine is killed each time, so that engines of both forms are in turn."""
    num_killed: collections.Counter[str] = collections.Counter()

    def kill_the_oldest(application: Application) -> list[Stream]:
        forms = [form_of(engine) for engine in application.processes(ENGINE)]
        assert sorted(forms) == sorted([BEST, OTHER])
        num_killed[forms[0]] += 1
        return kill(named(ENGINE, slice(1)))(application)

    assert sum(len(stream.logprob_values) for stream in undisturbed) > 500
    hold(Row(EXACT, kill_the_oldest, ANOTHER_S), application, undisturbed, record_property)
    record_property("killed", dict(num_killed))

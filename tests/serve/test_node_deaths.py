"""Streams whose clients reconnect, while processes and whole nodes die. A node takes its ingress, its engine with the
keeper of streams, its ranks and its grammar actors with it, and another node joins some seconds later.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.fault_streams import Application, Setup
from tests.serve.fault_table import RecordProperty, deaths, hold_histories, undisturbed_streams
from tests.serve.test_node_faults import INGRESS_PLACE, PLACE, Nodes

pytest.importorskip("ray")
pytestmark = [pytest.mark.prove, pytest.mark.timeout(3600)]

EVERYWHERE = Setup(
    num_ingresses=2,
    options={"grammar_pool": {"form": "actors"}, "tensor_parallel_size": 2},
    resources=PLACE,
    starts_new_first=False,
    ingress_resources=INGRESS_PLACE,
)
"""An ingress and an engine on each node."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    nodes.stop()


def test_64_clients_get_every_byte_once(nodes: Nodes, record_property: RecordProperty) -> None:
    application = Application(EVERYWHERE, listens=True)
    faults = {"node": nodes.kill_any, **deaths(application)}
    hold_histories(application, EVERYWHERE, undisturbed_streams(application), faults, record_property)

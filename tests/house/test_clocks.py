"""Durations and deadlines are on clocks that nobody sets: all that reads the clock on the wall is listed."""

from __future__ import annotations

import ast
import collections

from tests.house.syntax_trees import ROOMS, modules, nodes

STAMP, FILE, SHARED = "a time that people read", "compared with times of files", "compared by machines in a storage"
ORDER = "names of things, of which later ones are greater"
READERS = {
    "manta.cluster.batch.batch_run": (3, STAMP),
    "manta.cluster.batch.batch_runner": (1, SHARED),
    "manta.cluster.batch.lease": (4, SHARED),
    "manta.cluster.batch.stored": (1, ORDER),
    "manta.cluster.engine.event_publisher": (1, STAMP),
    "manta.cluster.http.endpoints.batches": (1, SHARED),
    "manta.cluster.http.endpoints.ollama": (2, STAMP),
    "manta.cluster.http.exchange.exchange": (2, STAMP),
    "manta.cluster.http.exchange.recordings": (1, STAMP),
    "manta.cluster.http.exchange.state": (1, STAMP),
    "manta.cluster.serve.adapters.adapter_directory": (1, SHARED),
    "manta.cluster.serve.engine.replica_adapters": (2, SHARED),
    "manta.cluster.serve.engine.step_thread": (2, "begins of spans"),
    "manta.cluster.serve.requests.submission": (1, STAMP),
    "manta.cluster.serve.starting.replica_process": (1, "the age of a process where no clock began at the boot"),
    "manta.cluster.serve.starting.start_watch": (1, FILE),
    "manta.cluster.storage.file_records": (5, SHARED),
    "manta.cluster.storage.kept_responses": (2, SHARED),
    "manta.cluster.storage.local_files": (1, FILE),
    "manta.cluster.storage.records": (4, SHARED),
    "manta.cluster.storage.retention": (1, SHARED),
    "manta.cluster.telemetry.engine_watch": (3, "ends of spans"),
    "manta.cluster.text.template_sandbox": (1, STAMP),
    "manta.workers.adapters.adapter_copies": (1, FILE),
    "manta.workers.checkpoints.values_digest": (1, FILE),
    "manta.workers.kept_files": (1, FILE),
    "manta.workers.prefix_store": (1, FILE),
}
"""Reads of the clock on the wall in each module, and their reason. What ends on `SHARED` clocks does so hours or days
later, or is also bounded on the reader's own clock (leases).
"""
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}


def reads(tree: ast.Module) -> int:
    """Counts the calls of wall clocks; `from time import time` would hide one, and counts too."""
    found = 0
    for node in nodes(tree):
        if isinstance(node, ast.Attribute):
            owner = getattr(node.value, "attr", None) or getattr(node.value, "id", "")
            found += f"{owner}.{node.attr}" in WALL_CLOCKS
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found += any(name.name in ("time", "time_ns") for name in node.names)
    return found


def test_what_reads_the_clock_on_the_wall_is_listed() -> None:
    found = collections.Counter({name: reads(tree) for room in ROOMS for name, tree in modules(room).items()})
    assert {name: count for name, count in found.items() if count} == {name: row[0] for name, row in READERS.items()}

"""How each replica's process is set up: its environment, its garbage collector and its place among others."""

import gc
import os

REPLICA_ENVIRONMENT = {
    # One event loop instead of three: threads of one process share one interpreter lock anyway. Ray's manual names both
    # among the settings for throughput.
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    # So often Ray collects metrics; by default Serve hands it each gauge and counter ten times a second.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
}
"""Serve reads it when it is imported, and whoever starts a cluster that is joined later does not set it: so it is
part of the deployments.
"""
OBJECTS_BETWEEN_COLLECTIONS = 20_000
"""Python's 700 are there after a few requests, most of them still in use."""


NICENESS = 10
"""Of what nobody waits for, beyond that of engines."""


def yield_to_engines() -> None:
    """The calling thread, and those that it starts, get the processor where others leave it: a model's threads wait for
    each other, so that whoever takes the core of one holds up all.
    """
    os.nice(NICENESS)


def collect_rarely() -> None:
    """Called when what stays for life is there: the collector of cycles does not look through it again while streams
    wait, and seldom through the rest. What has no cycle, as most has none, is freed at once all the same.
    """
    gc.freeze()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)

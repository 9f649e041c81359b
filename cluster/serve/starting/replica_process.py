"""Sets up the process of each replica: its environment, where it listens, its garbage collector and its priority.

`ReplicaProcess` makes a replica whose process is its own out of one that may share it, as in tests.
"""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import psutil
import ray
from ray._common.tls_utils import add_port_to_grpc_server
from ray.serve._private import replica

REPLICA_ENVIRONMENT = {
    # One event loop instead of three: threads of one process share one interpreter lock anyway. Ray's manual names both
    # among the settings for throughput.
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    # The interval at which Ray collects metrics; by default Serve hands it each gauge and counter ten times a second.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
}
"""The environment of the deployments' processes. Serve reads it when it is imported, and a cluster that is joined later
was started without it.
"""
OBJECTS_BETWEEN_COLLECTIONS = 20_000
"""Python's default of 700 is reached after a few requests, while most of those objects are still in use."""
NICENESS = 10
"""Added to the niceness of processes for which nobody waits."""


class ReplicaProcess:
    """Sets up the process of a replica that has it for itself. Comes before the replica's class among the bases."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        listen_on_own_address()
        super().__init__(*arguments, **options)
        collect_rarely()

    @staticmethod
    def seconds_before() -> float:
        """Returns the age of the process, which is part of what the start of its replica takes."""
        return process_age_s(psutil.Process())


def process_age_s(process: psutil.Process) -> float:
    """Returns how long ago a process began. Linux notes that in hundredths of a second since it booted, and the moment
    of that in whole seconds only, which the time of day would be wrong by.
    """
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return time.time() - process.create_time()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - (process.create_time() - psutil.boot_time())


def listen_on_own_address() -> None:
    """Lets Serve's gRPC server in this process listen at the node's own address, on loopback if Ray is this machine's.

    Serve 2.60 binds it to every address, and it unpickles what it is sent. Serve starts that server when the replica's
    constructor has returned.
    """
    host = ray.util.get_node_ip_address()
    address = f"[{host}]:0" if ":" in host else f"{host}:0"

    def add_port(server: Any, _: str) -> int:
        return int(add_port_to_grpc_server(server, address))

    replica.add_port_to_grpc_server = add_port


def yield_to_engines() -> None:
    """Lowers the priority of the calling thread and of those that it starts, so that they never hold up a step."""
    os.nice(NICENESS)


def collect_rarely() -> None:
    """Keeps the collector of cycles from looking through the objects that stay for life, and makes it run seldom.

    A process calls it once, when those objects are there. Objects without a cycle, which are most, are freed at once
    anyway.
    """
    gc.freeze()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)

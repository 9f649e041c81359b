"""The process of each replica: its environment, the address it listens at, its garbage collector and its priority.

`ReplicaProcess` adapts a replica class, which may share a process in tests, to a process of its own.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from typing import Any

import psutil
import ray
from ray import serve
from ray._common.tls_utils import add_port_to_grpc_server
from ray.serve._private import replica

from manta.cluster.serve.starting.start_failure import logs_folder
from manta.cluster.telemetry.request_log import keep_request_log, log_folder
from manta.structured.low_priority import NICENESS
from manta.structured.visible_logs import guard_process

REPLICA_ENVIRONMENT = {
    # One event loop instead of three, because threads of one process share one interpreter lock anyway. Ray's manual
    # names both among its settings for throughput.
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    # Interval at which Ray collects metrics; by default Serve passes each gauge and counter on ten times a second.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
}
"""Environment of the deployments' processes. Serve reads it when it is imported, and a joined cluster was started
without it.
"""
OBJECTS_BETWEEN_COLLECTIONS = 20_000
"""Allocations between two runs of the garbage collector. Python's default of 700 is reached after a few requests, while
most of those objects are still in use.
"""


class ReplicaProcess:
    """Sets up the process of a replica that does not share it. It must precede the replica's class among the bases."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        gc.disable()  # the constructor imports torch and others, whose objects stay: collections take a quarter of it
        guard_process()
        _keep_request_log()
        listen_on_own_address()
        super().__init__(*arguments, **options)
        gc.enable()
        collect_rarely()

    @staticmethod
    def seconds_before() -> float:
        """Returns the age of the process in seconds, which counts as part of the replica's start."""
        return process_age_s(psutil.Process())


def _keep_request_log() -> None:
    """Makes this replica's request log a file of its own in Ray's folder of logs. Without room for one it stays where
    standard output goes.
    """
    folder, context = logs_folder(), serve.get_replica_context()
    if folder is not None:
        name = f"{context.deployment}-{context.replica_id.unique_id}.jsonl"
        with contextlib.suppress(OSError):
            keep_request_log(log_folder(folder, context.app_name) / name)


def process_age_s(process: psutil.Process) -> float:
    """Returns the age of a process in seconds. Linux knows when a process began in hundredths of a second since the
    boot, but the time of the boot in whole seconds only. So the age is computed on the clock that began at the boot.
    """
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return time.time() - process.create_time()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - (process.create_time() - psutil.boot_time())


def listen_on_own_address() -> None:
    """Makes Serve's gRPC server in this process listen at the node's own address, which is loopback for a Ray of our
    own.

    Serve 2.60 binds the server to every address, and the server unpickles what it receives. Serve starts the server
    after the replica's constructor has returned.
    """
    host = ray.util.get_node_ip_address()
    address = f"[{host}]:0" if ":" in host else f"{host}:0"

    def add_port(server: Any, _: str) -> int:
        return int(add_port_to_grpc_server(server, address))

    replica.add_port_to_grpc_server = add_port


def yield_to_engines() -> None:
    """Lowers the priority of this process, for whose work nobody waits: on Linux of the calling thread and of the
    threads that it starts, elsewhere of all.
    """
    os.nice(NICENESS)


def collect_rarely() -> None:
    """Excludes the objects that exist now from garbage collection, and makes collections rare.

    A process calls it once, when its long-lived objects exist. Most objects belong to no cycle and are freed at once
    anyway.
    """
    gc.freeze()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)

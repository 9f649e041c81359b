"""Starts a Ray for this application alone, on this machine: without the parts that only clusters need, and with fewer
periodic checks.

Each wake-up of one of Ray's processes delays a step, whose threads wait for each other. Other users of the machine
cannot reach this Ray: its files are in a folder that they may not enter, and it listens on the loopback address only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import ray
from ray._private import ray_constants, services
from ray._private.authentication.authentication_token_generator import generate_new_authentication_token
from ray._private.node import Node
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from manta.cluster import worker_setup
from manta.cluster.private_folder import PrivateFolder
from manta.structured.host import address_space_limit, num_cores

STOP_PATIENCE_S = 15.0
"""Seconds after which processes that were asked to end are killed."""
START_PATIENCE_S = 300.0
"""Seconds within which Ray's node must register. Ray itself waits for 30, which a busy machine may exceed."""
LEAST_ADDRESS_SPACE = 2 * 2**30
"""Least address space of a process, in bytes. With 1.9 GiB an engine's imports find no memory. With 0.9 GiB Ray does
not start, and takes half a minute to say so.
"""
CONTROL_LOOP_S = 0.5
"""Default of the seconds between two looks of Serve's controller. Ray's default is 0.1 s."""
LOOPBACK = "127.0.0.1"
_OBJECT_STORE_BYTES = 128 * 2**20
"""Size of Ray's object store. Manta keeps nothing there, because requests and outputs are small."""

_ENVIRONMENT = {
    # Ray would start its workers at nice 15, behind everything else on this machine, clients included.
    "RAY_worker_niceness": "0",
    # Ray would start a worker for each CPU beforehand. Most of Manta's actors have an environment of their own, which
    # these lack; without them a server of two cores is ready with 10% less CPU time.
    "RAY_prestart_worker_first_driver": "false",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "10000",
    "RAY_memory_monitor_refresh_ms": "1000",
    "RAY_metrics_report_interval_ms": "60000",
    "RAY_enable_metrics_collection": "false",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_event_stats": "false",
    "METRICS_RECORD_INTERVAL_S": "60",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    "SCAN_EVENT_DIR_INTERVAL_SECONDS": "60",
}
"""Environment of Ray's own processes, unless the user has set these variables."""
_ACCESS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
"""Variables that say whether Ray requires a token, and which one."""


def _no_api_server(node: Node, **_: Any) -> None:
    # Until the node's agent is told where the dashboard is (nowhere), it asks once a second and logs a traceback.
    address = ray_constants.DASHBOARD_ADDRESS.encode()
    node.get_gcs_client().internal_kv_put(address, b"127.0.0.1:0", True, ray_constants.KV_NAMESPACE_DASHBOARD)


_INSTEAD: dict[str, Callable[..., None]] = {
    "start_monitor": lambda _: None,
    "start_log_monitor": lambda _: None,
    "start_api_server": _no_api_server,
}
"""Replacements for methods of Ray's `Node` while it starts. They leave out the autoscaler's monitor, the forwarding of
logs to a driver that wants none, and the dashboard's server, which Ray starts and waits for even without a dashboard.
Ray has switches for the first two, which `ray.init` does not pass on, and none for the last. Each slows the start by
more than a tenth and takes 40 to 60 MiB.
"""


_folders: list[PrivateFolder] = []
"""Folders of the running Ray."""
_before: dict[str, str | None] = {}
"""Values of the variables that the running Ray's start has changed, before it; None for one that was not set."""
_roots: list[psutil.Process] = []
"""Ray's first processes; this process may have other children."""


def start(num_cpus: int = 0, control_loop_s: float = CONTROL_LOOP_S) -> None:
    """Starts Ray with `num_cpus` CPUs, or with the number of cores if that is larger. `num_cpus` may exceed the cores,
    so that actors which claim more threads than there are cores start too. `control_loop_s` are the seconds between two
    looks of Serve's controller at what is to start and to end. Raises `ValueError` where Ray's processes may have too
    little address space, and what `ray.init` raises.
    """
    limit = address_space_limit()
    if limit is not None and limit < LEAST_ADDRESS_SPACE:
        raise ValueError(
            f"a process of this shell may have {limit:,} bytes of address space, and Ray and an engine need "
            f"{LEAST_ADDRESS_SPACE:,}: raise the limit (ulimit -v)"
        )
    for name, value in {**_ENVIRONMENT, "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": str(control_loop_s)}.items():
        if name not in os.environ:
            _before[name] = None
            os.environ[name] = value
    _require_token()
    _folders.append(PrivateFolder())
    others = set(psutil.Process().children())
    try:
        with _without_extras():
            _start(_folders[-1].path / "ray", max(num_cpus, num_cores()))
    except BaseException as error:
        if isinstance(error, Exception):
            keep_logs()  # the error names files in Ray's folder
        _forget()
        raise
    _roots[:] = set(psutil.Process().children()) - others


def _start(folder: pathlib.Path, num_cpus: int) -> None:
    ray.init(
        address="local",
        num_cpus=num_cpus,
        _temp_dir=str(folder),
        _node_ip_address=LOOPBACK,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=_OBJECT_STORE_BYTES,
    )


def keep_logs() -> None:
    """Marks Ray's folder to be kept after Ray's end, among the last few that are kept."""
    for folder in _folders:
        folder.is_kept = True


def stop() -> None:
    """Ends Ray with all its processes, and removes its files except logs that are kept."""
    started = _processes()
    # A process that ignores Ray's request to end would delay the shutdown, so a timer kills what is left.
    impatience = threading.Timer(STOP_PATIENCE_S, _kill, [started])
    impatience.daemon = True
    impatience.start()
    ray.shutdown()
    impatience.cancel()
    _kill(psutil.wait_procs(started, timeout=STOP_PATIENCE_S)[1])
    _forget()


def _forget() -> None:
    """Closes the folders of a Ray that has ended, and restores the environment that its start had changed."""
    while _folders:
        _folders.pop().close()
    while _before:
        name, value = _before.popitem()
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _read_environment()


def _require_token() -> None:
    """Makes this process and Ray's processes require a new token, whatever RAY_AUTH_MODE says.

    Whoever can talk to Ray can run code as this user. The token is in the environment of these processes only. In the
    file `~/.ray/auth_token`, where Ray would write it, every later `ray start` of this user would require it too.
    """
    for name, value in zip(_ACCESS, ("token", generate_new_authentication_token()), strict=True):
        _before.setdefault(name, os.environ.get(name))
        os.environ[name] = value
    _read_environment()


def _read_environment() -> None:
    """Makes Ray in this process read again whether it requires a token, and which one."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _processes() -> list[psutil.Process]:
    found = []
    for root in _roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [root, *root.children(recursive=True)]
    return found


def _patient(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a version of Ray's `get_node` that waits for the node as long as its raylet lives, for up to
    `START_PATIENCE_S`.
    """

    def wait(*arguments: Any) -> Any:
        deadline = time.monotonic() + START_PATIENCE_S
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:
                if time.monotonic() > deadline or not _has_raylet():
                    raise
                time.sleep(0.1)

    return wait


def _has_raylet() -> bool:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "raylet" and child.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


@contextlib.contextmanager
def _without_extras() -> Iterator[None]:
    methods = {name: getattr(Node, name) for name in _INSTEAD}
    resolve, get_node = services.resolve_ip_for_localhost, services.get_node
    setup_worker = ray_constants.SETUP_WORKER_FILENAME
    try:
        ray_constants.SETUP_WORKER_FILENAME = worker_setup.__file__  # Ray joins it to a folder; it is absolute
        services.get_node = _patient(get_node)
        services.resolve_ip_for_localhost = lambda host: host  # for a host of its own Ray would listen on every address
        for name, replacement in _INSTEAD.items():
            setattr(Node, name, replacement)
        with _own_sigterm():
            yield
    finally:
        services.resolve_ip_for_localhost, services.get_node = resolve, get_node
        ray_constants.SETUP_WORKER_FILENAME = setup_worker
        for name, method in methods.items():
            setattr(Node, name, method)


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Leaves SIGTERM to the handler that this process has, if any.

    Ray installs a handler of its own and, below Python, one that prints a stack dump. Both come with the driver's
    `CoreWorker`; SIGTERM is blocked while it is created.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    make, set_handler = ray._raylet.CoreWorker, ray._private.utils.set_sigterm_handler  # type: ignore[attr-defined]

    def make_quietly(*arguments: Any, **options: Any) -> Any:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            return make(*arguments, **options)
        finally:
            signal.signal(signal.SIGTERM, handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    ray._raylet.CoreWorker = make_quietly  # type: ignore[attr-defined]
    ray._private.utils.set_sigterm_handler = lambda _: None
    try:
        yield
    finally:
        ray._raylet.CoreWorker, ray._private.utils.set_sigterm_handler = make, set_handler  # type: ignore[attr-defined]


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()

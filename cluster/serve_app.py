"""The Ray Serve application: an ingress before engines. `start` runs it here, `build` is Serve's import path.

`serve run cluster.serve_app:build` and `configs/serve.yaml` take the same options as `manta serve`, and both end in
`application`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import socket
import threading
from typing import Any

import msgspec
import psutil
import ray
from ray import serve
from ray.serve.config import HTTPOptions

from cluster import direct_ingress
from cluster.config import DEMO_MODEL, ServeConfig
from cluster.engine_deployment import engine_deployment
from cluster.ingress import ingress_deployment
from workers.model_info import ModelInfo

APP_NAME = "manta"
STOP_PATIENCE_S = 15.0
"""After so long, processes that were asked to end are killed."""
_OBJECT_STORE_BYTES = 128 * 2**20
"""Manta keeps nothing there: requests and outputs are small."""


_OF_OWN_RAY = {
    # Ray would start its workers at nice 15, behind whatever else runs on this machine, clients included.
    "RAY_worker_niceness": "0",
    # What looks after clusters of thousands, ten times a second, takes a sixth of a core from one machine's steps.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "10000",
    "RAY_memory_monitor_refresh_ms": "1000",
    "RAY_metrics_report_interval_ms": "60000",
    "RAY_enable_metrics_collection": "false",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_event_stats": "false",
    "AUTOSCALER_UPDATE_INTERVAL_S": "60",
}
"""Environment of Ray's own processes where Ray is started for this application alone."""


def application(config: ServeConfig) -> serve.Application:
    """The bound application; paths become absolute, since replicas run in folders of their own."""
    engine = msgspec.structs.replace(
        config.engine, model=_absolute(config.engine.model), tokenizer=_absolute(config.engine.tokenizer)
    )
    config = msgspec.structs.replace(
        config, engine=engine, served_model_name=config.served_model_name or pathlib.PurePath(config.engine.model).name
    )
    num_threads = engine.num_threads or len(os.sched_getaffinity(0))
    engines = engine_deployment(engine, config.num_engine_replicas, num_threads).bind(engine)
    return ingress_deployment(config).bind(config, engines)


def build(options: dict[str, Any]) -> serve.Application:
    """For Serve's configuration files: `import_path: cluster.serve_app:build` with the options under `args`."""
    return application(msgspec.convert(options, ServeConfig))


def start(config: ServeConfig) -> ModelInfo:
    """Starts Ray and Serve in this process; when the application is healthy, returns what its engine loaded.

    Where `RAY_ADDRESS` names a cluster (as in a Ray job) the application runs there; else on a Ray of its own, never on
    one that happens to run on this machine. Raises what the replicas raised where they cannot start.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # One event loop in a replica instead of three: threads of one process share one interpreter lock anyway.
    os.environ.setdefault("RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", "0")
    os.environ.setdefault("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "0")
    proxy_port = config.port
    if _listens_itself(config):
        os.environ.update(direct_ingress.environment(config.port))
        proxy_port = _free_port(config.host)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if _joins_cluster():
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    else:
        for name, value in _OF_OWN_RAY.items():
            os.environ.setdefault(name, value)
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=_OBJECT_STORE_BYTES,
        )
    options = {"enable_access_log": False}
    serve.start(http_options=HTTPOptions(host=config.host, port=proxy_port), logging_config=options)
    serve.run(application(config), name=APP_NAME, route_prefix="/", logging_config=options)
    return serve.get_deployment_handle("engine", APP_NAME).model.remote().result(timeout_s=60)


def stop() -> None:
    """Ends what `start` began; harmless where nothing runs. No process of a Ray of its own outlives it."""
    if not ray.is_initialized():
        return
    if _joins_cluster():
        try:
            serve.delete(APP_NAME)
        finally:
            ray.shutdown()
        return
    started = psutil.Process().children(recursive=True)
    # Ray ends its processes politely. One that does not listen would hold up the shutdown, so patience has an end.
    impatience = threading.Timer(STOP_PATIENCE_S, _kill, [started])
    impatience.daemon = True
    impatience.start()
    ray.shutdown()
    impatience.cancel()
    _kill(psutil.wait_procs(started, timeout=STOP_PATIENCE_S)[1])


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _joins_cluster() -> bool:
    return bool(os.environ.get("RAY_ADDRESS"))


def _listens_itself(config: ServeConfig) -> bool:
    """Whether the ingress replica listens; several replicas or machines need Serve's proxy to share the work out."""
    return config.num_ingress_replicas == 1 and not _joins_cluster()


def _free_port(host: str) -> int:
    """For the proxy, which Serve starts all the same and nobody asks anything."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _absolute(name: str | None) -> Any:
    """A folder's absolute path; `demo` and hub ids as they are."""
    if name is None or name == DEMO_MODEL or not pathlib.Path(name).is_dir():
        return name
    return str(pathlib.Path(name).resolve())

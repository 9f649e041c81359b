"""Builds the Ray Serve application, ingresses in front of engines. `start` deploys it; Serve's own files import
`build`.

`serve run manta.cluster.serve.app:build` and the files in `configs/serve/` take the same options as `manta serve`. Both
ways lead to `application`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.context import _get_global_client as get_client
from ray.serve.schema import LoggingConfig

from manta.cluster import own_ray
from manta.cluster.batch.batch_deployment import batch_deployment
from manta.cluster.config import ServeConfig, ray_address
from manta.cluster.engine.ranks.claims import (
    CannotPlace,
    check_room,
    cluster_gpus,
    cluster_tpus,
    node_cpus,
    num_claimed,
    num_nodes,
    threads_each,
    with_device,
)
from manta.cluster.engine.stats import STANDBY
from manta.cluster.http.access.keys import with_api_keys
from manta.cluster.http.access.prefix_scope import kept_secret, new_secret
from manta.cluster.option_reader import read_options
from manta.cluster.serve.engine.engine_deployment import engine_deployment
from manta.cluster.serve.ingress import ingress_deployment
from manta.cluster.serve.listening.tls import Certificate
from manta.cluster.serve.starting import deployed, joined_ray
from manta.cluster.serve.starting.start_failure import StartFailed, unexpected
from manta.cluster.serve.starting.start_watch import wait_until_running
from manta.cluster.storage.storage import with_storage
from manta.cluster.version import version
from manta.structured.host import num_cores
from manta.workers.model_info import ModelInfo
from manta.workers.model_options import DEMO_MODEL

APP_NAME = "manta"
"""Name of the application, unless its user gives another one."""
MODEL_ANSWER_S = 60.0
"""Seconds within which an engine must answer what it loaded; after that the question is sent again, perhaps to another
engine.
"""
_LOGGING = LoggingConfig(enable_access_log=False)


def application(config: ServeConfig, nodes: list[int], shares_port: bool = True) -> serve.Application:
    """Binds the application. Raises `ValueError` for API keys that are too weak, and for a certificate or a batch
    storage that cannot be used.

    `nodes` holds the number of cores of each node; it determines `num_threads` if the configuration does not. The
    ingresses accept connections themselves if `http_server` is `listener`; otherwise Serve's proxies do. Without
    `shares_port` no other process may listen at the port, which suits a single ingress that is never updated.
    """
    num_living = num_nodes()
    config = with_storage(with_api_keys(_for_nodes(config, nodes, num_living)))
    Certificate.of(config)
    standby = None
    if config.num_standby_replicas:
        engine = msgspec.structs.replace(config.engine, claims_cpus=False)
        standby = engine_deployment(engine, config.num_standby_replicas, STANDBY).bind(engine)
    engines, batches = _engines(config), None
    secret = kept_secret() if config.engine.prefix_store_bytes else new_secret()
    if config.batch_storage is not None:
        batches = batch_deployment(config).bind(config, engines, standby, secret)
    return ingress_deployment(config, num_living).bind(config, engines, secret, standby, shares_port, batches)


def _engines(config: ServeConfig) -> serve.Application:
    is_alone = config.max_engines == 1
    deployment = engine_deployment(
        config.engine, config.num_engine_replicas, autoscaling=config.autoscaling, is_alone=is_alone
    )
    return deployment.bind(config.engine, is_alone)


def _for_nodes(config: ServeConfig, nodes: list[int], num_living: int = 1) -> ServeConfig:
    """Fills in the threads of an engine and the number of ingresses, unless ingresses follow the engines. Makes paths
    absolute, because each replica runs in a folder of its own. The model keeps its name in the API.
    """
    engine = msgspec.structs.replace(
        with_device(config.engine, cluster_gpus(), cluster_tpus()),
        model=_absolute(config.engine.model),
        tokenizer=_absolute(config.engine.tokenizer),
        adapters={name: str(_absolute(path)) for name, path in config.engine.adapters.items()},
        num_threads=threads_each(config.engine, config.max_engines, nodes),
    )
    num_ingresses, listens = config.num_ingress_replicas, config.http_server == "listener"
    follow_engines = listens and num_living > 1 and config.autoscaling is not None
    if num_ingresses is None and not follow_engines:
        num_ingresses = num_living if listens else 1
    return msgspec.structs.replace(
        config,
        engine=engine,
        served_model_name=config.model_name,
        num_ingress_replicas=num_ingresses,
        tls_certificate=_absolute_file(config.tls_certificate),
        tls_key=_absolute_file(config.tls_key),
    )


def build(options: dict[str, Any]) -> serve.Application:
    """Builds the application for Serve's configuration files: `import_path: manta.cluster.serve.app:build`, options
    under `args`.
    """
    config = read_options(options, ServeConfig)
    nodes = node_cpus()
    if config.http_server != "listener":
        if config.tls_certificate is not None:
            raise ValueError("tls_certificate is for the listener: set http_server: listener, or give it to the proxy")
        # Serve's own options set the address that it listens at; `host` here has no effect on it.
        config = msgspec.structs.replace(config, allowed_hosts=config.allowed_hosts or ("*",))
    return application(config, nodes)


def start(
    config: ServeConfig,
    name: str = APP_NAME,
    *,
    replace: bool = False,
    on_connected: Callable[[], None] = lambda: None,
) -> ModelInfo:
    """Starts Ray and Serve in this process, deploys the application `name`, and returns its engine's `ModelInfo` once
    the application runs.

    If `RAY_ADDRESS` names a cluster (as in a Ray job), the application runs there. Otherwise it runs on a Ray of its
    own, never on one that happens to run on this machine. `on_connected` is called after Ray is joined and before
    anything is deployed. Raises `StartFailed` if

    - Ray cannot be joined,
    - an application `name` runs there and `replace` is false, or
    - a replica cannot start.
    """
    with _told_on_failure():
        return _start(config, name, replace, on_connected)


def start_engines(config: ServeConfig, name: str) -> tuple[Any, str]:
    """Starts Ray, Serve and the engines, without an endpoint in front of them. Returns what an `EngineClient` needs:
    the handle of the engine deployment, and the address at which engines reach this machine.

    A command that was killed may have left engines on a cluster that this process joined. Those under `name` have the
    same options and are adopted. Others of its family (see `engines_name`) are ended, because they hold the resources.
    Raises `StartFailed` as `start` does, and if the command that started the other engines still runs.
    """
    with _told_on_failure():
        nodes = _connect(config)
        serve.start(ProxyLocation.Disabled, logging_config=_LOGGING)
        abandoned = _abandoned_engines(name)
        for other in sorted(abandoned):
            deployed.wait_until_abandoned(other)
            if other != name:
                serve.delete(other)
        if name in abandoned:
            deployed.adopt(name, config.engine.model)
            wait_until_running(name)
        else:
            deployed.check_name(name, replace=False)
            _run(_engines(_for_nodes(config, nodes)), name, None, config.engine.model)
        return serve.get_deployment_handle("engine", name), ray.util.get_node_ip_address()


def engines_name(family: str, config: ServeConfig) -> str:
    """Returns the application name that `start_engines` takes for these options: `family` and a hash of version and
    options. Different options need different names, because Serve restarts all engines of a name that is deployed
    again.
    """
    options = msgspec.json.encode((version(), config))
    return f"{family}-{hashlib.blake2b(options, digest_size=4).hexdigest()}"


def _abandoned_engines(name: str) -> set[str]:
    """Returns the applications of `name`'s family that a killed command left."""
    family = name.rpartition("-")[0]
    return {other for other in deployed.applications() if other.rpartition("-")[0] == family}


@contextlib.contextmanager
def _told_on_failure() -> Iterator[None]:
    """Turns any exception of a start into a `StartFailed`, and keeps the logs that its message names."""
    try:
        yield
    except Exception as error:  # Ray and Serve raise many types
        own_ray.keep_logs()
        if isinstance(error, StartFailed):
            raise
        if isinstance(error, CannotPlace):
            raise StartFailed(str(error)) from error
        raise unexpected(error) from error


def _start(config: ServeConfig, name: str, replace: bool, on_connected: Callable[[], None]) -> ModelInfo:
    nodes = _connect(config)
    deployed.check_name(name, replace)
    on_connected()
    listens = config.http_server != "proxy"
    if listens:
        config = msgspec.structs.replace(config, http_server="listener")
    is_alone = ray_address() is None and config.num_ingress_replicas in (None, 1)
    http = HTTPOptions(host=config.host, port=config.port)
    runs_already = get_client(raise_if_no_controller_running=False)
    if runs_already is not None and not listens:
        _check_proxies(runs_already.http_config.port, config.port)
        deployed.check_prefix(name, "/")
    if runs_already is None:  # Serve keeps the options that it was started with, and warns of any others
        try:
            serve.start(ProxyLocation.Disabled if listens else None, http, logging_config=_LOGGING)
        except Exception:
            serve.shutdown()  # else the next start would find a Serve that cannot listen
            raise
    what = f"{config.model_name} on port {config.port}"
    _run(application(config, nodes, shares_port=not is_alone), name, None if listens else "/", what)
    client = get_client()
    assert client is not None, "an application runs"
    client.wait_for_proxies_serving()
    return asyncio.run(_loaded_model(name))


async def _loaded_model(name: str) -> ModelInfo:
    """Returns the `ModelInfo` of an engine. If that engine dies, Serve replaces it and another one is asked.

    The call is made in an event loop because a handle requires one if `RAY_SERVE_THROUGHPUT_OPTIMIZED` is set.
    """
    engine = serve.get_deployment_handle("engine", name)
    try:
        while True:
            with contextlib.suppress(RayActorError, TimeoutError):
                return await asyncio.wait_for(engine.model.remote(), MODEL_ANSWER_S)
            await asyncio.sleep(deployed.POLL_S)
    finally:
        await engine.shutdown_async()  # an open handle wakes up ten times a second


def _connect(config: ServeConfig) -> list[int]:
    """Joins the cluster that `RAY_ADDRESS` names, or starts a Ray of our own, and returns each node's number of cores.
    Raises `CannotPlace` if the cluster is too small.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # `start_watch` tells in words what Serve's warnings here are about, such as a replica that is slow to answer.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    address = ray_address()
    if address is None:
        nodes = [num_cores()]
        # Otherwise uvicorn in Serve's proxies would trust X-Forwarded-For from every client on this machine.
        os.environ["FORWARDED_ALLOW_IPS"] = ",".join(config.trusted_proxies)
        own_ray.start(num_claimed(config.engine, config.max_engines, nodes))
    else:
        joined_ray.start(address)
        nodes = node_cpus()
        check_room(_for_nodes(config, nodes).engine, config.num_initial_engines, nodes)
    return nodes


def _run(app: serve.Application, name: str, prefix: str | None, what: str) -> None:
    # Serve's own blocking deployment would return only after all its attempts to start a replica.
    updates = deployed.deploy(app, name, prefix, _LOGGING, what)
    wait_until_running(name, updates)
    deployed.note_running(name)


def _check_proxies(actual: int, port: int) -> None:
    """Raises `StartFailed` if a running Serve has no proxies or listens at another port. Serve keeps the port that it
    was started with, and only logs that another one was asked for.
    """
    if not serve.status().proxies:
        raise StartFailed(
            "Serve runs on this cluster already, and without proxies; leave http_server=proxy out, or end all that it "
            "runs (serve shutdown) and start again"
        )
    if actual != port:
        raise StartFailed(f"Serve runs on this cluster already and listens on port {actual}; take it: --port {actual}")


def stop() -> None:
    """Ends what `start` or `start_engines` started, and nothing else; harmless if nothing runs. No process of a Ray of
    our own survives.
    """
    if not ray.is_initialized():
        return
    if ray_address() is None:
        own_ray.stop()
        return
    try:
        deployed.delete_own()
    finally:
        ray.shutdown()


def _absolute_file(path: str | None) -> str | None:
    return None if path is None else str(pathlib.Path(path).expanduser().resolve())


def _absolute(name: str | None) -> Any:
    """Returns the absolute path of a folder or file; `demo` and hub ids stay as they are."""
    if name is None or name == DEMO_MODEL or not pathlib.Path(name).exists():
        return name
    return str(pathlib.Path(name).resolve())

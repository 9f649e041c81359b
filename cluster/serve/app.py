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
from ray.serve.context import _set_global_client as set_client
from ray.serve.schema import LoggingConfig

from manta.cluster import own_ray
from manta.cluster.batch.batch_deployment import batch_deployment
from manta.cluster.config import OF_ONE_MODEL, ServeConfig, ServedModel, ray_address
from manta.cluster.engine.ranks.claims import (
    CannotPlace,
    check_room,
    has_room_for_another,
    node_cpus,
    num_claimed,
    num_nodes,
)
from manta.cluster.engine.stats import STANDBY
from manta.cluster.http.access.keys import with_api_keys
from manta.cluster.http.access.prefix_scope import kept_secret, new_secret
from manta.cluster.model_list import with_engine_model, with_shared_engine
from manta.cluster.models_folder import with_models_dir
from manta.cluster.option_reader import read_options, read_yaml
from manta.cluster.ray_llm_file import is_ray_llm, ray_llm_options
from manta.cluster.serve.engine.engine_deployment import engine_deployment
from manta.cluster.serve.fleet.found import application_name
from manta.cluster.serve.fleet.loader_deployment import loader_deployment
from manta.cluster.serve.fleet.model_application import model_application, placed_model
from manta.cluster.serve.fleet.model_changes import GcsChanges
from manta.cluster.serve.ingress import ingress_deployment
from manta.cluster.serve.listening.tls import Certificate
from manta.cluster.serve.starting import deployed, joined_ray
from manta.cluster.serve.starting.placed import absolute_file, absolute_folder, placed_engine
from manta.cluster.serve.starting.start_failure import StartFailed, unexpected
from manta.cluster.serve.starting.start_watch import wait_until_running
from manta.cluster.storage.storage import with_storage
from manta.cluster.version import version
from manta.structured.host import num_cores
from manta.workers.model_info import ModelInfo

APP_NAME = "manta"
"""Name of the application, unless its user gives another one."""
LOADING_LOOP_S = 0.05
"""Seconds between two looks of Serve's controller where models are loaded on demand: requests wait for three of them.
"""
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
    if config.has_several_models:
        raise ValueError(
            "models and models_dir name several models: give them to import_path "
            "manta.cluster.serve.app:build_address, or deploy each by itself with build_model"
        )
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


def address_application(config: ServeConfig, nodes: list[int], shares_port: bool = True) -> serve.Application:
    """Binds the application that answers the requests of several models. Its ingresses find the models whose
    applications name it as their address. Its loader deploys those that the configuration lists, some of them on
    demand, and those that operators add. Raises `ValueError` as `application` does.
    """
    num_living = num_nodes()
    config = with_models_dir(config)
    models = tuple(placed_model(model, nodes) for model in config.models)
    on_demand = tuple(model for model in models if model.on_demand)
    loader = loader_deployment().bind(
        config.models, models, config.max_loaded_models, config.min_loaded_s, config.max_loaded_bytes
    )
    roots = tuple(map(absolute_folder, config.model_roots))
    config = msgspec.structs.replace(config, models=(), served_model_name=None, model_roots=roots)
    config = with_storage(with_api_keys(_with_ingresses(config, num_living)))
    Certificate.of(config)
    secret, batches = kept_secret(), None
    if config.batch_storage is not None:
        batches = batch_deployment(config).bind(config, None, None, secret, on_demand, loader)
    return ingress_deployment(config, num_living).bind(
        config, None, secret, None, shares_port, batches, on_demand, loader
    )


def _engines(config: ServeConfig) -> serve.Application:
    is_alone = config.max_engines == 1
    deployment = engine_deployment(
        config.engine,
        config.num_engine_replicas,
        autoscaling=config.autoscaling,
        is_alone=is_alone,
        starts_new_first=has_room_for_another(config.engine, config.max_engines),
    )
    return deployment.bind(config.engine, is_alone)


def _for_nodes(config: ServeConfig, nodes: list[int], num_living: int = 1) -> ServeConfig:
    """Fills in the threads of an engine and the number of ingresses, unless ingresses follow the engines, and makes
    paths absolute. The model keeps its name in the API.
    """
    engine = placed_engine(config.engine, config.model_name, config.max_engines, nodes)
    return _with_ingresses(
        msgspec.structs.replace(config, engine=engine, served_model_name=config.model_name), num_living
    )


def _with_ingresses(config: ServeConfig, num_living: int) -> ServeConfig:
    num_ingresses, listens = config.num_ingress_replicas, config.http_server == "listener"
    follow_engines = listens and num_living > 1 and config.autoscaling is not None
    if num_ingresses is None and not follow_engines:
        num_ingresses = num_living if listens else 1
    return msgspec.structs.replace(
        config,
        num_ingress_replicas=num_ingresses,
        tls_certificate=absolute_file(config.tls_certificate),
        tls_key=absolute_file(config.tls_key),
    )


def build(options: dict[str, Any]) -> serve.Application:
    """Builds the application for Serve's configuration files: `import_path: manta.cluster.serve.app:build`, options
    under `args`.
    """
    return application(_served_by_serve(read_options(options, ServeConfig)), node_cpus())


def build_address(options: dict[str, Any]) -> serve.Application:
    """Builds, for Serve's configuration files, the application that answers the requests of several models. `options`
    are those of `build` without any of an only model's. Models may be listed here, or be applications of `build_model`.
    With `models` or `models_dir`, `engine` has what holds for all of them.
    """
    shared = with_shared_engine(options, "")
    config = read_options(shared, ServeConfig)
    for option in OF_ONE_MODEL if config.has_several_models else ("engine", *OF_ONE_MODEL):
        if option in options:
            raise ValueError(f"{option} belongs to the models; set it in the args of build_model, or leave it out")
    return address_application(_served_by_serve(config), node_cpus())


def build_app(options: dict[str, Any]) -> serve.Application:
    """Builds the application of several models for a configuration file of Ray Serve LLM, in the place of its own
    `ray.serve.llm:build_openai_app`. Raises `ValueError` naming a key of `llm_configs` that has no counterpart.
    """
    if not is_ray_llm(options):
        raise ValueError("llm_configs is missing; list the models as Ray Serve LLM does, or use build_address")
    return build_address(ray_llm_options(options, pathlib.Path(), read_yaml))


class ModelApplication(ServedModel, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of one of several models in Serve's configuration files."""

    address: str = APP_NAME
    """Name of the application that answers the model's requests."""


def build_model(options: dict[str, Any]) -> serve.Application:
    """Builds, for Serve's configuration files, the engines of one of several models. `options` are those of an entry of
    `models`, and `address`: the name of the application that `build_address` builds, by default `manta`.
    """
    given = read_options(with_engine_model(options, " of the model"), ModelApplication)
    if given.on_demand:
        raise ValueError("on_demand is for entries of models in the args of build_address; leave it out here")
    fields = {name: getattr(given, name) for name in ServedModel.__struct_fields__}
    return model_application(placed_model(ServedModel(**fields), node_cpus()), given.address)


def _served_by_serve(config: ServeConfig) -> ServeConfig:
    """Returns the configuration as Serve's own configuration files mean it. Raises `ValueError` for a certificate that
    Serve's proxies would need.
    """
    if config.http_server != "listener":
        if config.tls_certificate is not None:
            raise ValueError("tls_certificate is for the listener: set http_server: listener, or give it to the proxy")
        # Serve's own options set the address that it listens at; `host` here has no effect on it.
        config = msgspec.structs.replace(config, allowed_hosts=config.allowed_hosts or ("*",))
    return config


def start(
    config: ServeConfig,
    name: str = APP_NAME,
    *,
    replace: bool = False,
    on_connected: Callable[[], None] = lambda: None,
) -> dict[str, ModelInfo]:
    """Starts Ray and Serve in this process, deploys the application `name` and one for each of several models, and
    returns the `ModelInfo` of each model's engines, by its name, once all run. Models on demand have none yet.

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


def _start(config: ServeConfig, name: str, replace: bool, on_connected: Callable[[], None]) -> dict[str, ModelInfo]:
    config = with_models_dir(config)
    nodes = _connect(config)
    for each in (name, *(application_name(name, model.model_name) for model in config.models_at_start)):
        deployed.check_name(each, replace)
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
    if config.models:
        models = _with_changes(config, name, nodes)
        _run_models(models, name)
        served = ", ".join(model.model_name for model in config.models)
        app = address_application(config, nodes, shares_port=not is_alone)
    else:
        served, app = config.model_name, application(config, nodes, shares_port=not is_alone)
    _run(app, name, None if listens else "/", f"{served} on port {config.port}")
    client = get_client()
    assert client is not None, "an application runs"
    client.wait_for_proxies_serving()
    if not config.models:
        return {config.model_name: asyncio.run(_loaded_model(name))}
    return {model.model_name: asyncio.run(_loaded_model(each)) for each, model in models.items()}


def _with_changes(config: ServeConfig, name: str, nodes: list[int]) -> dict[str, ServedModel]:
    """Returns the models of the address `name` that are loaded at its start, as they are deployed, by the names of
    their applications: those of the configuration, with what operators have changed if the address runs already.
    """
    kept = GcsChanges(name)
    if name not in deployed.applications():
        kept.clear()
    changes = kept.read().still_valid({model.model_name: model for model in config.models})
    placed = changes.placed(placed_model(model, nodes) for model in config.models)
    return {application_name(name, model.model_name): model for model in placed if not model.on_demand}


def _run_models(models: dict[str, ServedModel], name: str) -> None:
    """Deploys the applications of several models, by their names, at the same time. Returns when all run."""
    updates = {
        each: deployed.deploy(model_application(model, name), each, None, _LOGGING, model.model_name)
        for each, model in models.items()
    }
    for each, is_update in updates.items():
        try:
            wait_until_running(each, is_update)
        except StartFailed as error:
            raise StartFailed(f"{models[each].model_name}: {error}") from error
        deployed.note_running(each)


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
        loads = any(model.on_demand for model in config.models)
        shares = any(model.on_demand and model.engine.num_threads is None for model in config.models)
        num_cpus = _num_claimed(config, nodes) + (num_cores() if shares else 0)
        own_ray.start(num_cpus, LOADING_LOOP_S if loads else own_ray.CONTROL_LOOP_S)
    else:
        joined_ray.start(address)
        nodes = node_cpus()
        for each in _of_each_model(config):
            check_room(_for_nodes(each, nodes).engine, each.num_initial_engines, nodes)
    return nodes


def _of_each_model(config: ServeConfig) -> list[ServeConfig]:
    """Returns the configuration of each of several models whose engines claim CPUs, or that of the only model."""
    return [each for each in config.of_each_model if not config.models or each.engine.num_threads is not None]


def _num_claimed(config: ServeConfig, nodes: list[int]) -> int:
    return sum(num_claimed(each.engine, each.max_engines, nodes) for each in _of_each_model(config))


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
        set_client(None)  # else the next start in this process would ask the controller of the Ray that has ended
        return
    try:
        deployed.delete_own()
    finally:
        ray.shutdown()

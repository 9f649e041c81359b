"""The configuration schema: every option with its unit, default and bounds in one place; unknown keys are refused.

`EngineConfig` is one model replica, `ServeConfig` the HTTP application around it. Both are read from YAML by
`load_config` and overridden from the command line. Imports neither torch nor ray.
"""

from __future__ import annotations

import os
import pathlib
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from manta.cluster.kv_event_options import KVEventOptions
from manta.cluster.model_list import name_of, owners_of, with_engine_model, with_shared_engine
from manta.cluster.option_reader import check_network, read_options, read_yaml
from manta.cluster.pull_hosts import check_host
from manta.cluster.ray_llm_file import is_ray_llm, ray_llm_options
from manta.cluster.serve_limits import (
    BatchLimits,
    BodyLimits,
    KeyLimits,
    ListenerLimits,
    ResponseLimits,
    Seconds,
    StreamLimits,
)
from manta.specdecode.speculative_config import SpeculativeConfig
from manta.structured.constraint import ConstraintLimits, JsonObjects
from manta.structured.pool_config import PoolConfig
from manta.workers.model_options import Bytes, Count, ModelOptions


class EngineConfig(ModelOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model replica: what it loads, where it runs, what it admits and how it schedules."""

    tokenizer: str | None = None
    """Folder or hub id of the tokenizer, as for `model`. None takes the model's own."""
    generation_config: Literal["auto", "none"] = "auto"
    """Whether requests that name no `temperature`, `top_p`, `top_k`, `min_p` or `repetition_penalty` take that of the
    checkpoint's `generation_config.json` (`auto`), or OpenAI's default (`none`). Stop tokens are read in both cases.
    """
    claims_cpus: bool = True
    """Whether the engine claims its `num_threads` from Ray as CPUs. Standby replicas claim none, because they work only
    while another engine does not.
    """
    placement_strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = "STRICT_PACK"
    """Strategy by which Ray places the ranks of one engine, by the names of Ray's placement groups. `STRICT_PACK`: all
    on one node. `PACK`: on as few nodes as possible. `SPREAD`: over the nodes. `STRICT_SPREAD`: each rank on a node of
    its own.
    """
    max_num_waiting: Annotated[int, Meta(ge=0)] = 2048
    """Requests that may wait for a place in the batch. The engine refuses the next one (HTTP 429). A client with no
    waiting request is refused only when the queue is an eighth longer.
    """
    enable_prefix_caching: bool = True
    """Whether a prompt reuses the KV blocks of an earlier prompt that begins with the same tokens."""
    kv_events: KVEventOptions | None = None
    """Address at which the engine publishes what its prefix cache holds, for gateways. None publishes nothing."""
    constraints: ConstraintLimits = ConstraintLimits()
    """Limits on what one constraint may cost."""
    json_objects: JsonObjects = JsonObjects()
    """Options for what the JSON schemas of a request leave open about objects."""
    grammar_pool: PoolConfig = PoolConfig()
    """Place of the grammar workers, and the time that they may take to fill masks."""
    speculative: SpeculativeConfig | None = None
    """Proposers of drafts: tokens that the model verifies, several in one step. None generates one token a step."""

    def __post_init__(self) -> None:
        if self.kv_events is not None and not self.enable_prefix_caching:
            raise ValueError("kv_events: there are none without enable_prefix_caching; set it, or leave kv_events out")


class AutoscalingOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The number of engines follows the load: enough to keep every target, and no fewer than would still keep them."""

    min_replicas: Annotated[int, Meta(ge=0)] = 1
    """Engines that always run. With 0 the last engine stops after `to_zero_delay_s` without requests. The next request
    then waits for an engine to start, at most `request_timeout_s`. One engine starts with the application in any case,
    so that a model that cannot be served is found at once.
    """
    max_replicas: Count = 4
    """Engines that may run at a time."""
    target_ongoing_requests: Count | None = None
    """Running and waiting requests for each engine. None takes `engine.max_num_sequences`."""
    target_kv_usage: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """Share of an engine's KV blocks that running sequences hold."""
    target_waiting_tokens: Count | None = None
    """Prompt tokens of requests without a first token, for each engine. None takes 4 times
    `engine.max_num_batched_tokens`.
    """
    target_ttft_s: Seconds = 2.0
    """Time to first token at the engine, in seconds, that 90% of the requests should stay below."""
    look_back_s: Annotated[float, Meta(ge=2)] = 10.0
    """Seconds over which loads are averaged."""
    upscale_delay_s: Annotated[float, Meta(ge=0)] = 10.0
    """Seconds for which more engines must be needed before they start. If no engine runs, one starts at once."""
    downscale_delay_s: Annotated[float, Meta(ge=0)] = 300.0
    """Seconds for which fewer engines must suffice before one stops. Its requests continue on other engines."""
    to_zero_delay_s: Annotated[float, Meta(ge=0)] = 600.0
    """Seconds without requests after which the last engine stops."""

    def __post_init__(self) -> None:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas {self.max_replicas} is less than min_replicas {self.min_replicas}; raise the one or "
                "lower the other"
            )

    @property
    def num_initial(self) -> int:
        """Engines that start with the application."""
        return max(1, self.min_replicas)


class ServedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of several models behind one address. Its engines are a Serve application of their own."""

    name: str | None = None
    """Name of the model in the API. None takes the last part of `engine.model`."""
    aliases: tuple[str, ...] = ()
    """Other names that requests may give. No two models share a name."""
    on_demand: bool = False
    """Whether the model is loaded when a request names it, and not at the start. It may leave again for another one
    (`max_loaded_models`).
    """
    engine: EngineConfig = EngineConfig()
    """The model replica. It takes what it leaves out from the server's `engine`."""
    num_engine_replicas: Count = 1
    """Engines that run. Each loads the whole model."""
    autoscaling: AutoscalingOptions | None = None
    """Limits and targets between which the number of engines follows the load. Without it `num_engine_replicas` run."""

    def __post_init__(self) -> None:
        _check_fixed_number(self)
        if not self.model_name or "" in self.aliases:
            raise ValueError("a model's name is empty; write at least one character")

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        return self.name if self.name is not None else name_of(self.engine.model)

    @property
    def names(self) -> tuple[str, ...]:
        """The name and the aliases, each once."""
        return tuple(dict.fromkeys((self.model_name, *self.aliases)))

    @property
    def max_engines(self) -> int:
        """Engines that may run at a time."""
        return self.num_engine_replicas if self.autoscaling is None else self.autoscaling.max_replicas

    @property
    def num_initial_engines(self) -> int:
        """Engines that start together when the model is loaded."""
        return self.num_engine_replicas if self.autoscaling is None else self.autoscaling.num_initial


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Ray Serve application: the HTTP server, its clients, and the number of replicas."""

    engine: EngineConfig = EngineConfig()
    """The model replica: what it loads, where it runs, how it schedules. With `models`, what they leave out."""
    models: tuple[ServedModel, ...] = ()
    """Models behind this address, if there are several. Requests name one of them."""
    models_dir: str | None = None
    """Folder whose models are served too, each loaded on demand: every folder in it that has a `config.json`, and every
    GGUF file. It is read when the server starts.
    """
    model_roots: tuple[str, ...] = ()
    """Folders below which operators may name models that they add while the server runs (`POST /v1/models`). A path
    whose links lead out of them is refused. If the list is empty, operators change and remove models, and add only
    `demo`.
    """
    pull_hosts: tuple[str, ...] = ()
    """Hosts from which operators may have models of hub ids downloaded (Ollama's `/api/pull`). The first one is the
    hub; the others are those to which it sends downloads, such as `*.hf.co` for all names below it. A name stands for
    HTTPS; an entry may also be an origin (`http://mirror.example:8080`). If the list is empty, nothing is downloaded
    for a request.
    """
    max_pull_bytes: Bytes = 64 * 2**30
    """Size of the files of one model that is downloaded for an operator. A larger one is refused."""
    max_loaded_models: Count = 3
    """Models on demand that are loaded at a time, those that are starting or leaving included. A request for another
    one waits until one without requests can leave, the one that was used longest ago first.
    """
    max_loaded_bytes: Bytes | None = None
    """Memory of the models on demand that are loaded at a time, those that are starting or leaving included: weights
    and KV caches of all their engines, as `manta check` counts them, and upper bounds of what their constraints take,
    and their tokenizers in each ingress. Each needs `engine.kv_cache_bytes`, because an
    engine without it takes what is free. None sets no bound beside `max_loaded_models`.
    """
    min_loaded_s: Annotated[float, Meta(ge=0)] = 10.0
    """Seconds for which a model that was loaded on demand stays. A request that has waited as long for a busy model to
    leave lets the one that was loaded first take no more requests, so that it becomes idle.
    """
    default_model: str | None = None
    """Name of the model that answers requests without a `model`, if there are several. None refuses them (HTTP 400)."""
    listener: ListenerLimits = ListenerLimits()
    """Limits on connections and headers."""
    body: BodyLimits = BodyLimits()
    """Limits on one request's body."""
    batches: BatchLimits = BatchLimits()
    """Limits on files and batches."""
    streams: StreamLimits = StreamLimits()
    """Limits on streams that can be resumed."""
    responses: ResponseLimits = ResponseLimits()
    """Limits on stored responses."""
    batch_storage: str | None = None
    """Storage of `/v1/files`, `/v1/batches` and stored responses: a folder, or the URL of an object store
    (`s3://bucket/folder`) whose fsspec package is installed. All nodes must reach the same place. With None, files and
    batches are refused (HTTP 404) and no responses are kept.
    """
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Meta(ge=1, le=65535)] = 8000
    """Port to listen on."""
    tls_certificate: str | None = None
    """PEM file with the certificate chain. The listener then speaks HTTPS, and loads the file again when it changes.
    None serves plain HTTP.
    """
    tls_key: str | None = None
    """PEM file with the certificate's private key, without a password."""
    served_model_name: str | None = None
    """Name in `/v1/models`. None takes the last part of `engine.model`."""
    model_aliases: tuple[str, ...] = ()
    """Other names of the model that requests may give."""
    accept_any_model: bool = False
    """Whether requests may name any model; the one that is served answers."""
    num_engine_replicas: Count = 1
    """Engines that run. Each loads the whole model."""
    autoscaling: AutoscalingOptions | None = None
    """Limits and targets between which the number of engines follows the load. None always runs `num_engine_replicas`.
    """
    num_standby_replicas: Annotated[int, Meta(ge=0)] = 0
    """Engines that are loaded and warm, and get requests only while no other engine can take one."""
    http_server: Literal["auto", "listener", "proxy"] = "auto"
    """Acceptor of connections: each ingress replica itself (`listener`), or Serve's proxies (`proxy`), through which
    tokens arrive later. `auto` is the listener under `manta serve` and the proxy under Serve's own configuration
    files. There the listener needs `proxy_location: Disabled`.
    """
    num_ingress_replicas: Count | None = None
    """Ingress replicas, spread evenly over the nodes. Those of one node share its port. None starts one on each node
    with the listener, and one in all behind Serve's proxies. With `autoscaling` on several nodes, None lets the
    ingresses follow the engines to new nodes.
    """
    drain_notice_s: Seconds = 10.0
    """Seconds for which an ingress that Serve stops still accepts requests while its readiness probe fails. The time is
    shorter if another ingress listens on the node, or if the whole application ends.
    """
    drain_timeout_s: Seconds = 120.0
    """Grace period in seconds for the streams of an ingress that accepts no more requests. Then Serve ends it."""
    api_keys: tuple[str, ...] | None = None
    """Accepted bearer tokens of at least 16 characters, as `KEY`, `NAME:KEY` or `NAME:sha256:DIGEST`. The names appear
    in logs and metrics. Keys of `api_keys_file` and of the environment variable `MANTA_API_KEYS` are added. None
    without those accepts every request.
    """
    api_keys_file: str | None = None
    """File with one such entry a line. Text after a # is a comment."""
    priority_clients: tuple[str, ...] = ()
    """Names of API keys whose requests may have a `priority` below 0 and so go before others; `*` is everybody. Any
    client may set a priority above 0, which lets others go first.
    """
    operator_keys: tuple[str, ...] = ()
    """Names of API keys that may change what the server serves: load, unload, add and remove; `*` is everybody. If the
    list is empty, every client of a server whose `host` is a loopback address may, and nobody else (HTTP 403).
    """
    client_weights: dict[str, Annotated[float, Meta(gt=0, le=1000)]] = {}
    """Shares of API keys in a full engine, by name. A key with weight 3 gets three turns for each turn of a key with
    weight 1, which is the default. The batches of a key are one more client of the same weight.
    """
    key_limits: dict[str, KeyLimits] = {}
    """Rate limits of API keys, by name; `*` is every key that is not named. Lines of batches wait for room."""
    share_prefix_cache: bool = False
    """Whether clients with different API keys share the prefix cache. Sharing saves work when they send the same system
    prompt, but it lets a client find out whether another one has sent a text that it guesses.
    """
    allowed_hosts: tuple[str, ...] = ()
    """Names in a request's Host header that the server accepts; `*` is any. Names of loopback addresses and `host` are
    always accepted, and IP addresses too unless `host` is a loopback address. If the list is empty, a server without
    API keys also accepts this machine's own name, and a server with keys that listens beyond loopback accepts any name.
    Under Serve's own configuration files an empty list accepts any name.
    """
    trusted_proxies: tuple[str, ...] = ()
    """IP addresses and networks (`10.0.0.0/8`) of proxies in front of the server. Only these may name the client's
    address in X-Forwarded-For. Clients without API keys take turns by address.
    """
    cors_origins: tuple[str, ...] = ()
    """Origins (`https://chat.example`) of web pages that may use this server; `*` is any. Requests of other pages are
    refused (HTTP 403).
    """
    max_body_bytes: Bytes = 8 * 2**20
    """Size of one request's body. The ingress refuses a longer one (HTTP 413)."""
    max_bodies_bytes: Bytes = 256 * 2**20
    """Size of all bodies that are being received, so that slow senders cannot fill the memory. Clients share it, and
    one client has at most three quarters of it. Above that its requests are refused (HTTP 503).
    """
    max_prompts_per_request: Count = 2048
    """Prompts of a completion, as many as OpenAI takes, or texts of a body that asks for vectors or scores."""
    max_choices_per_request: Count = 2048
    """Answers that one body may ask for: its prompts times `n`. Each costs the ingress about 20 us before it runs."""
    request_timeout_s: Seconds = 600.0
    """Seconds after which a running request is aborted (HTTP 408)."""
    client_timeout_s: Seconds = 60.0
    """Seconds in which a client must send a request's whole body, and in which it must read more of its answer. Then
    the ingress closes the connection and aborts the request.
    """
    min_body_bytes_per_s: Bytes = 1000
    """Lowest mean rate of a body, from its head on, after the first 10 s. A slower one is refused (HTTP 408)."""
    client_buffer_bytes: Bytes = 4 * 2**20
    """Size of a stream's output that waits for a slow reader. Above it the request is aborted."""
    health_bound_s: Seconds = 30.0
    """Seconds without progress after which `/health` fails while requests are pending. Progress is a token, an end or a
    computed position.
    """
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """Treatment of a body's fields that Manta does not know: the answer's header `x-manta-ignored` names them, or the
    request is refused (HTTP 400). A request can ask for a refusal by its header `x-manta-unknown-fields: refuse`.
    """
    vllm_metrics: bool = False
    """Whether `/metrics` has the metrics that vLLM has too under its names (`vllm:`) as well. Gateways and dashboards
    that were made for vLLM read those.
    """
    log_requests: bool = True
    """Whether each finished request, and each one that continued on another engine, gets a structured log line. Engines
    always log what they abort, preempt, continue or fail at.
    """

    def __post_init__(self) -> None:
        for adapter in self.engine.adapters:
            if adapter in ("", self.model_name, *self.model_aliases):
                raise ValueError(
                    f"engine.adapters: the name {adapter!r} is empty or the model's own; give the adapter another one"
                )
        for proxy in self.trusted_proxies:
            check_network("trusted_proxies", proxy)
        if (self.tls_certificate is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_certificate"
            raise ValueError(f"{missing} is missing: HTTPS needs tls_certificate and tls_key, two PEM files")
        if self.tls_certificate is not None and self.http_server == "proxy":
            raise ValueError(
                "tls_certificate is for the listener, and http_server is proxy: leave http_server out, or give the "
                "certificate to what stands in front of Serve's proxies"
            )
        for host in self.pull_hosts:
            check_host(host)
        if self.pull_hosts and self.pull_hosts[0].startswith("*"):
            raise ValueError(f"pull_hosts: {self.pull_hosts[0]} are several, and the first is the hub; name that first")
        self._check_models()
        _check_fixed_number(self)
        if self.autoscaling is not None and self.num_standby_replicas and self.autoscaling.min_replicas == 0:
            raise ValueError(
                f"num_standby_replicas {self.num_standby_replicas} would serve whenever no other engine runs; with it "
                "autoscaling.min_replicas must be at least 1"
            )

    def _check_models(self) -> None:
        self.name_owners()
        engines = [model.engine for model in self.models if model.on_demand]
        engines += [self.engine] if self.models_dir is not None else []
        if self.max_loaded_bytes is not None and any(engine.kv_cache_bytes is None for engine in engines):
            raise ValueError(
                "max_loaded_bytes counts the KV caches of models on demand, and one has no size; set "
                "engine.kv_cache_bytes for all of them"
            )
        if self.models_dir is not None and self.engine.model != EngineConfig().model:
            raise ValueError(f"engine.model is {self.engine.model}, and models_dir is set; add it to models")
        for option in OF_ONE_MODEL if self.has_several_models else ():
            if getattr(self, option) != _default_of(option):
                raise ValueError(
                    f"{option} is for a server of one model; set it in an entry of models, or leave it out"
                )

    def name_owners(self) -> dict[str, str]:
        """Returns the model of each name of several models and their adapters. Raises `ValueError` if two share one."""
        return owners_of((*model.names, *model.engine.adapters) for model in self.models)

    def check_default_model(self) -> None:
        """Raises `ValueError` if none of several models has the name of the default one. It is for a list of all models
        of the address, and checks nothing before a `models_dir` is read.
        """
        owners = {} if self.models_dir is not None else self.name_owners()
        if owners and self.default_model is not None and self.default_model not in owners:
            raise ValueError(
                f"default_model: no model is called {self.default_model!r}; name one of {', '.join(owners)}"
            )

    def of_model(self, model: ServedModel) -> ServeConfig:
        """Returns the configuration as it would be if `model` was the only one."""
        return msgspec.structs.replace(
            self,
            models=(),
            models_dir=None,
            default_model=None,
            engine=model.engine,
            served_model_name=model.model_name,
            model_aliases=tuple(name for name in model.names if name != model.model_name),
            num_engine_replicas=model.num_engine_replicas,
            autoscaling=model.autoscaling,
        )

    @property
    def has_several_models(self) -> bool:
        """Whether the address may have several models."""
        return bool(self.models) or self.models_dir is not None

    @property
    def of_each_model(self) -> tuple[ServeConfig, ...]:
        """The configuration of each of several models as if it was the only one, or this one of the only model."""
        return tuple(map(self.of_model, self.models)) or (self,)

    @property
    def of_each_model_at_start(self) -> tuple[ServeConfig, ...]:
        """Those of the models that are loaded at the start; none if all are on demand."""
        return tuple(map(self.of_model, self.models_at_start)) if self.models else (self,)

    @property
    def models_at_start(self) -> tuple[ServedModel, ...]:
        """Those of several models that are loaded at the start."""
        return tuple(model for model in self.models if not model.on_demand)

    @property
    def scheme(self) -> str:
        """The scheme of the endpoint's URL: `http` or `https`."""
        return "http" if self.tls_certificate is None else "https"

    @property
    def num_initial_engines(self) -> int:
        """Engines that start with the application, without standbys."""
        return self.num_engine_replicas if self.autoscaling is None else self.autoscaling.num_initial

    @property
    def num_engines_wanted(self) -> int:
        """Engines that should serve at any time, without standbys; 0 if all may stop."""
        return self.num_engine_replicas if self.autoscaling is None else self.autoscaling.min_replicas

    @property
    def max_engines(self) -> int:
        """Engines that may run at a time, without standbys."""
        return self.num_engine_replicas if self.autoscaling is None else self.autoscaling.max_replicas

    @property
    def model_name(self) -> str:
        """The model's name in the API: the configured one. Else it is the last part of its folder or hub id without a
        revision, or the name of its GGUF file without the suffix.
        """
        return self.served_model_name or name_of(self.engine.model)


OF_ONE_MODEL = (
    "served_model_name",
    "model_aliases",
    "accept_any_model",
    "num_engine_replicas",
    "autoscaling",
    "num_standby_replicas",
)
"""Options of the server that belong to its only model. Of several models each has its own, or none."""


def _default_of(option: str) -> Any:
    return next(field.default for field in msgspec.structs.fields(ServeConfig) if field.name == option)


def _check_fixed_number(config: ServeConfig | ServedModel) -> None:
    """Raises `ValueError` for a fixed number of engines beside an automatic one."""
    if config.autoscaling is not None and config.num_engine_replicas != 1:
        raise ValueError(
            f"num_engine_replicas {config.num_engine_replicas} is a fixed number, and with autoscaling there is "
            "none; set autoscaling.min_replicas and autoscaling.max_replicas"
        )


def ray_address() -> str | None:
    """The Ray cluster to join, if `RAY_ADDRESS` names one (as in a Ray job); None means to start a Ray of our own."""
    address = os.environ.get("RAY_ADDRESS", "")
    return None if address in ("", "local") else address


def load_config(path: str | pathlib.Path | None, overrides: dict[str, Any] | None = None) -> ServeConfig:
    """Reads a YAML file into a `ServeConfig` and applies dotted `overrides` such as `{"engine.model": "..."}`.

    Raises `ValueError` for an unknown key, a wrong type or a value out of range, naming the key and the bound. If the
    file is no YAML, the message shows the line with a mark below the place.
    """
    data = {} if path is None else _read_file(pathlib.Path(path))
    where = f" {path}" if path else ""
    data = with_engine_model(data, where)
    for key, value in (overrides or {}).items():
        key = "engine.model" if key == "model" else key
        target = data
        *parents, last = key.split(".")
        for parent in parents:
            if target.get(parent) is None:
                target[parent] = {}
            target = target[parent]
            if not isinstance(target, dict):
                raise ValueError(f"configuration: {key} cannot be set: {parent} is a value, no group of options")
        target[last] = value
    data = with_shared_engine(data, where)
    if "api_keys" in data and data["api_keys"] is None:  # a variable that was to hold them and is not set
        raise ValueError(f"configuration{where}: api_keys is empty; leave it out, or list the keys")
    try:
        config = read_options(data, ServeConfig)
        config.check_default_model()
    except ValueError as error:
        raise ValueError(f"configuration{where}: {error}") from error
    return config


def _read_file(path: pathlib.Path) -> dict[str, Any]:
    data = read_yaml(path)
    if is_ray_llm(data):
        return ray_llm_options(data, path, _read_file)
    if "applications" in data or "import_path" in data:
        raise ValueError(
            f"{path} is a configuration of Ray Serve: 'serve deploy {path}' takes it. For --config give a file with "
            "the options that stand under its args"
        )
    return data

"""The configuration schema: every option with its unit, default and bounds in one place; unknown keys are refused.

`EngineConfig` is one model replica, `ServeConfig` the HTTP application around it. Both are read from YAML by
`load_config` and overridden from the command line. Imports neither torch nor ray.
"""

from __future__ import annotations

import ipaddress
import os
import pathlib
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from cluster.option_reader import read_options
from specdecode.speculative_config import SpeculativeConfig
from structured.constraint import ConstraintLimits
from structured.pool_config import PoolConfig
from workers.model_options import Bytes, Count, ModelOptions

Seconds = Annotated[float, Meta(gt=0)]


class EngineConfig(ModelOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model replica: beside what its ranks are told (`ModelOptions`), what it admits and how it schedules."""

    tokenizer: str | None = None
    """Folder or hub id of the tokenizer, as for `model`; None takes the model's own."""
    claims_cpus: bool = True
    """Whether they are claimed. Standbys claim none, since they work while another engine does not."""
    placement_strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = "STRICT_PACK"
    """Where the ranks run: all on one node, on as few as will do, on as many as there are, or each on one of its own.
    The words are those of Ray's placement groups.
    """
    max_num_waiting: Annotated[int, Meta(ge=0)] = 2048
    """Requests waiting beyond those running; one more is refused (HTTP 429). A client of which none waits is refused
    only when an eighth more than that wait.
    """
    enable_prefix_caching: bool = True
    """Whether prompts read from the KV cache what an earlier prompt that begins alike has left there."""
    constraints: ConstraintLimits = ConstraintLimits()
    """What one constraint may cost."""
    grammar_pool: PoolConfig = PoolConfig()
    """Where masks are filled, and for how long."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Whether the engine does its own work while the device computes a step; the tokens stay the same. A step is then
    launched before the tokens of the one before it are known to the host, with speculation as soon as they are known.
    `auto` overlaps on a device that computes by itself (a GPU), `on` on CPUs too.
    """
    speculative: SpeculativeConfig | None = None
    """Who proposes tokens that the model then verifies, several a step; None for one token a step."""


class ListenerLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the ingress's own listener takes of a connection before a request is read, each of several ingresses for
    itself. If Serve's proxies take the connections (`http_server`), these bounds are for a proxy in front of them.
    """

    max_connections: Count = 4096
    """In all, and at most half of the files that the process may open. At the bound the connection closes that has
    waited longest for a request; if none waits the new one is refused (HTTP 503).
    """
    max_connections_per_address: Count = 1024
    """Of one IPv4 address, or one IPv6 network of 64 bits. A proxy in front is one address."""
    max_header_bytes: Bytes = 32 * 2**10
    """Of a request's headers and trailers together; more are refused (HTTP 431)."""
    header_timeout_s: Seconds = 20.0
    """Within which the head of a request must have come whole, from its first byte or that of the connection; else the
    connection closes (HTTP 408).
    """


class BodyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request's body may ask for; more is refused (HTTP 400)."""

    max_values: Count = 2**20
    """JSON values; its commas and opening brackets are counted, those in texts too."""
    max_messages: Count = 4096
    """Messages of a conversation, their parts and calls included."""
    max_token_ids: Count = 2**20
    """Entries of `allowed_token_ids`, `logit_bias` or `stop_token_ids` times the prompts: each prompt is an engine
    request of its own, which carries them.
    """
    max_logprobs: Count = 2**18
    """Log-probabilities that one answer may hold, alternatives included, about 70 bytes each. A stream sends those of
    its output as they come, and they do not count.
    """


class AutoscalingOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many engines there are: as many as keep every target below, and no fewer than would still keep it. Loads are
    means over `look_back_s`.
    """

    min_replicas: Annotated[int, Meta(ge=0)] = 1
    """0 stops the last engine when nothing was asked for `to_zero_delay_s`. The next request waits for one to start, at
    most `request_timeout_s`. One engine starts with the application all the same: so a model that cannot be served is
    found out then, and how long a start takes is known.
    """
    max_replicas: Count = 4
    target_ongoing_requests: Count | None = None
    """Requests that run or wait, for each engine; None takes `engine.max_num_sequences`."""
    target_kv_usage: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """Share of an engine's KV blocks that running sequences hold."""
    target_waiting_tokens: Count | None = None
    """Prompt tokens of requests without a first token, for each engine; None takes 4 times
    `engine.max_num_batched_tokens`.
    """
    target_ttft_s: Seconds = 2.0
    """From a request's arrival at an engine to its first token; nine of ten requests should have it by then."""
    look_back_s: Annotated[float, Meta(ge=2)] = 10.0
    upscale_delay_s: Annotated[float, Meta(ge=0)] = 10.0
    """For so long more engines must be needed before they start. If there is none, one starts at once."""
    downscale_delay_s: Annotated[float, Meta(ge=0)] = 300.0
    """For so long fewer engines must do before one is stopped. What it runs goes on elsewhere."""
    to_zero_delay_s: Annotated[float, Meta(ge=0)] = 600.0
    """The same for the last engine."""

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


class BatchLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `/v1/files` and `/v1/batches` keep and run. A client is an API key; without keys all clients are one."""

    max_file_bytes: Bytes = 200 * 2**20
    """Of one file; a longer one is refused (HTTP 413). It is never held in memory."""
    max_files: Count = 1000
    """Of one client, results of batches included; one more is refused (HTTP 400)."""
    max_stored_bytes: Bytes = 10 * 2**30
    """Of one client's files and results. Beyond them uploads and batches are refused (HTTP 400), and a batch that runs
    ends as `failed` with the results that it has. An upload without a Content-Length counts as `max_file_bytes`.
    """
    max_batches: Count = 10_000
    """Of one client that are kept, ended ones included; one more is refused (HTTP 400)."""
    max_open_batches: Count = 100
    """Of one client that have not ended; one more is refused (HTTP 400)."""
    keep_s: Seconds = 30 * 86_400.0
    """Files, and batches that have ended, are removed after so long."""
    max_in_flight: Count | None = None
    """Lines of all batches that run or wait in the engines at a time. None takes half of the places of all engines:
    others' requests go before them, and the more run the longer each step takes.
    """


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one API key may use in a minute; more is refused (HTTP 429). All ingresses together keep the limits."""

    requests_per_minute: Count | None = None
    """Chat and completion requests; None is any number."""
    tokens_per_minute: Count | None = None
    """Tokens of prompts and outputs; None is any number. An output counts when it has ended."""


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Ray Serve application: HTTP limits, names and replica counts."""

    engine: EngineConfig = EngineConfig()
    listener: ListenerLimits = ListenerLimits()
    body: BodyLimits = BodyLimits()
    batches: BatchLimits = BatchLimits()
    batch_storage: str | None = None
    """Where `/v1/files` and `/v1/batches` keep files: a folder, or an object store's URL (`s3://bucket/folder`) whose
    fsspec package is installed. On several nodes it must be the same place on all of them. None refuses both (HTTP
    404).
    """
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Meta(ge=1, le=65535)] = 8000
    """Port to listen on."""
    tls_certificate: str | None = None
    """PEM file with the certificate chain of the listener, which then speaks HTTPS; None for plain HTTP. It is loaded
    again when the file changes.
    """
    tls_key: str | None = None
    """PEM file with the certificate's private key, without a password."""
    served_model_name: str | None = None
    """Name in `/v1/models`; None takes the last part of `engine.model`."""
    num_engine_replicas: Count = 1
    autoscaling: AutoscalingOptions | None = None
    """As many engines as the load needs; None for always `num_engine_replicas`."""
    num_standby_replicas: Annotated[int, Meta(ge=0)] = 0
    """Engines that are loaded and warm, and get requests only while none of the others can take any."""
    http_server: Literal["auto", "listener", "proxy"] = "auto"
    """Who takes the connections: each ingress replica itself, or Serve's proxies for them, through which tokens come
    slower. `auto` is the listener under `manta serve`, and the proxy under Serve's own configuration files, where the
    listener wants `proxy_location: Disabled`.
    """
    num_ingress_replicas: Count | None = None
    """Spread evenly over the nodes if they listen themselves; those of one node share its port. None is one for each
    node that there is at the start if they listen, and one behind Serve's proxies. With `autoscaling`, None on several
    nodes means that those that listen follow the engines: more come when engines run on more nodes.
    """
    drain_notice_s: Seconds = 10.0
    """An ingress that Serve told to go still takes requests for so long, while its readiness probe fails. Less if
    another one listens on its node by then, or if all go.
    """
    drain_timeout_s: Seconds = 120.0
    """How long the streams of an ingress that takes no more requests may go on; then Serve ends it."""
    api_keys: tuple[str, ...] | None = None
    """Accepted bearer tokens of at least 16 characters, as `KEY`, `NAME:KEY` or `NAME:sha256:DIGEST`; names go into log
    and metrics. Those of `api_keys_file` and of the environment's `MANTA_API_KEYS` count too. None accepts every
    request.
    """
    api_keys_file: str | None = None
    """A file with such entries, one a line; what follows a # is a remark."""
    priority_clients: tuple[str, ...] = ()
    """Names of API keys whose requests may go before others' (a `priority` below 0); `*` is everybody. A priority above
    0 lets others go first, and anybody may ask for it.
    """
    client_weights: dict[str, Annotated[float, Meta(gt=0, le=1000)]] = {}
    """Shares of API keys in a full engine, by name: one with 3 has three turns where one with 1 has one. Those that are
    not named have 1. The batches of a key are one client more, of the same weight.
    """
    key_limits: dict[str, KeyLimits] = {}
    """Rates of API keys, by name; `*` is every key that is not named. Lines of batches do not count."""
    share_prefix_cache: bool = False
    """Whether clients with different API keys read one another's prompts from the prefix cache. That saves work if they
    send one system prompt, and lets each of them find out whether another one has sent a text that it guesses.
    """
    allowed_hosts: tuple[str, ...] = ()
    """Names in a request's Host header that this server answers to; `*` is any. Names of loopback addresses and `host`
    itself are always among them, and IP addresses if `host` is none of a loopback address. If this is empty, a server
    without API keys answers to this machine's own name too, and one with keys that others reach answers to any name.
    Under Serve's own configuration files empty is any.
    """
    trusted_proxies: tuple[str, ...] = ()
    """IP addresses and networks (`10.0.0.0/8`) of proxies in front. Only they may name the client's address, in
    X-Forwarded-For, by which clients without API keys take turns.
    """
    cors_origins: tuple[str, ...] = ()
    """Origins (`https://chat.example`) of web pages that may use this server; `*` is any. Those of other pages are
    refused (HTTP 403).
    """
    max_body_bytes: Bytes = 8 * 2**20
    max_bodies_bytes: Bytes = 256 * 2**20
    """Of all bodies that are being received; beyond them a request is refused (HTTP 503). Else slow senders could fill
    the memory.
    """
    max_prompts_per_request: Count = 1024
    """Prompts in one `/v1/completions` body."""
    max_choices_per_request: Count = 2048
    """Answers that one body may ask for: its prompts times `n`. Each costs the ingress about 20 us before it runs."""
    request_timeout_s: Seconds = 600.0
    """A request still running after this long is aborted."""
    client_timeout_s: Seconds = 60.0
    """Within which a client must send a request's body whole, and take more of what it is sent. If it does not, its
    connection is closed and what it asked for is aborted.
    """
    min_body_bytes_per_s: Bytes = 1000
    """Of a request's body must have come since its head, after 10 s in which it may be slower; else it is refused
    (HTTP 408).
    """
    client_buffer_bytes: Bytes = 4 * 2**20
    """Of a stream that wait for a client who reads too slowly; beyond them its request is aborted."""
    health_bound_s: Seconds = 30.0
    """`/health` fails when work is pending and for this long no step brought a token, an end or a computed position."""
    log_requests: bool = True
    """One structured log line a finished request, with its id, and one where it went on on another engine. Engines log
    in any case what they aborted, preempted, continued or failed at.
    """

    def __post_init__(self) -> None:
        for proxy in self.trusted_proxies:
            _check_network("trusted_proxies", proxy)
        if (self.tls_certificate is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_certificate"
            raise ValueError(f"{missing} is missing: HTTPS needs tls_certificate and tls_key, two PEM files")
        if self.tls_certificate is not None and self.http_server == "proxy":
            raise ValueError(
                "tls_certificate is for the listener, and http_server is proxy: leave http_server out, or give the "
                "certificate to what stands in front of Serve's proxies"
            )
        if self.autoscaling is None:
            return
        if self.num_engine_replicas != 1:
            raise ValueError(
                f"num_engine_replicas {self.num_engine_replicas} is a fixed number, and with autoscaling there is "
                "none; set autoscaling.min_replicas and autoscaling.max_replicas"
            )
        if self.num_standby_replicas and self.autoscaling.min_replicas == 0:
            raise ValueError(
                f"num_standby_replicas {self.num_standby_replicas} would serve whenever no other engine runs; with it "
                "autoscaling.min_replicas must be at least 1"
            )

    @property
    def scheme(self) -> str:
        """The scheme of the endpoint's URL: `http` or `https`."""
        return "http" if self.tls_certificate is None else "https"

    @property
    def num_initial_engines(self) -> int:
        """That start with the application, without standbys."""
        return self.num_engine_replicas if self.autoscaling is None else self.autoscaling.num_initial

    @property
    def max_engines(self) -> int:
        """That there may be at a time, without standbys."""
        return self.num_engine_replicas if self.autoscaling is None else self.autoscaling.max_replicas

    @property
    def model_name(self) -> str:
        """The model's name in the API: the configured one, else the last part of its folder or hub id, without a
        revision, or the name of its GGUF file without the suffix.
        """
        model = pathlib.Path(self.engine.model)
        if model.suffix == ".gguf":
            return self.served_model_name or model.stem
        return self.served_model_name or (model.name if model.is_dir() else model.name.partition("@")[0])


def _check_network(option: str, network: str) -> None:
    try:
        ipaddress.ip_network(network)
    except ValueError as error:
        message = f"{option}: {network!r} is neither an IP address nor a network"
        raise ValueError(f"{message} ({error}); write 10.0.0.7 or 10.0.0.0/8") from error


def ray_address() -> str | None:
    """The Ray cluster to join, if `RAY_ADDRESS` names one (as in a Ray job); None means to start a Ray of our own."""
    address = os.environ.get("RAY_ADDRESS", "")
    return None if address in ("", "local") else address


def load_config(path: str | pathlib.Path | None, overrides: dict[str, Any] | None = None) -> ServeConfig:
    """Reads a YAML file into a `ServeConfig` and applies dotted `overrides` such as `{"engine.model": "..."}`.

    Raises `ValueError` naming the key and the bound for an unknown key, a wrong type or a value out of range; for what
    is no YAML, the line with a mark below the place.
    """
    data = {} if path is None else _read_yaml(pathlib.Path(path))
    where = f" {path}" if path else ""
    if "model" in data:
        _move_model(data, where)
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
    if "api_keys" in data and data["api_keys"] is None:  # a variable that was to hold them and is not set
        raise ValueError(f"configuration{where}: api_keys is empty; leave it out, or list the keys")
    try:
        return read_options(data, ServeConfig)
    except ValueError as error:
        raise ValueError(f"configuration{where}: {error}") from error


def _move_model(data: dict[str, Any], where: str) -> None:
    """Makes a `model` at the top, where other servers have it, the engine's. Raises `ValueError` if there are two."""
    model, engine = data.pop("model"), data.get("engine") or {}
    if not isinstance(engine, dict) or model is None:
        return
    if engine.get("model") not in (None, model):
        raise ValueError(f"configuration{where}: model is {model} and engine.model {engine['model']}; give one")
    data["engine"] = engine | {"model": model}


def _read_yaml(path: pathlib.Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"cannot read the configuration {path}: {getattr(error, 'strerror', error)}") from error
    try:
        loaded = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark, lines = error.problem_mark, [*text.splitlines(), ""]
        place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        shown = "" if mark is None else f"\n{lines[min(mark.line, len(lines) - 1)]}\n{' ' * mark.column}^"
        raise ValueError(f"{path} is not valid YAML{place}: {error.problem or error.context}{shown}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if loaded is not None and not isinstance(loaded, dict):
        raise ValueError(f"{path} must hold a mapping of options, not a {type(loaded).__name__}")
    data = loaded or {}
    if "applications" in data or "import_path" in data:
        raise ValueError(
            f"{path} is a configuration of Ray Serve: 'serve deploy {path}' takes it. For --config give a file with "
            "the options that stand under its args"
        )
    return data

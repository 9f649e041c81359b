"""Live streams of all kinds through a real Serve application, on whatever Ray this process is joined to.

The application is deployed as `serve deploy` would: its configuration changes and Serve does the rest.
`tests/serve/fault_table.py` harms it and judges what came of the streams.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import threading
import time
import urllib.request
from typing import Any

import msgspec
import psutil
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.context import _get_global_client as get_client
from ray.serve.schema import ServeDeploySchema

from benchmarks.processes import free_port
from manta.cluster.http.exchange.metrics import TAKEOVER_PHASES
from manta.cluster.serve.starting.replica_process import REPLICA_ENVIRONMENT
from manta.cluster.serve.starting.start_failure import logs_folder
from manta.cluster.telemetry.request_log import log_folder
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S, wait_until
from tests.processes import running_below

APP = "faults"
"""Not that of the servers of other tests, whose engines run under this process too."""
ENGINE, INGRESS = f"ray::ServeReplica:{APP}:engine", f"ray::ServeReplica:{APP}:ingress"
RANK, GRAMMAR_ACTOR, CONTROLLER = "ray::RankActor", "ray::GrammarActor", "ray::ServeController"
"""Beginnings of the processes' titles."""
WORDS = {"type": "array", "items": {"enum": ["ab", "cde", "f"]}, "minItems": 60, "maxItems": 70}
TOOL = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {"words": WORDS},
            "required": ["words"],
            "additionalProperties": False,
        },
    },
}


def bodies(model: str) -> list[tuple[str, dict[str, Any]]]:
    """Path and body of 16 streams: plain, seeded, under a schema, n = 3, with stop strings, with tools."""
    found: list[tuple[str, dict[str, Any]]] = []
    for number in range(16):
        prompt = [5 + number, 9, 17, 30] * 3
        chat = {"messages": [{"role": "user", "content": f"number {number}"}], "seed": number, "max_tokens": 380}
        text = {"prompt": prompt, "seed": number, "max_tokens": 380, "ignore_eos": True, "temperature": 1}
        schema = {"type": "json_schema", "json_schema": {"name": "words", "schema": WORDS, "strict": True}}
        path, body = [
            ("/v1/completions", {**text, "temperature": 0}),
            ("/v1/completions", {**text, "logprobs": 2}),
            ("/v1/chat/completions", {**chat, "response_format": schema}),
            ("/v1/completions", {**text, "n": 3, "max_tokens": 250}),
            ("/v1/completions", {**text, "stop": ["~", "QZ", "}}"], "n": 2}),
            ("/v1/chat/completions", {**chat, "tools": [TOOL], "tool_choice": "required"}),
        ][number % 6]
        found.append((path, {"model": model, "stream": True, "stream_options": {"include_usage": True}, **body}))
    return found


@dataclasses.dataclass
class Stream:
    """What one client read."""

    texts: dict[int, str] = dataclasses.field(default_factory=dict)
    """Text of each choice, or arguments of tools."""
    logprobs: list[str] = dataclasses.field(default_factory=list)
    """Tokens of the log-probabilities."""
    logprob_values: list[float] = dataclasses.field(default_factory=list)
    """Log-probabilities of those tokens. Their last bits depend on the batch and the kernels, unless `exact` is set."""
    finish: dict[int, str] = dataclasses.field(default_factory=dict)
    num_tokens: int | None = None
    """Number of tokens in `usage`."""
    error: str | None = None
    times: list[float] = dataclasses.field(default_factory=list)
    """Times of the events, by `time.monotonic`."""

    @property
    def is_complete(self) -> bool:
        return self.error is None and self.num_tokens is not None

    @property
    def pause_s(self) -> float:
        """The longest time between two events."""
        return max((later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)), default=0.0)

    def equals(self, other: Stream, is_exact: bool = False) -> bool:
        """With `is_exact` the log-probabilities are equal to the last bit too."""
        names = ("texts", "logprobs", "finish", "num_tokens", *(["logprob_values"] if is_exact else []))
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def read(self, url: str, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                for line in response:
                    if line.startswith(b"data: {"):
                        self.add(json.loads(line.removeprefix(b"data: ")))
            if not self.is_complete:
                self.error = self.error or "it broke off"
        except Exception as error:
            self.error = repr(error)

    def add(self, event: dict[str, Any]) -> None:
        """Adds an event of any of the APIs."""
        self.times.append(time.monotonic())
        if "error" in event:
            self.error = event["error"]["message"]
            return
        if "choices" not in event:
            self._add_typed(event)
            return
        if event.get("usage"):
            self.num_tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            index = choice["index"]
            delta = choice.get("delta", {})
            calls = delta.get("tool_calls") or []
            text = choice.get("text") or delta.get("content") or ""
            text += "".join(call["function"].get("arguments") or "" for call in calls)
            self.texts[index] = self.texts.get(index, "") + text
            logprobs = choice.get("logprobs") or {}
            self.logprobs += logprobs.get("tokens") or []
            self.logprob_values += logprobs.get("token_logprobs") or []
            if choice["finish_reason"]:
                self.finish[index] = choice["finish_reason"]

    def _add_typed(self, event: dict[str, Any]) -> None:
        """Adds an event of /v1/responses or /v1/messages."""
        kind, delta = event["type"], event.get("delta", "")
        if isinstance(delta, dict):
            delta = delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
        if kind.endswith("delta"):
            self.texts[0] = self.texts.get(0, "") + delta
        if kind in ("response.completed", "response.incomplete"):
            self.num_tokens = event["response"]["usage"]["output_tokens"]
            self.finish[0] = event["response"]["status"]
        if kind == "message_delta":
            self.num_tokens = event["usage"]["output_tokens"]
            self.finish[0] = event["delta"]["stop_reason"]


class Streams:
    """Streams under way."""

    def __init__(self, url: str, requests: list[tuple[str, dict[str, Any]]]) -> None:
        self.streams = [Stream() for _ in requests]
        self._threads = [
            threading.Thread(target=stream.read, args=(url + path, body))
            for stream, (path, body) in zip(self.streams, requests, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def wait_for_events(self, count: int) -> None:
        """Until every stream had so many."""
        wait_until(lambda: all(len(stream.times) >= count or stream.error for stream in self.streams))

    def join(self) -> list[Stream]:
        for thread in self._threads:
            thread.join()
        return self.streams


class Setup(msgspec.Struct, frozen=True):
    """What is deployed. Another number of engines or another version leaves the ingress as it is."""

    num_engines: int = 2
    num_ingresses: int = 1
    num_standbys: int = 0
    version: str = "1"
    options: dict[str, Any] = {}
    """Options of the engines besides those that all have."""
    resources: dict[str, float] = {}
    """Ray's resources that an engine claims, which decide its node."""
    starts_new_first: bool = True
    """Whether a new engine serves before an old one ends. It must be false where the old ones hold its resources."""
    ingress_resources: dict[str, float] = msgspec.field(default_factory=lambda: {"node:__internal_head__": 0.001})
    """Ray's resources that an ingress claims, which decide its node: by default the head."""

    @property
    def is_exact(self) -> bool:
        return bool(self.options.get("exact", False))


class Application:
    """Engines of a tiny float32 model, and ingresses behind Serve's proxy on the head. Their processes have the
    environment that they have by default, which the options of a configuration replace. With `listens` the ingresses
    share a port instead, and clients lose their connections when one dies. Serve runs until the caller ends it.
    """

    def __init__(self, setup: Setup, listens: bool = False) -> None:
        self._deployed: Setup | None = None
        self._listens = listens
        self.model = checkpoint("llama").name
        self.requests = bodies(self.model)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        http = HTTPOptions(host="127.0.0.1", port=self.port)
        proxies = ProxyLocation.Disabled if listens else ProxyLocation.HeadOnly
        serve.start(proxies, http, logging_config={"enable_access_log": False})
        self.deploy(setup)

    def deploy(self, setup: Setup) -> None:
        """Returns when Serve has done it."""
        if setup != self._deployed:
            self.order(setup)
        self.until_running(setup.num_engines, setup.num_ingresses)

    def order(self, setup: Setup) -> None:
        """Tells Serve to deploy it. Returns when Serve has begun."""
        self._deployed = setup
        client = get_client()
        assert client is not None
        schema = ServeDeploySchema(applications=[self._configuration(setup)])  # type: ignore[list-item]
        client.deploy_apps(schema, _blocking=False)
        time.sleep(1.0)

    def _configuration(self, setup: Setup) -> dict[str, Any]:
        environment = {"env_vars": {**REPLICA_ENVIRONMENT, "OMP_NUM_THREADS": "1", "VERSION": setup.version}}
        engine = {
            "model": str(checkpoint("llama")),
            "dtype": "float32",
            "kv_cache_bytes": 8 << 20,
            "num_threads": 1,
            "logits_processors": {"poison": "tests.serve.poison:Poison", "stall": "tests.serve.poison:Stall"},
        }
        of_ingress = {
            "num_cpus": 0,
            "resources": setup.ingress_resources,
            "runtime_env": {"env_vars": REPLICA_ENVIRONMENT},
        }
        of_engine = {"num_cpus": 0, "resources": setup.resources, "runtime_env": environment}
        listener = {"http_server": "listener", "host": "127.0.0.1", "port": self.port}
        return {
            "name": APP,
            "route_prefix": None if self._listens else "/",
            "import_path": "manta.cluster.serve.app:build",
            "args": {
                "num_engine_replicas": 2,  # of which engines tell what they hold; how many run is said below
                "num_ingress_replicas": setup.num_ingresses,
                "num_standby_replicas": setup.num_standbys,
                "engine": engine | setup.options,
                **(listener if self._listens else {}),
            },
            "deployments": [
                {"name": "ingress", "num_replicas": setup.num_ingresses, "ray_actor_options": of_ingress},
                {
                    "name": "engine",
                    "num_replicas": setup.num_engines,
                    "ray_actor_options": of_engine,
                    "max_surge_percent": int(setup.starts_new_first),
                },
            ],
        }

    def until_running(self, num_engines: int, num_ingresses: int = 1) -> None:
        def runs() -> bool:
            application = serve.status().applications.get(APP)
            if application is None or application.status != "RUNNING":
                return False
            states = {name: deployment.replica_states for name, deployment in application.deployments.items()}
            if any(list(each) != ["RUNNING"] for each in states.values()):
                return False
            engines, ingresses = states["engine"]["RUNNING"], states["ingress"]["RUNNING"]
            return engines == num_engines == len(self.processes(ENGINE)) and ingresses == num_ingresses

        wait_until(runs, poll_s=0.25)  # a look keeps this process and Serve's controller busy

    def processes(self, title: str) -> list[psutil.Process]:
        """Returns those of this Ray that have `title` in their command line, oldest first."""
        return running_below(None, title)

    def start_streams(self) -> Streams:
        return Streams(self.url, self.requests)

    def metrics(self) -> dict[str, float]:
        """Series without labels but the model's, by name."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=PATIENCE_S) as response:
            lines = response.read().decode().splitlines()
        values = (line.rpartition(" ") for line in lines if not line.startswith("#") and line.count('="') == 1)
        return {name.partition("{")[0]: float(value) for name, _, value in values}

    def until_serving(self, num_engines: int) -> None:
        """Until every engine computes steps: none restarts its ranks, and an ingress says so."""

        def serves() -> bool:
            with contextlib.suppress(OSError, http.client.HTTPException, KeyError):
                return self.metrics()["manta:engines_serving"] == num_engines
            return False

        wait_until(serves, poll_s=0.5)  # a look asks every engine

    def events(self) -> list[dict[str, Any]]:
        """Returns the events in the request logs of all ingresses and engines, those that have ended included."""
        folder = logs_folder()
        assert folder is not None
        files = log_folder(folder, APP).glob("*.jsonl*")
        entries = (json.loads(line) for path in files for line in path.read_text().splitlines() if '"event"' in line)
        return [entry for entry in entries if "event" in entry]

    def takeovers(self) -> list[dict[str, Any]]:
        """Returns the events of streams that went on on another engine, longest pause first."""
        found = [entry for entry in self.events() if entry["event"] == "resumed"]
        return sorted(found, key=lambda entry: -sum(entry[f"{phase}_s"] for phase in TAKEOVER_PHASES))

    def until_nothing_is_left(self) -> None:
        """Neither a block nor a grammar session in any engine."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "grammar_sessions")

        def is_idle() -> bool:
            metrics = self.metrics()
            return all(metrics[f"manta:{name}"] == 0 for name in names)

        wait_until(is_idle, poll_s=0.1)  # a look asks every engine

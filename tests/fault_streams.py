"""Live streams of all kinds through a real Serve application, what is done to its engines meanwhile, and what came of
it. `tests/test_resume.py` judges; `make prove` writes the table.

The application is deployed as `serve deploy` would: its configuration changes and Serve does the rest.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
import urllib.request
from typing import Any

import psutil
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client as get_client
from ray.serve.schema import ServeDeploySchema

from benchmarks.processes import free_port
from cluster import own_ray
from tests.checkpoints import checkpoint

APP = "faults"
"""Not that of the servers of other tests, whose engines run under this process too."""
START_S = 120.0
STREAM_S = 40.0
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
    """Of each choice: text, or arguments of tools."""
    logprobs: list[str] = dataclasses.field(default_factory=list)
    """Their tokens."""
    finish: dict[int, str] = dataclasses.field(default_factory=dict)
    num_tokens: int | None = None
    """As `usage` says."""
    error: str | None = None
    times: list[float] = dataclasses.field(default_factory=list)
    """When events came, on `time.monotonic`'s clock."""

    @property
    def is_complete(self) -> bool:
        return self.error is None and self.num_tokens is not None

    @property
    def pause_s(self) -> float:
        """The longest time between two events."""
        return max((later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)), default=0.0)

    def equals(self, other: Stream) -> bool:
        return all(
            getattr(self, name) == getattr(other, name) for name in ("texts", "logprobs", "finish", "num_tokens")
        )

    def read(self, url: str, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=STREAM_S) as response:
                for line in response:
                    if line.startswith(b"data: {"):
                        self._add(json.loads(line.removeprefix(b"data: ")))
        except Exception as error:
            self.error = repr(error)

    def _add(self, event: dict[str, Any]) -> None:
        self.times.append(time.monotonic())
        if "error" in event:
            self.error = event["error"]["message"]
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
            self.logprobs += (choice.get("logprobs") or {}).get("tokens") or []
            if choice["finish_reason"]:
                self.finish[index] = choice["finish_reason"]


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
        _until(lambda: all(len(stream.times) >= count or stream.error for stream in self.streams), STREAM_S)

    def join(self) -> list[Stream]:
        for thread in self._threads:
            thread.join()
        return self.streams


class Application:
    """Engines of a tiny float32 model behind one ingress, two at first, until `stop`."""

    def __init__(self) -> None:
        self._deployed: tuple[object, ...] = ()
        self.model = checkpoint("llama").name
        self.requests = bodies(self.model)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        own_ray.start()
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port), logging_config={"enable_access_log": False})
        self.deploy(2)

    def deploy(self, num_replicas: int, version: str = "1", num_standby_replicas: int = 0) -> None:
        """Returns when Serve has done it. Another number of standbys is another ingress, too."""
        deployed = (num_replicas, version, num_standby_replicas)
        if deployed == self._deployed:
            self.until_running(num_replicas)
            return
        self._deployed = deployed
        options = {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1", "VERSION": version}}}
        application = {
            "name": APP,
            "route_prefix": "/",
            "import_path": "cluster.serve.app:build",
            "args": {
                "num_standby_replicas": num_standby_replicas,
                "engine": {
                    "model": str(checkpoint("llama")),
                    "dtype": "float32",
                    "kv_cache_bytes": 8 << 20,
                    "num_threads": 1,
                    "logits_processors": {"poison": "tests.poison:Poison"},
                },
            },
            "deployments": [{"name": "engine", "num_replicas": num_replicas, "ray_actor_options": options}],
        }
        client = get_client()
        assert client is not None
        client.deploy_apps(ServeDeploySchema(applications=[application]), _blocking=False)  # type: ignore[list-item]
        time.sleep(1.0)  # until Serve has begun
        self.until_running(num_replicas)

    def until_running(self, num_replicas: int) -> None:
        def runs() -> bool:
            application = serve.status().applications.get(APP)
            if application is None or application.status != "RUNNING":
                return False
            states = [deployment.replica_states for deployment in application.deployments.values()]
            if any(list(each) != ["RUNNING"] for each in states):
                return False
            running = application.deployments["engine"].replica_states["RUNNING"]
            return running == num_replicas == len(self.engines())

        _until(runs, START_S)

    def stop(self) -> None:
        serve.shutdown()
        own_ray.stop()

    def engines(self) -> list[psutil.Process]:
        """Processes of engine replicas, oldest first."""
        found = []
        for process in psutil.Process().children(recursive=True):
            try:
                name = (process.cmdline() or [""])[0]
            except psutil.Error:
                continue
            if name.startswith(f"ray::ServeReplica:{APP}:engine") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def signal(self, number: int, which: slice) -> list[psutil.Process]:
        victims = self.engines()[which]
        for victim in victims:
            victim.send_signal(number)
        return victims

    def start_streams(self) -> Streams:
        return Streams(self.url, self.requests)

    def metrics(self) -> dict[str, float]:
        """Series without labels but the model's, by name."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        values = (line.rpartition(" ") for line in lines if not line.startswith("#") and line.count('="') == 1)
        return {name.partition("{")[0]: float(value) for name, _, value in values}

    def until_nothing_is_left(self) -> None:
        """Neither a block nor a grammar session in any engine."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "grammar_sessions")

        def is_idle() -> bool:
            metrics = self.metrics()
            return all(metrics[f"manta:{name}"] == 0 for name in names)

        _until(is_idle, 30.0)


def _until(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not come true within {seconds:g} s"
        time.sleep(0.02)

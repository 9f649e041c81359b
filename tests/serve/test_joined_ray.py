"""`manta serve` beside a Ray cluster that runs already: a real `ray start --head`, which protects itself by a token."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

from benchmarks.processes import free_port
from manta.cluster.serve.starting import joined_ray
from manta.cluster.serve.starting.start_failure import StartFailed
from tests.checkpoints import checkpoint
from tests.conftest import PROVE
from tests.patience import PATIENCE_S
from tests.processes import kill_tree
from tests.serve.test_start_failures import refusal, serve

RAY = str(pathlib.Path(sys.executable).parent / "ray")
SOON_S = 10.0
"""Seconds from the command to its refusal, on an idle machine."""


class Cluster:
    """The home folder has the token where Ray puts it, `~/.ray/auth_token`."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.home = folder / "home"
        self.home.mkdir()
        environment = {**os.environ, "HOME": str(self.home), "RAY_AUTH_MODE": "token"}
        environment["RAY_SERVE_SLOW_STARTUP_WARNING_S"] = "3"  # until Serve says that a replica waits for room
        subprocess.run([RAY, "get-auth-token", "--generate"], env=environment, check=True, capture_output=True)
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        command = [RAY, "start", "--head", f"--port={port}", f"--ray-client-server-port={free_port()}", "--block"]
        command += ["--include-dashboard=false", "--num-cpus=2", f"--temp-dir={folder}"]
        command += [f"--dashboard-agent-listen-port={free_port()}"]  # another Ray's has the usual one
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if b"Ray runtime started" in line:
                return
        raise RuntimeError("ray start ended")

    def stop(self) -> None:
        kill_tree(self.process.pid)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Ray's sockets lie in its folder, and their paths may have 107 bytes.
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ray-"))
    started = Cluster(folder)
    yield started
    started.stop()
    shutil.rmtree(folder, ignore_errors=True)


def joining(
    cluster: Cluster, port: int, *settings: str, flags: tuple[str, ...] = (), **environment: str
) -> subprocess.Popen[str]:
    environment = {"RAY_ADDRESS": cluster.address, "HOME": str(cluster.home), **environment}
    model = f"engine.model={checkpoint('llama')}"
    return serve(model, f"port={port}", *settings, flags=flags, **environment)


def test_an_unanswered_address_is_refused_in_a_sentence(cluster: Cluster) -> None:
    started = time.monotonic()
    said = refusal(joining(cluster, free_port(), RAY_ADDRESS="127.0.0.1:9"))
    assert not PROVE or time.monotonic() - started < SOON_S
    assert "no Ray cluster answers at RAY_ADDRESS=127.0.0.1:9" in said
    assert "ray start" in said


@pytest.fixture
def forgets_tokens() -> Iterator[AuthenticationTokenLoader]:
    """Ray's loader, which keeps a token that it has read once."""
    loader = AuthenticationTokenLoader.instance()
    loader.reset_cache()
    yield loader
    loader.reset_cache()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"HOME": "/nowhere"}, ["wants a token and there is none here", "~/.ray/auth_token"]),
        ({"RAY_AUTH_TOKEN": "12345678"}, ["refuses this machine's token", "RAY_AUTH_TOKEN"]),
        ({"RAY_AUTH_TOKEN_PATH": "/nowhere"}, ["RAY_AUTH_TOKEN_PATH", "/nowhere"]),
        ({"RAY_AUTH_MODE": "disabled"}, ["unset RAY_AUTH_MODE"]),
    ],
)
def test_a_token_that_opens_nothing_is_explained(
    cluster: Cluster,
    environment: dict[str, str],
    words: list[str],
    forgets_tokens: AuthenticationTokenLoader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in ({"HOME": str(cluster.home)} | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StartFailed) as failure:
        joined_ray.start(cluster.address)
    for word in words:
        assert word in str(failure.value)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nowhere.invalid:6379", ["no Ray cluster answers at RAY_ADDRESS=nowhere.invalid:6379"]),
        ("http://127.0.0.1:8265", ["the address of Ray's dashboard", "host:port"]),
        ("nonsense", ["nonsense", "host:port"]),
        ("tcp://127.0.0.1:6379", ["is no address of a Ray cluster", "host:port"]),
    ],
)
def test_an_address_without_cluster_is_explained(address: str, words: list[str]) -> None:
    with pytest.raises(StartFailed) as failure:
        joined_ray.start(address)
    for word in words:
        assert word in str(failure.value)


@pytest.mark.prove
def test_an_engines_failed_start_is_reported(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "four-layers"
    shutil.copytree(checkpoint("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    port = free_port()
    said = refusal(joining(cluster, port, f"engine.model={folder}", "http_server=proxy"))
    assert "the engine did not start: tensor model.layers.3.input_layernorm.weight of shape [64] is missing" in said
    log = re.search(r"The whole story is in (\S+)$", said)
    assert log is not None
    assert "Traceback" in pathlib.Path(log[1]).read_text()

    # The cluster's Serve has that port now.
    other = refusal(joining(cluster, free_port(), "http_server=proxy"))
    assert f"Serve runs on this cluster already and listens on port {port}; take it: --port {port}" in other

    process = joining(cluster, port, "http_server=proxy")
    try:
        assert process.stdout is not None
        assert any("Ctrl-C stops it." in line for line in process.stdout)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=PATIENCE_S) as response:
            assert json.loads(response.read())["data"][0]["id"]
    finally:
        process.send_signal(signal.SIGTERM)
        printed, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert "Traceback" not in printed + error


HOLD = """
import time, ray
ray.init(logging_level="ERROR")
actor = ray.remote(num_cpus=1)(dict).remote()
ray.get(actor.__ray_ready__.remote())
print("holds", flush=True)
time.sleep(600)
"""


def test_more_threads_than_any_node_has_are_refused(cluster: Cluster) -> None:
    process = joining(cluster, free_port(), "engine.num_threads=3")
    assert process.stdout is not None
    begun = f"Joining the Ray cluster at {cluster.address} and loading {checkpoint('llama')} ...\n"
    assert process.stdout.readline() == begun
    said = refusal(process)
    assert "engines claim 1 x 3 CPUs, one a thread, and the cluster's nodes have 2 CPUs; lower" in said


@pytest.mark.prove
def test_an_engine_waiting_for_cpus_says_so(cluster: Cluster) -> None:
    environment = {**os.environ, "HOME": str(cluster.home), "RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": "token"}
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, env=environment)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "holds\n"
    process = joining(cluster, free_port(), "engine.num_threads=2")
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "waits for room" in line)
        assert "the engine waits for room on the cluster: each of its replicas claims" in line
        assert "lower engine.num_threads" in line
    finally:
        holder.kill()
        holder.communicate()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)


CLAIMS = """
import time, ray
ray.init(logging_level="ERROR")
while True:
    print(ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0), flush=True)
    time.sleep(0.2)
"""
"""Tells again and again how many CPUs are claimed."""


@pytest.mark.prove
def test_models_on_demand_claim_the_nodes_cores_once_together(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    """One that is loaded claims as much as two, and after the last one nothing is claimed any more."""
    environment = {**os.environ, "HOME": str(cluster.home), "RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": "token"}
    claims = subprocess.Popen([sys.executable, "-c", CLAIMS], stdout=subprocess.PIPE, text=True, env=environment)
    assert claims.stdout is not None
    models = {"a": checkpoint("llama"), "b": checkpoint("qwen2")}
    for name, model in models.items():
        (tmp_path / name).symlink_to(model)
    port = free_port()
    command = [sys.executable, "-m", "manta.cluster.cli", "serve", "--models-dir", str(tmp_path), "--port", str(port)]
    command += ["--set", "engine.kv_cache_bytes=8388608", "--set", "min_loaded_s=0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def wait_until_claimed(num_cpus: float) -> None:
        assert claims.stdout is not None
        assert any(float(line) == num_cpus for line in claims.stdout)

    def ask(path: str, **body: Any) -> None:
        url = f"http://127.0.0.1:{port}{path}"
        assert httpx.post(url, json=body, timeout=PATIENCE_S, trust_env=False).status_code == 200

    try:
        assert process.stdout is not None
        assert any("Ctrl-C stops it." in line for line in process.stdout)
        wait_until_claimed(0)
        for name in models:
            ask("/v1/completions", model=name, prompt=[5, 6, 7], max_tokens=2)
        wait_until_claimed(2)
        ask("/models/unload", model="a")
        wait_until_claimed(2)
        ask("/models/unload", model="b")
        wait_until_claimed(0)
        ask("/v1/completions", model="b", prompt=[5, 6, 7], max_tokens=2)
        wait_until_claimed(2)
    finally:
        claims.kill()
        claims.communicate()
        process.send_signal(signal.SIGTERM)
        printed, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, printed + error


# ---- ingresses that listen -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def joined(cluster: Cluster, port: int, *settings: str, flags: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """Serves there; when it was not ended before, it is at the end, in peace."""
    process = joining(cluster, port, "engine.dtype=float32", *settings, flags=flags)
    try:
        assert process.stdout is not None
        assert any("Ctrl-C stops it." in line for line in process.stdout)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        printed, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert "Traceback" not in printed + error


def completion(port: int, num_tokens: int) -> dict[str, Any]:
    """On a connection of its own."""
    body = {"model": checkpoint("llama").name, "prompt": [5, 6, 7], "max_tokens": num_tokens, "ignore_eos": True}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.prove
def test_ingresses_of_one_node_share_its_port(cluster: Cluster) -> None:
    port = free_port()
    with joined(cluster, port, "num_ingress_replicas=2"):
        for _ in range(24):
            assert completion(port, 4)["usage"]["completion_tokens"] == 4
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
        counts = re.findall(r"^manta:generation_tokens_total\{.*\} (\S+)$", metrics, re.MULTILINE)
        assert len(counts) == 2
        assert sum(map(float, counts)) == 96
        assert min(map(float, counts)) > 0, "both took some"
        assert httpx.get(f"http://127.0.0.1:{port}/-/healthz", trust_env=False).text == "success"
    with pytest.raises(httpx.ConnectError):
        completion(port, 1)


@pytest.mark.prove
def test_a_new_ingress_version_takes_over_without_gap(cluster: Cluster) -> None:
    port = free_port()
    settings = ("num_engine_replicas=2",)
    ended = threading.Event()
    num_answers = 0

    def ask() -> None:
        nonlocal num_answers
        while not ended.is_set():
            assert completion(port, 4)["usage"]["completion_tokens"] == 4
            num_answers += 1

    with joined(cluster, port, *settings), concurrent.futures.ThreadPoolExecutor() as clients:
        before = completion(port, 1)
        asking = clients.submit(ask)
        try:
            with joined(cluster, port, *settings, "max_prompts_per_request=7", flags=("--replace",)):
                limits = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
                assert 'option="max_prompts_per_request"} 7.0' in limits
                count = num_answers
                while num_answers < count + 10:
                    assert not asking.done(), asking.result()
                    time.sleep(0.1)
                ended.set()
                asking.result()
        finally:
            ended.set()
    assert before["usage"]["completion_tokens"] == 1
    assert num_answers > 20


@pytest.mark.prove
def test_who_asks_while_the_application_ends_is_answered(cluster: Cluster) -> None:
    """With tokens or an error; nobody's connection ends without either."""
    port = free_port()

    def statuses(num_tokens: int) -> list[int]:
        """Until nobody listens any more."""
        found: list[int] = []
        body = {"model": checkpoint("llama").name, "prompt": [5, 6, 7], "max_tokens": num_tokens, "ignore_eos": True}
        with contextlib.suppress(httpx.ConnectError):
            while True:
                url = f"http://127.0.0.1:{port}/v1/completions"
                found.append(httpx.post(url, json=body, timeout=PATIENCE_S, trust_env=False).status_code)
        return found

    with concurrent.futures.ThreadPoolExecutor() as clients, joined(cluster, port):
        asking = [clients.submit(statuses, 300 if number % 4 == 0 else 3) for number in range(12)]
        time.sleep(2)
    found = [status for each in asking for status in each.result()]
    assert set(found) <= {200, 503}
    assert found.count(200) > 20

"""Several applications on one Ray cluster: side by side by their ports or prefixes, and none overwrites, deletes or
prints the requests of another one without being told to.
"""

from __future__ import annotations

import json
import pathlib
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.processes import free_port
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S
from tests.ray_cluster import RayCluster, ray_cluster, until

pytestmark = pytest.mark.prove

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "serve" / "two-models.yaml"
REQUEST_LINE = r"^\d\d:\d\d:\d\d  200  /v1/completions  "


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(num_cpus=8) as started:
        started.environment["RAY_ADDRESS"] = f"127.0.0.1:{started.port}"
        until(lambda: started.run("ray", "status").returncode == 0)
        yield started


class Command:
    """A `manta serve` on the cluster, of one engine with one thread."""

    def __init__(self, cluster: RayCluster, family: str, port: int, *flags: str) -> None:
        self.model = checkpoint(family)
        self.url = f"http://127.0.0.1:{port}"
        words = [sys.executable, "-m", "manta.cluster.cli", "serve", str(self.model), "--port", str(port), *flags]
        for setting in ("engine.dtype=float32", "engine.kv_cache_bytes=8388608", "engine.num_threads=1"):
            words += ["--set", setting]
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=cluster.environment
        )
        self.printed = ""
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def until_printed(self, pattern: str, count: int = 1) -> None:
        while len(re.findall(pattern, self.printed, re.MULTILINE)) < count:
            line = self._lines.get()
            assert line, f"it ended: {self.printed} {self.ended()}"
            self.printed += line

    def is_ready(self) -> Command:
        self.until_printed("Ctrl-C stops it.")
        return self

    def ask(self) -> None:
        """Its own model, which it alone names."""
        assert [card["id"] for card in httpx.get(f"{self.url}/v1/models").json()["data"]] == [self.model.name]
        body = {"model": self.model.name, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.json()["usage"]["completion_tokens"] == 4

    def ended(self) -> tuple[int, str]:
        """The exit code, and standard error on one line."""
        code = self.process.wait(PATIENCE_S)
        assert self.process.stderr is not None
        return code, " ".join(self.process.stderr.read().split())

    def stop(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        code, error = self.ended()
        assert code == 0, error
        assert "Traceback" not in error
        return error


def test_two_models_serve_side_by_side(cluster: RayCluster) -> None:
    port = free_port()
    first = Command(cluster, "llama", port).is_ready()
    second = Command(cluster, "qwen2", free_port(), "--name", "second").is_ready()
    for each in (first, second):
        each.ask()

    code, error = Command(cluster, "qwen2", free_port()).ended()
    assert code == 1
    what = f"{first.model.name} on port {port}, from the command with process id {first.process.pid}"
    assert f"the application 'manta' runs on this cluster already ({what}, RUNNING, replicas: 1 engine, " in error
    assert "); add --replace to replace it, or --name NAME and another --port to run beside it" in error
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, error = Command(cluster, "llama", taken.getsockname()[1], "--name", "third").ended()
    assert code == 1
    assert "is in use by another program" in error
    for each in (first, second):
        each.ask()
    assert statuses(cluster) == {"manta": "RUNNING", "second": "RUNNING"}

    second.stop()
    first.ask()
    first.until_printed(REQUEST_LINE, 3)
    first.stop()
    assert len(re.findall(REQUEST_LINE, first.printed, re.MULTILINE)) == 3, "its own three, and not those of others"

    # Another server of the same name, on the same Ray and so with the same folder of logs.
    later = Command(cluster, "llama", port).is_ready()
    later.ask()
    later.until_printed(REQUEST_LINE)
    update = Command(cluster, "qwen2", port, "--replace").is_ready()
    update.ask()
    update.until_printed(REQUEST_LINE)
    assert "the application 'manta' goes on: another command has replaced it since" in later.stop()
    update.ask()
    update.stop()
    for each in (later, update):
        assert len(re.findall(REQUEST_LINE, each.printed, re.MULTILINE)) == 1
    assert statuses(cluster) == {}


def test_a_failed_update_deletes_nothing(cluster: RayCluster) -> None:
    port = free_port()
    first = Command(cluster, "llama", port).is_ready()
    wrong = ("--replace", "--set", "engine.logits_processors={wrong: nowhere:A}")
    code, error = Command(cluster, "qwen2", port, *wrong).ended()
    assert code == 1
    assert "the engine did not start: logits processor 'wrong': 'nowhere:A' cannot be imported" in error
    assert "the application 'manta' stays as it is" in error
    assert set(statuses(cluster)) == {"manta"}
    later = Command(cluster, "qwen2", port, "--replace").is_ready()
    later.ask()
    first.stop()
    later.ask()
    later.stop()
    assert statuses(cluster) == {}


ENGINES = """
import sys
from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.serve import app
from manta.cluster.serve.starting import deployed
from manta.cluster.serve.starting import joined_ray

joined_ray.ANSWER_S = 600.0
deployed.OWNER_PATIENCE_S = float(sys.argv[2])
engine = EngineConfig(model=sys.argv[1], dtype="float32", kv_cache_bytes=8 << 20, num_threads=1)
try:
    app.start_engines(ServeConfig(engine=engine), "batch-family-options")
    print("ready", flush=True)
    sys.stdin.readline()
except app.StartFailed as error:
    print(error, flush=True)
finally:
    app.stop()
"""


def start_engines(cluster: RayCluster, patience_s: float) -> tuple[subprocess.Popen[str], str]:
    """Returns a command that starts engines as `manta batch` does, and the first line that it prints. On a busy machine
    Ray itself may end it, because its node has no time to register it; then it is started anew.
    """
    words = [sys.executable, "-c", ENGINES, str(checkpoint("llama")), str(patience_s)]
    for _ in range(3):
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=cluster.environment
        )
        assert process.stdout is not None
        said = process.stdout.readline()
        if said:
            break
        process.wait()
    return process, said


def test_only_a_killed_commands_batch_engines_are_reused(cluster: RayCluster) -> None:
    first, said = start_engines(cluster, 60)
    assert said == "ready\n"
    second, said = start_engines(cluster, 0)
    assert f"belong to a command that runs, with process id {first.pid}; wait until it has ended" in said
    assert second.wait() == 0
    assert statuses(cluster) == {"batch-family-options": "RUNNING"}
    first.kill()
    first.communicate()
    third, said = start_engines(cluster, 600)
    assert said == "ready\n"
    assert statuses(cluster) == {"batch-family-options": "RUNNING"}
    third.communicate("\n")
    assert statuses(cluster) == {}


def statuses(cluster: RayCluster) -> dict[str, str]:
    """The status of each application, by name."""
    found = cluster.get("/api/serve/applications/")["applications"]
    return {name: application["status"] for name, application in found.items()}


def test_two_models_serve_behind_proxies_with_prefixes(cluster: RayCluster, tmp_path: pathlib.Path) -> None:
    cluster.run("serve", "shutdown", "--yes", "--address", cluster.address)  # one that has no proxies gets none
    config = yaml.safe_load(CONFIG.read_text())
    url = f"http://127.0.0.1:{free_port()}"
    config["http_options"]["port"] = int(url.rpartition(":")[2])
    families = {"first": "llama", "second": "qwen2"}
    for application in config["applications"]:
        application["args"]["engine"] |= {"model": str(checkpoint(families[application["name"]])), "dtype": "float32"}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(config))
    deploy = ("serve", "deploy", "--address", cluster.address, tmp_path / "two.yaml")
    until(lambda: cluster.run(*deploy).returncode == 0)
    until(lambda: statuses(cluster) == {"first": "RUNNING", "second": "RUNNING"})
    for name in families:
        asked: dict[str, Any] = {"model": name, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{url}/{name}/v1/completions", json=asked, timeout=PATIENCE_S)
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert f'model_name="{name}"' in httpx.get(f"{url}/{name}/metrics").text
        home = httpx.get(f"{url}/{name}").json()
        assert httpx.get(url + home["docs"]).status_code == 200
        assert httpx.get(url + home["openapi"]).json()["servers"] == [{"url": f"/{name}"}]
        command = [sys.executable, "-m", "manta.cluster.cli", "status", "--json", "--url", f"{url}/{name}"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=cluster.environment)
        assert [len(json.loads(shown.stdout)["engines"])] == [1], shown.stderr
    assert httpx.get(f"{url}/first/v1/nothing").json()["error"]["code"] == "unknown_url"

    port, flags = config["http_options"]["port"], ("--set", "http_server=proxy", "--name")
    code, error = Command(cluster, "llama", free_port(), *flags, "third").ended()
    assert code == 1
    assert f"Serve runs on this cluster already and listens on port {port}; take it: --port {port}" in error
    third = Command(cluster, "llama", port, *flags, "third").is_ready()
    third.ask()
    code, error = Command(cluster, "llama", port, *flags, "fourth").ended()
    assert code == 1
    assert "Serve's proxies send requests below / to the application 'third' already; give this one a port" in error
    third.ask()
    third.stop()
    assert statuses(cluster) == {"first": "RUNNING", "second": "RUNNING"}
    assert cluster.run("serve", "shutdown", "--yes", "--address", cluster.address).returncode == 0

"""Three models of different families at one address on a Ray cluster, deployed by Serve's own command: one is killed,
updated, removed and one fails to load, while another answers without a pause and in the same processes.
"""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
import yaml

from benchmarks.processes import free_port
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S
from tests.ray_cluster import RayCluster, ray_cluster, until

pytestmark = pytest.mark.prove

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "serve" / "several-models.yaml"
FAMILIES = ("llama", "qwen2", "gpt_neox")
BODY = {"prompt": [5, 9, 17, 30], "temperature": 0, "ignore_eos": True, "max_tokens": 200, "stream": True}


class Deployed:
    """The address and its models on a cluster, as a file says it."""

    def __init__(self, cluster: RayCluster, folder: pathlib.Path) -> None:
        self.cluster = cluster
        self.file = folder / "models.yaml"
        config = yaml.safe_load(CONFIG.read_text())
        self.url = f"http://127.0.0.1:{free_port()}"
        config["http_options"]["port"] = int(self.url.rpartition(":")[2])
        config["proxy_location"] = "Disabled"
        address = config["applications"][0]
        address["args"] |= {"http_server": "listener", "port": config["http_options"]["port"], "drain_timeout_s": 1.0}
        self._base = config | {"applications": [address]}
        self.models = {family: str(checkpoint(family)) for family in FAMILIES}
        self.options: dict[str, dict[str, Any]] = {family: {} for family in FAMILIES}

    def deploy(self) -> None:
        models = [
            {
                "name": f"engines-{name}",
                "route_prefix": None,
                "import_path": "manta.cluster.serve.app:build_model",
                "args": {
                    "name": name,
                    "engine": {"model": folder, "dtype": "float32", "kv_cache_bytes": 8 << 20},
                    **self.options.get(name, {}),
                },
            }
            for name, folder in self.models.items()
        ]
        self.file.write_text(yaml.safe_dump(self._base | {"applications": [*self._base["applications"], *models]}))
        deploy = ("serve", "deploy", "--address", self.cluster.address, self.file)
        until(lambda: self.cluster.run(*deploy).returncode == 0)

    def states(self) -> dict[str, str]:
        with contextlib.suppress(httpx.TransportError):
            return {card["id"]: card["state"] for card in httpx.get(f"{self.url}/v1/models").json()["data"]}
        return {}

    def process_ids(self) -> dict[str, set[int]]:
        """Returns the processes of the replicas of each application."""
        found = self.cluster.get("/api/serve/applications/")["applications"]
        return {
            name: {replica["pid"] for each in details["deployments"].values() for replica in each["replicas"]}
            for name, details in found.items()
        }

    def text(self, model: str) -> str:
        answer = httpx.post(f"{self.url}/v1/completions", json=BODY | {"model": model}, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        return "".join(httpx.Response(200, text=line[6:]).json()["choices"][0]["text"] for line in lines)


class Asking:
    """Asks for one model's text again and again, and compares each with the first."""

    def __init__(self, deployed: Deployed, model: str) -> None:
        self._deployed, self._model = deployed, model
        self._expected = deployed.text(model)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.num_asked = 0
        self.faults: list[str] = []
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                text = self._deployed.text(self._model)
            except (AssertionError, httpx.HTTPError) as error:
                self.faults.append(repr(error))
            else:
                self.num_asked += 1
                if text != self._expected:
                    self.faults.append(text)

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with ray_cluster(num_cpus=4) as cluster:
        cluster.environment["RAY_ADDRESS"] = f"127.0.0.1:{cluster.port}"
        until(lambda: cluster.run("ray", "status").returncode == 0)
        made = Deployed(cluster, tmp_path_factory.mktemp("models"))
        made.deploy()
        until(lambda: made.states() == dict.fromkeys(sorted(FAMILIES), "loaded"))
        yield made


def test_one_models_faults_and_changes_reach_no_other(deployed: Deployed, tmp_path: pathlib.Path) -> None:
    texts = {family: deployed.text(family) for family in FAMILIES}
    assert len(set(texts.values())) == len(FAMILIES)
    before = deployed.process_ids()
    asking = Asking(deployed, "llama")
    try:
        (victim,) = before["engines-qwen2"]
        psutil.Process(victim).kill()
        until(lambda: deployed.process_ids()["engines-qwen2"] not in (set(), {victim}))
        assert deployed.text("qwen2") == texts["qwen2"]

        deployed.options["qwen2"] = {"aliases": ["q"]}
        deployed.deploy()
        until(lambda: deployed.states().get("q") == "loaded")
        assert deployed.text("q") == texts["qwen2"]

        deployed.models["broken"] = str(tmp_path)
        deployed.deploy()
        until(lambda: deployed.states().get("broken") == "failed")

        del deployed.models["broken"], deployed.models["gpt_neox"]
        deployed.deploy()
        until(lambda: set(deployed.states()) == {"llama", "qwen2", "q"})
    finally:
        asking.stop()
    assert not asking.faults
    assert asking.num_asked > 2
    after = deployed.process_ids()
    for application in ("manta", "engines-llama"):
        assert after[application] == before[application]

"""Three models of different families at one address on an own Ray: one is killed, updated, removed and one fails
to load, while another answers without a pause and in the same processes.
"""

from __future__ import annotations

import json
import pathlib
import threading
from collections.abc import Iterator

import httpx
import psutil
import pytest
from ray import serve
from ray.serve.context import _get_global_client as get_client

from benchmarks.processes import free_port
from manta.cluster.config import EngineConfig, ServeConfig, ServedModel
from manta.cluster.serve import app
from manta.cluster.serve.fleet.model_application import model_application, placed_model
from manta.structured.host import num_cores
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.prove

FAMILIES = ("llama", "qwen2", "gpt_neox")
BODY = {"prompt": [5, 9, 17, 30], "temperature": 0, "ignore_eos": True, "max_tokens": 200, "stream": True}


def served(family: str, *aliases: str, folder: pathlib.Path | None = None) -> ServedModel:
    model = str(folder or checkpoint(family))
    engine = EngineConfig(model=model, dtype="float32", kv_cache_bytes=8 << 20)
    return ServedModel(name=family, aliases=aliases, engine=engine)


class Deployed:
    """The address and its models, which this process has started."""

    def __init__(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        models = tuple(map(served, FAMILIES))
        loaded = app.start(ServeConfig(models=models, port=port, drain_timeout_s=1.0))
        assert len(loaded) == len(FAMILIES)

    def deploy(self, model: ServedModel) -> None:
        """Deploys one model's application, as `serve deploy` does if only this one has changed."""
        made = model_application(placed_model(model, [num_cores()]), app.APP_NAME)
        target = serve.RunTarget(made, f"{app.APP_NAME}.{model.model_name}", None)
        serve.run_many([target], wait_for_applications_running=False)

    def states(self) -> dict[str, str]:
        cards = httpx.get(f"{self.url}/v1/models", timeout=PATIENCE_S).json()["data"]
        return {card["id"]: card["state"] for card in cards}

    def process_ids(self) -> dict[str, set[int]]:
        """Returns the processes of the replicas of each application, as far as they have started."""
        client = get_client()
        assert client is not None
        return {
            name: {
                replica["pid"]
                for each in details["deployments"].values()
                for replica in each["replicas"]
                if replica.get("pid") is not None
            }
            for name, details in client.get_serve_details()["applications"].items()
        }

    def text(self, model: str) -> str:
        answer = httpx.post(f"{self.url}/v1/completions", json=BODY | {"model": model}, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        return "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines)


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
def deployed() -> Iterator[Deployed]:
    try:
        yield Deployed()
    finally:
        app.stop()


def test_one_models_faults_and_changes_reach_no_other(deployed: Deployed, tmp_path: pathlib.Path) -> None:
    texts = {family: deployed.text(family) for family in FAMILIES}
    assert len(set(texts.values())) == len(FAMILIES)
    before = deployed.process_ids()
    asking = Asking(deployed, "llama")
    try:
        (victim,) = before["manta.qwen2"]
        psutil.Process(victim).kill()
        wait_until(lambda: not deployed.process_ids()["manta.qwen2"] <= {victim}, poll_s=0.5)
        assert deployed.text("qwen2") == texts["qwen2"]

        deployed.deploy(served("qwen2", "q"))
        wait_until(lambda: deployed.states().get("q") == "loaded", poll_s=0.5)
        assert deployed.text("q") == texts["qwen2"]

        deployed.deploy(served("broken", folder=tmp_path))
        wait_until(lambda: deployed.states().get("broken") == "failed", poll_s=0.5)
        assert httpx.post(f"{deployed.url}/v1/completions", json=BODY | {"model": "broken"}).status_code == 503

        serve.delete("manta.broken")
        serve.delete("manta.gpt_neox")
        wait_until(lambda: set(deployed.states()) == {"llama", "qwen2", "q"}, poll_s=0.5)
    finally:
        asking.stop()
    assert not asking.faults
    assert asking.num_asked > 2
    after = deployed.process_ids()
    for application in ("manta", "manta.llama"):
        assert after[application] == before[application]

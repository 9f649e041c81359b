"""Three models of different families at one address on an own Ray: one is killed, updated, unloaded, removed, one is
added and one fails to load, all under load. The streams of another one, each longer than an ingress's grace period,
have the same text as before, from the same processes. What was changed outlives the loader and Serve's controller. A
hot model uses all its engines.
"""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest
from ray.serve.context import _get_global_client as get_client

from benchmarks.processes import free_port
from manta.cluster.cli.__main__ import main
from manta.cluster.config import EngineConfig, ServeConfig, ServedModel
from manta.cluster.serve import app
from manta.cluster.serve.fleet.loader_deployment import LOADER
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S, wait_until
from tests.processes import running_below

pytestmark = pytest.mark.prove

FAMILIES = ("llama", "qwen2", "gpt_neox")
BODY = {"prompt": [5, 9, 17, 30], "temperature": 0, "ignore_eos": True, "max_tokens": 200, "stream": True}
LONG = {"max_tokens": 6000}
"""The length of the streams that nothing may touch."""
DRAIN_S = 0.5
"""The grace period of an ingress, `drain_timeout_s`."""
HOT, NUM_AT_ONCE = "gpt_neox", 8
"""The model with two engines, and its streams at the same time."""
SIZES = {"llama": {"max_position_embeddings": 8192}}


def served(family: str) -> ServedModel:
    engine = EngineConfig(
        model=str(checkpoint(family, **SIZES.get(family, {}))), dtype="float32", kv_cache_bytes=8 << 20
    )
    return ServedModel(name=family, engine=engine, num_engine_replicas=2 if family == HOT else 1)


class Deployed:
    """The address and its models, which this process has started."""

    def __init__(self, root: pathlib.Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        models = tuple(map(served, FAMILIES))
        self.port = str(port)
        roots = (str(checkpoint("llama").parent), str(root))
        loaded = app.start(ServeConfig(models=models, model_roots=roots, port=port, drain_timeout_s=DRAIN_S))
        assert [*loaded] == [*FAMILIES]

    def manta(self, *arguments: str) -> int:
        """Returns the exit code of `manta models`."""
        return main(["models", *arguments, "--port", self.port])

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

    def loader_process(self) -> int | None:
        """Returns the process of the loader; None if Serve tells none that runs."""
        client = get_client()
        assert client is not None
        replicas = client.get_serve_details()["applications"][app.APP_NAME]["deployments"][LOADER]["replicas"]
        return next((each["pid"] for each in replicas if each["state"] == "RUNNING"), None)

    def text(self, model: str, **more: object) -> str:
        """Returns the text of a stream that has come to its end."""
        answer = httpx.post(f"{self.url}/v1/completions", json=BODY | more | {"model": model}, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        *lines, last = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert last == "[DONE]"
        choices = [json.loads(line)["choices"][0] for line in lines]
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
        return "".join(choice["text"] for choice in choices)


class Asking:
    """Asks for one model's stream again and again, and compares the text of each with that of the first."""

    def __init__(self, deployed: Deployed, model: str, **more: object) -> None:
        self._deployed, self._model, self._more = deployed, model, more
        self._expected = deployed.text(model, **more)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seconds: list[float] = []
        """Duration of each stream."""
        self.faults: list[str] = []
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            begun = time.monotonic()
            try:
                text = self._deployed.text(self._model, **self._more)
            except (AssertionError, httpx.HTTPError) as error:
                self.faults.append(repr(error))
                continue
            self.seconds.append(time.monotonic() - begun)
            if text != self._expected:
                self.faults.append(text)

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder of models with one that cannot be loaded."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "broken").mkdir()
    return folder


@pytest.fixture(scope="module")
def deployed(root: pathlib.Path) -> Iterator[Deployed]:
    try:
        yield Deployed(root)
    finally:
        app.stop()


def test_a_hot_model_is_not_pinned_to_one_engine(deployed: Deployed) -> None:
    with concurrent.futures.ThreadPoolExecutor(NUM_AT_ONCE) as threads:

        def are_all_used() -> bool:
            texts = set(threads.map(deployed.text, [HOT] * NUM_AT_ONCE))
            assert len(texts) == 1
            engines = httpx.get(f"{deployed.url}/status", timeout=PATIENCE_S).json()["engines"]
            return sum(each["model"] == HOT and each["requests_per_s"] > 0 for each in engines) == 2

        wait_until(are_all_used)


def test_one_models_faults_and_changes_reach_no_other(
    deployed: Deployed, record_property: Callable[[str, object], None]
) -> None:
    texts = {family: deployed.text(family) for family in FAMILIES}
    assert len(set(texts.values())) == len(FAMILIES)
    before = deployed.process_ids()
    asking = Asking(deployed, "llama", **LONG)
    changed = Asking(deployed, "qwen2")
    try:
        (victim,) = before["manta.qwen2"]
        psutil.Process(victim).kill()
        wait_until(lambda: not deployed.process_ids()["manta.qwen2"] <= {victim}, poll_s=0.5)
        assert deployed.text("qwen2") == texts["qwen2"]

        engines = deployed.process_ids()["manta.qwen2"]
        assert deployed.manta("update", "qwen2", "--set", "aliases=[q]", "--set", "engine.max_model_len=300") == 0
        wait_until(lambda: deployed.process_ids()["manta.qwen2"].isdisjoint(engines), poll_s=0.5)
        assert deployed.text("q") == texts["qwen2"]

        assert deployed.manta("add", "broken=broken") == 1
        assert deployed.states()["broken"] == "failed"
        assert httpx.post(f"{deployed.url}/v1/completions", json=BODY | {"model": "broken"}).status_code == 503

        for name in ("broken", "gpt_neox"):
            assert deployed.manta("remove", name) == 0
        assert set(deployed.states()) == {"llama", "qwen2", "q"}
        wait_until(lambda: set(deployed.process_ids()) == {"manta", "manta.llama", "manta.qwen2"}, poll_s=0.5)

        added = ("--set", "engine.dtype=float32", "--set", "engine.kv_cache_bytes=8MiB")
        assert deployed.manta("add", f"added={checkpoint('gpt_neox').name}", *added) == 0
        assert deployed.text("added") == texts["gpt_neox"]

        assert deployed.manta("add", f"spare={checkpoint('gpt_neox').name}", "--on-demand", *added) == 0
        spare = Asking(deployed, "spare")
        try:
            (engine,) = deployed.process_ids()["manta.spare"]
            assert httpx.post(f"{deployed.url}/models/unload", json={"model": "spare"}).json() == {"success": True}
            wait_until(lambda: deployed.process_ids().get("manta.spare", set()) not in (set(), {engine}), poll_s=0.5)
        finally:
            spare.stop()
        assert not spare.faults
    finally:
        asking.stop()
        changed.stop()
    assert not asking.faults
    assert not changed.faults
    assert len(asking.seconds) > 2
    assert max(asking.seconds) > DRAIN_S
    record_property("streams", len(asking.seconds))
    record_property("longest stream s", f"{max(asking.seconds):.1f}")
    after = deployed.process_ids()
    for application in ("manta", "manta.llama"):
        assert after[application] == before[application]


def test_what_operators_have_changed_outlives_the_loader_and_the_controller(deployed: Deployed) -> None:
    states, before, loader = deployed.states(), deployed.process_ids(), deployed.loader_process()
    for controller in running_below(None, "ray::ServeController"):
        controller.kill()
    psutil.Process(loader).kill()
    wait_until(lambda: deployed.loader_process() not in (loader, None), poll_s=0.5)
    assert deployed.manta("add", "later=demo", "--on-demand") == 0
    assert deployed.states() == states | {"later": "unloaded"}
    after = deployed.process_ids()
    models = [name for name in before if name != app.APP_NAME]
    assert [after[name] for name in models] == [before[name] for name in models]

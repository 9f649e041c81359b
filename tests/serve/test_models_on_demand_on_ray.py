"""A folder of models with room for a few of them, on an own Ray: requests in random order load and unload them, one of
them fails, and the loader is killed meanwhile.
"""

from __future__ import annotations

import concurrent.futures
import pathlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest
import ray
from ray.serve.context import _get_global_client as get_client

from benchmarks.processes import free_port
from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.serve import app
from manta.cluster.serve_limits import ListenerLimits
from manta.structured.host import num_cores
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.prove

NUM_MODELS = 20
NUM_REQUESTS = 200
NUM_AT_ONCE = 4
MAX_LOADED = 3
BROKEN = "m7"
FAMILIES = ("llama", "qwen2", "gpt_neox")
BODY = {"prompt": [5, 9, 17, 30], "temperature": 0, "ignore_eos": True, "max_tokens": 20}


def applications() -> dict[str, Any]:
    client = get_client()
    assert client is not None
    found: dict[str, Any] = client.get_serve_details()["applications"]
    return found


def process_of(deployment: str) -> int | None:
    """Returns the process id of the only replica of a deployment of the address that runs; None if there is none."""
    replicas = applications()[app.APP_NAME]["deployments"][deployment]["replicas"]
    return next((each["pid"] for each in replicas if each["state"] == "RUNNING"), None)


def num_claimed() -> float:
    """Returns the CPUs that actors and placement groups claim of Ray."""
    return ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0)


class Counting:
    """Counts the applications of models again and again, those that fail and those that Serve is deleting included, and
    the cores that are claimed.
    """

    def __init__(self) -> None:
        self.most = 0
        self.claims: set[float] = set()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(0.2):
            self.most = max(self.most, len(applications().keys() - {app.APP_NAME}))
            self.claims.add(num_claimed())

    def stop(self) -> int:
        self._is_over.set()
        self._thread.join()
        return self.most


@pytest.fixture
def url(tmp_path: pathlib.Path) -> Iterator[str]:
    for number in range(NUM_MODELS):
        (tmp_path / f"m{number}").symlink_to(checkpoint(FAMILIES[number % len(FAMILIES)]))
    (tmp_path / BROKEN).unlink()
    (tmp_path / BROKEN).mkdir()
    (tmp_path / BROKEN / "config.json").write_text("{}")
    port = free_port()
    config = ServeConfig(
        models_dir=str(tmp_path),
        max_loaded_models=MAX_LOADED,
        min_loaded_s=0.0,
        engine=EngineConfig(dtype="float32", kv_cache_bytes=8 << 20),
        listener=ListenerLimits(header_timeout_s=PATIENCE_S),
        port=port,
    )
    try:
        assert app.start(config) == {}
        yield f"http://127.0.0.1:{port}"
    finally:
        app.stop()


def test_a_folder_of_models_shares_a_few_places(url: str, record_property: Callable[[str, object], None]) -> None:
    draw, texts = random.Random(1), dict[str, str]()
    asked = [f"m{draw.randrange(NUM_MODELS)}" for _ in range(NUM_REQUESTS)]
    ingress, loader = process_of("ingress"), process_of("loader")
    assert loader is not None

    def ask(name: str) -> tuple[str, int, str]:
        answer = httpx.post(f"{url}/v1/completions", json=BODY | {"model": name}, timeout=PATIENCE_S)
        return name, answer.status_code, answer.text if answer.is_error else answer.json()["choices"][0]["text"]

    counting = Counting()
    try:
        with concurrent.futures.ThreadPoolExecutor(NUM_AT_ONCE) as threads:
            for number, (name, status, text) in enumerate(threads.map(ask, asked)):
                assert status == (503 if name == BROKEN else 200), f"{name}: {text}"
                if name != BROKEN:
                    assert texts.setdefault(name, text) == text
                if number == NUM_REQUESTS // 2:
                    assert process_of("loader") == loader, "several starts at once have ended it"
                    psutil.Process(loader).kill()
    finally:
        most = counting.stop()
    assert most <= MAX_LOADED
    assert counting.claims <= {0.0, float(num_cores())}, "the models share their cores"
    assert float(num_cores()) in counting.claims
    record_property("requests", len(asked))
    record_property("loaded at most", most)
    of_family = {family: {text for name, text in texts.items() if is_of(name, family)} for family in FAMILIES}
    assert all(len(found) <= 1 for found in of_family.values())
    assert process_of("ingress") == ingress

    def states() -> dict[str, str]:
        cards = httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).json()["data"]
        return {card["id"]: card["state"] for card in cards}

    assert len(states()) == NUM_MODELS
    assert [name for name, state in states().items() if state == "failed"] == [BROKEN] * (BROKEN in asked)
    for name in [name for name, state in states().items() if state != "unloaded"]:
        assert httpx.post(f"{url}/models/unload", json={"model": name}).json() == {"success": True}
    wait_until(lambda: set(states().values()) == {"unloaded"}, poll_s=0.5)
    wait_until(lambda: set(applications()) == {app.APP_NAME}, poll_s=0.5)
    wait_until(lambda: num_claimed() == 0, poll_s=0.5)
    assert httpx.post(f"{url}/models/load", json={"model": "m0"}).json() == {"success": True}
    wait_until(lambda: states()["m0"] == "loaded", poll_s=0.5)


def is_of(name: str, family: str) -> bool:
    return FAMILIES[int(name.removeprefix("m")) % len(FAMILIES)] == family

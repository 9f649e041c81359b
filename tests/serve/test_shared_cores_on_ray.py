"""Models on demand of an address on a cluster that runs already, of one node with two cores: while one or two of them
are loaded they claim these cores once, and while none is loaded they claim none.
"""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from collections.abc import Iterator

import httpx
import pytest
import ray
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

from benchmarks.processes import free_port
from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.serve import app
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S, wait_until
from tests.serve.test_joined_ray import Cluster

pytestmark = pytest.mark.prove

MODELS = {"a": checkpoint("llama"), "b": checkpoint("qwen2")}


@pytest.fixture
def port(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ray-"))  # Ray's sockets lie in it, and their paths are bounded
    cluster = Cluster(folder)
    for name, model in MODELS.items():
        (tmp_path / name).symlink_to(model)
    for name, value in {"RAY_ADDRESS": cluster.address, "HOME": str(cluster.home)}.items():
        monkeypatch.setenv(name, value)
    AuthenticationTokenLoader.instance().reset_cache()
    port = free_port()
    engine = EngineConfig(dtype="float32", kv_cache_bytes=8 << 20)
    try:
        assert app.start(ServeConfig(models_dir=str(tmp_path), min_loaded_s=0.0, engine=engine, port=port)) == {}
        yield port
    finally:
        app.stop()
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
        AuthenticationTokenLoader.instance().reset_cache()


def num_claimed() -> float:
    return ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0)


def test_loaded_models_claim_their_cores_once_together(port: int) -> None:
    url = f"http://127.0.0.1:{port}"

    def ask(name: str) -> None:
        body = {"model": name, "prompt": [5, 9, 17], "max_tokens": 2}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text

    assert num_claimed() == 0
    for name in MODELS:
        ask(name)
        wait_until(lambda: num_claimed() == 2)
    for name in MODELS:
        assert num_claimed() == 2
        assert httpx.post(f"{url}/models/unload", json={"model": name}).json() == {"success": True}
    wait_until(lambda: num_claimed() == 0)
    ask("a")
    wait_until(lambda: num_claimed() == 2)

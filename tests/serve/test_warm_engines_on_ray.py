"""Models on demand on an own Ray: their engines are forks of a warm process, and each of the three processes dies."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import httpx
import psutil
import pytest

from benchmarks.processes import free_port
from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.serve import app
from manta.cluster.serve.starting import warm_process
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S, wait_until
from tests.processes import running_below

pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(not warm_process.is_possible(), reason="this system has no warm processes"),
]

NAMES = pathlib.Path("/proc/net/unix")
BODY = {"model": "m0", "prompt": [5, 9, 17, 30], "temperature": 0, "ignore_eos": True, "max_tokens": 20}


@pytest.fixture
def url(tmp_path: pathlib.Path) -> Iterator[str]:
    (tmp_path / "m0").symlink_to(checkpoint("llama"))
    port = free_port()
    engine = EngineConfig(dtype="float32", kv_cache_bytes=8 << 20)
    config = ServeConfig(models_dir=str(tmp_path), min_loaded_s=0.0, engine=engine, port=port)
    try:
        assert app.start(config) == {}
        wait_until(lambda: listening() != [])
        yield f"http://127.0.0.1:{port}"
    finally:
        app.stop()


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def listening() -> list[psutil.Process]:
    """Returns the warm processes, if one answers."""
    if not any("@manta-warm-" in line and " 00010000 " in line for line in NAMES.read_text().splitlines()):
        return []
    return [each for each in psutil.process_iter() if warm_process.WARM in command_of(each)]


def engines() -> list[psutil.Process]:
    return [each for each in psutil.process_iter() if any("m0:engine" in word for word in command_of(each))]


def ask(url: str) -> str:
    answer = httpx.post(f"{url}/v1/completions", json=BODY, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_a_model_outlives_the_death_of_each_process(url: str) -> None:
    text = ask(url)
    (warm,), (engine,) = listening(), engines()
    assert engine.parent() == warm, "the engine is a fork"
    (stand_in,) = running_below(None, warm_process.MODULE)
    warm.kill()
    assert ask(url) == text
    assert engines() == [engine]
    stand_in.kill()
    psutil.wait_procs([engine], timeout=PATIENCE_S)
    assert not engine.is_running()
    assert ask(url) == text
    (second,) = engines()
    second.kill()
    assert ask(url) == text
    assert engines() != [second]
    assert httpx.post(f"{url}/models/unload", json={"model": "m0"}).json() == {"success": True}
    wait_until(lambda: engines() == [])
    wait_until(lambda: listening() != [])
    assert ask(url) == text
    (third,) = engines()
    assert third.parent() in listening()

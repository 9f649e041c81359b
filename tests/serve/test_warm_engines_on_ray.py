"""Models on demand on an own Ray: their engines are forks of a warm process, and each of the three processes dies. A
model that sleeps costs next to no memory.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterable, Iterator

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
NUM_SLEEPING = 6
WARM_BYTES, SLEEPING_BYTES = 300_000_000, 10_000_000
"""Most memory of the warm process, and of each further model that was used and sleeps."""
BODY = {"prompt": [5, 9, 17, 30], "temperature": 0, "ignore_eos": True, "max_tokens": 20}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models")
    for number in range(NUM_SLEEPING):
        (folder / f"m{number}").symlink_to(checkpoint("llama", vocab_size=320 + number))
    port = free_port()
    engine = EngineConfig(dtype="float32", kv_cache_bytes=8 << 20)
    config = ServeConfig(models_dir=str(folder), min_loaded_s=0.0, engine=engine, port=port)
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
    """Returns the warm processes of the tests' own Ray, if one answers."""
    if not any("@manta-warm-" in line and " 00010000 " in line for line in NAMES.read_text().splitlines()):
        return []
    raylets = {str(each.pid) for each in running_below(None, "raylet")}
    warm = [each for each in psutil.process_iter() if warm_process.WARM in command_of(each)]
    return [each for each in warm if each.environ().get(warm_process.RAYLET) in raylets]


def engines() -> list[psutil.Process]:
    return [
        each
        for each in psutil.process_iter()
        if any("manta.m" in word and ":engine" in word for word in command_of(each))
    ]


def only_engine() -> psutil.Process:
    """Returns the engine, as soon as there is one. While Ray calls it, its title may be another one."""
    found: list[psutil.Process] = []

    def is_one() -> bool:
        found[:] = engines()
        return len(found) == 1

    wait_until(is_one)
    return found[0]


def ask(url: str, model: str = "m0") -> str:
    answer = httpx.post(f"{url}/v1/completions", json=BODY | {"model": model}, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def unload(url: str, model: str = "m0") -> None:
    assert httpx.post(f"{url}/models/unload", json={"model": model}).json() == {"success": True}
    wait_until(lambda: engines() == [])


def num_bytes(processes: Iterable[psutil.Process]) -> int:
    """Returns the memory of processes, in bytes. Of pages that k processes share each counts 1/k."""
    total = 0
    for each in processes:
        with contextlib.suppress(psutil.Error):
            total += each.memory_full_info().pss
    return total


def test_a_sleeping_model_costs_next_to_nothing(url: str, record_property: Callable[[str, object], None]) -> None:
    """In all processes of the server: those of Ray and of Serve, the ingress, the loader and the warm process."""
    for _ in range(2):  # the first time, each process fills caches
        ask(url)
        unload(url)
    before = num_bytes([*running_below(None), *listening()])
    for number in range(1, NUM_SLEEPING):
        ask(url, f"m{number}")
        unload(url, f"m{number}")
    grown = (num_bytes([*running_below(None), *listening()]) - before) / (NUM_SLEEPING - 1)
    warm = num_bytes(listening())
    record_property("MB of a sleeping model", f"{grown / 1e6:.1f}")
    record_property("MB of the warm process", f"{warm / 1e6:.0f}")
    assert grown <= SLEEPING_BYTES
    assert 0 < warm <= WARM_BYTES


def test_a_model_outlives_the_death_of_each_process(url: str) -> None:
    text = ask(url)
    (warm,), engine = listening(), only_engine()
    assert engine.parent() == warm, "the engine is a fork"
    (stand_in,) = running_below(None, warm_process.MODULE)
    warm.kill()
    assert ask(url) == text
    assert only_engine() == engine
    stand_in.kill()
    psutil.wait_procs([engine], timeout=PATIENCE_S)
    assert not engine.is_running()
    assert ask(url) == text
    second = only_engine()
    second.kill()
    assert ask(url) == text
    assert only_engine() != second
    unload(url)
    wait_until(lambda: listening() != [])
    assert ask(url) == text
    assert only_engine().parent() in listening()

"""An engine with ranks behind `manta serve` and in a program of its own, on a Ray that Manta starts for it."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from manta.cluster.llm import LLM, SamplingParams
from tests.adapters import adapters_of
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S, wait_until
from tests.processes import running_below
from tests.server import Server

pytestmark = pytest.mark.prove

PROMPT = [5, 6, 7]
NUM_TOKENS = 40

OFFLINE = """
import sys
from manta.cluster.llm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", kv_cache_bytes=1 << 24, tensor_parallel_size=4)
params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
print(*llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids)
"""


def expected() -> tuple[str, list[int]]:
    llm = LLM(str(checkpoint("llama")), dtype="float32", kv_cache_bytes=1 << 23, num_threads=1)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    return output.outputs[0].text, output.outputs[0].token_ids


def test_a_model_on_two_ranks_survives_their_death() -> None:
    text, _ = expected()
    server = Server("engine.tensor_parallel_size=2")

    def answers() -> bool:
        body = {"model": server.model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        status, _, answer = server.post("/v1/completions", body)
        assert status != 200 or answer["choices"][0]["text"] == text
        return status == 200

    try:
        assert answers()
        for number in (1, 2):
            running_below(server.process.pid, "RankActor")[number - 1].send_signal(signal.SIGKILL)
            assert answers()
            assert server.metrics()["manta:rank_rebuilds_total"] == number
        assert server.metrics()["manta:rank_disagreements_total"] == 0
        ranks = running_below(server.process.pid, "RankActor")
        assert len(ranks) == 2
        (engine,) = running_below(server.process.pid, "ServeReplica:manta:engine")
        engine.send_signal(signal.SIGKILL)
        wait_until(lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks))
        wait_until(answers)
        assert len(running_below(server.process.pid, "RankActor")) == 2
    finally:
        server.stop()


def test_adapters_are_loaded_on_all_ranks_and_outlive_them(tmp_path: pathlib.Path) -> None:
    """A rank dies while requests with the old and the new values run, and another one between requests."""
    made = adapters_of(checkpoint("llama"))
    expected = {}
    for seed, name in enumerate(("earlier", "later")):
        made.add(name, 80 + seed)
        expected[name] = made.greedy(PROMPT, name, NUM_TOKENS)
    server = Server("engine.tensor_parallel_size=2", "engine.dtype=float32", f"engine.adapter_roots=['{tmp_path}']")

    def put(name: str) -> None:
        shutil.copytree(made.folders[name], tmp_path / "live", dirs_exist_ok=True)
        body = {"lora_name": "live", "lora_path": "live", "load_inplace": True}
        status, _, answer = server.post("/v1/load_lora_adapter", body)
        assert (status, list(answer["loaded_adapters"])) == (200, ["live"])

    def tokens() -> list[int]:
        body = {"model": "live", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        status, _, answer = server.post("/v1/completions", body | {"return_token_ids": True})
        assert status == 200, answer
        found: list[int] = answer["choices"][0]["token_ids"]
        return found

    try:
        put("earlier")
        assert tokens() == expected["earlier"]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            before = [pool.submit(tokens) for _ in range(8)]
            put("later")
            after = [pool.submit(tokens) for _ in range(8)]
            running_below(server.process.pid, "RankActor")[1].send_signal(signal.SIGKILL)
            assert all(each.result(PATIENCE_S) in expected.values() for each in before)
            assert [each.result(PATIENCE_S) for each in after] == [expected["later"]] * 8
        shutil.rmtree(tmp_path / "live")
        running_below(server.process.pid, "RankActor")[0].send_signal(signal.SIGKILL)
        assert tokens() == expected["later"], "from the copy, which the new ranks read"
        assert server.metrics()["manta:rank_rebuilds_total"] == 2
    finally:
        server.stop()


def test_four_ranks_draw_one_processs_tokens() -> None:
    """They may have more threads than this machine has cores."""
    root = str(pathlib.Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    command = [sys.executable, "-c", OFFLINE, str(checkpoint("llama"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S)
    assert done.stdout.split() == [str(token) for token in expected()[1]], done.stderr

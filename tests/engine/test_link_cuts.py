"""The link between two nodes is cut for some seconds: ranks on both, and streams from the other node's engine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from manta.cluster.llm import LLM, SamplingParams
from tests.checkpoints import checkpoint
from tests.two_nodes import TwoNodes, wait_for_line

pytestmark = pytest.mark.prove

PROMPTS = [[5, 9, 17, 30 + number] for number in range(4)]
NUM_TOKENS = 400

DRIVER = """
import json, sys
from manta.cluster.llm import LLM, SamplingParams
folder, prompts, num_tokens = json.loads(sys.argv[1])
options = {"dtype": "float32", "kv_cache_bytes": 1 << 23, "num_threads": 1}
llm = LLM(folder, **options, tensor_parallel_size=2, placement_strategy="STRICT_SPREAD")
params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
print("ready", flush=True)
for number, _ in enumerate(sys.stdin):
    ids = [f"{number}-{index}" for index in range(len(prompts))]
    for request_id, prompt in zip(ids, prompts):
        llm.add_request(request_id, prompt, params)
    ended, num_steps = {}, 0
    while len(ended) < len(ids):
        ended |= {each.request_id: each.outputs[0].token_ids for each in llm.step() if each.finished}
        num_steps += 1
        if num_steps == 20:
            print("runs", flush=True)
    print(json.dumps([[ended[each] for each in ids], llm.engine.stats().num_rank_rebuilds]), flush=True)
"""


@pytest.fixture(scope="module")
def driver(namespaces: TwoNodes) -> Iterator[subprocess.Popen[str]]:
    """An engine on the head with a rank on each node. A line that it is sent starts a run."""
    arguments = json.dumps([str(checkpoint("llama", dtype="float32")), PROMPTS, NUM_TOKENS])
    process = namespaces.head.popen([sys.executable, "-c", DRIVER, arguments], namespaces.environment)
    wait_for_line(process, "ready")
    yield process
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    llm = LLM(str(checkpoint("llama", dtype="float32")), dtype="float32", kv_cache_bytes=1 << 23, num_threads=1)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def start_run(driver: subprocess.Popen[str]) -> None:
    assert driver.stdin is not None
    driver.stdin.write("\n")
    driver.stdin.flush()
    wait_for_line(driver, "runs")


def end_of_run(driver: subprocess.Popen[str]) -> tuple[list[list[int]], int]:
    """Tokens of each prompt, and how often the ranks have been started anew so far."""
    tokens, num_rebuilds = json.loads(wait_for_line(driver, "[[").splitlines()[-1])
    return tokens, num_rebuilds


@pytest.mark.parametrize("seconds", [1, 5, 30])
def test_ranks_on_both_nodes_go_on(
    namespaces: TwoNodes, driver: subprocess.Popen[str], expected: list[list[int]], seconds: int, record_property
) -> None:
    start_run(driver)
    with namespaces.worker.cut_off():
        time.sleep(seconds)
    if seconds > 20:
        namespaces.keep_worker()
    restored = time.monotonic()
    tokens, num_rebuilds = end_of_run(driver)
    record_property("pause after the link came back, s", round(time.monotonic() - restored, 2))
    record_property("ranks started anew so far", num_rebuilds)
    assert tokens == expected
    start_run(driver)
    assert end_of_run(driver) == (expected, num_rebuilds), "it serves on as before"

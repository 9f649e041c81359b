"""The executor over Ray actors: the tokens of the engine's own process, on one node or two, and through any rank's end.

A real Ray of two nodes on this machine. One engine serves most tests: what one of them breaks, the next one finds
rebuilt.
"""

from __future__ import annotations

import gc
import os
import pathlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from cluster.config import EngineConfig
from cluster.engine.engine import EngineDead
from cluster.engine.ranks import deadline
from cluster.engine.ranks.channel import Hello, Listener, RankChannel, RankLost
from cluster.engine.ranks.claims import CannotPlace, check_room, num_claimed, own_cpus, threads_each
from cluster.engine.ranks.deadline import StepDeadline
from cluster.engine.ranks.executor import RayExecutor
from cluster.engine.ranks.messages import Masks
from cluster.llm import LLM, ConstraintSpec, LogitsProcessorSpec, RequestOutput, SamplingParams
from structured.masks import LATE, NO_MASK, MaskBatch
from tests.checkpoints import checkpoint
from tests.grammar_pools import wait_until

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(240)

PROVE = os.environ.get("MANTA_PROVE") == "1"
ROOT = str(pathlib.Path(__file__).resolve().parents[1])
OPTIONS: dict[str, Any] = {"kv_cache_bytes": 1 << 24, "num_threads": 1, "max_num_sequences": 32}
PROMPTS = [[5, 6, 7], [8, 9], [30, 31, 32, 33], [40]]
NUM_TOKENS = 24


class Only:
    """A logits processor that leaves one token, another one at each position."""

    def __init__(self, arguments: dict[str, Any], prompt: Any, output: Any, vocab_size: int) -> None:
        self.first = arguments["first"]

    def __call__(self, output: np.ndarray, logits: Any) -> None:
        logits[: self.first + len(output)] = -float("inf")
        logits[self.first + len(output) + 1 :] = -float("inf")


def params() -> list[SamplingParams]:
    """Greedy, seeded with logprobs, several choices, under a grammar, with a processor."""
    common: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    regex = ConstraintSpec(kind="regex", text="[a-f]{8}-[0-9]{60}")
    return [
        SamplingParams(temperature=0, **common),
        SamplingParams(seed=7, logprobs=2, prompt_logprobs=1, **common),
        SamplingParams(seed=3, n=3, repetition_penalty=1.2, **common),
        SamplingParams(seed=5, constraint=regex, **common),
        SamplingParams(logits_processors=(LogitsProcessorSpec(name="only", arguments={"first": 50}),), **common),
    ]


def submit(llm: LLM) -> list[str]:
    prompts = [*PROMPTS, PROMPTS[0]]
    ids = [f"{next(llm._ids)}" for _ in prompts]
    for request_id, prompt, one in zip(ids, prompts, params(), strict=True):
        llm.add_request(request_id, prompt, one)
    return ids


def finish(llm: LLM, ids: list[str]) -> list[list[tuple[Any, ...]]]:
    """What tells two runs apart: tokens, log-probabilities and ends."""
    ended: dict[str, RequestOutput] = {}
    while len(ended) < len(ids):
        ended |= {output.request_id: output for output in llm.step() if output.finished}
    llm.step()  # checks that nothing leaked
    return [
        [(choice.token_ids, choice.logprobs, choice.finish_reason, choice.error) for choice in ended[one].outputs]
        for one in ids
    ]


def executor(llm: LLM) -> RayExecutor:
    assert isinstance(llm.engine.executor, RayExecutor)
    return llm.engine.executor


def make_llm(**options: Any) -> LLM:
    llm = LLM(str(checkpoint("llama", dtype="float32")), **OPTIONS, **options)
    llm.register_logits_processor("only", Only)
    return llm


@pytest.fixture(scope="module")
def expected() -> list[list[tuple[Any, ...]]]:
    llm = make_llm()
    return finish(llm, submit(llm))


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Two nodes: the first has room for two ranks of one thread, the second for one."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_worker_niceness", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    ray.init(cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": ROOT}})
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def llm(nodes: Any) -> Iterator[LLM]:
    yield make_llm(tensor_parallel_size=2, placement_strategy="SPREAD")


def test_two_nodes_draw_the_tokens_of_one_process(llm: LLM, expected: list[Any]) -> None:
    assert finish(llm, submit(llm)) == expected
    assert finish(llm, submit(llm)) == expected
    group = executor(llm)._group
    placed = ray.util.placement_group_table(group._placement)["bundles_to_node_id"]
    assert len(set(placed.values())) == 2
    stats = llm.engine.stats()
    assert stats.num_rank_rebuilds == stats.num_rank_disagreements == 0


@pytest.mark.parametrize("ranks", [[1, 0, 1, 0] * 5 if PROVE else [1, 0]], ids=str)
def test_ranks_that_are_killed_one_after_another_cost_no_token(llm: LLM, expected: list[Any], ranks: list[int]) -> None:
    """Each is killed in the middle of a run. The engine serves from one death to the next."""
    num_rebuilds = llm.engine.stats().num_rank_rebuilds
    for rank in ranks:
        ids = submit(llm)
        for _ in range(4):
            llm.step()
        os.kill(executor(llm)._ranks.pids[rank], signal.SIGKILL)
        assert finish(llm, ids) == expected
    stats = llm.engine.stats()
    assert stats.num_rank_rebuilds == num_rebuilds + len(ranks)
    assert stats.num_rank_disagreements == 0

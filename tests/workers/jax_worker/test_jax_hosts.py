"""A mesh over two processes: the tokens of one, and an engine that goes on when one of them is killed.

Each process simulates four devices. JAX's coordination service and gloo stand for what connects the hosts of a slice.
"""

from __future__ import annotations

import tests.workers.jax_worker.devices  # isort: skip  # noqa: F401
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from manta.cluster.config import EngineConfig
from manta.cluster.engine.ranks import claims
from manta.cluster.engine.ranks.claims import SLICE_LABEL, TPU, free_slice, rank_bundle, tpus_each, with_device
from manta.cluster.llm import LLM, ConstraintSpec, LogitsProcessorSpec, SamplingParams
from manta.workers.checkpoints.model_folder import resolve_model_folder
from tests.checkpoints import checkpoint
from tests.conftest import PROVE
from tests.engine_parts import device_of
from tests.patience import wait_until
from tests.processes import running_below
from tests.server import Server

ray = pytest.importorskip("ray")

PROMPTS = [[5, 17, 200, 33, 54, 100, 7], [8, 9], [30, 31, 32, 33] * 8, [40]]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "max_num_sequences": 8,
    "max_num_batched_tokens": 32,
    "kv_cache_bytes": 1 << 20,
}


class Prefer:
    """A logits processor that forbids all tokens but a few."""

    def __init__(self, arguments: dict[str, Any], prompt: Any, output: Any, vocab_size: int) -> None:
        self.least = arguments["least"]

    def __call__(self, output: Any, logits: Any) -> None:
        logits[: self.least] = -float("inf")


PREFER = LogitsProcessorSpec(name="prefer", arguments={"least": 200})


def params() -> list[SamplingParams]:
    common: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
    return [
        SamplingParams(temperature=0, **common),
        SamplingParams(seed=7, logprobs=2, prompt_logprobs=1, n=2, **common),
        SamplingParams(seed=2, constraint=ConstraintSpec(kind="regex", text="[a-f]{8}-[0-9]{60}"), **common),
        SamplingParams(
            seed=3, logits_processors=(LogitsProcessorSpec(name="prefer", arguments={"least": 200}),), **common
        ),
    ]


def tokens_of(llm: LLM) -> list[list[list[int]]]:
    llm.register_logits_processor("prefer", Prefer)
    return [[list(choice.token_ids) for choice in output.outputs] for output in llm.generate(PROMPTS, params())]


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[LLM]:
    folder = str(checkpoint("llama", num_attention_heads=8, num_key_value_heads=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
        llm = LLM(folder, device="tpu", tensor_parallel_size=8, tpu_chips_per_host=4, **OPTIONS)
        yield llm
        del llm


def expected() -> list[list[list[int]]]:
    folder = str(checkpoint("llama", num_attention_heads=8, num_key_value_heads=2))
    return tokens_of(LLM(folder, device="cpu", **OPTIONS))


@pytest.mark.prove
def test_two_hosts_give_one_hosts_tokens(two_hosts: LLM) -> None:
    wanted = expected()
    assert tokens_of(two_hosts) == wanted
    executor = device_of(two_hosts.engine)
    assert executor.num_rank_disagreements == 0
    deaths = (1, 0) if PROVE else ()
    for rank in deaths:
        pid = executor.rank_pids[rank]
        requests = [f"{rank}-{index}" for index in range(len(PROMPTS))]
        for request, prompt, each in zip(requests, PROMPTS, params(), strict=True):
            two_hosts.add_request(request, prompt, each)
        finished: dict[str, Any] = {}
        for _ in range(3):
            finished |= {output.request_id: output for output in two_hosts.step() if output.finished}
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: not os.path.exists(f"/proc/{pid}") or executor.has_lost_ranks())
        while two_hosts.engine.has_unfinished:
            finished |= {output.request_id: output for output in two_hosts.step() if output.finished}
        found = [[list(choice.token_ids) for choice in finished[request].outputs] for request in requests]
        assert found == wanted
    assert executor.num_rank_rebuilds == len(deaths)


def test_a_host_claims_its_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(device="tpu", tensor_parallel_size=16, tpu_chips_per_host=8, num_threads=4)
    assert config.num_ranks == 2
    assert tpus_each(config) == 0  # simulated
    monkeypatch.delenv("JAX_PLATFORMS")
    assert rank_bundle(config) == {"CPU": 4.0, TPU: 8.0}
    assert tpus_each(EngineConfig(device="tpu", tensor_parallel_size=1)) == 1
    assert EngineConfig(device="tpu", tensor_parallel_size=4).num_ranks == 1
    assert with_device(EngineConfig(), 0, 8).device == "tpu"
    assert with_device(EngineConfig(), 1, 8).device == "cuda"
    assert with_device(EngineConfig(), 0, 0).device == "cpu"


def test_only_a_whole_free_slice_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chips of different slices cannot compute together, and half a slice cannot start."""
    free = {"a0": 8, "a1": 4, "b0": 8, "b1": 8, "c0": 8, "d0": 8, "d1": 8, "d2": 8, "d3": 8}
    nodes = [
        {"NodeID": name, "Alive": True, "Labels": {SLICE_LABEL: f"slice-{name[0]}"}, "Resources": {TPU: 8.0}}
        for name in free
    ]
    monkeypatch.setattr(claims.ray, "nodes", lambda: [*nodes, {"NodeID": "cpu", "Alive": True, "Resources": {}}])
    monkeypatch.setattr(
        claims, "available_resources_per_node", lambda: {name: {TPU: float(n)} for name, n in free.items()}
    )
    assert free_slice(2, 8) == "slice-b"
    assert free_slice(4, 8) == "slice-d"
    assert free_slice(3, 8) is None


@pytest.mark.prove
def test_two_hosts_serve_and_survive_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    folder = resolve_model_folder("demo")
    body = {"model": folder.name, "prompt": "What is Manta?", "temperature": 0, "max_tokens": 100, "stream": False}
    two_hosts = ("engine.device=tpu", "engine.tensor_parallel_size=4", "engine.tpu_chips_per_host=2")
    texts = []
    for settings in ((), two_hosts):
        server = Server("engine.max_num_sequences=8", "engine.max_num_batched_tokens=64", *settings, folder=folder)
        try:
            texts.append(server.post("/v1/completions", body)[2]["choices"][0]["text"])
            if settings:
                ranks = running_below(server.process.pid, "ray::RankActor")
                assert len(ranks) == 2
                ranks[0].kill()
                texts.append(server.post("/v1/completions", body)[2]["choices"][0]["text"])
        finally:
            server.stop()
    assert texts[0] == texts[1] == texts[2]
    assert texts[0].strip()

"""Families whose layers do more than Llama's give the CPU's and transformers' tokens on meshes of simulated devices."""

from __future__ import annotations

import tests.workers.jax_worker.devices  # isort: skip  # noqa: F401
from typing import Any

import pytest

from manta.cluster.llm import LLM, SamplingParams
from tests.checkpoints import reference_greedy
from tests.workers.test_layer_kinds import ON_TPUS, folder_of
from tests.workers.test_models import random_tokens

NUM_TOKENS = 12
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_sequences": 8,
    "max_num_batched_tokens": 16,
    "kv_cache_bytes": 1 << 20,
}
QUICK = {"gemma3": 4, "cohere2": 1, "gpt_oss": 4}
"""Families of `make test`, which have every variant together, and the number of devices of each. `make prove` runs all
families on all numbers.
"""
TWO_GROUPS = {
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "lara_mini", "olmo_hybrid"),
    *("bamba", "falcon_h1", "falcon_h1 with norms", "nemotron_h", "mamba2"),
}
"""Families whose recurrent heads have two groups, which four devices cannot split."""
COMBINATIONS = [
    pytest.param(name, size, marks=[] if QUICK.get(name) == size else pytest.mark.prove)
    for name in ON_TPUS
    for size in (1, 2, 4)
    if size <= 2 or name not in TWO_GROUPS
]


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, greedy, use_tqdm=False)]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "num_devices"), COMBINATIONS)
def test_tokens_equal_the_cpus_and_transformers(name: str, num_devices: int) -> None:
    """One prompt is longer than every window and computed in chunks; then both are read from the prefix cache."""
    folder = str(folder_of(name))
    llm = LLM(folder, device="tpu", tensor_parallel_size=num_devices, **OPTIONS)
    prompts = [random_tokens(length, seed=length) for length in (70, 9)]
    expected = tokens_of(LLM(folder, device="cpu", **OPTIONS), prompts)
    assert expected[0] == reference_greedy(folder_of(name), prompts[0], NUM_TOKENS)
    assert tokens_of(llm, prompts) == expected
    assert tokens_of(llm, prompts) == expected
    assert llm.engine.stats().prefix_cache_hits

"""Several ranks compute what one does: token for token in float32, whatever is asked of the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.llm import LLM, SamplingParams
from tests.checkpoints import VOCAB_SIZE, checkpoint
from tests.rank_processes import RankProcesses, over_ranks


@pytest.fixture(scope="module")
def two() -> Iterator[RankProcesses]:
    ranks = RankProcesses(2)
    yield ranks
    ranks.close()


def greedy(llm: LLM) -> list[list[int]]:
    prompts = [[7, 8, 9], [11] * 20, list(range(30, 80))]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("max_shard_size", ["1GB", "50KB"], ids=["single file", "sharded"])
@pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "qwen2", "qwen3"])
def test_two_ranks_draw_the_same_tokens(two: RankProcesses, family: str, max_shard_size: str) -> None:
    folder = str(checkpoint(family, max_shard_size=max_shard_size))
    expected = greedy(LLM(folder, dtype="float32"))
    with over_ranks(two):
        assert greedy(LLM(folder, dtype="float32")) == expected

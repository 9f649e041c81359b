"""One model of each kind of layer through the engine's histories: cold, from the prefix cache, in chunks, preempted,
with several choices, with drafts. In float32 it gives transformers' tokens, in other numbers those of a cold engine.
"""

from __future__ import annotations

from typing import Any

import pytest

from manta.cluster.llm import LLM, SamplingParams
from manta.workers.checkpoints.model_folder import load_model_config
from tests.engine.histories import BLOCK, GREEDY, NGRAM, expected, prompts
from tests.workers.test_layer_kinds import folder_of

KINDS = ("gemma2", "gemma3", "olmo2", "cohere2", "gpt_oss", "lfm2", "deepseek_v3", "llama4", "gemma4")
SPARSE = ("deepseek_v32", "glm_moe_dsa", "hy_v4", "longcat_flash", "dots3_note")
"""Kinds without a rounded cache, and one whose layers are two in the engine."""
HISTORIES: dict[str, dict[str, Any]] = {
    "cold": {},
    "in chunks": {"max_num_batched_tokens": 11},
    "preempted": {"num_blocks": 9, "max_num_batched_tokens": 24},
    "drafts": {"speculative": NGRAM},
}


def make_llm(kind: str, num_blocks: int = 64, **options: Any) -> LLM:
    folder = folder_of(kind)
    bytes_per_token = load_model_config(folder).kv_bytes_per_token(options.get("kv_cache_dtype", "float32"))
    defaults = {"dtype": "float32", "num_threads": 1, "kv_cache_bytes": num_blocks * BLOCK * bytes_per_token}
    return LLM(str(folder), **(defaults | options))


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[list[int]]]:
    outputs = llm.generate(prompts(), params, use_tqdm=False)
    llm.engine.step()
    llm.engine.check_integrity()
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", [*KINDS, *SPARSE])
def test_every_history_gives_the_tokens_of_transformers(kind: str) -> None:
    greedy = [[token_ids] for token_ids in expected(kind)]
    for history, options in HISTORIES.items():
        llm = make_llm(kind, **options)
        assert tokens(llm) == greedy, history
        if history == "cold":
            assert tokens(llm) == greedy, "from the prefix cache"
            assert llm.engine.stats().prefix_cache_hits > 0


@pytest.mark.parametrize(
    "kind", ["gemma3", "gpt_oss", "deepseek_v3", pytest.param("glm_moe_dsa", marks=pytest.mark.prove)]
)
def test_choices_share_their_prompt(kind: str) -> None:
    """Those of one request are forks, and have the tokens of requests with these seeds alone."""
    params = SamplingParams(n=3, seed=5, temperature=0.8, max_tokens=12, ignore_eos=True)
    assert tokens(make_llm(kind), params) == tokens(make_llm(kind, num_blocks=20, max_num_batched_tokens=16), params)


@pytest.mark.axes_in_turns
@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("gemma2", "gpt_oss", "deepseek_v3", "lfm2") else pytest.param(kind, marks=pytest.mark.prove)
        for kind in KINDS
    ],
)
@pytest.mark.parametrize(
    "numbers",
    [{"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "int4"}, {"weights": "int8"}, {"weights": "int4"}],
    ids=str,
)
def test_other_numbers_do_not_depend_on_the_history(kind: str, numbers: dict[str, Any]) -> None:
    assert tokens(make_llm(kind, **numbers)) == tokens(make_llm(kind, **HISTORIES["in chunks"], **numbers))

"""Families that transformers' own code runs, through `LLM`: its greedy tokens, one by one.

Those that cannot run are refused in `tests/workers/test_models.py`.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from manta.cluster.llm import LLM, SamplingParams
from manta.workers.checkpoints.model_folder import load_model_config
from tests.checkpoints import VOCAB_SIZE, checkpoint, reference_greedy

OWN_ATTENTION = ("falcon", "bloom", "mpt", "gpt_neo", "xglm")
"""Families with attention code of their own, which is replaced."""
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("opt", {}),
    ("opt", {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    ("gptj", {}),
    ("stablelm", {}),
    ("stablelm", {"qk_layernorm": True, "num_key_value_heads": 4}),
    ("gpt2", {}),
    ("gpt_neox", {}),
    ("gpt_bigcode", {}),
    ("gpt_bigcode", {"multi_query": False}),
    ("phi", {}),
    ("persimmon", {}),
    ("gemma", {}),
    ("starcoder2", {}),
    ("biogpt", {}),
    *((family, {}) for family in OWN_ATTENTION),
]


@pytest.mark.few(4)
@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_greedy_tokens_through_transformers_are_its_own(case: tuple[str, dict[str, Any]]) -> None:
    family, options = case
    folder = checkpoint(family, **options)
    llm = LLM(str(folder), dtype="float32", kv_cache_bytes=2**23, num_threads=1)
    prompts = [list(range(5, 42)), [7, 9, 300]]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert output.outputs[0].token_ids == reference_greedy(folder, prompt, 40)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", OWN_ATTENTION)
def test_replaced_attention_gives_transformers_tokens(family: str) -> None:
    """Prompts of which two share their first blocks, in a cache that does not hold them all to their ends."""
    folder = checkpoint(family)
    kv_cache_bytes = 16 * 12 * load_model_config(folder).kv_bytes_per_token("float32")
    llm = LLM(str(folder), dtype="float32", kv_cache_bytes=kv_cache_bytes, max_num_batched_tokens=11, num_threads=1)
    generator = random.Random(1)
    prompts = [[generator.randrange(5, VOCAB_SIZE) for _ in range(length)] for length in (3, 17, 40, 64, 9)]
    prompts.append([*prompts[3][:48], 7, 8])
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [reference_greedy(folder, p, 48) for p in prompts]
    stats = llm.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0

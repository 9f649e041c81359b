"""Families that transformers' own code runs, through `LLM`: its greedy tokens, one by one.

Those that cannot run are refused in `tests/workers/test_models.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from cluster.llm import LLM, SamplingParams
from tests.checkpoints import checkpoint, reference_greedy

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
    ("phi3", {}),
    ("gemma", {}),
    ("starcoder2", {}),
    ("biogpt", {}),
]


@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_greedy_tokens_through_transformers_are_its_own(family: str, options: dict[str, Any]) -> None:
    folder = checkpoint(family, **options)
    llm = LLM(str(folder), dtype="float32", kv_cache_bytes=2**23, num_threads=1)
    prompts = [list(range(5, 42)), [7, 9, 300]]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert output.outputs[0].token_ids == reference_greedy(folder, prompt, 40)

"""A model of each recurrent mixer and family through the engine's histories: transformers' tokens in each."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.checkpoints import reference_greedy, reference_logits
from tests.engine.test_recurrent_engine import NGRAM, NUM_TOKENS, make_llm, prompts, run
from tests.workers.test_layer_kinds import folder_of

CHEAP = ("qwen3_next", "falcon_h1", "jamba", "mamba2")
"""Families of every run: gated delta nets with experts, two mixers side by side, Mamba 1 and Mamba 2."""
KINDS = (
    *CHEAP,
    "qwen3_5",
    "qwen3_5_moe",
    "granite_hybrid",
    "nemotron_h",
    "lfm2_moe",
    "bamba",
    "mamba",
    "falcon_mamba",
    "kimi_linear",
)
WITHOUT_ATTENTION = ("mamba2", "mamba", "falcon_mamba")
HISTORIES: dict[str, dict[str, Any]] = {
    "cold": {},
    "chunks": {"max_num_batched_tokens": 11},
    "drafts": {"speculative": NGRAM},
    "preempted": {"num_blocks": 8, "max_num_batched_tokens": 24},
}


@functools.cache
def expected(kind: str) -> list[list[int]]:
    """transformers' own generation needs a layer of attention."""
    if kind not in WITHOUT_ATTENTION:
        return [reference_greedy(folder_of(kind), prompt, NUM_TOKENS) for prompt in prompts()]
    outputs = []
    for prompt in prompts():
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            tokens.append(int(reference_logits(folder_of(kind), tokens)[-1].argmax()))
        outputs.append(tokens[len(prompt) :])
    return outputs


@pytest.mark.parametrize(
    "kind", [kind if kind in CHEAP else pytest.param(kind, marks=pytest.mark.prove) for kind in KINDS]
)
def test_every_history_gives_the_tokens_of_transformers(kind: str) -> None:
    for history, options in HISTORIES.items():
        llm = make_llm(kind, **options)
        assert run(llm) == expected(kind), history
        hits = llm.engine.stats().prefix_cache_hits
        assert run(llm) == expected(kind), f"{history}, from snapshots"
        assert llm.engine.stats().prefix_cache_hits > hits

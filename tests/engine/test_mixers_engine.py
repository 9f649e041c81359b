"""A model of each recurrent mixer and family through the engine's histories: transformers' tokens in each."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.histories import NGRAM, expected
from tests.engine.test_recurrent_engine import make_llm, run

CHEAP = ("qwen3_next", "falcon_h1", "jamba", "mamba2")
"""Families of every run: gated delta nets with experts, two mixers side by side, Mamba 1 and Mamba 2."""
KINDS = (
    *CHEAP,
    "qwen3_5",
    "qwen3_5_moe",
    "qwen4_exp",
    "granite_hybrid",
    "nemotron_h",
    "lfm2_moe",
    "bamba",
    "mamba",
    "falcon_mamba",
    "kimi_linear",
    "olmo_hybrid",
    "minimax",
    "bailing_hybrid",
    "glm5_next",
    "lara_mini",
    "lfm3",
    "recurrent_gemma",
    "zamba",
    "zaya",
    "inkling",
    "inkling2",
    "inkling2_loop",
    "rwkv",
)
HISTORIES: dict[str, dict[str, Any]] = {
    "cold": {},
    "chunks": {"max_num_batched_tokens": 11},
    "drafts": {"speculative": NGRAM},
    "preempted": {"num_blocks": 8, "max_num_batched_tokens": 24},
}


@pytest.mark.few(2)
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

"""Models with recurrent states through the engine's histories. A state may not be updated twice with one token, and
these are the cases in which an engine computes tokens again: late masks, rejected drafts, forks, preemption, steps out
of memory, steps under way.

The hybrid model is a tiny LFM2 with convolutions and attention, the recurrent one has convolutions only.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from manta.cluster.llm import LLM, SamplingParams
from manta.workers.checkpoints import memory
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.kv_groups import most_states
from manta.workers.step import NUM_FIXED_STATES
from tests.checkpoints import VOCAB_SIZE, reference_greedy, reference_logits
from tests.workers.test_layer_kinds import folder_of

NUM_TOKENS = 24
BLOCK = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
HYBRID, PURE = KINDS = ("lfm2", "lfm2, convolutions only")
NGRAM = {"proposers": ["ngram"], "ngram_min": 1, "adaptive": False}


@functools.cache
def prompts() -> list[list[int]]:
    """Repetitive ones; the last begins like the one before it."""
    generator = random.Random(3)
    found = []
    for length in (5, 37, 64):
        period = [generator.randrange(5, VOCAB_SIZE) for _ in range(max(3, length // 3))]
        found.append((period * length)[:length])
    return [*found, [*found[2][:48], 7, 8]]


@functools.cache
def expected(kind: str) -> list[list[int]]:
    if kind != PURE:
        return [reference_greedy(folder_of(kind), prompt, NUM_TOKENS) for prompt in prompts()]
    outputs = []  # transformers generates nothing without a layer of attention
    for prompt in prompts():
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            tokens.append(int(reference_logits(folder_of(kind), tokens)[-1].argmax()))
        outputs.append(tokens[len(prompt) :])
    return outputs


@pytest.fixture(autouse=True)
def states_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of any size then has the states of `max_num_sequences` sequences, and as many blocks as are left."""
    monkeypatch.setattr(memory, "TYPICAL_SEQUENCE_TOKENS", 0)


def make_llm(kind: str, num_sequences: int = 8, num_blocks: int = 64, **options: Any) -> LLM:
    """An engine whose cache holds the states of `num_sequences` sequences, and `num_blocks` blocks."""
    config = load_model_config(folder_of(kind))
    num_steps_ahead = int(options.get("overlap") == "on" and "speculative" not in options)
    num_slots = NUM_FIXED_STATES + num_sequences * most_states(num_steps_ahead, "speculative" in options)
    num_bytes = num_slots * config.state_bytes + num_blocks * BLOCK * config.kv_bytes_per_token("float32")
    defaults = {"dtype": "float32", "num_threads": 1, "kv_cache_bytes": num_bytes, "max_num_sequences": num_sequences}
    llm = LLM(str(folder_of(kind)), **(defaults | options))
    assert llm.engine.scheduler.max_num_sequences == num_sequences
    return llm


def run(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts(), params, use_tqdm=False)
    llm.engine.step()
    llm.engine.check_integrity()
    return [choice.token_ids for output in outputs for choice in output.outputs]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 11},
        {"max_num_batched_tokens": 40},
        {"speculative": NGRAM},
        {"speculative": NGRAM, "num_sequences": 2},
        {"num_sequences": 1},
        {"num_blocks": 8, "max_num_batched_tokens": 24},
        {"enable_prefix_caching": False},
    ],
    ids=["cold", "chunks", "aligned chunks", "drafts", "drafts in few slots", "one at a time", "preempted", "no cache"],
)
def test_every_history_gives_the_tokens_of_transformers(kind: str, options: dict[str, Any]) -> None:
    llm = make_llm(kind, **options)
    assert run(llm) == expected(kind)
    hits = llm.engine.stats().prefix_cache_hits
    assert run(llm) == expected(kind), "from snapshots"
    has_more_hits = llm.engine.stats().prefix_cache_hits > hits
    assert has_more_hits == ("enable_prefix_caching" not in options)
    assert bool(llm.engine.stats().num_preemptions) == ("num_blocks" in options and kind == HYBRID)

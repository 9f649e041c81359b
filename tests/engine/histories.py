"""Prompts that the engine's histories share, and transformers' greedy tokens after them, for every kind of layer."""

from __future__ import annotations

import functools
import random

from manta.cluster.llm import SamplingParams
from manta.workers.checkpoints.model_folder import load_model_config
from tests.checkpoints import VOCAB_SIZE, reference_greedy, reference_logits
from tests.workers.test_layer_kinds import folder_of

NUM_TOKENS = 24
BLOCK = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
NGRAM = {"proposers": ["ngram"], "ngram_min": 1, "adaptive": False}


@functools.cache
def prompts() -> list[list[int]]:
    """Repetitive ones, longer than the windows; the last begins like the one before it."""
    generator = random.Random(3)
    found = []
    for length in (5, 37, 64):
        period = [generator.randrange(5, VOCAB_SIZE) for _ in range(max(3, length // 3))]
        found.append((period * length)[:length])
    return [*found, [*found[2][:48], 7, 8]]


@functools.cache
def expected(kind: str) -> list[list[int]]:
    """The tokens after each prompt. transformers' own generation needs a layer of attention."""
    if any(load_model_config(folder_of(kind)).attends):
        return [reference_greedy(folder_of(kind), prompt, NUM_TOKENS) for prompt in prompts()]
    outputs = []
    for prompt in prompts():
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            tokens.append(int(reference_logits(folder_of(kind), tokens)[-1].argmax()))
        outputs.append(tokens[len(prompt) :])
    return outputs

"""The tokens of many seeds, with and without speculation, have one distribution: χ² on a tiny vocabulary.

Equal tokens at equal seeds (`tests/specdecode/test_speculative.py`) say the same of these seeds; here both sides
have their own, and the whole engine lies between.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from scipy import stats

from manta.cluster.engine.engine import Engine
from manta.cluster.engine.request import EngineRequest
from manta.specdecode.speculative_config import SpeculativeConfig
from manta.workers.sampling_params import SamplingParams
from tests.checkpoints import checkpoint
from tests.engine.test_engine import drain, make_engine
from tests.specdecode.test_speculative import drafting

VOCABULARY = (20, 21, 22, 23, 24, 25)
NUM_DRAWS = 20_000 if os.environ.get("MANTA_PROVE") == "1" else 1200
LENGTH = 6
PROMPT = [20, 21, 22, 20, 21, 23, 20, 21, 22, 20, 21]
"""An n-gram finds something at every step."""
ALPHA = 1e-4

PARAMS = {
    "plain": {},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "top-p": {"top_p": 0.8, "temperature": 1.4},
}


def draws(engine: Engine, fields: dict, seed: int) -> np.ndarray:
    """int [NUM_DRAWS, LENGTH]: outputs of independent requests, as indices into the vocabulary."""
    rows = []
    for index in range(0, NUM_DRAWS, 100):
        params = SamplingParams(
            n=100, seed=seed + index, max_tokens=LENGTH, ignore_eos=True, allowed_token_ids=VOCABULARY, **fields
        )
        engine.add_request(EngineRequest(request_id=str(index), prompt_token_ids=PROMPT, params=params))
        outputs: list[list[int]] = [[] for _ in range(100)]
        for delta in drain(engine):
            assert delta.error is None
            outputs[delta.index] += delta.token_ids
        rows += outputs
    return np.array(rows) - VOCABULARY[0]


def p_value(one: np.ndarray, other: np.ndarray) -> float:
    """Pearson's χ² of two samples; rare values are counted together."""
    counts = np.stack([np.bincount(each, minlength=one.max() + other.max() + 2) for each in (one, other)])
    rare = counts.sum(axis=0) < 20
    counts = np.column_stack([counts[:, ~rare], counts[:, rare].sum(axis=1)])
    return float(stats.chi2_contingency(counts[:, counts.sum(axis=0) > 0]).pvalue)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", PARAMS)
def test_speculative_output_has_the_distribution_of_plain_output(kind: str) -> None:
    fields = PARAMS[kind]
    expected = draws(make_engine("llama", max_num_sequences=128), fields, 10**6)
    ngram = SpeculativeConfig(proposers=("ngram",), ngram_min=1, adaptive=False, max_draft_tokens=3)
    chain = SpeculativeConfig(proposers=("ngram", "draft"), draft_model=str(checkpoint("qwen2")), max_draft_tokens=3)
    for name, speculative in (
        ("ngram", ngram),
        ("draft", drafting("llama", max_draft_tokens=3)),
        ("far draft", drafting("qwen2", max_draft_tokens=3)),
        ("chain", chain),
    ):
        got = draws(make_engine("llama", max_num_sequences=128, speculative=speculative), fields, 2 * 10**6)
        powers = len(VOCABULARY) ** np.arange(2)
        for place in range(LENGTH - 1):  # pairs, so that tokens drawn in one step and across steps are both seen
            pair = slice(place, place + 2)
            assert p_value(got[:, pair] @ powers, expected[:, pair] @ powers) > ALPHA, (name, place)

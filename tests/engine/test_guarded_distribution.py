"""What the engine draws under a guard has the exact distribution, with drafts and without: χ² on a tiny vocabulary.

The probabilities come from listing every text, by transformers' logits and jsonschema's verdict.
"""

from __future__ import annotations

import collections
import functools
import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import pytest
import torch
from scipy import stats

from manta.cluster.llm import LLM, SamplingParams
from manta.structured.backend import make_backend
from manta.structured.backends.guarded import GuardedSession
from manta.structured.constraint import ConstraintSpec
from manta.structured.vocabulary import Vocabulary
from tests.checkpoints import EOS_TOKEN_ID, VOCAB_SIZE, checkpoint, reference_logits
from tests.conftest import PROVE
from tests.engine.test_constrained_engine import make_llm
from tests.structured.grammar_walk import allowed_tokens

NUM_DRAWS = 20_000 if PROVE else 600
ALPHA = 1e-4
"""Seeds are fixed, so nothing is flaky."""
FAMILY = "llama"


class Case(NamedTuple):
    schema: dict[str, Any]
    values: list[Any]
    """Values that the grammar allows, written as JSON. The guard forbids those that jsonschema rejects."""
    looks_ahead: bool
    """Whether the guard also forbids every beginning that cannot end well."""


_TWO = [list(items) for count in range(3) for items in itertools.product(("a", "b"), repeat=count)]
_THREE = [list(items) for count in range(4) for items in itertools.product((1, 12, 2), repeat=count)]
CASES = {
    "unique": Case(
        {"type": "array", "items": {"enum": [1, 12, 2]}, "uniqueItems": True, "maxItems": 3}, _THREE, looks_ahead=True
    ),
    "contains": Case(
        {"type": "array", "items": {"enum": ["a", "b"]}, "contains": {"const": "b"}, "maxItems": 2}, _TWO, False
    ),
}
cases = pytest.mark.parametrize("name", CASES)


@functools.cache
def vocabulary() -> Vocabulary:
    return Vocabulary.load(str(checkpoint(FAMILY)), VOCAB_SIZE, (EOS_TOKEN_ID,))


@functools.cache
def _grammar(name: str) -> Any:
    backend = make_backend("llguidance", vocabulary())
    spec = ConstraintSpec(kind="json_schema", text=json.dumps(CASES[name].schema), any_whitespace=False)
    return backend.load(spec, backend.compile(spec))


def _of_grammar(name: str, token_ids: tuple[int, ...]) -> set[int]:
    """The tokens that the grammar alone allows. Where it forces text, those are the tokenizer's own for that text."""
    session = _grammar(name).session()
    assert isinstance(session, GuardedSession)
    assert all(session.unguarded.accept(token_id) for token_id in token_ids)
    return set(allowed_tokens(session.unguarded, vocabulary()).tolist())


def _allowed(case: Case, text: bytes) -> list[int]:
    """The tokens that may follow, by looking at every text."""
    texts = [json.dumps(value).encode() for value in case.values]
    judge = jsonschema.Draft202012Validator(case.schema)
    right = {each for each in texts if judge.is_valid(json.loads(each))}
    begun = right if case.looks_ahead else set(texts)
    special = set(vocabulary().special_token_ids)

    def may_follow(token: bytes) -> bool:
        longer = text + token
        return any(each.startswith(longer) for each in begun) and (longer not in texts or longer in right)

    found = [i for i, token in enumerate(vocabulary().tokens) if token and i not in special and may_follow(token)]
    return found + ([EOS_TOKEN_ID] if text in right else [])


def _outcomes(name: str, prompt: list[int]) -> Iterator[tuple[tuple[int, ...], float]]:
    """Each sequence of tokens that can be drawn, without the end, and its probability. One that nothing may follow ends
    there.
    """
    pending: list[tuple[tuple[int, ...], bytes, float]] = [((), b"", 1.0)]
    while pending:
        token_ids, text, probability = pending.pop()
        allowed = sorted(_of_grammar(name, token_ids).intersection(_allowed(CASES[name], text)))
        if not allowed:
            yield token_ids, probability
            continue
        logits = reference_logits(checkpoint(FAMILY), [*prompt, *token_ids])[-1, allowed]
        for token_id, share in zip(allowed, torch.softmax(logits.double(), -1).tolist(), strict=True):
            if token_id == EOS_TOKEN_ID:
                yield token_ids, probability * share
            else:
                pending.append(((*token_ids, token_id), text + vocabulary().tokens[token_id], probability * share))


@functools.cache
def expected(name: str, prompt: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    return dict(_outcomes(name, list(prompt)))


def draws(llm: LLM, case: Case, prompt: list[int]) -> collections.Counter[tuple[int, ...]]:
    spec = ConstraintSpec(kind="json_schema", text=json.dumps(case.schema), any_whitespace=False)
    params = [
        SamplingParams(n=50, seed=1 + index, temperature=1.0, max_tokens=40, constraint=spec)
        for index in range(0, NUM_DRAWS, 50)
    ]
    found: collections.Counter[tuple[int, ...]] = collections.Counter()
    for output in llm.generate([prompt] * len(params), params, use_tqdm=False):
        for choice in output.outputs:
            assert choice.error is None
            found[tuple(choice.token_ids)] += 1
    return found


def p_value(found: collections.Counter[tuple[int, ...]], probabilities: dict[tuple[int, ...], float]) -> float:
    """Pearson's χ² against exact probabilities. Outcomes that are expected less than five times count together."""
    total = found.total()
    common = [key for key, share in probabilities.items() if share * total >= 5]
    observed = np.array([found[key] for key in common] + [total - sum(found[key] for key in common)], dtype=float)
    wanted = np.array([probabilities[key] * total for key in common])
    wanted = np.append(wanted, total - wanted.sum())
    keep = wanted > 1e-9
    assert observed[~keep].sum() == 0
    return float(stats.chisquare(observed[keep], wanted[keep]).pvalue)


@pytest.fixture(scope="module", params=["plain", "drafts"])
def llm(request: pytest.FixtureRequest) -> LLM:
    if request.param == "plain":
        return make_llm()
    return make_llm(speculative={"proposers": ["forced", "ngram"], "ngram_min": 1, "adaptive": False})


@pytest.mark.few(2)
@cases
def test_guarded_draws_have_the_exact_distribution(name: str, llm: LLM) -> None:
    case = CASES[name]
    prompt = llm.tokenizer.encode(" ".join(json.dumps(value) for value in case.values[-4:]))
    probabilities = expected(name, tuple(prompt))
    assert sum(probabilities.values()) == pytest.approx(1)
    found = draws(llm, case, prompt)
    impossible = set(found) - set(probabilities)
    assert not impossible, [llm.tokenizer.decode(list(each)) for each in impossible]
    assert p_value(found, probabilities) > ALPHA
    if llm.engine.config.speculative is not None:
        accepted = llm.engine.stats().drafts.accepted
        assert sum(sum(counts) for counts in accepted.values()) > 0


def test_the_test_detects_a_slightly_wrong_distribution() -> None:
    """An eighth of the draws, moved from the likeliest outcome to another, is noticed."""
    probabilities = {(index,): share for index, share in enumerate((0.5, 0.3, 0.2))}
    exact = collections.Counter({key: round(share * NUM_DRAWS) for key, share in probabilities.items()})
    assert p_value(exact, probabilities) > 0.9
    moved = collections.Counter(exact)
    moved[0,] -= NUM_DRAWS // 8
    moved[1,] += NUM_DRAWS // 8
    assert p_value(moved, probabilities) < ALPHA

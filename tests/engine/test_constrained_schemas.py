"""Schemas through the whole engine: what a model with random weights writes under them is valid, or they are refused.

With drafts and without. The same hand-written and generated schemas as in
`tests/structured/test_schema_conformance.py`, which walks the masks alone; `MANTA_PROVE=1` takes 600 generated ones.
"""

from __future__ import annotations

import json
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from manta.cluster.engine.request import FinishStatus
from manta.cluster.errors import RequestRefused
from manta.cluster.llm import LLM, SamplingParams
from manta.structured.constraint import ConstraintSpec
from tests.conftest import PROVE
from tests.engine.test_constrained_engine import make_llm, settled
from tests.patience import PATIENCE_S
from tests.schema_cases import CASES
from tests.structured.test_schema_conformance import schemas, validator
from tests.structured.test_schema_guard import GUARDED

BATCH = 20
NUM_BATCHES = 30 if PROVE else 3
CLOSING = '"}]0'
"""A text at random hardly ever ends; these are made likelier."""


KINDS = pytest.mark.parametrize("llm", ["plain", "drafting"], indirect=True)
MOSTLY_DRAFTING = pytest.mark.parametrize(
    "llm", [pytest.param("plain", marks=pytest.mark.prove), "drafting"], indirect=True
)


@pytest.fixture(scope="module")
def llm(request: pytest.FixtureRequest) -> LLM:
    if request.param == "plain":
        return make_llm()
    return make_llm(speculative={"proposers": ["forced", "ngram"], "adaptive": False})


def exact(text: str) -> float | Decimal:
    """Returns a float, or a decimal if rounding would make a whole number of one that is none."""
    value = float(text)
    if value.is_integer() and abs(value) > 2**52 and Fraction(text).denominator != 1:
        return Decimal(text)
    return value


def write_and_judge(llm: LLM, wanted: list[Any]) -> Counter[str]:
    """Writes under all schemas in one batch, two texts each, and judges every whole one."""
    counts: Counter[str] = Counter()
    bias = {llm.tokenizer.encode(text)[-1]: 6.0 for text in CLOSING}
    params, judges = [], []
    for schema in wanted:
        spec = ConstraintSpec(kind="json_schema", text=json.dumps(schema), any_whitespace=False)
        try:
            llm.engine.constraints.resolve(spec).result(timeout=PATIENCE_S)
        except RequestRefused as refusal:
            if not str(refusal):
                pytest.fail(f"refused without a reason: {schema}")
            counts["refused"] += 1
            continue
        for seed in range(2):
            options = {"temperature": 1.5, "seed": seed, "max_tokens": 300, "logit_bias": bias}
            params.append(SamplingParams(constraint=spec, **options))
            judges.append(validator(schema))
    prompts = [[5 + index % 50] * (1 + index % 7) for index in range(len(params))]
    for one, judge, output in zip(params, judges, llm.generate(prompts, params, use_tqdm=False), strict=True):
        choice = output.outputs[0]
        assert choice.error is None, f"{one.constraint}: {choice.error}"
        assert choice.finish_reason in (FinishStatus.FINISHED_STOPPED, FinishStatus.FINISHED_LENGTH)
        counts[choice.finish_reason.name] += 1
        if choice.finish_reason is FinishStatus.FINISHED_STOPPED:
            written = json.loads(choice.text, parse_float=exact)
            assert judge.is_valid(written), f"{one.constraint}: {choice.text!r}"
    settled(llm)
    return counts


@MOSTLY_DRAFTING
def test_hand_written_schemas(llm: LLM) -> None:
    counts = write_and_judge(llm, [case.schema for case in CASES])
    assert counts["refused"] <= 12
    assert counts["FINISHED_STOPPED"] > len(CASES)


@pytest.mark.few(1)
@KINDS
def test_guarded_schemas(llm: LLM) -> None:
    counts = write_and_judge(llm, [schema for schema, _, _ in GUARDED])
    assert counts["refused"] == 0
    assert counts["FINISHED_STOPPED"] > len(GUARDED) / 2


@KINDS
def test_an_uncompletable_text_ends_like_a_long_one(llm: LLM) -> None:
    before = llm.engine.stats().num_dead_ends
    schema = {"type": "integer", "minimum": 10, "maximum": 99, "not": {"multipleOf": 1, "minimum": 20}}
    spec = ConstraintSpec(kind="json_schema", text=json.dumps(schema))
    params = [SamplingParams(constraint=spec, temperature=1.0, seed=seed, max_tokens=20) for seed in range(12)]
    choices = [output.outputs[0] for output in llm.generate([[5, 6]] * 12, params, use_tqdm=False)]
    assert all(choice.error is None for choice in choices)
    dead = [choice for choice in choices if choice.finish_reason is FinishStatus.FINISHED_LENGTH]
    assert dead
    assert all(len(choice.token_ids) < 20 for choice in dead)
    assert all(10 <= int(choice.text) < 20 for choice in choices if choice not in dead)
    assert llm.engine.stats().num_dead_ends - before == len(dead)
    settled(llm)


@MOSTLY_DRAFTING
def test_generated_schemas(llm: LLM, record_property: Any) -> None:
    counts: Counter[str] = Counter()

    @hypothesis.settings(max_examples=NUM_BATCHES, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(wanted=st.lists(schemas(), min_size=BATCH, max_size=BATCH))
    def check(wanted: list[Any]) -> None:
        counts.update(write_and_judge(llm, wanted), schemas=BATCH)

    check()
    for name, value in counts.items():
        record_property(name, value)
    assert counts["refused"] <= 0.1 * counts["schemas"], counts
    assert counts["FINISHED_STOPPED"] > counts["FINISHED_LENGTH"], counts

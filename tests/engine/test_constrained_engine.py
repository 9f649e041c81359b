"""Constraints in the engine: right for each sequence, invisible to the others, and one victim per failure.

Random float32 models, which try everything that a mask lets through; jsonschema and re judge.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from manta.cluster.engine.request import FinishStatus
from manta.cluster.errors import RequestRefused
from manta.cluster.llm import LLM, ConstraintSpec, RequestOutput, SamplingParams
from tests.checkpoints import VOCAB_SIZE
from tests.engine import llms
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("plugin")


ORDER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["small", "smaller", "smallest", 'quo"ted']},
        "items": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 700}, "maxItems": 3},
        "nested": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"$ref": "#/$defs/pair"}]},
    },
    "required": ["name", "kind", "items", "nested"],
    "additionalProperties": False,
    "$defs": {
        "pair": {
            "type": "object",
            "properties": {"left": {"$ref": "#/properties/nested"}, "right": {"type": "number"}},
            "required": ["left"],
            "additionalProperties": False,
        }
    },
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm()


def make_llm(num_blocks: int = 512, **options: Any) -> LLM:
    options.setdefault("constraints", {"compile_seconds": 60.0})  # for a machine that has much else to do
    return llms.make_llm(num_blocks, **options)


def spec(kind: str, text: Any, **fields: Any) -> ConstraintSpec:
    return ConstraintSpec(kind=kind, text=text if isinstance(text, str) else json.dumps(text), **fields)


def example(**options: Any) -> ConstraintSpec:
    """Of the example backend in tests/plugin."""
    return spec("regex", {"allowed": list(range(20, 60)), **options}, backend="example")


def constrained(constraint: ConstraintSpec, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"constraint": constraint, "temperature": 1.5, "seed": 1, "max_tokens": 400, **fields})


def is_an_order(text: str) -> bool:
    return jsonschema.Draft202012Validator(ORDER).is_valid(json.loads(text))


def whole(output: RequestOutput) -> bool:
    """Whether the grammar ended the text; an output cut by max_tokens must say so."""
    choice = output.outputs[0]
    assert choice.error is None
    assert choice.finish_reason in (FinishStatus.FINISHED_STOPPED, FinishStatus.FINISHED_LENGTH)
    return choice.finish_reason is FinishStatus.FINISHED_STOPPED


def settled(llm: LLM) -> None:
    """Nothing is left: no block, no session."""
    llm.engine.step()
    llm.engine.check_integrity()
    assert llm.engine.masks.pool is None or llm.engine.masks.pool.session_ids == []


def test_every_output_of_a_wild_model_is_valid(llm: LLM) -> None:
    cases: dict[ConstraintSpec, Callable[[str], object]] = {
        spec("json_schema", ORDER, any_whitespace=False): is_an_order,
        spec("regex", r"[a-c]{2,5}-(\d{3}|x+y)!"): lambda text: re.fullmatch(r"[a-c]{2,5}-(\d{3}|x+y)!", text),
        spec("choice", ["yes", "yes, but", "no", "nö"]): lambda text: text in ("yes", "yes, but", "no", "nö"),
        spec("lark", 'start: "a" b\nb: /[0-9]{2}/ | "(" b ")"'): lambda text: re.fullmatch(r"a\(*\d\d\)*", text),
        spec("ebnf", 'root ::= "ab" [0-9] root | "."'): lambda text: re.fullmatch(r"(ab\d)*\.", text),
        spec("json_object", ""): lambda text: isinstance(json.loads(text), dict),
    }
    params = [constrained(one, seed=seed) for one in cases for seed in range(6)]
    outputs = llm.generate([[7, 8, 9]] * len(params), params, use_tqdm=False)
    num_whole = dict.fromkeys(cases, 0)
    for one, output in zip(params, outputs, strict=True):
        if whole(output):
            assert one.constraint is not None
            num_whole[one.constraint] += 1
            assert cases[one.constraint](output.outputs[0].text), output.outputs[0].text
    assert all(count for one, count in num_whole.items() if one.kind != "json_object"), num_whole
    settled(llm)


def test_plain_rows_are_untouched_by_constrained_ones(llm: LLM) -> None:
    generator = random.Random(3)
    prompts = [[generator.randrange(5, VOCAB_SIZE) for _ in range(generator.randrange(1, 40))] for _ in range(12)]
    plain = [SamplingParams(temperature=1.0, seed=index, max_tokens=40, ignore_eos=True) for index in range(12)]
    alone = llm.generate(prompts, plain, use_tqdm=False)
    mixed_prompts, mixed = list(prompts), list(plain)
    for index in range(10):
        mixed_prompts.insert(2 * index, [3 + index] * (1 + index))
        mixed.insert(2 * index, constrained(spec("regex", f"({index}a)+"), seed=index, max_tokens=60))
    outputs = llm.generate(mixed_prompts, mixed, use_tqdm=False)
    found = [output for output, one in zip(outputs, mixed, strict=True) if one.constraint is None]
    assert [output.outputs[0].token_ids for output in found] == [output.outputs[0].token_ids for output in alone]
    for output, one in zip(outputs, mixed, strict=True):  # each constrained row had its own mask
        if one.constraint is not None and whole(output):
            assert re.fullmatch(one.constraint.text, output.outputs[0].text)
    settled(llm)


def test_tokens_do_not_depend_on_batch_or_preemption() -> None:
    constraints = [spec("json_schema", ORDER, any_whitespace=False), spec("regex", "(ab|c[0-9]){30}"), None]
    params = [
        SamplingParams(constraint=constraints[index % 3], seed=index, temperature=1.2, max_tokens=60)
        for index in range(9)
    ]
    prompts = [[5 + index] * (3 + 7 * index) for index in range(9)]
    roomy, tight = make_llm(), make_llm(num_blocks=14)
    alone = [roomy.generate(p, one, use_tqdm=False)[0].outputs[0] for p, one in zip(prompts, params, strict=True)]
    together = [output.outputs[0] for output in tight.generate(prompts, params, use_tqdm=False)]
    assert tight.engine.stats().num_preemptions > 0
    assert [choice.token_ids for choice in together] == [choice.token_ids for choice in alone]
    assert [choice.finish_reason for choice in together] == [choice.finish_reason for choice in alone]
    settled(tight)


def test_a_finished_grammar_always_ends_the_text(llm: LLM) -> None:
    for fields in ({"min_tokens": 50}, {"ignore_eos": True}, {"stop_token_ids": (40,)}, {}):
        output = llm.generate([[7]], constrained(spec("regex", "ab?c"), **fields), use_tqdm=False)[0]
        assert whole(output)
        assert output.outputs[0].text in ("abc", "ac")


def test_end_tokens_appear_only_where_text_may_end(llm: LLM) -> None:
    """With a strong bias towards them, the text ends at the first place where it may."""
    bias = {2: 100.0, 40: 90.0}
    for stop_token_ids in ((), (40,)):
        params = constrained(
            spec("regex", "[0-9]{3,9}"), logit_bias=bias, stop_token_ids=stop_token_ids, min_tokens=0, temperature=0.5
        )
        output = llm.generate([[7]], params, use_tqdm=False)[0]
        assert whole(output)
        text = output.outputs[0].text
        assert re.fullmatch("[0-9]{3,9}", text)


def test_a_stop_token_ends_constrained_text_only_where_it_must_or_completes_it(llm: LLM) -> None:
    (comma,) = llm.tokenizer.encode(",")
    cases = {"(a[,;]){4}b": "(a;){4}b", "a{1,4},": "a{1,4}", "ab,c": "ab", "(a,b|ab?;),?": "a|ab?;"}
    for seed, (given, wanted) in enumerate(cases.items()):
        params = constrained(spec("regex", given), stop_token_ids=(comma,), seed=seed, temperature=1.0)
        choice = llm.generate([[7]], params, use_tqdm=False)[0].outputs[0]
        assert choice.finish_reason is FinishStatus.FINISHED_STOPPED
        assert re.fullmatch(wanted, choice.text), (given, choice.text)
    settled(llm)


def test_a_stop_string_ends_constrained_text_too(llm: LLM) -> None:
    params = constrained(spec("regex", "[ab]{20,60}"), stop=("ab",))
    choice = llm.generate([[7]], params, use_tqdm=False)[0].outputs[0]
    assert choice.finish_reason is FinishStatus.FINISHED_STOPPED
    assert choice.stop_reason == "ab"
    assert "ab" not in choice.text
    settled(llm)


def test_max_tokens_cuts_and_says_so(llm: LLM) -> None:
    choice = llm.generate([[7]], constrained(spec("regex", "a{500}"), max_tokens=10), use_tqdm=False)[0].outputs[0]
    assert choice.finish_reason is FinishStatus.FINISHED_LENGTH
    assert set(choice.text) == {"a"}
    settled(llm)


def test_the_constraint_begins_after_the_thinking(llm: LLM) -> None:
    params = constrained(spec("choice", ["yes", "no"], begin_after=(50, 51)), logit_bias={50: 6.0, 51: 6.0, 2: -100.0})
    for seed in range(4):
        output = llm.generate([[7]], SamplingParams(**{**as_fields(params), "seed": seed}), use_tqdm=False)[0]
        ids = output.outputs[0].token_ids
        if whole(output):
            end = next(i for i in range(1, len(ids)) if ids[i - 1 : i + 1] == [50, 51]) + 1
            assert llm.tokenizer.decode([t for t in ids[end:] if t != 2]) in ("yes", "no")


def as_fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


@pytest.mark.parametrize(
    ("constraint", "match"),
    [
        (spec("json_schema", "{"), "not valid JSON"),
        (spec("json_schema", {"type": "strin"}), "strin"),
        (spec("regex", "a(b"), "the open group"),
        (spec("choice", []), "at least one string"),
        (spec("choice", ["x"] * 20_000), "20000 entries and the limit is 10000"),
        (spec("json_schema", "[" * 10_000 + "]" * 10_000), "10000 levels of nesting and the limit is 128"),
        (spec("json_schema", {"description": "x" * 5_000_000}), "bytes and the limit is 1000000"),
        (spec("json_schema", {"enum": [str(i) for i in range(100_000)]}), "100000 entries"),
        (spec("json_schema", {"$ref": "#"}), "nothing satisfies it"),
        (spec("regex", "a", backend="nobody"), "'nobody' is unknown"),
        (spec("lark", "start: missing"), "missing"),
        (example(refuse=True), "refused, as it was told to"),
        (example(at={"compile": "raise"}), "RuntimeError"),
        (example(at={"compile": "exit"}), "ended the compiler"),
    ],
    ids=lambda value: value.kind if isinstance(value, ConstraintSpec) else "",
)
def test_bad_constraints_are_refused_before_anything_runs(llm: LLM, constraint: ConstraintSpec, match: str) -> None:
    with pytest.raises(RequestRefused, match=match) as refused:
        llm.generate([[7]], constrained(constraint), use_tqdm=False)
    assert refused.value.refusal.field == "constraint"
    settled(llm)


def test_an_endless_compilation_is_killed_others_go_on() -> None:
    llm = make_llm(constraints={"compile_seconds": 2.0})
    endless = llm.engine.constraints.resolve(example(at={"compile": "hang"}))
    quick = llm.generate([[7]], constrained(spec("regex", "abc")), use_tqdm=False)[0]
    assert quick.outputs[0].text == "abc"
    with pytest.raises(RequestRefused) as caught:
        endless.result(timeout=PATIENCE_S)
    refusal = caught.value.refusal
    assert (refusal.kind, refusal.bound, refusal.unit) == ("over_budget", 2.0, "s")
    assert llm.generate([[7]], constrained(spec("regex", "abd")), use_tqdm=False)[0].outputs[0].text == "abd"


def test_one_compilation_serves_all_that_wait_for_it(llm: LLM) -> None:
    constraint = spec("regex", "once[0-9]")
    before = llm.engine.constraints.num_compiled
    futures = [llm.engine.constraints.resolve(constraint) for _ in range(20)]
    assert len({future.result(timeout=PATIENCE_S).compiled for future in futures}) == 1
    assert llm.engine.constraints.num_compiled == before + 1


@pytest.mark.parametrize("how", ["raise", "hang", 0.3])
def test_a_backend_that_misbehaves_costs_its_own_sequence(how: str | float) -> None:
    llm = make_llm(grammar_pool={"mask_seconds": 1.5})
    plain = [SamplingParams(temperature=1, seed=index, max_tokens=40, ignore_eos=True) for index in range(4)]
    good = [constrained(spec("regex", "[a-f]{40}"), seed=index) for index in range(4)]
    prompts = [[5 + index] for index in range(8)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, plain + good, use_tqdm=False)]
    bad = constrained(example(length=20, at={"3": how}), max_tokens=30)
    outputs = llm.generate([*prompts, [7]], [*plain, *good, bad], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs[:-1]] == expected
    victim = outputs[-1].outputs[0]
    if isinstance(how, float):  # slow, within its budget: it waits, and nothing else happens
        assert victim.finish_reason is FinishStatus.FINISHED_STOPPED
        assert len(victim.token_ids) == 20
        assert llm.engine.masks.num_late > 0
    else:
        assert victim.finish_reason is FinishStatus.FINISHED_INTERNAL_ERROR
        assert "the constraint failed" in (victim.error or "")
        assert len(victim.token_ids) == 3
    settled(llm)


def test_an_external_backend_adjusts_logits(llm: LLM) -> None:
    params = constrained(example(length=12, favour={"33": 200.0}), temperature=0.5)
    assert llm.generate([[7]], params, use_tqdm=False)[0].outputs[0].token_ids == [33] * 12


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    params = constrained(spec("regex", "[ab]{5}"), logprobs=3)
    choice = llm.generate([[7]], params, use_tqdm=False)[0].outputs[0]
    assert choice.logprobs is not None
    assert len(choice.logprobs) == len(choice.token_ids)
    assert all(entry.rank >= 1 and entry.logprob <= 0 for entry in choice.logprobs)


def test_an_aborted_request_leaves_no_session(llm: LLM) -> None:
    llm.add_request("x", [7], constrained(spec("regex", "a{100}")))
    for _ in range(5):
        llm.step()
    llm.abort("x")
    settled(llm)

"""What no grammar says is kept by the guard: masks are exact, whatever is rolled back, forked or drawn."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest

from manta.structured.backend import DeadEnd, Grammar, Session, make_backend
from manta.structured.backends.guarded import GuardedSession
from manta.structured.backends.llguidance import LLGuidanceBackend
from manta.structured.constraint import ConstraintSpec
from manta.structured.masks import row_words
from manta.structured.schemas.documents import read
from manta.structured.schemas.rewriting import rewritten
from tests.structured.grammar_walk import allowed_tokens, walk
from tests.structured.session_checks import check_mask_byte_by_byte, check_state_is_that_of_its_tokens
from tests.structured.test_schema_conformance import EOS, VOCAB_SIZE, accepts, accepts_text, grammar_of, vocabulary

_INT = {"type": "integer"}
_TREE = {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "uniqueItems": True}}, "$ref": "#/$defs/t"}

GUARDED: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "array", "items": _INT, "uniqueItems": True}, [[], [1], [1, 12, 2]], [[1, 1], [12, 1, 12]]),
    (
        {"type": "array", "uniqueItems": True},
        [[1, True, "1"], [{}, []]],
        [[1, 1.0], [{"a": 1, "b": 2}, {"b": 2, "a": 1}]],
    ),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, [["a", "ab"]], [["a", "a"]]),
    (_TREE, [[], [[]], [[], [[]]]], [[[], []], [[[], []]]]),
    ({"type": "array", "items": _INT, "contains": {"const": 3}}, [[3], [1, 3]], [[], [1], [1, 33]]),
    ({"type": "array", "contains": {"type": "null"}, "minContains": 2, "maxContains": 3}, [[None, 1, None]], [[None]]),
    ({"type": "integer", "not": {"multipleOf": 2}}, [1, 21], [2, 0, 22]),
    ({"oneOf": [{"type": "number"}, _INT]}, [1.5], [1, 1.0]),
    (
        {"type": "object", "properties": {"n": {"type": "number", "not": _INT}}, "required": ["n"]},
        [{"n": 1.5}],
        [{"n": 1}, {"n": 2.0}],
    ),
    (
        {"type": "object", "minProperties": 2, "additionalProperties": _INT},
        [{"a": 1, "b": 2}],
        [{}, {"a": 1}],
    ),
    (
        {"allOf": [{"properties": {"a": _INT}}, {"anyOf": [{"properties": {"b": True}, "required": ["b"]}, {}]}]}
        | {"type": "object", "unevaluatedProperties": False},
        [{"a": 1}, {"a": 1, "b": 2}],
        [{"c": 1}, {"a": 1, "c": 2}],
    ),
    (
        {"type": "object", "unevaluatedProperties": False}
        | {"oneOf": [{"properties": {"a": _INT}, "required": ["a"]}, {"properties": {"b": True}, "required": ["b"]}]},
        [{"a": 1}, {"b": 1}],
        [{"a": 1, "c": 2}, {"a": 1, "b": 2}, {}],
    ),
    (
        {"type": "string", "pattern": r"^(?=.*a.{9})(?=.*b.{9})\w+$"},
        ["ab0123456789", "ba0123456789", "abababababababababab"],
        ["ab01234567", "aaaaaaaaaaaaaaa", "ab 0123456789"],
    ),
    (
        {"oneOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "array", "items": {"type": "string"}}]},
        [[1], ["a"]],
        [[], [1, "a"]],
    ),
]
cases = pytest.mark.parametrize(("schema", "valid", "invalid"), GUARDED, ids=lambda value: json.dumps(value)[:50])


@functools.cache
def _grammar(text: str) -> Grammar:
    return grammar_of(json.loads(text), any_whitespace=False)


def grammar(schema: Any) -> Any:
    """Its sessions are `GuardedSession`s."""
    found = _grammar(json.dumps(schema))
    assert isinstance(found.session(), GuardedSession)
    return found


@cases
def test_exactly_the_valid_texts_can_be_written(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    judge = jsonschema.Draft202012Validator(schema)
    assert all(map(judge.is_valid, valid))
    assert not any(map(judge.is_valid, invalid))
    assert all(accepts(grammar(schema), value) for value in valid)
    assert not any(accepts(grammar(schema), value) for value in invalid)


@pytest.mark.few(6)
@cases
def test_walks_at_random_end_in_valid_instances(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    judge, rng = jsonschema.Draft202012Validator(schema), random.Random(json.dumps(schema))
    for _ in range(12):
        try:
            token_ids, ended = walk(grammar(schema).session(), vocabulary(), rng, free=15, longest=120)
        except DeadEnd:
            continue  # no answer at all is no wrong answer
        if ended:
            text = b"".join(vocabulary().tokens[token_id] for token_id in token_ids)
            assert judge.is_valid(json.loads(text)), text


@cases
def test_a_mask_equals_checking_bytes_one_by_one(schema: Any, valid: list[Any], invalid: Any) -> None:
    rng, single = random.Random(json.dumps(schema)), vocabulary().byte_token_ids()
    for value in valid:
        session = grammar(schema).session()
        text = json.dumps(value).encode()
        assert all(session.accept(single[byte]) for byte in text[: rng.randint(0, len(text))])
        check_mask_byte_by_byte(session, vocabulary(), rng, 300)


@cases
def test_rolled_back_forked_and_replayed_sessions_are_equal(schema: Any, valid: Any, invalid: Any) -> None:
    check_state_is_that_of_its_tokens(grammar(schema).session, vocabulary(), random.Random(json.dumps(schema)), 25)


def test_a_dead_end_is_no_failure() -> None:
    session = grammar({"type": "array", "items": _INT, "maxItems": 1, "contains": {"const": 3}}).session()
    single = {token: index for index, token in enumerate(vocabulary().tokens)}
    assert session.accept(single[b"["])
    assert session.accept(single[b"4"])
    session.fill(np.zeros(row_words(VOCAB_SIZE), dtype=np.int32))  # it may become 43, and then must not end
    chosen = {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 1, "contains": {"const": "b"}}
    session = grammar(chosen).session()
    assert all(session.accept(single[bytes([byte])]) for byte in b'["a"')
    with pytest.raises(DeadEnd):
        session.fill(np.zeros(row_words(VOCAB_SIZE), dtype=np.int32))


def _all_texts(session: Session) -> set[bytes]:
    """Every text that can be written. A dead end is an assertion error."""
    found, begun, tokens = set(), set(), vocabulary().tokens

    def go_on(text: bytes) -> None:
        begun.add(text)
        allowed = allowed_tokens(session, vocabulary()).tolist()
        assert allowed, f"nothing may follow {text!r}"
        if session.is_accepting():
            found.add(text)
        for token_id in allowed:
            if token_id != EOS and text + tokens[token_id] not in begun:
                assert session.accept(token_id)
                go_on(text + tokens[token_id])
                session.rollback(1)

    go_on(b"")
    return found


@pytest.mark.parametrize(
    "items",
    [{"enum": ["a", "ab", "b"]}, {"type": "integer", "minimum": 8, "maximum": 11}, {"enum": [1, None, True, "x"]}],
)
def test_arrays_over_few_values_avoid_dead_ends(items: Any) -> None:
    schema = {"type": "array", "items": items, "uniqueItems": True}
    found = _all_texts(grammar(schema).session())
    values = items.get("enum", list(range(8, 12)))
    count = sum(
        functools.reduce(lambda product, left: product * left, range(len(values), len(values) - k, -1), 1)
        for k in range(len(values) + 1)
    )
    assert len(found) == count
    assert all(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)) for text in found)


def test_a_name_that_comes_twice_counts_once() -> None:
    schema = {"type": "object", "minProperties": 3, "additionalProperties": _INT}
    assert not accepts_text(grammar(schema), '{"a": 1, "b": 1, "a": 1}')
    assert accepts_text(grammar(schema), '{"a": 1, "b": 1, "a": 1, "c": 1}')


def test_schemas_in_grammars_are_rewritten_exactly() -> None:
    options = {"x-guidance": {"whitespace_flexible": False}}
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "date"}, "b": {}, "c": {}}} | options
    either = schema | {"additionalProperties": False, "oneOf": [{"required": ["b"]}, {"required": ["c"]}]}
    backend = make_backend("llguidance", vocabulary())
    spec = ConstraintSpec(kind="lark", text=f'start: "<" %json {json.dumps(either)} ">"', backend="llguidance")
    found = backend.load(spec, backend.compile(spec))
    assert accepts_text(found, '<{"b":1}>')
    assert accepts_text(found, '<{"a":"2024-02-29","c":1}>')
    assert not accepts_text(found, '<{"b":1,"c":1}>')
    assert not accepts_text(found, '<{"a":"2023-02-29","c":1}>')


def test_what_takes_too_many_proofs_is_guarded() -> None:
    branches = [{"properties": {f"p{index}": {"type": "integer"}}} for index in range(9)]
    nested = [{"oneOf": [{"required": [f"p{index}"]}, {"anyOf": branches}]} for index in range(12)]
    schema = {"type": "object", "allOf": nested, "additionalProperties": {"type": "integer"}, "maxProperties": 12}
    judge = jsonschema.Draft202012Validator(schema)
    for value in ({f"p{index}": 1 for index in range(12)}, {}, {"p0": 1}, {"q": 1}):
        assert not accepts(grammar(schema), value) or judge.is_valid(value)


def test_values_that_no_mark_reaches_are_not_judged() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array", "uniqueItems": True}}}
    session = grammar(schema).session()
    assert isinstance(session, GuardedSession)
    assert rewritten(read({"type": "object", "properties": {"a": {"uniqueItems": False}}}))[1] == ""


# ---- types that no completion saves ----------------------------------------------------------------------------------

_BOTH = [{"properties": {"a": {"enum": values}}, "required": ["a"]} for values in ([1], [2, 3])]
TYPED: dict[str, tuple[Any, bytes]] = {
    "one of two schemas of objects that take all else": ({"oneOf": _BOTH}, b"{"),
    "no string": ({"not": {"type": ["string", "null"]}}, b"{[tf-1"),
    "of two strings one": ({"oneOf": [{"minLength": 2}, {"maxLength": 3}]}, b'"'),
    "a condition that holds for all but objects": ({"if": {"required": ["a"]}, "then": {"type": "array"}}, b"[{"),
}
AROUND: dict[str, Callable[[Any], Any]] = {
    "in an array": lambda schema: {"type": "array", "items": schema, "uniqueItems": True},
    "alone": lambda schema: schema,
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", TYPED)
def test_a_value_of_a_type_that_no_completion_saves_does_not_begin(name: str, around: str) -> None:
    schema, begins = TYPED[name]
    backend = LLGuidanceBackend(vocabulary())
    spec = ConstraintSpec(kind="json_schema", text=json.dumps(AROUND[around](schema)), any_whitespace=False)
    single = vocabulary().byte_token_ids()
    for way in ("proved", "guarded"):
        session = backend.load(spec, backend.compiled_by(spec, way)).session()
        assert around == "alone" or session.accept(single[ord("[")])
        begun = bytes(byte for byte in b'{["tfn-1' if session.fork().accept(single[byte]))
        assert set(begun) == set(begins), way
        if hasattr(session, "unguarded"):
            check_mask_byte_by_byte(session, vocabulary(), random.Random(name), 10_000)

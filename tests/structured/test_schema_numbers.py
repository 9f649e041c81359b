"""Numbers at the edges of what machines hold, in every keyword that takes one: a schema means what `jsonschema` says of
it on decimals, or is refused by name.

Schemas and instances draw their numbers from the same few values and their neighbours, where 32-bit and 64-bit
integers, floats and Python's own conversions end.
"""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jsonschema
import pytest

from manta.structured.backend import DeadEnd, Grammar
from manta.structured.constraint import ConstraintError, ConstraintLimits, ConstraintSpec, check_limits
from manta.structured.schemas.guard import MAX_DEPTH
from tests.conftest import PROVE
from tests.structured.grammar_walk import allowed_tokens, walk
from tests.structured.grammar_walk import text_of as walked_text
from tests.structured.test_schema_conformance import accepts_text, backends, make_backend_once, vocabulary

NUM_SCHEMAS = 4000 if PROVE else 150
BACKENDS = ("auto", "xgrammar")
EDGES = [0, 1, 7, 2**31, 2**32, 2**53, 2**63, 2**64, 10**20, 10**400]
WHOLE = sorted({sign * edge + step for edge in EDGES for sign in (1, -1) for step in (-1, 0, 1)})
FRACTIONS = [
    Decimal(text) for text in ("0.1", "-0.5", "1e-7", "0.01", "9007199254740992.5", "1e400", "123456789.012345678")
]
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OF_TYPE = {"Length": "string", "Items": "array", "Properties": "object"}
SIZED: list[Any] = ["", "a", "ab", "abcdefgh", [], [1], [1, 2], [1] * 8, {}, {"a": 1}, {"a": 1, "b": 2}, None, 5]


def text_of(value: Any) -> str:
    """The value as JSON, numbers without exponents."""
    if isinstance(value, list):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(name)}: {text_of(item)}' for name, item in value.items())}}}"
    if isinstance(value, Decimal):
        return str(int(value)) if value == value.to_integral_value() else format(value, "f")
    return json.dumps(value, ensure_ascii=False)


def _is_integer(checker: Any, value: Any) -> bool:
    is_number = isinstance(value, int | Decimal) and not isinstance(value, bool)
    return is_number and Fraction(value).denominator == 1


def _multiples(validator: Any, divisor: Any, value: Any, schema: Any) -> Iterator[Any]:
    is_number = isinstance(value, int | Decimal) and not isinstance(value, bool)
    if is_number and (Fraction(value) / Fraction(divisor)).denominator != 1:
        yield jsonschema.ValidationError("no multiple")


@functools.cache
def _judge() -> Any:
    """`jsonschema` on decimals."""
    kind = jsonschema.Draft202012Validator
    types = kind.TYPE_CHECKER.redefine("integer", _is_integer)
    return jsonschema.validators.extend(kind, {"multipleOf": _multiples}, type_checker=types)


def is_valid(schema: Any, value: Any) -> bool:
    return bool(_judge()(schema).is_valid(value))


def grammar_of(schema: Any, backend: str, loose: bool = False) -> tuple[Grammar, list[str]]:
    options = {"backend": backend, "loose": loose, "any_whitespace": False, "additional_properties": "as_schema"}
    spec = ConstraintSpec(kind="json_schema", text=text_of(schema), **options)  # type: ignore[arg-type]
    resolved = backends().resolve(spec)
    return make_backend_once(resolved.spec.backend).load(resolved.spec, resolved.compiled), resolved.not_enforced


def check(schema: Any, instances: list[Any], backend: str) -> None:
    """Accepts every valid instance and no other, or refuses the schema by the name of a keyword."""
    valid = [value for value in instances if is_valid(schema, value)]
    for loose in (False, True):
        try:
            grammar, not_enforced = grammar_of(schema, backend, loose)
        except ConstraintError as error:
            words = str(error)
            assert loose or not valid or any(name in words for name in _keywords(schema)), words
            continue
        assert loose or not not_enforced
        for value in instances:
            is_right = value in valid and any(value is each for each in valid)
            if not_enforced:
                continue
            assert accepts_text(grammar, text_of(value)) == is_right, (text_of(schema), text_of(value), is_right)
        if not loose:
            _check_walk(grammar, schema)


def _check_walk(grammar: Grammar, schema: Any) -> None:
    try:
        token_ids, ended = walk(grammar.session(), vocabulary(), random.Random(text_of(schema)), free=8, longest=40)
    except DeadEnd:
        return
    if ended:
        text = walked_text(token_ids, vocabulary())
        assert is_valid(schema, json.loads(text, parse_float=Decimal)), (text_of(schema), text)


def _keywords(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return {name for item in schema for name in _keywords(item)}
    if not isinstance(schema, dict):
        return set()
    return set(schema) | {name for item in schema.values() for name in _keywords(item)}


# ---- drawn schemas ---------------------------------------------------------------------------------------------------


def numbers(rng: random.Random) -> Any:
    return rng.choice(WHOLE) if rng.random() < 0.8 else rng.choice(FRACTIONS)


def near(number: Any) -> list[Any]:
    """The number, its neighbours, its double and its negative."""
    if number != int(number):
        return [number, int(number), number.copy_negate(), number + number]
    whole = int(number)
    return [whole, whole - 1, whole + 1, 2 * whole, -whole, Decimal(f"{whole}.5")]


def a_case(rng: random.Random) -> tuple[Any, list[Any]]:
    """A schema, and instances of which some are valid."""
    schema, instances = rng.choice([_of_numbers, _of_numbers, _listed, _counted, _contained])(rng)
    return rng.choice([_alone, _alone, _in_object, _in_array, _nullable, _joined, _negated])(schema, instances)


def _of_numbers(rng: random.Random) -> tuple[Any, list[Any]]:
    kind = rng.choice(["integer", "integer", "number", None])
    schema: dict[str, Any] = {} if kind is None else {"type": kind}
    drawn = [numbers(rng) for _ in range(rng.choice([1, 1, 2]))]
    for number in drawn:
        name = rng.choice([*BOUNDS, "multipleOf"])
        schema[name] = abs(number) or 1 if name == "multipleOf" else number
    return schema, [*(value for number in drawn for value in near(number)), 0, 1, -1, "a"]


def _listed(rng: random.Random) -> tuple[Any, list[Any]]:
    drawn = [numbers(rng) for _ in range(rng.choice([1, 1, 3]))]
    schema = rng.choice(
        [
            {"const": drawn[0]},
            {"enum": drawn},
            {"enum": [*drawn, "a", None]},
            {"type": "string", "enum": ["a", *drawn]},
            {"type": ["integer", "null"], "enum": [*drawn, None, "a"]},
            {"enum": [{"n": drawn[0]}, [drawn[-1]]]},
        ]
    )
    values = [value for number in drawn for value in near(number)]
    return schema, [*values, "a", None, {"n": drawn[0]}, [drawn[-1]], [drawn[-1], 1]]


def _counted(rng: random.Random) -> tuple[Any, list[Any]]:
    schema: dict[str, Any] = {}
    for _ in range(rng.choice([1, 2])):
        name = rng.choice(COUNTS)
        schema[name] = abs(rng.choice([0, 1, 2, 7, int(rng.choice(WHOLE))]))
        if rng.random() < 0.7:
            schema["type"] = _OF_TYPE[name[3:]]
    return schema, SIZED


def _contained(rng: random.Random) -> tuple[Any, list[Any]]:
    schema: dict[str, Any] = {"type": "array", "contains": {"const": 1}}
    for name in rng.sample(["minContains", "maxContains"], rng.choice([1, 2])):
        schema[name] = abs(rng.choice([0, 1, 2, int(rng.choice(WHOLE))]))
    return schema, [[], [1], [2], [1, 1], [1, 2, 1], [1, 1, 1]]


def _alone(schema: Any, instances: list[Any]) -> tuple[Any, list[Any]]:
    return schema, instances


def _in_object(schema: Any, instances: list[Any]) -> tuple[Any, list[Any]]:
    other = {"type": "integer", "multipleOf": 5000}
    whole = {"type": "object", "properties": {"v": schema, "w": other}, "required": ["v"]}
    values = [{"v": value} for value in instances]
    return whole | {"additionalProperties": False}, [
        *values,
        {"v": instances[0], "w": 1},
        {"v": instances[0], "w": 5000},
        {},
    ]


def _in_array(schema: Any, instances: list[Any]) -> tuple[Any, list[Any]]:
    return {"type": "array", "items": schema, "maxItems": 2}, [[value] for value in instances] + [[instances[0]] * 2]


def _nullable(schema: Any, instances: list[Any]) -> tuple[Any, list[Any]]:
    return {"anyOf": [schema, {"type": "null"}]}, [*instances, None]


def _joined(schema: Any, instances: list[Any]) -> tuple[Any, list[Any]]:
    return {"allOf": [schema, {"not": {"const": -3}}]}, [*instances, -3]


def _negated(schema: Any, instances: list[Any]) -> tuple[Any, list[Any]]:
    return {"type": ["integer", "string", "array"], "not": schema}, instances


# ---- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.few(4)
@pytest.mark.axes_in_turns
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("part", range(10))
def test_numbers_mean_what_they_say(part: int, backend: str) -> None:
    rng = random.Random(part)
    for _ in range(NUM_SCHEMAS // 10):
        check(*a_case(rng), backend)


def accepted(schema: Any, *texts: str) -> list[bool]:
    grammar, not_enforced = grammar_of(schema, "auto")
    assert not_enforced == []
    return [accepts_text(grammar, text) for text in texts]


INT64 = {"type": "integer", "format": "int64", "minimum": -(2**63), "maximum": 2**63 - 1}
UINT64 = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}


def test_bounds_as_generators_write_them_are_served() -> None:
    grammar, _ = grammar_of(INT64, "auto")
    for number in (0, -(2**63), 2**63 - 1):
        assert accepts_text(grammar, str(number))
    assert not accepts_text(grammar, str(2**63))
    assert not accepts_text(grammar, str(-(2**63) - 1))
    assert accepted(UINT64, str(2**64 - 1), str(2**64), "-1") == [True, False, False]
    assert accepted({"anyOf": [UINT64, {"type": "null"}]}, "null", str(2**64 - 1), str(2**64)) == [True, True, False]
    assert accepted({"type": "string", "maxLength": 2**32}, '"a"', "1") == [True, False]
    assert accepted({"type": "array", "maxItems": 2**63 - 1}, "[1]") == [True]


def test_a_large_number_somewhere_takes_nothing_from_the_other_keywords() -> None:
    large = {"enum": [2**63, "x"]}
    schema = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 5000}, "b": large}}
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    texts = (
        f'{{"a": 5000, "b": {2**63}}}',
        f'{{"a": 1, "b": {2**63}}}',
        '{"a": 5000}',
        f'{{"a": 5000, "b": {2**63 + 1}}}',
    )
    assert accepted(schema, *texts) == [True, False, False, False]
    with pytest.raises(ConstraintError, match="required"):
        grammar_of({**schema, "required": ["c"]}, "auto")


def test_listed_numbers_of_any_size_can_be_written() -> None:
    listed = [10**20 + 1, 2**63, -(2**63), Decimal("1e400"), Decimal("0.1")]
    assert accepted({"enum": listed}, *map(text_of, listed)) == [True] * 5
    assert accepted({"enum": listed}, "1e+20", str(10**20), str(2**63 + 1)) == [False] * 3


def test_values_that_xgrammar_is_not_proven_to_keep_are_refused_by_name() -> None:
    """The first one crashed its process."""
    for schema, name in (
        ({"enum": [-(2**63)]}, "enum"),
        ({"type": "integer", "multipleOf": 5000}, "multipleOf"),
        ({"type": "string", "enum": ["a", 5]}, "enum"),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"]}, "required"),
    ):
        with pytest.raises(ConstraintError, match=name):
            grammar_of({**schema}, "xgrammar")


def test_a_grammar_leads_to_the_numbers_of_its_range() -> None:
    """No token is allowed after which no number of the range can be written."""
    schema = {"type": "integer", "minimum": 2**60, "maximum": 2**60 + 5, "multipleOf": 2**60 + 3}
    grammar, _ = grammar_of(schema, "auto")
    for seed in range(5):
        token_ids, ended = walk(grammar.session(), vocabulary(), random.Random(seed))
        assert ended
        assert walked_text(token_ids, vocabulary()) == str(2**60 + 3).encode()


def test_a_guard_takes_whatever_a_model_writes() -> None:
    """Numbers that Python does not read, and nesting deeper than it recurses."""
    schema = {"type": "array", "contains": {"const": 1}}
    assert accepted(schema, f"[1, {'7' * 5000}]", f"[{'7' * 5000}]", "[1e99999999999999999999, 1]") == [
        True,
        False,
        True,
    ]
    nested = {
        "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "uniqueItems": True}},
        "$ref": "#/$defs/t",
    }
    texts = ["[" * depth + "]" * depth for depth in (MAX_DEPTH, MAX_DEPTH + 1, 900)]
    assert accepted(nested, *texts) == [True, False, False]


def test_masks_keep_to_the_deepest_nesting() -> None:
    grammar, _ = grammar_of({"type": "array", "uniqueItems": True}, "auto")
    session = grammar.session()
    single = vocabulary().byte_token_ids()
    assert all(session.accept(single[byte]) for byte in b"[" * (MAX_DEPTH - 1))
    for token_id in allowed_tokens(session, vocabulary()).tolist():
        assert session.fork().accept(token_id), vocabulary().tokens[token_id]


# ---- other spellings and places of numbers ---------------------------------------------------------------------------

NUMERIC_KEYWORDS = (*BOUNDS, "multipleOf", *COUNTS, "minContains", "maxContains")


def of_text(text: str) -> Grammar:
    """The grammar of a schema that is written in JSON."""
    spec = ConstraintSpec(kind="json_schema", text=text, any_whitespace=False)
    check_limits(spec, ConstraintLimits())
    resolved = backends().resolve(spec)
    return make_backend_once(resolved.spec.backend).load(resolved.spec, resolved.compiled)


@pytest.mark.parametrize("keyword", [*NUMERIC_KEYWORDS, "const"])
@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_of_json_is_refused(keyword: str, text: str) -> None:
    for schema in (f'{{"{keyword}": {text}}}', f'{{"properties": {{"a": {{"{keyword}": {text}}}}}}}'):
        with pytest.raises(ConstraintError) as refusal:
            of_text(schema)
        assert refusal.value.refusal.kind == "malformed"


@pytest.mark.parametrize("keyword", COUNTS)
@pytest.mark.parametrize("text", ["2.0", "2e0", "20e-1", "0.2E+1"])
def test_a_count_may_be_written_as_a_fraction_without_one(keyword: str, text: str) -> None:
    grammar = of_text(f'{{"{keyword}": {text}}}')
    for value in SIZED:
        assert accepts_text(grammar, text_of(value)) == is_valid({keyword: 2}, value), value


@pytest.mark.parametrize("keyword", COUNTS)
@pytest.mark.parametrize("text", ["-1", "-1e400", "0.5", "1e-400", '"2"', "true", "null"])
def test_what_is_no_count_is_refused_by_name(keyword: str, text: str) -> None:
    with pytest.raises(ConstraintError, match=keyword):
        of_text(f'{{"type": "{_OF_TYPE[keyword[3:]]}", "{keyword}": {text}}}')


@pytest.mark.parametrize("draft", [3, 4])
def test_exclusive_bounds_are_flags_in_draft_4(draft: int) -> None:
    uri = f"http://json-schema.org/draft-0{draft}/schema#"
    for edge in (0, 1, 2**31, 2**53, 2**63, 10**20, 10**400):
        schema = f'{{"$schema": "{uri}", "type": "integer", "minimum": {edge}, "exclusiveMinimum": true}}'
        if draft != 4:
            with pytest.raises(ConstraintError):
                of_text(schema)
            continue
        grammar = of_text(schema)
        assert [accepts_text(grammar, str(edge + step)) for step in (-1, 0, 1)] == [False, False, True]


REPEATS = (0, 1, 2, 2**16, 2**31, 2**32 - 2)


@pytest.mark.parametrize(
    "least", [*REPEATS[:-2], *(pytest.param(many, marks=pytest.mark.prove) for many in REPEATS[-2:])]
)
def test_repetitions_in_a_pattern_mean_what_they_say(least: int) -> None:
    """Or the pattern is refused. `None` stands for no upper bound, and `...` for exactly so many."""
    for most in (*REPEATS, None, ...):
        counts = f"{least}" if most is ... else f"{least}," if most is None else f"{least},{most}"
        upper = least if most is ... else math.inf if most is None else most
        lengths = [length for length in range(5) if least <= length <= upper]
        try:
            grammar = of_text(f'{{"type": "string", "pattern": "^a{{{counts}}}$"}}')
        except ConstraintError:
            assert not least <= min(upper, 3) <= 2, f"{{{counts}}} is refused"
            assert upper < least or upper > 2, f"{{{counts}}} is refused"
            continue
        assert [length for length in range(5) if accepts_text(grammar, json.dumps("a" * length))] == lengths, counts

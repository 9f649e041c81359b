"""What a schema says is what comes out: masks against jsonschema's verdict, whatever a model would like to write.

Models are replaced by something worse: a choice at random among all tokens that the mask allows. A schema is enforced
or refused with a reason; nothing is ignored. `python -m tests.structured.test_schema_conformance` writes the list of
what xgrammar is proven to enforce, and the test holds the list to it. (hypothesis-jsonschema 0.23 does not work with
the hypothesis of today, so schemas and their instances are generated here.)
"""

from __future__ import annotations

import functools
import json
import pathlib
import random
from typing import Any

import hypothesis
import jsonschema
import numpy as np
import pytest
from hypothesis import strategies as st

from manta.structured.backend import Grammar, Session, make_backend
from manta.structured.backends import xgrammar
from manta.structured.backends.choose import Backends
from manta.structured.backends.keywords import combinations
from manta.structured.constraint import ConstraintError, ConstraintSpec
from manta.structured.masks import row_words
from manta.structured.vocabulary import Vocabulary
from tests.conftest import PROVE
from tests.schema_cases import CASES, Case

DEMO = pathlib.Path(__file__).parents[2] / "configs" / "demo" / "target"
VOCAB_SIZE, EOS = 4160, 2
NUM_SCHEMAS = 600 if PROVE else 60
MAX_TOKENS = 400
ENFORCED_FILE = pathlib.Path(xgrammar.__file__).with_name("xgrammar_enforced.json")


@functools.cache
def vocabulary() -> Vocabulary:
    return Vocabulary.load(str(DEMO), VOCAB_SIZE, (EOS,))


@functools.cache
def backends() -> Backends:
    return Backends(vocabulary())


@functools.cache
def byte_tokens() -> dict[int, int]:
    return {token[0]: index for index, token in reversed(list(enumerate(vocabulary().tokens))) if len(token) == 1}


def validator(schema: Any) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)


def grammar_of(schema: Any, backend: str = "auto", **options: Any) -> Grammar:
    options = {"additional_properties": "as_schema", **options}
    spec = ConstraintSpec(kind="json_schema", text=json.dumps(schema), backend=backend, **options)
    resolved = backends().resolve(spec)
    return make_backend_once(resolved.spec.backend).load(resolved.spec, resolved.compiled)


@functools.cache
def make_backend_once(name: str) -> Any:
    return make_backend(name, vocabulary())


def accepts(grammar: Grammar, value: Any) -> bool:
    return accepts_text(grammar, json.dumps(value, ensure_ascii=False))


def no_json(values: list[Any]) -> list[str]:
    """The values' texts with a raw control character in a string, which JSON forbids."""
    texts = [json.dumps(value, ensure_ascii=False) for value in values]
    broken = [f"{text[:i]}\x01{text[i + 1 :]}" for text in texts for i, char in enumerate(text) if char in "abcxz"]
    return [text for text in broken if _is_no_json(text)]


def _is_no_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return True
    return False


def accepts_text(grammar: Grammar, text: str) -> bool:
    session = grammar.session()
    return all(session.accept(byte_tokens()[byte]) for byte in text.encode()) and session.is_accepting()


def wild_output(session: Session, chooser: random.Random) -> str | None:
    """Text of a walk at random through the masks; None if it does not end in time.

    One choice in three closes something where it can, so that most walks end.
    """
    tokens = vocabulary().tokens
    row = np.zeros(row_words(VOCAB_SIZE), dtype=np.int32)
    output = b""
    closing = [byte_tokens()[byte] for byte in b'"}]0']
    for _ in range(MAX_TOKENS):
        if session.is_finished() or (session.is_accepting() and chooser.random() < 0.5):
            return output.decode()
        session.fill(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        allowed = allowed[allowed != EOS]
        assert allowed.size, f"nothing may follow {output!r}"
        assert allowed.max() < len(tokens), "padding is allowed"
        ways_out = [token_id for token_id in closing if token_id in allowed]
        token_id = chooser.choice(ways_out if ways_out and chooser.random() < 0.33 else allowed.tolist())
        assert session.accept(token_id), f"the mask allowed {tokens[token_id]!r} behind {output!r}, accept refuses it"
        output += tokens[token_id]
    return None


# ---- hand-written cases ----------------------------------------------------------------------------------------------


@pytest.mark.few(35)
@pytest.mark.filterwarnings("ignore:Possible :FutureWarning")  # of Python, for `--` and the like in a class
@pytest.mark.parametrize("case", CASES, ids=lambda case: json.dumps(case.schema, ensure_ascii=False)[:60])
def test_a_schema_is_enforced_or_refused(case: Case) -> None:
    check = validator(case.schema)
    assert all(check.is_valid(value) for value in case.valid), "the case is wrong"
    assert not any(check.is_valid(value) for value in case.invalid), "the case is wrong"
    try:
        grammar = grammar_of(case.schema, any_whitespace=False)
    except ConstraintError:
        return
    for value in case.invalid:
        assert not accepts(grammar, value), f"accepts {value!r}"
    for text in no_json(case.valid):
        assert not accepts_text(grammar, text), f"accepts {text!r}"
    for value in case.valid:
        assert accepts(grammar, value), f"refuses {value!r}"
    chooser = random.Random(json.dumps(case.schema))
    for _ in range(4):
        text = wild_output(grammar.session(), chooser)
        if text is not None:
            assert check.is_valid(json.loads(text)), text


def test_few_hand_written_schemas_are_refused() -> None:
    refused = []
    for case in CASES:
        try:
            grammar_of(case.schema)
        except ConstraintError:
            refused.append(case.schema)
    assert len(refused) <= 12, refused


# ---- generated schemas -----------------------------------------------------------------------------------------------


def schemas() -> st.SearchStrategy[Any]:
    """Schemas of every common keyword, nested."""
    names = st.sampled_from(["a", "b", "name", "ü", 'q"', "long_property_name"])
    leaves = st.one_of(
        st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": "string"}, {"type": "number"}]),
        st.builds(
            lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
            st.integers(-300, 300),
            st.integers(0, 1000),
        ),
        st.builds(
            lambda low, size: {"type": "string", "minLength": low, "maxLength": low + size},
            st.integers(0, 3),
            st.integers(0, 5),
        ),
        st.builds(
            lambda values: {"enum": values},
            st.lists(
                st.one_of(st.text(max_size=5), st.integers(-9, 99), st.none()), min_size=1, max_size=4, unique=True
            ),
        ),
        st.sampled_from(["^[a-f]{1,3}$", "^(x|yz)+$", "^\\d{2,4}-[A-Z]$"]).map(
            lambda pattern: {"type": "string", "pattern": pattern}
        ),
        st.sampled_from(["date", "uuid", "ipv4", "date-time"]).map(lambda name: {"type": "string", "format": name}),
        st.text(max_size=6).map(lambda value: {"const": value}),
    )

    def nested(child: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        objects = st.dictionaries(names, child, min_size=1, max_size=4).flatmap(
            lambda properties: st.builds(
                lambda required, extra: {
                    "type": "object",
                    "properties": properties,
                    "required": [name for name in properties if name in required],
                    "additionalProperties": extra,
                },
                st.sets(st.sampled_from(sorted(properties))),
                st.sampled_from([False, False, {"type": "integer"}]),
            )
        )
        arrays = st.builds(
            lambda items, low, size: {"type": "array", "items": items, "minItems": low, "maxItems": low + size},
            child,
            st.integers(0, 2),
            st.integers(0, 2),
        )
        tuples = st.lists(child, min_size=1, max_size=3).map(
            lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        )
        return st.one_of(objects, arrays, tuples, st.lists(child, min_size=1, max_size=3).map(lambda c: {"anyOf": c}))

    return st.recursive(leaves, nested, max_leaves=8)


ENDED = {"walks": 0, "ended": 0, "schemas": 0, "refused": 0}


@hypothesis.settings(max_examples=NUM_SCHEMAS, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(schema=schemas())
def check_generated_schema(schema: Any) -> None:
    ENDED["schemas"] += 1
    try:
        grammar = grammar_of(schema)
    except ConstraintError:
        ENDED["refused"] += 1
        return
    check = validator(schema)
    chooser = random.Random(json.dumps(schema))
    for _ in range(3):
        text = wild_output(grammar.session(), chooser)
        ENDED["walks"] += 1
        if text is not None:
            ENDED["ended"] += 1
            assert check.is_valid(json.loads(text)), text
    compact = grammar_of(schema, any_whitespace=False)
    for _ in range(3):
        instance = an_instance(schema, chooser)
        assert check.is_valid(instance)
        assert accepts(compact, instance), f"{instance!r} is valid and refused"


def an_instance(schema: Any, chooser: random.Random) -> Any:
    """A valid instance of one of `schemas()`, properties in order."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return chooser.choice(schema["enum"])
    if "anyOf" in schema:
        return an_instance(chooser.choice(schema["anyOf"]), chooser)
    kind = schema["type"]
    if kind == "object":
        names = [n for n in schema["properties"] if n in schema["required"] or chooser.random() < 0.5]
        return {name: an_instance(schema["properties"][name], chooser) for name in names}
    if kind == "array" and "prefixItems" in schema:
        return [an_instance(item, chooser) for item in schema["prefixItems"]]
    if kind == "array":
        count = chooser.randint(schema["minItems"], schema["maxItems"])
        return [an_instance(schema["items"], chooser) for _ in range(count)]
    if kind == "string" and "pattern" in schema:
        return {"^[a-f]{1,3}$": "abf", "^(x|yz)+$": "yzx", "^\\d{2,4}-[A-Z]$": "123-Q"}[schema["pattern"]]
    if kind == "string" and "format" in schema:
        return FORMATTED[schema["format"]]
    if kind == "string":
        count = chooser.randint(schema.get("minLength", 0), schema.get("maxLength", 9))
        return "".join(chooser.choices('aZ 9"\\\n/üß€漢😀', k=count))
    if kind == "integer":
        return chooser.randint(schema["minimum"], schema["maximum"])
    return {"number": chooser.choice([0, -3, 2.5, 1e-3]), "boolean": True, "null": None}[kind]


FORMATTED = {
    "date": "2024-02-29",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
    "ipv4": "10.0.255.1",
    "date-time": "2024-02-29T23:59:00Z",
}


def test_generated_schemas_are_enforced_or_refused(record_property: Any) -> None:
    ENDED.update(walks=0, ended=0, schemas=0, refused=0)
    check_generated_schema()
    for name, value in ENDED.items():
        record_property(name, value)
    assert ENDED["ended"] >= 0.7 * ENDED["walks"], ENDED
    assert ENDED["refused"] <= 0.1 * ENDED["schemas"], ENDED


# ---- what xgrammar is proven to enforce ------------------------------------------------------------------------------


def proven() -> list[str]:
    """Combinations of keywords that stand in a case which xgrammar serves rightly, and in none that it does not."""
    right: set[str] = set()
    wrong: set[str] = set()
    for case in CASES:
        try:
            # loose: the list being made must not decide
            grammar = grammar_of(case.schema, "xgrammar", any_whitespace=False, loose=True)
            serves = (
                all(accepts(grammar, value) for value in case.valid)
                and not any(accepts(grammar, value) for value in case.invalid)
                and not any(accepts_text(grammar, text) for text in no_json(case.valid))
            )
        except ConstraintError:
            continue
        (right if serves else wrong).update(combinations(case.schema))
    return sorted(right - wrong)


def test_xgrammar_enforces_exactly_its_list() -> None:
    listed, found = json.loads(ENFORCED_FILE.read_text()), proven()
    assert set(listed) - set(found) == set(), "listed and not enforced: remove it"
    assert set(found) - set(listed) == set(), (
        "enforced and not listed: run python -m tests.structured.test_schema_conformance"
    )


def test_unenforced_keywords_are_refused_or_served_loosely() -> None:
    old = "http://json-schema.org/draft-07/schema#"
    schema = {"$schema": old, "type": "array", "prefixItems": [{"type": "integer"}]}
    with pytest.raises(ConstraintError, match=r"#/prefixItems.*loose"):
        grammar_of(schema)
    spec = ConstraintSpec(kind="json_schema", text=json.dumps(schema), loose=True)
    resolved = backends().resolve(spec)
    assert any("prefixItems" in keyword for keyword in resolved.not_enforced)


def test_an_undefined_format_is_a_reported_annotation() -> None:
    schema = {"type": "object", "properties": {"color": {"type": "string", "format": "color"}}}
    resolved = backends().resolve(ConstraintSpec(kind="json_schema", text=json.dumps(schema)))
    assert resolved.not_enforced == ["#/properties/color/format: 'color' is no format of JSON Schema"]
    assert accepts(grammar_of(schema, any_whitespace=False), {"color": "no color at all"})
    spelled = ConstraintSpec(kind="json_schema", text=json.dumps(schema).replace('"format"', '"\\u0066ormat"'))
    assert backends().resolve(spelled).not_enforced == resolved.not_enforced


def grammar_of_spec(spec: ConstraintSpec) -> Any:
    resolved = backends().resolve(spec)
    return backends().get(resolved.spec.backend).load(resolved.spec, resolved.compiled)


def test_loose_schemas_in_grammars_drop_unenforceable_parts() -> None:
    """As the arguments of a tool with `"strict": false`, whose strict form is tried before the loose one."""

    def spec(schema: str, **options: bool) -> ConstraintSpec:
        return ConstraintSpec(kind="lark", text=f'start: "x" arguments\narguments: %json {schema}', **options)

    unnamed = '{"$dynamicRef": "#nowhere", "x-guidance": {"lenient": true}}'
    loose = backends().resolve(spec(unnamed, loose=True))
    assert any("dynamicRef" in keyword for keyword in loose.not_enforced)
    with pytest.raises(ConstraintError, match="dynamicRef"):
        backends().resolve(spec(unnamed))
    whole = '{"type": "array", "contains": {"const": 3}, "x-guidance": {"lenient": true}}'
    resolved = backends().resolve(spec(whole, loose=True))
    assert resolved.not_enforced == []
    for one in (loose, resolved):  # an engine resolves again what an ingress resolved
        again = backends().resolve(one.spec)
        assert (again.spec, again.not_enforced) == (one.spec, one.not_enforced)
    both = spec(f"{unnamed} %json {whole}", loose=True)
    assert backends().resolve(both).not_enforced == loose.not_enforced
    assert not accepts_text(grammar_of_spec(both), 'x{"a":1}[4]')
    assert accepts_text(grammar_of_spec(both), 'x{"a":1}[3]')
    with pytest.raises(ConstraintError, match="nowhere"):
        backends().resolve(ConstraintSpec(kind="lark", text="start: nowhere", loose=True))


if __name__ == "__main__":
    ENFORCED_FILE.write_text(json.dumps(proven(), indent=1) + "\n")

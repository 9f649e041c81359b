"""Schemas within a grammar are guarded as those that stand alone: a tool's arguments, structural tags, users' Lark."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import pytest

from manta.cluster.chat.tool_formats import HERMES, LLAMA3, MISTRAL, ToolFormat
from manta.cluster.chat.tool_grammar import calls_grammar
from manta.cluster.protocol.tools import Function, Tool
from manta.structured.backend import DeadEnd, make_backend
from manta.structured.backends.choose import Backends
from manta.structured.backends.guarded import GuardedPartsSession
from manta.structured.backends.lark_schemas import embedded_schemas, named_token_ids, with_replaced
from manta.structured.backends.striker import token_ids_of
from manta.structured.constraint import ConstraintError, ConstraintSpec, Unsupported
from manta.structured.masks import row_words
from manta.structured.vocabulary import Vocabulary
from tests.structured.grammar_walk import text_of, walk
from tests.structured.session_checks import check_mask_byte_by_byte, check_state_is_that_of_its_tokens
from tests.structured.test_schema_conformance import EOS, VOCAB_SIZE, accepts_text, vocabulary

UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
ODD = {"type": "integer", "not": {"multipleOf": 2}}
MARKS = {"<tool_call>": 5, "</tool_call>": 6}
"""Special tokens of the demo model."""
TIGHT = {"x-guidance": {"whitespace_flexible": False}}
TOOLS = {
    "sort": {"type": "object", "properties": {"a": UNIQUE}, "required": ["a"], "additionalProperties": False},
    "pick": {
        "type": "object",
        "properties": {"n": {"oneOf": [{"type": "number"}, {"type": "integer"}]}, "s": {"type": "string"}},
        "required": ["n"],
        "additionalProperties": False,
    },
    "wait": {"type": "object", "properties": {"s": {"type": "integer"}}, "additionalProperties": False},
}


def _is_valid(schema: Any, text: str) -> bool:
    try:
        return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    except ValueError:
        return False


def _are_calls(text: str) -> bool:
    calls = re.findall(r"<tool_call>[ \n]{0,2}(.*?)[ \n]{0,2}</tool_call>", text, re.DOTALL)
    found = [json.loads(call) for call in calls]
    return bool(found) and all(_is_valid(TOOLS[each["name"]], json.dumps(each["arguments"])) for each in found)


def tools_grammar(form: ToolFormat, **options: Any) -> str:
    tools = [Tool(function=Function(name=name, parameters=schema)) for name, schema in TOOLS.items()]
    return calls_grammar(form, tools, MARKS.get, parallel=True, **options)


class GrammarCase(NamedTuple):
    """A grammar, what decides by itself whether a text is right, and examples."""

    lark: str
    is_right: Callable[[str], bool]
    right: list[str]
    wrong: list[str]


def _json(schema: Any) -> str:
    return f"%json {json.dumps({**schema, **TIGHT})}"


def _split(*judges: Callable[[str], bool]) -> Callable[[str], bool]:
    """Whether a text can be cut into pieces that satisfy the judges, one after the other."""

    def is_right(text: str) -> bool:
        if len(judges) == 1:
            return judges[0](text)
        return any(judges[0](text[:cut]) and _split(*judges[1:])(text[cut:]) for cut in range(len(text) + 1))

    return is_right


def _one(schema: Any) -> Callable[[str], bool]:
    return lambda text: _is_valid(schema, text)


def _like(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text, re.DOTALL) is not None


CASES = {
    "one": GrammarCase(
        f'start: "<" {_json(UNIQUE)} ">"',
        _split(_like("<"), _one(UNIQUE), _like(">")),
        ["<[]>", "<[1,12,2]>"],
        ["<[1,1]>", "<[12,1,12]>", "<[1]"],
    ),
    "a scalar at the end": GrammarCase(
        f'start: "n=" {_json(ODD)}', _split(_like("n="), _one(ODD)), ["n=1", "n=21"], ["n=2", "n=120", "n="]
    ),
    "two in a row": GrammarCase(
        f'start: {_json(UNIQUE)} {_json(UNIQUE)} "."',
        _split(_one(UNIQUE), _one(UNIQUE), _like(r"\.")),
        ["[][].", "[1][1,2]."],
        ["[1,1][].", "[][2,2]."],
    ),
    "one of two": GrammarCase(
        f"start: {_json(UNIQUE)} | {_json({'type': 'array', 'items': ODD})}",
        lambda text: _is_valid(UNIQUE, text) or _is_valid({"type": "array", "items": ODD}, text),
        ["[1,1]", "[2,4]", "[]"],
        ["[2,2]", "[1,1,4,4]"],
    ),
    "many": GrammarCase(
        f'start: ({_json(UNIQUE)} ";")* "end"',
        lambda text: (
            text.endswith("end")
            and all(_is_valid(UNIQUE, each) for each in text.removesuffix("end").split(";")[:-1])
            and text.removesuffix("end")[-1:] in ("", ";")
        ),
        ["end", "[1];[1];end"],
        ["[1];[2,2];end", "[1]end"],
    ),
    "a number that something may follow": GrammarCase(
        f'start: {_json(ODD)} /[a-c]{{0,2}}/ "!"',
        _split(_one(ODD), _like("[a-c]{0,2}"), _like("!")),
        ["1!", "23ab!"],
        ["2!", "20a!"],
    ),
    "calls of tools": GrammarCase(
        tools_grammar(HERMES, required=True),
        _are_calls,
        [],
        [],
    ),
}
cases = pytest.mark.parametrize("name", CASES)


def compiled(text: str, kind: str = "lark", tokens: Vocabulary | None = None) -> Any:
    backend = make_backend("llguidance", tokens or vocabulary())
    spec = ConstraintSpec(kind=kind, text=text, backend="llguidance")  # type: ignore[arg-type]
    return backend.load(spec, backend.compile(spec))


@functools.cache
def grammar(name: str) -> Any:
    found = compiled(CASES[name].lark)
    assert isinstance(found.session(), GuardedPartsSession)
    return found


@cases
def test_exactly_the_valid_texts_can_be_written(name: str) -> None:
    case = CASES[name]
    assert all(map(case.is_right, case.right))
    assert not any(map(case.is_right, case.wrong))
    assert all(accepts_text(grammar(name), text) for text in case.right)
    assert not any(accepts_text(grammar(name), text) for text in case.wrong)


@cases
def test_walks_at_random_end_in_right_texts(name: str) -> None:
    rng, num_ended = random.Random(name), 0
    for _ in range(20):
        try:
            token_ids, ended = walk(grammar(name).session(), vocabulary(), rng, free=12, longest=150)
        except DeadEnd:
            continue
        num_ended += ended
        if ended:
            assert CASES[name].is_right(text_of(token_ids, vocabulary()).decode()), text_of(token_ids, vocabulary())
    assert num_ended


@cases
def test_a_mask_equals_checking_bytes_one_by_one(name: str) -> None:
    rng, single = random.Random(name), vocabulary().byte_token_ids()
    for text in CASES[name].right:
        data = text.encode()
        for cut in range(len(data) + 1):
            session = grammar(name).session()
            assert all(session.accept(single[byte]) for byte in data[:cut])
            check_mask_byte_by_byte(session, vocabulary(), rng, 150)


@cases
def test_rolled_back_forked_and_replayed_sessions_are_equal(name: str) -> None:
    check_state_is_that_of_its_tokens(grammar(name).session, vocabulary(), random.Random(name), 60, 6, 4)


def _tokenised(text: str) -> list[int]:
    """Marks as tokens, the rest as bytes."""
    single, found = vocabulary().byte_token_ids(), []
    for piece in re.split(r"(</?tool_call>)", text):
        mark = MARKS.get(piece)
        found += [mark] if mark is not None else [single[byte] for byte in piece.encode()]
    return found


def _takes(found: Any, text: str) -> bool:
    session = found.session()
    return all(session.accept(token_id) for token_id in _tokenised(text)) and session.is_accepting()


@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA3], ids=lambda form: form.name)
def test_the_calls_of_a_model_are_guarded(form: ToolFormat) -> None:
    found = compiled(tools_grammar(form, required=False))

    def calls(*bodies: tuple[str, str]) -> str:
        texts = [f'{{"name": "{name}", "{form.arguments_key}": {arguments}}}' for name, arguments in bodies]
        if form.calls == "list":
            return form.begin + "[" + ",".join(texts) + "]"
        return "".join(form.begin + text + form.end for text in texts)

    good, bad = ("sort", '{"a": [1, 2]}'), ("sort", '{"a": [1, 1]}')
    assert _takes(found, "Hello. " + calls(good))
    assert _takes(found, "Hello. [1, 1]")
    assert not _takes(found, calls(bad))
    assert _takes(found, calls(("pick", '{"n": 1.5}')))
    assert not _takes(found, calls(("pick", '{"n": 1}')))
    assert _takes(found, calls(("wait", '{"s": 1}')))
    if not form.is_bare:
        assert _takes(found, calls(good, ("wait", "{}"), good))
        assert not _takes(found, calls(good, bad))


def test_a_structural_tag_is_guarded() -> None:
    tag = {"structures": [{"begin": "<f>", "schema": UNIQUE, "end": "</f>"}], "triggers": ["<f"]}
    found = compiled(json.dumps(tag), "structural_tag")
    assert accepts_text(found, "text <f>[1, 2]</f> text")
    assert accepts_text(found, "no tag [1, 1]")
    assert not accepts_text(found, "text <f>[1, 1]</f> text")


def test_a_mark_may_be_an_ordinary_token() -> None:
    data = json.loads(vocabulary().tokenizer_json)
    size = len(vocabulary().tokens)
    data["added_tokens"].append(data["added_tokens"][0] | {"id": size, "content": "<go>", "special": False})
    tokens = Vocabulary(json.dumps(data), VOCAB_SIZE, (EOS,))
    found = compiled(f'start: "a" <[{size}]> {_json(UNIQUE)}', tokens=tokens)
    single = tokens.byte_token_ids()
    for text, is_right in (("[1,2]", True), ("[1,1]", False)):
        session = found.session()
        assert session.accept(single[ord("a")])
        assert not session.fork().accept(single[ord("[")])
        assert session.accept(size)
        assert all(session.accept(single[byte]) for byte in text.encode()) == is_right


def _without_tokens(is_gone: Callable[[bytes], bool]) -> Vocabulary:
    """The vocabulary without some of its tokens; the ids of the others stay."""
    data, special = json.loads(vocabulary().tokenizer_json), set(vocabulary().special_token_ids)
    gone = {index for index, token in enumerate(vocabulary().tokens) if is_gone(token) and index not in special}
    names = data["model"]["vocab"]
    data["model"]["vocab"] = {name: index for name, index in names.items() if index not in gone}
    data["model"]["merges"] = []
    return Vocabulary(json.dumps(data), VOCAB_SIZE, (EOS,))


def test_bytes_that_no_token_has_need_no_token() -> None:
    """SmolLM2's vocabulary lacks 21 bytes, which its tokens never spell."""
    never = {0x04, 0x06, 0xC0, 0xFF}
    tokens = _without_tokens(lambda token: not never.isdisjoint(token))
    found = compiled(tools_grammar(HERMES, required=True), tokens=tokens)
    single, session = tokens.byte_token_ids(), found.session()
    assert never.isdisjoint(single)
    assert session.accept(MARKS["<tool_call>"])
    text = b'{"name": "sort", "arguments": {"a": [1, '
    assert all(session.accept(single[byte]) for byte in text)
    again = session.fork()
    assert [again.accept(single[byte]) for byte in b"1]"] == [True, False]
    assert all(session.accept(single[byte]) for byte in b"2]}}")


def test_bytes_that_only_longer_tokens_spell_need_no_token() -> None:
    """As in vocabularies whose tokens for single bytes are special, or are gone."""
    tokens = _without_tokens(lambda token: token == b"v")
    assert tokens.bytes_without_token() == b"v"
    session = compiled(tools_grammar(HERMES, required=True), tokens=tokens).session()
    row, single = np.zeros(row_words(VOCAB_SIZE), dtype=np.int32), tokens.byte_token_ids()
    assert session.accept(MARKS["<tool_call>"])
    assert all(session.accept(single[byte]) for byte in b'{"name": "pick", "arguments": {"n": 1')
    assert not session.fork().accept(single[ord(",")])  # an integer matches both branches of oneOf
    assert all(session.accept(single[byte]) for byte in b'.5, "s": "')
    session.fill(row)
    spelling = [token_id for token_id in token_ids_of(row) if b"v" in tokens.tokens[token_id]]
    assert spelling
    for token_id in spelling:
        assert session.accept(token_id)
    assert all(session.accept(single[byte]) for byte in b'"}}')


def test_constraints_that_count_tokens_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"uniqueItems and max_tokens, .* exclude each other"):
        compiled(f"start: a {_json(UNIQUE)}\na[max_tokens=3]: /[a-z]+/")


def test_schemas_are_found_only_where_grammars_have_them() -> None:
    lark = 'start: "%json {" /[^"]%json {/ b // %json {"c": 1}\nb:%json{"a": "%json {}"} | %json  {"b": 1} # %json 1\n'
    found = embedded_schemas(lark)
    assert [each.schema for each in found] == [{"a": "%json {}"}, {"b": 1}]
    assert with_replaced(lark, found, ["X", "Y"]).count("%json") == 4
    assert named_token_ids("a: <[5]> <[7-9,12]> <eos>") == {5, 7, 8, 9, 12}


def test_what_llguidance_ignores_is_refused_in_grammars() -> None:
    with pytest.raises(ConstraintError, match="other"):
        compiled(f"start: {_json({'$ref': 'other.json'})}")


def test_xgrammar_takes_only_proven_schemas_in_grammars() -> None:
    chosen = Backends(vocabulary())
    proven = f'start: "a" %json {json.dumps({"type": "boolean"})}'
    assert chosen.resolve(ConstraintSpec(kind="lark", text=proven, backend="xgrammar"))
    unproven = f'start: "a" %json {json.dumps(UNIQUE)}'
    with pytest.raises(ConstraintError, match="uniqueItems"):
        chosen.resolve(ConstraintSpec(kind="lark", text=unproven, backend="xgrammar"))
    loose = chosen.resolve(ConstraintSpec(kind="lark", text=unproven, backend="xgrammar", loose=True))
    assert any("uniqueItems" in keyword for keyword in loose.not_enforced)

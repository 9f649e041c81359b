"""Sessions of both backends are functions of their tokens: rolled back, forked or replayed, they allow the same."""

from __future__ import annotations

import functools
import json
import pathlib
import random
import re
import subprocess
import sys
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from manta.structured.backend import Grammar, Session, backend_names, make_backend
from manta.structured.constraint import ConstraintError, ConstraintSpec, Unsupported
from manta.structured.masks import row_words
from manta.structured.vocabulary import Vocabulary

DEMO = pathlib.Path(__file__).parents[2] / "configs" / "demo" / "target"
EOS = 2
BACKENDS = ("llguidance", "xgrammar")


@functools.cache
def vocabulary(kind: str = "bytelevel") -> Vocabulary:
    """The demo model's byte-level tokenizer, or a SentencePiece-like one with byte fallback."""
    if kind == "bytelevel":
        return Vocabulary.load(str(DEMO), 4160, (EOS,))
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁a", "ab", "▁the", *'abcdefghijklmnopqrstuvwxyz0123456789"{}[]:,.-', '"}', '":', "▁12", "ü"]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Vocabulary(tokenizer.to_str(), 32 * (len(pieces) // 32 + 2), (EOS,))


SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["a", "ab", "abc"]},
    },
    "required": ["ok", "n", "kind"],
    "additionalProperties": False,
}
SPECS = {
    "json_schema": ConstraintSpec(kind="json_schema", text=json.dumps(SCHEMA), any_whitespace=False),
    "json_object": ConstraintSpec(kind="json_object", any_whitespace=False),
    "regex": ConstraintSpec(kind="regex", text="[a-c]{2,5}(12|1)?ü*!"),
    "choice": ConstraintSpec(kind="choice", text='["yes", "yes, but", "nö", "\\"quoted\\""]'),
    "lark": ConstraintSpec(kind="lark", text='start: "a" b\nb: /[0-9]{2}/ | "(" b ")"'),
    "ebnf": ConstraintSpec(kind="ebnf", text='root ::= "ab" [0-9] root | "."'),
}
JUDGES: dict[str, Any] = {
    "json_object": lambda text: isinstance(json.loads(text), dict),
    "regex": lambda text: re.fullmatch("[a-c]{2,5}(12|1)?ü*!", text),
    "choice": lambda text: text in ("yes", "yes, but", "nö", '"quoted"'),
    "lark": lambda text: re.fullmatch(r"a(\(*)\d\d(\)*)", text) and text.count("(") == text.count(")"),
    "ebnf": lambda text: re.fullmatch(r"(ab\d)*\.", text),
    "json_schema": lambda text: json.loads(text)["kind"] in ("a", "ab", "abc") and 0 <= json.loads(text)["n"] <= 120,
}


@functools.cache
def grammar(backend: str, kind: str, tokenizer: str = "bytelevel") -> Grammar:
    made = make_backend(backend, vocabulary(tokenizer))
    return made.load(SPECS[kind], made.compile(SPECS[kind]))


def mask(session: Session, tokenizer: str = "bytelevel") -> list[int]:
    row = np.full(row_words(vocabulary(tokenizer).vocab_size), 0x5A5A5A5A, dtype=np.int32)
    session.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def fresh(backend: str, kind: str, tokens: list[int], tokenizer: str = "bytelevel") -> Session:
    session = grammar(backend, kind, tokenizer).session()
    assert all(session.accept(token_id) for token_id in tokens)
    return session


cases = pytest.mark.parametrize(
    ("backend", "kind"), [(backend, kind) for backend in BACKENDS for kind in SPECS], ids=lambda value: value
)


@cases
@pytest.mark.parametrize("tokenizer", ["bytelevel", "bytefallback"])
def test_walks_through_masks_end_in_the_language(backend: str, kind: str, tokenizer: str) -> None:
    chooser = random.Random(f"{backend}{kind}{tokenizer}")
    tokens = vocabulary(tokenizer).tokens
    num_ended = 0
    for _ in range(12):
        session, output = grammar(backend, kind, tokenizer).session(), b""
        for _ in range(120):
            allowed = mask(session, tokenizer)
            assert (EOS in allowed) == session.is_accepting()
            assert max(allowed, default=0) < len(tokens), "padding is allowed"
            assert session.is_finished() == (allowed in ([EOS], [])) or not session.is_accepting()
            if session.is_accepting() and (session.is_finished() or chooser.random() < 0.3):
                num_ended += 1
                assert JUDGES[kind](output.decode()), output
                break
            token_id = chooser.choice([token_id for token_id in allowed if token_id != EOS])
            assert session.accept(token_id)
            output += tokens[token_id]
    assert num_ended or kind == "json_object"


@cases
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=12)
def test_rollback_fork_and_replay_equal_a_fresh_session(backend: str, kind: str, data: st.DataObject) -> None:
    chooser = random.Random(data.draw(st.integers(0, 10**6)))
    session, tokens = grammar(backend, kind).session(), []
    for _ in range(data.draw(st.integers(1, 14))):
        action = chooser.choice(["accept", "accept", "accept", "rollback", "fork", "refused"])
        if action == "accept":
            allowed = [token_id for token_id in mask(session) if token_id != EOS]
            if allowed:
                tokens.append(chooser.choice(allowed))
                assert session.accept(tokens[-1])
        elif action == "rollback" and tokens:
            count = chooser.randint(1, len(tokens))
            session.rollback(count)
            del tokens[-count:]
        elif action == "fork":
            other = session.fork()
            allowed = [token_id for token_id in mask(session) if token_id != EOS]
            if allowed:
                assert session.accept(chooser.choice(allowed))  # the one left behind must not disturb the copy
            session = other
        elif action == "refused":
            forbidden = set(range(100, 300)) - set(mask(session))
            if forbidden:
                assert not session.accept(chooser.choice(sorted(forbidden)))
        if chooser.random() < 0.5:
            session.forced_tokens()  # asking changes nothing
        again = fresh(backend, kind, tokens)
        assert mask(session) == mask(again)
        assert session.is_accepting() == again.is_accepting()
        assert session.is_finished() == again.is_finished()


def test_equal_tokenizers_are_one_object() -> None:
    """Else each row of a process's second engine would compare megabytes of text to find the table of tokens."""
    one, other = (Vocabulary.load(str(DEMO), size, (EOS,)) for size in (4160, 4224))
    assert one.tokenizer_json is other.tokenizer_json
    assert one.tokens is other.tokens


def test_only_forced_tokens_may_follow() -> None:
    session = grammar("llguidance", "json_schema").session()
    forced = session.forced_tokens()
    text = b"".join(vocabulary().tokens[token_id] for token_id in forced)
    assert text
    assert '{"ok": '.startswith(text.decode())
    assert all(session.accept(token_id) for token_id in forced)


@pytest.mark.parametrize("tokenizer", ["bytelevel", "bytefallback"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_forced_tokens_begin_every_continuation(backend: str, tokenizer: str) -> None:
    """The tokenizer itself says how whole texts are spelled."""
    judge = Tokenizer.from_str(vocabulary(tokenizer).tokenizer_json)
    made = make_backend(backend, vocabulary(tokenizer))
    endings = ["", "a", "ab", " 12", '"}', "ü", "_id", "\n", "the"]
    num_forced = 0
    for fixed in ('{"customer_id": "', "the end of", '", "is_active": ', "ab ab ab", "größe", "<s>", "0.12 the"):
        spec = ConstraintSpec(kind="choice", text=json.dumps([fixed + ending for ending in endings]))
        forced = made.load(spec, made.compile(spec)).session().forced_tokens()
        assert not set(forced) & set(vocabulary(tokenizer).special_token_ids)
        num_forced += len(forced)
        if "<s>" in fixed:
            continue  # the judge reads a special token in it, and the grammar means text
        for ending in endings:
            spelled = judge.encode(fixed + ending, add_special_tokens=False).ids
            assert spelled[: len(forced)] == forced, (fixed, ending)
    assert num_forced > 20


@pytest.mark.parametrize("backend", BACKENDS)
def test_forced_tokens_work_within_a_character(backend: str) -> None:
    made = make_backend(backend, vocabulary())
    spec = ConstraintSpec(kind="choice", text='["aaüb", "aaöb"]')
    single = {token: index for index, token in reversed(list(enumerate(vocabulary().tokens)))}
    session, text = made.load(spec, made.compile(spec)).session(), "aaöb".encode()
    for index in range(len(text)):
        forced = b"".join(vocabulary().tokens[token_id] for token_id in session.forced_tokens())
        assert any(one.encode()[index:].startswith(forced) for one in ("aaüb", "aaöb"))
        assert session.accept(single[text[index : index + 1]])
    assert session.forced_tokens() == []


@pytest.mark.parametrize("text", ["<think>", "<|im_end|>", "a<tool_call>b"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_special_tokens_text_is_ordinary_text(backend: str, text: str) -> None:
    made = make_backend(backend, vocabulary())
    spec = ConstraintSpec(kind="choice", text=json.dumps([text]))
    session, output = made.load(spec, made.compile(spec)).session(), b""
    while not session.is_finished():
        allowed = [token_id for token_id in mask(session) if token_id != EOS]
        assert not set(allowed) & set(vocabulary().special_token_ids)
        assert session.accept(allowed[0])
        output += vocabulary().tokens[allowed[0]]
    assert output.decode() == text


TRIGGERED = {
    "type": "structural_tag",
    "triggers": ["<f="],
    "structures": [{"begin": "<f=get>", "schema": {"type": "object", "maxProperties": 0}, "end": "</f>"}],
}


def test_structural_tags_constrain_behind_their_trigger() -> None:
    made = make_backend("llguidance", vocabulary())
    spec = ConstraintSpec(kind="structural_tag", text=json.dumps(TRIGGERED), any_whitespace=False)
    loaded = made.load(spec, made.compile(spec))
    single = {token: index for index, token in reversed(list(enumerate(vocabulary().tokens)))}

    def run(text: str) -> tuple[bool, bool]:
        session = loaded.session()
        taken = all(session.accept(single[bytes([byte])]) for byte in text.encode())
        return taken, taken and session.is_accepting()

    assert run("Hello < there. ") == (True, True)
    assert run("Hello <f=get>{}</f> and on") == (True, True)
    assert run("Hello <f=get>{") == (True, False)
    assert run("Hello <f=other>")[0] is False
    with pytest.raises(ConstraintError, match="no trigger starts"):
        made.compile(ConstraintSpec(kind="structural_tag", text=json.dumps({**TRIGGERED, "triggers": ["<x"]})))


def test_xgrammar_serves_only_tags_with_proven_schemas() -> None:
    made = make_backend("xgrammar", vocabulary())

    def tag(schema: Any) -> ConstraintSpec:
        content = {"type": "json_schema", "json_schema": schema}
        form = {"type": "tag", "begin": "<x>", "content": content, "end": "</x>"}
        return ConstraintSpec(kind="structural_tag", text=json.dumps({"type": "structural_tag", "format": form}))

    session = made.load(tag({"type": "integer", "minimum": 1, "maximum": 3}), made.compile(tag({"type": "boolean"})))
    assert mask(session.session())
    with pytest.raises(Unsupported, match="uniqueItems"):
        made.compile(tag({"type": "array", "uniqueItems": True}))


def test_a_backend_process_has_neither_torch_nor_transformers() -> None:
    code = f"""
import sys
from manta.structured.constraint import ConstraintSpec
from manta.structured.backends.choose import Backends
from manta.structured.vocabulary import Vocabulary
backends = Backends(Vocabulary.load({str(DEMO)!r}, 4160, (2,)))
for name in ("llguidance", "xgrammar"):
    backends.resolve(ConstraintSpec(kind="regex", text="a+", backend=name))
print(sorted(set(sys.modules) & {{"torch", "transformers"}}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_vocabularies_say_which_bytes_a_token_stands_for() -> None:
    fallback = vocabulary("bytefallback")
    assert fallback.tokens[3 + 0xE4] == b"\xe4"
    assert fallback.tokens[260] == b" a"
    assert fallback.special_token_ids == [0, 1, 2]
    assert set(b"".join(vocabulary().tokens)) == set(range(256))


@pytest.mark.parametrize(
    "texts", [["a", "ab", ""], [""], ['q"\\\n', "😀", "// no comment"], [f"text {i}" for i in range(9000)]]
)
def test_a_choice_takes_its_texts_and_no_other(texts: list[str]) -> None:
    made = make_backend("llguidance", vocabulary())
    spec = ConstraintSpec(kind="choice", text=json.dumps(texts), backend="llguidance")
    grammar, single = made.load(spec, made.compile(spec)), vocabulary().byte_token_ids()

    def takes(text: str) -> bool:
        session = grammar.session()
        return all(session.accept(single[byte]) for byte in text.encode()) and session.is_accepting()

    assert all(map(takes, texts[-3:]))
    assert not any(takes(text + "b") for text in texts[-3:] if text + "b" not in texts)


def test_unknown_backends_are_named() -> None:
    with pytest.raises(ConstraintError, match=r"'none' is unknown; use one of auto, .*llguidance"):
        make_backend("none", vocabulary())
    assert set(BACKENDS) <= set(backend_names())


def test_a_folder_without_fast_tokenizer_is_explained(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConstraintError, match=r"tokenizer\.json cannot be read.*fast format"):
        Vocabulary.load(str(tmp_path), 100, (1,))

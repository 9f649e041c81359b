"""Forced text is split into tokens that stand for it. The name of a special token in it is text like any other."""

from __future__ import annotations

import functools
import json
import random
import re
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from manta.structured.backend import make_backend
from manta.structured.backends.forced_text import ForcedText
from manta.structured.constraint import ConstraintSpec
from manta.structured.vocabulary import Vocabulary
from tests.structured.grammar_walk import allowed_tokens, text_of
from tests.structured.test_grammar_backends import EOS
from tests.structured.test_grammar_backends import vocabulary as plain_vocabulary

MARKS = ["<unk>", "<s>", "</s>", "[INST]", "<tool_call>", "</tool_call>", "<|im_end|>"]
"""The first four are special. The others are added tokens which a reader shows, as in Qwen's tokenizers."""


@functools.cache
def vocabulary(kind: str) -> Vocabulary:
    """Tokenizers that would split a forced text wrongly: by a mark, into unknown tokens, or after changing it."""
    if kind == "demo":
        return plain_vocabulary()
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if kind == "unigram":
        pieces = [*MARKS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
        tokenizer = Tokenizer(models.Unigram([(piece, 0.0) for piece in pieces], 0, byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        pieces = [*MARKS, *characters, "ab"]
        tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [("a", "b")]))
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS[:4]])
    tokenizer.add_tokens([AddedToken(mark) for mark in MARKS[4:]])
    return Vocabulary(tokenizer.to_str(), 32 * (len(pieces) // 32 + 2), (EOS,))


def escaped(text: str) -> str:
    """JSON with every character escaped."""
    units = text.encode("utf-16-be").hex()
    return '"' + "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)) + '"'


def in_parts(text: str, between: str) -> str:
    return between.join(json.dumps(each, ensure_ascii=False) for each in text)


def constraints(text: str) -> dict[str, tuple[ConstraintSpec, str]]:
    """Constraints of each kind that leave only one text, with that text."""

    def schema(value: str) -> ConstraintSpec:
        return ConstraintSpec(kind="json_schema", text=value, any_whitespace=False)

    quoted, pattern = json.dumps(text, ensure_ascii=False), json.dumps(f"^{re.escape(text)}$")
    within = '{"k": ' + quoted + "}"
    properties = f'{{"k": {{"const": {escaped(text)}}}}}'
    fixed = f'{{"type": "object", "properties": {properties}, "required": ["k"], "additionalProperties": false}}'
    begun = {"begin": f"begin {text}", "schema": {"const": text}, "end": text}
    tag = {"type": "structural_tag", "triggers": ["begin"], "structures": [begun]}
    characters = "".join(f"[{re.escape(each)}]" for each in text)
    return {
        "regex": (ConstraintSpec(kind="regex", text=re.escape(text)), text),
        "regex of classes": (ConstraintSpec(kind="regex", text=characters), text),
        "choice": (ConstraintSpec(kind="choice", text=json.dumps([text])), text),
        "const": (schema(f'{{"const": {quoted}}}'), quoted),
        "escaped const": (schema(f'{{"const": {escaped(text)}}}'), quoted),
        "enum": (schema(f'{{"enum": [{escaped(text)}]}}'), quoted),
        "pattern": (schema(f'{{"type": "string", "pattern": {pattern}}}'), quoted),
        "property": (schema(fixed), within),
        "lark": (ConstraintSpec(kind="lark", text=f"start: {in_parts(text, ' ')}"), text),
        "lark with a header": (ConstraintSpec(kind="lark", text=f"%llguidance {{}}\nstart: {quoted}"), text),
        "lark with a schema": (
            ConstraintSpec(kind="lark", text=f'start: "x" %json {fixed}', any_whitespace=False),
            f"x{within}",
        ),
        "ebnf": (ConstraintSpec(kind="ebnf", text=f"root ::= {in_parts(text, ' ')}"), text),
        "structural tag": (ConstraintSpec(kind="structural_tag", text=json.dumps(tag)), f"begin {text}{quoted}{text}"),
    }


KINDS = list(constraints("x"))


def walked(spec: ConstraintSpec, known: Vocabulary, text: str, backend: str) -> None:
    """Follows `text` through the masks, and checks that no mask and no forced token holds a mark."""
    made = make_backend(backend, known)
    marks = set(known.mark_token_ids) - {EOS}
    session, taken = made.load(spec, made.compile(spec)).session(), list[int]()
    while len(written := text_of(taken, known)) < len(text.encode()):
        rest = text.encode()[len(written) :]
        allowed = allowed_tokens(session, known).tolist()
        assert not set(session.forced_tokens()) & {*marks, EOS}
        assert not set(allowed) & marks
        fitting = [each for each in allowed if each != EOS and rest.startswith(known.tokens[each])]
        assert fitting, f"nothing follows {written!r} of {text!r}"
        taken.append(max(fitting, key=lambda each: len(known.tokens[each])))
        assert session.accept(taken[-1])
    assert session.is_accepting()


@pytest.mark.axes_in_turns
@pytest.mark.parametrize("tokenizer", ["demo", "bytelevel", "unigram"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_name_of_a_mark_is_forced_as_text(kind: str, tokenizer: str) -> None:
    known = vocabulary(tokenizer)
    for token_id in known.mark_token_ids:
        spec, text = constraints(f"a{known.tokens[token_id].decode()}b")[kind]
        walked(spec, known, text, "llguidance")


@pytest.mark.parametrize("kind", ["regex", "regex of classes", "choice", "lark", "ebnf"])
def test_the_name_of_a_special_token_is_text_to_xgrammar(kind: str) -> None:
    known = vocabulary("demo")
    for token_id in known.special_token_ids:
        spec, text = constraints(f"a{known.tokens[token_id].decode()}b")[kind]
        walked(spec, known, text, "xgrammar")


@pytest.mark.axes_in_turns
@pytest.mark.parametrize("tokenizer", ["demo", "bytelevel", "unigram"])
@pytest.mark.parametrize("text", ["e\u0301", " a", "\uff41", "☃😀", "a  b", "<|im_end|>e\u0301"])
def test_a_text_that_the_tokenizer_would_change_is_forced_as_it_is(text: str, tokenizer: str) -> None:
    for spec, wanted in constraints(text).values():
        walked(spec, vocabulary(tokenizer), wanted, "llguidance")


@pytest.mark.parametrize("tokenizer", ["demo", "bytelevel", "unigram"])
def test_forced_text_is_the_bytes_of_its_tokens(tokenizer: str) -> None:
    rng, known = random.Random(7), vocabulary(tokenizer)
    forced, marks = ForcedText(known, 4), [known.tokens[each].decode() for each in known.mark_token_ids]
    pieces: list[Any] = [*marks, "a", "b", "ab", " ", "é", "e\u0301", "\n", "😀", "<", ">", "|"]
    for _ in range(400):
        text = "".join(rng.choices(pieces, k=rng.randrange(1, 12)))
        token_ids = forced(text)
        assert text_of(token_ids, known) == text.encode()
        assert not set(token_ids) & set(known.mark_token_ids)

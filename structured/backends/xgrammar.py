"""The xgrammar backend: EBNF, Lark and structural tags, and the JSON schemas that it is proven to enforce.

It accepts schemas and ignores some of their keywords, so a schema may use it only if every combination of keywords in
it is listed in `xgrammar_enforced.json`, which `tests/structured/test_schema_conformance.py` proves. Its package
imports torch and transformers; here its C++ core is loaded without them. See github.com/mlc-ai/xgrammar.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import llguidance
import numpy as np

from manta.structured.backends.keywords import combinations, subschemas
from manta.structured.backends.lark_schemas import embedded_schemas, with_replaced
from manta.structured.backends.llguidance import tokenizer_of
from manta.structured.backends.llguidance_grammar import closed
from manta.structured.backends.schema_patterns import check_patterns, with_grammar_patterns
from manta.structured.constraint import ConstraintError, ConstraintSpec, Unsupported
from manta.structured.gbnf.writing import gbnf_as_ebnf
from manta.structured.masks import row_words
from manta.structured.schemas.documents import COUNTS
from manta.structured.schemas.judge import is_of_type
from manta.structured.schemas.numbers import (
    NUMERIC,
    Number,
    is_integer,
    is_number,
    json_text,
    numbers_in,
    plain_text,
    read_json,
)
from manta.structured.vocabulary import Vocabulary

ENFORCED = frozenset(json.loads(pathlib.Path(__file__).with_name("xgrammar_enforced.json").read_text()))
_NUMBERED = COUNTS | NUMERIC | {"enum", "const"}
_MAX_NUMBER = 2**31 - 1
"""xgrammar keeps counts as 32-bit integers."""
_MAX_MULTIPLE = 1024
"""xgrammar ignores a greater `multipleOf`."""
_PRIVATE_NAME = "_manta_xgrammar"
_RAW_VOCABULARY = 0


class XGrammarBackend:
    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._core = load_core()
        self._vocabulary = vocabulary
        tokens = list(vocabulary.tokens)
        for token_id in vocabulary.special_token_ids:
            tokens[token_id] = b""  # never part of a text
        self._info = self._core.TokenizerInfo(
            tokens, _RAW_VOCABULARY, vocabulary.vocab_size, list(vocabulary.eos_token_ids), False
        )
        self._compiler = self._core.GrammarCompiler(self._info, 1, False, -1)

    def compile(self, spec: ConstraintSpec) -> bytes:
        missing = self.not_enforced(spec)
        if missing and not spec.loose:
            cause = f"xgrammar is not proven to enforce {', '.join(missing)}"
            raise Unsupported.at(spec.kind, cause)
        try:
            compiled = self._compile(spec)
        except ConstraintError:
            raise
        except Exception as error:  # the core raises its own kinds, RuntimeError mostly
            raise ConstraintError.because("unfit", spec.kind, cause=str(error)) from error
        matcher = self._core.GrammarMatcher(compiled, None, False, -1, None)
        session = XGrammarSession(matcher, self._vocabulary, self._certain_tokens)
        row = np.zeros(row_words(self._vocabulary.vocab_size), dtype=np.int32)
        session.fill(row)
        if not row.any():
            raise ConstraintError.because("unsatisfiable", spec.kind)
        return compiled.serialize_json().encode()

    def _compile(self, spec: ConstraintSpec) -> Any:
        compiler = self._compiler
        if spec.kind == "json_object":
            return compiler.compile_json_schema('{"type": "object"}', spec.any_whitespace, None, None, False, 20, False)
        if spec.kind == "json_schema":
            text = json_text(_with_patterns(closed(read_json(spec.text), spec)))
            return compiler.compile_json_schema(text, spec.any_whitespace, None, None, False, 20, False)
        if spec.kind == "regex":
            return compiler.compile_regex(spec.text)
        if spec.kind == "choice":
            alternatives = " | ".join(json.dumps(item, ensure_ascii=False) for item in json.loads(spec.text))
            return compiler.compile_grammar_from_strings(f"root ::= {alternatives}", "root")
        if spec.kind == "ebnf":
            return compiler.compile_grammar_from_strings(gbnf_as_ebnf(spec.text), "root")
        if spec.kind == "lark":
            found = embedded_schemas(spec.text)
            texts = [f"%json {json_text(_with_patterns(closed(each.schema, spec)))}" for each in found]
            return compiler.compile_lark(with_replaced(spec.text, found, texts), [], [])
        return compiler.compile_structural_tag(json_text(_tag_with_patterns(read_json(spec.text))))

    def load(self, spec: ConstraintSpec, compiled: bytes) -> XGrammarGrammar:
        return XGrammarGrammar(self._core, self._info, compiled.decode(), self._vocabulary, self._certain_tokens)

    def _certain_tokens(self, text: str) -> list[int]:
        """The tokens that `text` begins with whatever text follows it. Last tokens that the tokenizer might merge with
        what follows are left out.
        """
        tokens, _ = self._tokenizer.tokenize_partial(text.encode())
        return tokens

    @functools.cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        """llguidance's tokenizer, because it knows which tokens are certain."""
        return tokenizer_of(self._vocabulary)

    def not_enforced(self, spec: ConstraintSpec) -> list[str]:
        if spec.kind == "json_schema":
            return _not_proven(closed(read_json(spec.text), spec))
        if spec.kind == "structural_tag":
            return sorted({text for schema in _schemas(read_json(spec.text)) for text in _not_proven(schema)})
        if spec.kind == "lark":
            return sorted({text for schema in _schemas_in_lark(spec.text) for text in _not_proven(schema)})
        return []


def _not_proven(schema: Any) -> list[str]:
    values = {text for _, subschema in subschemas(schema) for text in _unproven_values(subschema)}
    return sorted(combinations(schema) - ENFORCED) + sorted(_foreign_references(schema)) + sorted(values)


def _unproven_values(schema: dict[str, Any]) -> Iterator[str]:
    """Keywords with values beyond those for which the conformance run holds: it takes few of each."""
    for name, value in schema.items():
        if name in _NUMBERED and not all(map(_is_proven, numbers_in(value))):
            yield f"{name}:{json_text(value)[:40]}"
    listed = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    if any(isinstance(value, list | dict) for value in listed):
        yield "enum:arrays and objects"
    if "type" in schema and not all(is_of_type(value, schema["type"]) for value in listed):
        yield f"enum beside type:{schema['type']}"
    multiple = schema.get("multipleOf", 1)
    if is_number(multiple) and multiple > _MAX_MULTIPLE:
        yield f"multipleOf:{plain_text(multiple)[:40]}"
    names = set(_list(schema.get("required"))) - set(schema.get("properties", ()))
    if names:
        yield f"required:{min(names)[:40]}"


def _is_proven(number: Number) -> bool:
    return -_MAX_NUMBER <= number <= _MAX_NUMBER and is_integer(number)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _schemas_in_lark(grammar: str) -> list[Any]:
    try:
        return [each.schema for each in embedded_schemas(grammar)]
    except ValueError as error:
        raise ConstraintError.because("malformed", "lark: %json", bound="JSON", cause=str(error)) from error


def _foreign_references(schema: Any) -> set[str]:
    """References by anything but a pointer: xgrammar takes them for schemas that allow everything."""
    found = {subschema.get("$ref", "#") for _, subschema in subschemas(schema)}
    return {f"$ref:{ref}" for ref in found if not (ref == "#" or ref.startswith("#/"))}


def _with_patterns(schema: Any) -> Any:
    check_patterns(schema)
    return with_grammar_patterns(schema)


def _tag_with_patterns(tag: Any) -> Any:
    """The structural tag with the patterns of its schemas in the spelling of backends."""
    if isinstance(tag, list):
        return [_tag_with_patterns(item) for item in tag]
    if not isinstance(tag, dict):
        return tag
    return {
        name: _with_patterns(value) if name == "json_schema" else _tag_with_patterns(value)
        for name, value in tag.items()
    }


def _schemas(tag: Any) -> Iterator[Any]:
    """The schemas anywhere in a structural tag."""
    if isinstance(tag, dict):
        if "json_schema" in tag:
            yield tag["json_schema"]
        tag = [value for name, value in tag.items() if name != "json_schema"]
    if isinstance(tag, list):
        for item in tag:
            yield from _schemas(item)


class XGrammarGrammar:
    def __init__(
        self, core: Any, info: Any, compiled: str, vocabulary: Vocabulary, tokenize: Callable[[str], list[int]]
    ) -> None:
        self._core = core
        self._vocabulary = vocabulary
        self._tokenize = tokenize
        self._compiled = core.CompiledGrammar.deserialize_json(compiled, info)
        # xgrammar counts half of it at most; with the size of the text that it was read from it is an upper bound.
        self.num_bytes = int(self._compiled.memory_size_bytes()) + len(compiled)

    def session(self) -> XGrammarSession:
        matcher = self._core.GrammarMatcher(self._compiled, None, False, -1, None)
        return XGrammarSession(matcher, self._vocabulary, self._tokenize)


class XGrammarSession:
    def __init__(self, matcher: Any, vocabulary: Vocabulary, tokenize: Callable[[str], list[int]]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._tokenize = tokenize

    def accept(self, token_id: int) -> bool:
        if token_id in self._vocabulary.eos_token_ids:
            return False
        return bool(self._matcher.accept_token(token_id, False))

    def fill(self, row: np.ndarray) -> None:
        row[:] = -1  # if everything is allowed, the matcher does not write to the row
        self._matcher.fill_next_token_bitmask(row.reshape(1, -1), 0, False)
        self._vocabulary.forbid_padding(row)
        self._vocabulary.set_tokens(row, self._vocabulary.eos_token_ids, self.is_accepting())

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def fork(self) -> XGrammarSession:
        return XGrammarSession(self._matcher.fork(), self._vocabulary, self._tokenize)

    def forced_tokens(self) -> list[int]:
        """The jump-forward string as the tokenizer would begin it. The text is forced, the borders of its tokens are
        not: the masks allow others, but a model trained on this tokenizer's tokens seldom takes them.
        """
        try:
            text = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError as error:  # it begins or ends within a character
            text = error.object[: error.start].decode()
        return self._tokenize(text) if text else []

    def is_accepting(self) -> bool:
        return bool(self._matcher.is_completed())

    def is_finished(self) -> bool:
        if not self.is_accepting():
            return False
        row = np.zeros(row_words(self._vocabulary.vocab_size), dtype=np.int32)
        self.fill(row)
        self._vocabulary.set_tokens(row, self._vocabulary.eos_token_ids, False)
        return not row.any()


@functools.cache
def load_core() -> Any:
    """xgrammar's bindings, loaded under a private name so that its package's `__init__` does not run. Its FFI library
    imports torch and transformers if it can; unless they are loaded already, they are hidden from it.
    """
    found = importlib.util.find_spec("xgrammar")
    if found is None or found.submodule_search_locations is None:
        more = {"value": "xgrammar", "cause": "it is not installed", "remedy": "pip install xgrammar"}
        raise ConstraintError.because("unsupported", "backend", **more)
    package = types.ModuleType(_PRIVATE_NAME)
    package.__path__ = list(found.submodule_search_locations)
    sys.modules[_PRIVATE_NAME] = package
    hidden = [name for name in ("torch", "transformers") if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: importing it raises ImportError
    try:
        importlib.import_module(f"{_PRIVATE_NAME}.load_binding")
        return importlib.import_module(f"{_PRIVATE_NAME}.base")._core
    finally:
        for name in hidden:
            del sys.modules[name]

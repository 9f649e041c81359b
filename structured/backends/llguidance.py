"""The llguidance backend: quick to compile, bounded in every step, and it says what it does not support.

It serves every kind of constraint. Its matchers never raise, so each call here checks whether the matcher has failed.
Its tokens come from `tokenizer.json` directly. See github.com/guidance-ai/llguidance.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from typing import Any, cast

import llguidance
import msgspec
import numpy as np

from structured.backend import DeadEnd, Session
from structured.backends.guarded import GuardedSession
from structured.backends.heap import heap_bytes
from structured.backends.keywords import subschemas
from structured.backends.llguidance_schema import departures, has_control_characters, located, mended
from structured.constraint import ConstraintError, ConstraintSpec, Unsupported
from structured.masks import row_words
from structured.schemas.formats import is_annotation, with_exact_formats
from structured.schemas.guard import Guard
from structured.schemas.rewriting import needs_rewriting, rewritten
from structured.vocabulary import Vocabulary

_UNSUPPORTED = re.compile(r"Unimplemented keys|Unknown format|(not|only) supported|unsupported", re.IGNORECASE)
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[[^\]]*\]")
_UNSATISFIABLE = re.compile(r"Unsatisfiable schema|nothing satisfies")
_EMBEDDED_SCHEMA = re.compile(r"(?<=\s)%json\s*(?=\{)")
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
_SHORT_ESCAPES = 'nrbtf"\\'
"""`\\uXXXX` is left out: with it, an additional property could spell a given property's name and replace it."""
NOTHING = "nothing satisfies it"
WHITESPACE = r"[ \n\t]{0,20}"
"""Allowed between two tokens of JSON. It is bounded, so that a model cannot write white space for ever."""
MATCHER_BYTES = 32 * 2**10
"""No matcher holds less. Most hold 35 to 200 KB, one with `\\w` in it 0.5 MB, whatever the length of the text."""
UNMEASURED_BYTES = 2**20
"""What a matcher is assumed to hold if memory cannot be measured."""
AUTOMATA_FACTOR = 2
"""Automata are built as sessions need them and stay with the grammar. Soon they hold as much as the matcher did at
first, which is why its bytes are counted twice.
"""
GUARD_FACTOR = 20
"""A guard holds about this many bytes for each of its schema's text: parsed, and with its places."""
ROW_BYTES = 2000
"""What one row adds to the automata if every row finds new states, as with `(a|b)*a(a|b){20}`."""


class Compiled(msgspec.Struct, array_like=True):
    """What `compile` returns, in msgpack."""

    grammar: str
    num_bytes: int
    """Memory that a matcher for the grammar took when it was measured."""
    guard: str = ""
    """The marked schema that `Guard.of` reads; empty if the grammar allows no more than the schema."""


@functools.lru_cache(maxsize=2)
def tokenizer_of(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """One for each process: it is large, takes a while to make, and any thread may use it."""
    return llguidance.LLTokenizer(
        vocabulary.tokenizer_json, n_vocab=vocabulary.vocab_size, eos_token=list(vocabulary.eos_token_ids) or None
    )


class LLGuidanceBackend:
    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer_of(vocabulary)

    def compile(self, spec: ConstraintSpec) -> bytes:
        """A schema whose exact grammar llguidance refuses is tried once more with a simple grammar and a guard."""
        try:
            return self._compiled(spec)
        except ConstraintError as error:
            if not _is_schema(spec) or spec.loose or _UNSATISFIABLE.search(str(error)):
                raise
            try:
                return self._compiled(spec, proves=False)
            except ConstraintError:
                raise error from None

    def _compiled(self, spec: ConstraintSpec, proves: bool = True) -> bytes:
        grammar, guard = self._grammar_of(spec, proves)
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        if failed or (messages and not spec.loose):
            message = "; ".join(messages).strip()
            if spec.kind != "json_schema":
                raise ConstraintError(f"{spec.kind}: {_located_in_grammar(message, spec.text)}")
            error = Unsupported if _UNSUPPORTED.search(message) else ConstraintError
            raise error(f"json_schema: {located(message, json.loads(spec.text))}")
        row = np.zeros(row_words(self._vocabulary.vocab_size), dtype=np.int32)
        try:
            loaded = LLGuidanceGrammar(self._tokenizer, Compiled(grammar, 0, guard), self._vocabulary)
            session = loaded.session()
            session.fill(row)
            check_next_row(session, row)
        except ConstraintError as error:
            raise ConstraintError(f"{spec.kind}: {error}") from error
        except DeadEnd as error:
            raise ConstraintError(f"{spec.kind}: {NOTHING}") from error
        if not row.any() and not session.is_finished():
            raise ConstraintError(f"{spec.kind}: {NOTHING}")
        # `session` still lives, so the matcher that is measured must allocate memory of its own.
        return msgspec.msgpack.encode(Compiled(grammar, self._matcher_bytes(grammar), guard))

    def _matcher_bytes(self, grammar: str) -> int:
        """Memory that a matcher holds, measured; only an estimate if other threads allocate at the same time. The
        length of the text does not tell it: a matcher may hold 20 or 5,000 times as much.
        """
        before = heap_bytes()
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        after = heap_bytes()
        del matcher
        return UNMEASURED_BYTES if before is None or after is None else max(after - before, MATCHER_BYTES)

    def load(self, spec: ConstraintSpec, compiled: bytes) -> LLGuidanceGrammar:
        return LLGuidanceGrammar(self._tokenizer, msgspec.msgpack.decode(compiled, type=Compiled), self._vocabulary)

    def not_enforced(self, spec: ConstraintSpec) -> list[str]:
        """Formats that no specification defines; if loose, also what llguidance ignores, and what it warns of."""
        annotations = (
            list(_unknown_formats(json.loads(spec.text))) if '"format"' in spec.text and _is_schema(spec) else []
        )
        if not spec.loose:
            return annotations
        silent = departures(json.loads(spec.text)) if _is_schema(spec) else []
        grammar, _ = self._grammar_of(spec)
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        return annotations + silent + ([] if failed else messages)

    def _grammar_of(self, spec: ConstraintSpec, proves: bool = True) -> tuple[str, str]:
        """The grammar, without forced tokens if the constraint's text names a special token, and its guard."""
        grammar, guard = _translated(spec, proves)
        special = (self._vocabulary.tokens[token_id].decode() for token_id in self._vocabulary.special_token_ids)
        if any(text in spec.text for text in special):
            grammar = _without_forcing(grammar)
        return grammar, guard


class LLGuidanceGrammar:
    """A matcher that is copied for each session. The copies share its automata, and make them grow."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, compiled: Compiled, vocabulary: Vocabulary) -> None:
        self.num_rows = 0
        """Rows that sessions have filled."""
        self._vocabulary = vocabulary
        self._matcher = llguidance.LLMatcher(tokenizer, compiled.grammar, log_level=0)
        self._guard = Guard.of(compiled.guard) if compiled.guard else None
        self._first_bytes = AUTOMATA_FACTOR * compiled.num_bytes + GUARD_FACTOR * len(compiled.guard)

    @property
    def num_bytes(self) -> int:
        return self._first_bytes + ROW_BYTES * self.num_rows

    def session(self) -> Session:
        session = LLGuidanceSession(self, self._matcher.deep_copy(), self._vocabulary)
        return session if self._guard is None else GuardedSession(session, self._guard, self._vocabulary)


class LLGuidanceSession:
    def __init__(self, grammar: LLGuidanceGrammar, matcher: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("<state>")[0].strip()
            raise ConstraintError(NOTHING if reason.startswith("NoExtension") else reason)

    def accept(self, token_id: int) -> bool:
        if self._matcher.is_stopped() or token_id in self._vocabulary.eos_token_ids:
            return False
        accepted = self._matcher.try_consume_tokens([token_id]) == 1
        self._check()
        return accepted

    def fill(self, row: np.ndarray) -> None:
        self._grammar.num_rows += 1
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()
        self._vocabulary.forbid_padding(row)
        self._vocabulary.set_tokens(row, self._vocabulary.eos_token_ids, self._matcher.is_accepting())

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and not self._matcher.rollback(num_tokens):
            raise ConstraintError(f"rollback of {num_tokens} tokens failed: {self._matcher.get_error()}")

    def fork(self) -> LLGuidanceSession:
        return LLGuidanceSession(self._grammar, self._matcher.deep_copy(), self._vocabulary)

    def forced_tokens(self) -> list[int]:
        return [] if self._matcher.is_stopped() else list(self._matcher.compute_ff_tokens())

    def is_accepting(self) -> bool:
        return self._matcher.is_accepting()

    def is_finished(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()


def check_next_row(session: Session, row: np.ndarray) -> None:
    """Accepts the first token that `row` allows and fills the next row; `row` itself stays as it is.

    Automata are built lazily, so only rows prove that they stay within llguidance's limits. A long text that the
    grammar forces is walked through at the first token. Raises `ConstraintError` where a limit is exceeded.
    """
    allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
    if len(allowed) and session.accept(int(allowed[0])) and not session.is_finished():
        session.fill(row.copy())


def _is_schema(spec: ConstraintSpec) -> bool:
    return spec.kind == "json_schema"


def _unknown_formats(schema: Any) -> Iterator[str]:
    for path, subschema in subschemas(schema):
        name = subschema.get("format")
        if is_annotation(name):
            yield f"{path}/format: {name!r} is no format of JSON Schema"


def _without_forcing(grammar: str) -> str:
    """The grammar without forced tokens: forced bytes that spell a special token's name would become that token, which
    does not stand for text.
    """
    if not grammar.startswith("{"):
        return grammar if "%llguidance" in grammar else _NO_FORCING + grammar
    (part,) = json.loads(grammar)["grammars"]
    schema = part.get("json_schema")
    return _NO_FORCING + (part["lark_grammar"] if schema is None else f"start: %json {json.dumps(schema)}")


def _translated(spec: ConstraintSpec, proves: bool) -> tuple[str, str]:
    """The constraint as a grammar of llguidance, Lark or JSON, and what the guard of its sessions is made of. Raises
    `ConstraintError`.
    """
    try:
        if spec.kind in ("json_schema", "json_object"):
            return _schema_grammar(spec, proves)
        return _plain_grammar(spec), ""
    except ConstraintError:
        raise
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise ConstraintError(f"{spec.kind}: {error}") from error


def _plain_grammar(spec: ConstraintSpec) -> str:
    if spec.kind == "choice":
        return llguidance.grammar_from("choice", spec.text)
    if spec.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "lark":
        return llguidance.LLMatcher.grammar_from_lark(spec.text if spec.loose else _with_exact_schemas(spec.text))
    if spec.kind == "ebnf":
        return llguidance.grammar_from("gbnf", spec.text)
    structures = json.loads(spec.text)
    if "structures" in structures:
        return _tag_grammar(structures)
    raise Unsupported("structural_tag: llguidance serves the form with structures and triggers")


def _with_exact_schemas(grammar: str) -> str:
    """The grammar with its schemas (`%json {...}`, such as those of tool arguments) rewritten where that is exact. No
    guard follows a part of a text, so the other schemas stay and llguidance refuses their keywords.
    """
    parts, end = [], 0
    for found in _EMBEDDED_SCHEMA.finditer(grammar):
        if found.end() < end:
            continue
        schema, length = json.JSONDecoder().raw_decode(grammar[found.end() :])
        parts += [grammar[end : found.end()], json.dumps(_embedded(schema))]
        end = found.end() + length
    return "".join([*parts, grammar[end:]])


def _located_in_grammar(message: str, grammar: str) -> str:
    """The reason alone, with the place of the keyword that it is about, if a schema of the grammar has that keyword."""
    found = _UNIMPLEMENTED.search(message)
    if found is None:
        return message
    for place in _EMBEDDED_SCHEMA.finditer(grammar):
        schema, _ = json.JSONDecoder().raw_decode(grammar[place.end() :])
        text = located(found.group(), schema)
        if text != found.group():
            return text
    return message


def _embedded(schema: dict[str, Any]) -> Any:
    if schema.get("x-guidance", {}).get("lenient"):
        return schema
    prepared = schema
    if needs_rewriting(schema):
        result, guard = rewritten(schema)
        prepared = schema if guard or isinstance(result, bool) else result
    return with_exact_formats(mended(prepared))


def _schema_grammar(spec: ConstraintSpec, proves: bool) -> tuple[str, str]:
    schema, guard = _prepared(spec, proves)
    options: dict[str, Any] = {"lenient": spec.loose}
    if spec.any_whitespace:
        options |= {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
    else:
        options |= {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    if not has_control_characters(schema):
        options["json_allowed_escapes"] = _SHORT_ESCAPES
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=cast(Any, options)), guard


def _prepared(spec: ConstraintSpec, proves: bool) -> tuple[Any, str]:
    """The schema as llguidance can serve it, and its guard. Raises `Unsupported` for what it would ignore, if not
    loose.
    """
    schema, guard = json.loads(spec.text) if spec.kind == "json_schema" else {"type": "object"}, ""
    if not spec.loose and (needs_rewriting(schema) or not proves):
        schema, guard = rewritten(schema, proves)
    if schema is False:
        raise ConstraintError(f"json_schema: {NOTHING}")
    schema = {} if schema is True else with_exact_formats(mended(schema))
    ignored = [] if spec.loose else departures(schema)
    if ignored:
        raise Unsupported(f"json_schema: {'; '.join(ignored)}")
    return schema, guard


def _tag_grammar(tag: dict[str, Any]) -> str:
    """A grammar for free text in which each trigger begins one of the tags whose `begin` starts with the trigger."""
    structures = []
    for item in tag["structures"]:
        trigger = next((text for text in tag["triggers"] if item["begin"].startswith(text)), None)
        if trigger is None:
            raise ConstraintError(f"structural_tag: no trigger starts {item['begin']!r}; add one to triggers")
        structures.append(
            llguidance.StructTag(trigger=trigger, begin=item["begin"], grammar=item["schema"], end=item["end"])
        )
    return llguidance.StructTag.to_grammar(structures, assume_special=False)

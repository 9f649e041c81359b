"""The llguidance backend: quick to compile, bounded in every step, and it says what it does not support.

It serves every kind of constraint. Its matchers never raise, so each call here checks whether the matcher has failed.
See github.com/guidance-ai/llguidance.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import llguidance
import msgspec
import numpy as np

from manta.structured.backend import DeadEnd, Session
from manta.structured.backends.forced_text import ForcedText
from manta.structured.backends.guarded import GuardedPartsSession, GuardedSession, Part, Parts
from manta.structured.backends.heap import heap_bytes
from manta.structured.backends.lark_schemas import EmbeddedSchema, embedded_schemas, named_token_ids, with_replaced
from manta.structured.backends.llguidance_grammar import (
    NUM_MARKERS,
    SIMPLER_WAYS,
    UNIMPLEMENTED,
    Translation,
    Way,
    holds_schemas,
    lark_of,
    may_be_partial,
    place_within,
    schemas_within,
    translated,
    unknown_formats,
    with_leave,
)
from manta.structured.backends.llguidance_schema import departures, has_control_characters, place_of
from manta.structured.backends.schema_patterns import unenforced_patterns
from manta.structured.backends.striker import Striker
from manta.structured.constraint import ConstraintError, ConstraintSpec, Unsupported
from manta.structured.host import num_cores
from manta.structured.masks import row_words
from manta.structured.schemas.documents import TYPES
from manta.structured.schemas.guard import Guard
from manta.structured.schemas.numbers import json_text, read_json
from manta.structured.vocabulary import Vocabulary

_UNSUPPORTED = re.compile(r"Unimplemented keys|Unknown format|(not|only) supported|unsupported", re.IGNORECASE)
_UNSATISFIABLE = re.compile(r"Unsatisfiable schema")
_UNBOUNDED_WHITESPACE = r"[\x20\x0A\x0D\x09]+"
"""The slice of the vocabulary that never applies here, because white space in JSON is bounded. llguidance builds each
slice into each matcher: without this one a matcher is built 3% faster, and masks take as long.
"""
_SOURCE = re.compile(r"^\s*(\d+ \||\^\s*$).*\n?", re.MULTILINE)
"""Lines of a message that show the grammar, and that point into the line above."""
_MAY_HAVE_FORMAT = re.compile(r"format|\\u")
"""Matches the text of any schema with the keyword `format`, whose name JSON may spell with escapes."""
MATCHER_BYTES = 32 * 2**10
"""No matcher holds less. Most hold 35 to 200 KB, one with `\\w` in it 0.5 MB, whatever the length of the text."""
UNMEASURED_BYTES = 2**20
"""Bytes that a matcher is assumed to hold if memory cannot be measured."""
AUTOMATA_FACTOR = 2
"""Automata are built as sessions need them and stay with the grammar. Soon they hold as much as the matcher did at
first, which is why its bytes are counted twice.
"""
GUARD_FACTOR = 20
"""A guard holds about this many bytes for each of its schema's text: parsed, and with its places."""
MOST_MASK_THREADS = 4
"""Most threads that compute the masks of one process together."""
ROW_BYTES = 2000
"""Bytes that one row adds to the automata if every row finds new states, as with `(a|b)*a(a|b){20}`."""


class Compiled(msgspec.Struct, array_like=True):
    """The result of `compile`, in msgpack."""

    translation: Translation
    num_bytes: int
    """Memory that its matchers took when it was measured."""


@functools.lru_cache(maxsize=2)
def tokenizer_of(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """One for each process: it is large, takes a while to make, and any thread may use it. Its tokens,
    and how it splits text, are those of `ForcedText`.
    """
    return llguidance.LLTokenizer(
        cast(Any, ForcedText(vocabulary, NUM_MARKERS)),
        eos_token=list(vocabulary.eos_token_ids) or None,
        slices=_slices(),
    )


def width_of(vocabulary: Vocabulary) -> int:
    """Returns the number of tokens that masks of `tokenizer_of` have."""
    return vocabulary.vocab_size + NUM_MARKERS + len(vocabulary.bytes_without_token())


def token_of_byte(vocabulary: Vocabulary) -> dict[int, int]:
    """Returns a token of `tokenizer_of` for each byte that any token of the vocabulary holds."""
    first = vocabulary.vocab_size + NUM_MARKERS
    added = {byte: first + index for index, byte in enumerate(vocabulary.bytes_without_token())}
    return {**vocabulary.byte_token_ids(), **added}


def _slices() -> list[str]:
    """The parts of the vocabulary whose masks llguidance keeps: tokens within JSON strings. Without Unicode's ends of
    lines they apply to ECMA-262's `.` too, whose rows then take half as long (4,160 tokens).
    """
    slices = [each for each in llguidance.LLTokenizer.general_slices() if each != _UNBOUNDED_WHITESPACE]
    return [each.replace(r"\x7F]", r"\x7F\u2028\u2029]") for each in slices]


@functools.cache
def executor() -> llguidance.LLExecutor:
    """Returns the threads that compute masks together: one for each eight processors, because the model and the pool's
    other processes need the others.
    """
    return llguidance.LLExecutor(max(1, min(MOST_MASK_THREADS, num_cores() // 8)))


def masks_of(matchers: Sequence[llguidance.LLMatcher], vocabulary: Vocabulary) -> np.ndarray:
    """Returns the matchers' masks for the model's tokens: int32 `[num_matchers, ceil(vocab_size / 32)]`."""
    masks = np.empty((len(matchers), row_words(width_of(vocabulary))), dtype=np.int32)
    indexed = [(matcher, index) for index, matcher in enumerate(matchers)]
    executor().unsafe_compute_mask_ptr(indexed, masks.ctypes.data, masks.strides[0], len(matchers))
    rows = masks[:, : row_words(vocabulary.vocab_size)]
    vocabulary.forbid_padding(rows)
    return rows


def fill_mask(matcher: llguidance.LLMatcher, row: np.ndarray, vocabulary: Vocabulary) -> None:
    """Writes the matcher's mask for the model's tokens: int32 `[ceil(vocab_size / 32)]`."""
    mask = np.empty(row_words(width_of(vocabulary)), dtype=np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    row[:] = mask[: len(row)]
    vocabulary.forbid_padding(row)


class Settled(NamedTuple):
    """A schema within a loose grammar as it is enforced, and what of it is not."""

    schema: Any
    left_out: list[str]


class InPart(NamedTuple):
    """A loose grammar, and what of its schemas is not enforced."""

    compiled: bytes
    left_out: list[str]


class LLGuidanceBackend:
    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer_of(vocabulary)
        self._last: tuple[ConstraintSpec, InPart] | None = None
        """The last loose grammar, because `not_enforced` is asked right after `compile`."""

    def compile(self, spec: ConstraintSpec) -> bytes:
        """Schemas whose exact grammar llguidance refuses are tried with simpler grammars and a guard."""
        if spec.loose and holds_schemas(spec):
            return self._in_part(spec).compiled
        return self._compiled(spec)

    def _compiled(self, spec: ConstraintSpec) -> bytes:
        try:
            return self.compiled_by(spec)
        except ConstraintError as error:
            is_exact = not spec.loose or spec.kind != "json_schema"
            may_help = is_exact and error.refusal.kind != "unsatisfiable" and bool(schemas_within(spec))
            for way in SIMPLER_WAYS if may_help else ():
                with contextlib.suppress(ConstraintError):
                    return self.compiled_by(spec, way)
            if not isinstance(error, Unsupported):
                self._raise_for_schema(spec)
            raise

    def _raise_for_schema(self, spec: ConstraintSpec) -> None:
        """Raises the refusal of the first schema within a grammar that is refused on its own. It names the place in the
        schema, where llguidance shows the source of the grammar.
        """
        for schema in schemas_within(spec) if spec.kind != "json_schema" else []:
            loose = spec.loose and may_be_partial(schema)
            text = json_text({**schema, "x-guidance": {}} if isinstance(schema, dict) else schema)
            try:
                self._compiled(msgspec.structs.replace(spec, kind="json_schema", text=text, loose=loose))
            except ConstraintError as error:
                refusal = error.refusal
                place = "#" if refusal.place == "json_schema" else refusal.place
                hint = not spec.loose and refusal.kind == "not_enforced"
                raise ConstraintError(msgspec.structs.replace(refusal, place=place, can_be_loose=hint)) from error

    def _in_part(self, spec: ConstraintSpec) -> InPart:
        """Compiles a grammar of which some schemas may be enforced in part: each as far as it can be."""
        if self._last is not None and self._last[0] == spec:
            return self._last[1]
        found = embedded_schemas(lark_of(spec) or "")
        try:
            result = self._with_schemas(spec, found, [self._settled(each.schema, spec) for each in found])
        except ConstraintError:  # one by one their exact grammars are possible, and not together
            settled = [self._settled(each.schema, spec, tries_all=False) for each in found]
            result = self._with_schemas(spec, found, settled)
        self._last = spec, result
        return result

    def _with_schemas(self, spec: ConstraintSpec, found: list[EmbeddedSchema], settled: list[Settled]) -> InPart:
        texts = [f"%json {json_text(each.schema)}" for each in settled]
        grammar = with_replaced(lark_of(spec) or "", found, texts)
        compiled = self._compiled(msgspec.structs.replace(spec, kind="lark", text=grammar, loose=True))
        return InPart(compiled, [text for each in settled for text in each.left_out])

    def _settled(self, schema: Any, spec: ConstraintSpec, tries_all: bool = True) -> Settled:
        """Returns what of a schema is enforced: all of it, what llguidance knows, or its type alone. Raises
        `ConstraintError` if all of it must be enforced and cannot be.
        """
        if not may_be_partial(schema):
            self._compiled(_alone(schema, spec, loose=False))
            return Settled(schema, [])
        if tries_all:
            with contextlib.suppress(ConstraintError):
                exact = with_leave(schema, lenient=False)
                self._compiled(_alone(exact, spec, loose=False))
                return Settled(exact, [])
        partial = with_leave(schema, lenient=True)
        with contextlib.suppress(ConstraintError):
            alone = _alone(partial, spec, loose=True)
            self._compiled(alone)
            return Settled(partial, self._left_out([schema], alone))
        given = schema.get("type")
        kind = {"type": given} if isinstance(given, str) and given in TYPES else {}
        options = schema.get("x-guidance", {})
        left_out = "#: no grammar enforces this schema; only the type is enforced"
        return Settled({**kind, "x-guidance": options}, [left_out])

    def compiled_by(self, spec: ConstraintSpec, way: Way = "proved") -> bytes:
        """Compiles in one `way` alone. Builds the grammar's matcher once, because that takes most of the time."""
        translation = translated(spec, way, self._vocabulary.vocab_size)
        try:
            grammar, num_bytes = self._measured(translation)
        except ConstraintError as error:
            self._raise_invalid(spec, translation)
            raise _of_kind(spec, error) from error
        if not spec.loose and (warnings := grammar.warnings()):
            raise _refusal(spec, warnings)
        row = np.zeros(row_words(self._vocabulary.vocab_size), dtype=np.int32)
        try:
            session = grammar.session()
            session.fill(row)
            check_next_row(session, row)
        except ConstraintError as error:
            raise _of_kind(spec, error) from error
        except DeadEnd as error:
            raise ConstraintError.because("unsatisfiable", spec.kind) from error
        if not row.any() and not session.is_finished():
            raise ConstraintError.because("unsatisfiable", spec.kind)
        return msgspec.msgpack.encode(Compiled(translation, num_bytes))

    def _raise_invalid(self, spec: ConstraintSpec, translation: Translation) -> None:
        """Raises llguidance's reason, with its place, if the grammar itself is invalid. Otherwise a limit was exceeded
        or a part of the grammar failed.
        """
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(translation.grammar, self._tokenizer)
        if failed:
            raise _refusal(spec, messages)

    def _measured(self, translation: Translation) -> tuple[LLGuidanceGrammar, int]:
        """The grammar, and the memory that its matchers and those of all its parts hold. The memory is measured. It is
        only an estimate if other threads allocate at the same time. The length of the text does not tell it: a matcher
        may hold 20 or 5,000 times as much.
        """
        before = heap_bytes()
        grammar = LLGuidanceGrammar(self._tokenizer, Compiled(translation, 0), self._vocabulary)
        parts = [llguidance.LLMatcher(self._tokenizer, part, log_level=0) for part, _ in translation.parts]
        after = heap_bytes()
        del parts
        if before is None or after is None:
            return grammar, UNMEASURED_BYTES
        return grammar, max(after - before, MATCHER_BYTES)

    def load(self, spec: ConstraintSpec, compiled: bytes) -> LLGuidanceGrammar:
        return LLGuidanceGrammar(self._tokenizer, msgspec.msgpack.decode(compiled, type=Compiled), self._vocabulary)

    def not_enforced(self, spec: ConstraintSpec) -> list[str]:
        """Formats that no specification defines; if loose, also what llguidance ignores, and what it warns of."""
        if not spec.loose and not _MAY_HAVE_FORMAT.search(spec.text):
            return []
        schemas = schemas_within(spec)
        annotations = [text for schema in schemas for text in unknown_formats(schema)]
        if not spec.loose:
            return annotations
        if holds_schemas(spec):
            return annotations + self._in_part(spec).left_out
        return annotations + self._left_out(schemas, spec)

    def _left_out(self, schemas: list[Any], spec: ConstraintSpec) -> list[str]:
        """Returns what llguidance ignores of the schemas in a loose constraint, and what it warns of."""
        controls = [has_control_characters(schema, json_text(schema)) for schema in schemas]
        silent = [text for each in zip(schemas, controls, strict=True) for text in departures(*each)]
        grammar = translated(spec, "proved", self._vocabulary.vocab_size).grammar
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        patterns = [text for schema in schemas for text in unenforced_patterns(schema)]
        return silent + patterns + ([] if failed else messages)


class LLGuidanceGrammar:
    """A matcher that is copied for each session. The copies share its automata, and make them grow."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, compiled: Compiled, vocabulary: Vocabulary) -> None:
        self.num_rows = 0
        """Rows that sessions have filled."""
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        translation = compiled.translation
        self._matcher = self._matcher_of(translation.grammar)
        self._guard = Guard.of(translation.guard) if translation.guard else None
        self._sources = translation.parts
        self._made: dict[int, Part] = {}
        self._parts = self._parts_of(translation.frame) if translation.parts else None
        self._first_bytes = AUTOMATA_FACTOR * compiled.num_bytes + GUARD_FACTOR * translation.guard_bytes

    def warnings(self) -> list[str]:
        """Returns what llguidance says that it ignores."""
        return list(self._matcher.get_grammar_warnings())

    def _matcher_of(self, grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        check_matcher(matcher)
        return matcher

    def _parts_of(self, frame: str) -> Parts:
        special = frozenset(self._vocabulary.mark_token_ids)
        return Parts(
            frame=self._matcher_of(frame),
            num_parts=len(self._sources),
            part=self._part,
            first_marker=self._vocabulary.vocab_size,
            special=special,
            named=special | named_token_ids(frame),
            of_bytes=token_of_byte(self._vocabulary),
            fill=self._fill_of_part,
        )

    def _part(self, index: int) -> Part:
        if index not in self._made:
            grammar, guard = self._sources[index]
            self._made[index] = Part(self._matcher_of(grammar), Striker(Guard.of(guard), self._vocabulary))
        return self._made[index]

    def _fill_of_part(self, matcher: llguidance.LLMatcher, row: np.ndarray) -> None:
        self.num_rows += 1
        fill_mask(matcher, row, self._vocabulary)

    @property
    def num_bytes(self) -> int:
        return self._first_bytes + ROW_BYTES * self.num_rows

    def session(self) -> Session:
        session = LLGuidanceSession(self, self._matcher.deep_copy(), self._vocabulary)
        if self._parts is not None:
            return GuardedPartsSession(session, self._parts, self._vocabulary)
        return session if self._guard is None else GuardedSession(session, self._guard, self._vocabulary)


class LLGuidanceSession:
    def __init__(self, grammar: LLGuidanceGrammar, matcher: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._check()

    def _check(self) -> None:
        check_matcher(self._matcher)

    def accept(self, token_id: int) -> bool:
        if self._matcher.is_stopped() or token_id in self._vocabulary.eos_token_ids:
            return False
        accepted = self._matcher.try_consume_tokens([token_id]) == 1
        self._check()
        return accepted

    def fill(self, row: np.ndarray) -> None:
        self._grammar.num_rows += 1
        fill_mask(self._matcher, row, self._vocabulary)
        self._check()
        self._vocabulary.set_tokens(row, self._vocabulary.eos_token_ids, self._matcher.is_accepting())

    @staticmethod
    def fill_all(sessions: Sequence[LLGuidanceSession]) -> tuple[np.ndarray, list[Exception | None]]:
        """Fills the rows of sessions of one vocabulary; see `JointSession`."""
        vocabulary = sessions[0]._vocabulary
        rows = masks_of([session._matcher for session in sessions], vocabulary)
        vocabulary.set_tokens(rows, vocabulary.eos_token_ids, False)
        errors: list[Exception | None] = []
        for session, row in zip(sessions, rows, strict=True):
            session._grammar.num_rows += 1
            try:
                session._check()
            except ConstraintError as error:
                errors.append(error)
                continue
            if session._matcher.is_accepting():
                vocabulary.set_tokens(row, vocabulary.eos_token_ids, True)
            errors.append(None)
        return rows, errors

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and not self._matcher.rollback(num_tokens):
            cause = f"rollback of {num_tokens} tokens failed: {self._matcher.get_error()}"
            raise ConstraintError.because("unfit", "", cause=cause)

    def fork(self) -> LLGuidanceSession:
        return LLGuidanceSession(self._grammar, self._matcher.deep_copy(), self._vocabulary)

    def forced_tokens(self) -> list[int]:
        return [] if self._matcher.is_stopped() else list(self._matcher.compute_ff_tokens())

    def is_accepting(self) -> bool:
        return self._matcher.is_accepting()

    def is_finished(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()


def _refusal(spec: ConstraintSpec, messages: list[str]) -> ConstraintError:
    """The error for what llguidance says of a constraint's grammar, with the place of the keyword that it is about."""
    message = without_source("; ".join(messages))
    if _UNSATISFIABLE.search(message):
        return ConstraintError.because("unsatisfiable", spec.kind, cause=message)
    if spec.kind != "json_schema":
        if (place := place_within(message, schemas_within(spec))) is None:
            return ConstraintError.because("unfit", spec.kind, cause=message)
        return ConstraintError.because("not_enforced", place, can_be_loose=not spec.loose)
    place = place_of(message, read_json(spec.text))
    if _UNSUPPORTED.search(message):
        cause = "" if place and UNIMPLEMENTED.search(message) else message  # the place names the keyword
        return Unsupported.at(place or spec.kind, cause)
    return ConstraintError.because("unfit", place or spec.kind, cause=message)


def _alone(schema: Any, spec: ConstraintSpec, loose: bool) -> ConstraintSpec:
    """Returns a grammar of one of the schemas of a grammar."""
    text = f"start: %json {json_text(schema)}\n"
    return msgspec.structs.replace(spec, kind="lark", text=text, loose=loose)


def _of_kind(spec: ConstraintSpec, error: ConstraintError) -> ConstraintError:
    """Returns the refusal of a part of the constraint as one of the whole."""
    return ConstraintError(msgspec.structs.replace(error.refusal, place=error.refusal.place or spec.kind))


def without_source(message: str) -> str:
    """Returns llguidance's message without the lines of the grammar that it shows: Manta may have written them."""
    return _SOURCE.sub("", message).strip()


def check_matcher(matcher: llguidance.LLMatcher) -> None:
    """Raises `ConstraintError` if the matcher has failed."""
    if matcher.is_error():
        reason = without_source(matcher.get_error().partition("<state>")[0])
        if reason.startswith("NoExtension"):
            raise ConstraintError.because("unsatisfiable", "")
        raise ConstraintError.because("unfit", "", cause=reason)


def check_next_row(session: Session, row: np.ndarray) -> None:
    """Takes one step in `session`, to find out early whether the grammar exceeds llguidance's limits. `row` is the
    session's first bitmask, and stays as it is.

    llguidance builds its automata when it fills a bitmask, so compiling a grammar does not show an exceeded limit. If
    the grammar forces a long text, llguidance walks through all of it at the first token. States behind the second
    bitmask are not checked. Raises `ConstraintError` where a limit is exceeded.
    """
    allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
    if len(allowed) and session.accept(int(allowed[0])) and not session.is_finished():
        with contextlib.suppress(DeadEnd):  # another token may lead on
            session.fill(row.copy())

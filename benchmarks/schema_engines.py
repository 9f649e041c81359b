"""Engines that turn JSON schemas into masks, each behind one face, and the process that tries one of them on schemas.

`python -m benchmarks.schema_engines NAME ...` reads lines of JSON, `{"file": ...}`, and answers each with a line. The
process ends by `SIGPROF` when a file has cost more processor time than it may, so an endless compilation or a crash
costs its parent one schema. Times are the thread's processor time: other work on the machine does not count.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, Protocol

import jsonschema
import llguidance
import numpy as np
from tokenizers import Tokenizer

from benchmarks.property_order import in_order
from manta.structured.backend import DeadEnd, Session
from manta.structured.backends.choose import Backends
from manta.structured.backends.llguidance import Compiled, LLGuidanceGrammar, tokenizer_of
from manta.structured.backends.llguidance_grammar import Translation
from manta.structured.backends.xgrammar import XGrammarBackend
from manta.structured.constraint import (
    ConstraintError,
    ConstraintLimits,
    ConstraintSpec,
    JsonObjects,
    check_form,
    check_limits,
    check_size,
)
from manta.structured.masks import row_words
from manta.structured.pool_config import PoolConfig
from manta.structured.schemas.numbers import json_text, plain_text, read_json
from manta.structured.vocabulary import Vocabulary

RANDOM_TOKENS = 200
"""Tokens of a walk that are drawn at random. Then the walk heads for its end."""
WALK_TOKENS = 2000
"""Tokens after which a walk has found no end, beside twice those of the longest valid instance."""
OPENING = b'"0123456789ntf{[,:-'
"""First bytes of the tokens among which a walk that heads for its end draws, where nothing can be closed."""
LETTERS = bytes(range(0x20, 0x7F))
"""First bytes of the tokens among which it draws in a string that may not end."""
MEMORY_BYTES = 4 * 2**30
"""Address space of the process; an engine that needs more fails on the schema."""
MASK_SECONDS = PoolConfig().mask_seconds
"""Time in which the server must fill a mask: a text with a slower one counts as timed out."""
BUCKETS_PER_DECADE = 40
"""Resolution of the recorded times: a quantile is right within 6%."""


class Matcher(Protocol):
    def fill(self, row: np.ndarray) -> None:
        """Writes the mask: int32 `[ceil(vocab_size / 32)]`. Raises `DeadEnd`."""

    def accept(self, token_id: int) -> bool: ...
    def is_accepting(self) -> bool: ...


class Engine(Protocol):
    """Made once in each process."""

    compile_seconds: float
    """Processor seconds that one compilation may take; 0 if it has no limit of its own."""

    def compile(self, schema: Any) -> Callable[[], Matcher]:
        """What makes matchers of the schema. Raises any exception if the engine refuses it."""


class MantaEngine:
    """The server's way with its default limits: checked, rewritten, guarded, by the backend that `auto` chooses."""

    def __init__(self, vocabulary: Vocabulary, objects: JsonObjects = JsonObjects()) -> None:  # noqa: B008
        self._limits = ConstraintLimits()
        self.compile_seconds = self._limits.compile_seconds
        self._backends = Backends(vocabulary, objects)
        self._backends.warm_up()

    def compile(self, schema: Any) -> Callable[[], Session]:
        spec = ConstraintSpec(kind="json_schema", text=json_text(schema))
        check_form(spec)
        check_size(spec, self._limits)
        check_limits(spec, self._limits)
        resolved = self._backends.resolve(spec)
        return self._backends.get(resolved.spec.backend).load(resolved.spec, resolved.compiled).session


class LLGuidanceEngine:
    """llguidance's own reading of a schema."""

    compile_seconds = 0.0

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer_of(vocabulary)

    def compile(self, schema: Any) -> Callable[[], Matcher]:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        if failed:
            raise ConstraintError.because("unfit", "", cause="; ".join(messages))
        return LLGuidanceGrammar(self._tokenizer, Compiled(Translation(grammar), 0), self._vocabulary).session


class XGrammarEngine:
    """xgrammar's own reading of a schema, whatever it ignores."""

    compile_seconds = 0.0

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._backend = XGrammarBackend(vocabulary)

    def compile(self, schema: Any) -> Callable[[], Session]:
        spec = ConstraintSpec(kind="json_schema", text=json.dumps(schema), loose=True)
        return self._backend.load(spec, self._backend.compile(spec)).session


AS_SCHEMA = JsonObjects(additional_properties="as_schema")
ANY_ORDER = JsonObjects(additional_properties="as_schema", property_order="any")
ENGINES: dict[str, Callable[[Vocabulary], Engine]] = {
    "manta": MantaEngine,
    "manta-as-schema": functools.partial(MantaEngine, objects=AS_SCHEMA),
    "manta-any-order": functools.partial(MantaEngine, objects=ANY_ORDER),
    "llguidance": LLGuidanceEngine,
    "xgrammar": XGrammarEngine,
}


class Times:
    """Times in µs, as counts of buckets on a logarithmic scale, with their exact sum and maximum."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self._sum = self._max = 0.0

    def add(self, seconds: float) -> None:
        microseconds = max(seconds * 1e6, 0.1)
        self._buckets[round(BUCKETS_PER_DECADE * math.log10(microseconds))] += 1
        self._sum += microseconds
        self._max = max(self._max, microseconds)

    def as_json(self) -> dict[str, Any]:
        return {"buckets": self._buckets, "sum": round(self._sum), "max": round(self._max)}


class TooSlow(Exception):
    """A mask took longer than the server waits for one."""


class Trial:
    """Tries one engine on one schema after another."""

    def __init__(self, name: str, vocabulary: Vocabulary, num_tests: int, num_walks: int, seconds: float) -> None:
        self._engine = ENGINES[name](vocabulary)
        self._vocabulary = vocabulary
        self._num_tests, self._num_walks, self._seconds = num_tests, num_walks, seconds
        self._walk_tokens = WALK_TOKENS
        self._tokenizer = Tokenizer.from_str(vocabulary.tokenizer_json)
        self._row = np.zeros(row_words(vocabulary.vocab_size), dtype=np.int32)
        self._ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
        self._longest = max(map(len, self._ids))
        self._ends = list(vocabulary.eos_token_ids)

    def run(self, file: str) -> dict[str, Any]:
        """Counts and times, or only why the schema is refused."""
        data = json.loads(pathlib.Path(file).read_text())
        found: dict[str, Any] = Counter()
        self._masks, self._grammar_masks = Times(), Times()
        signal.setitimer(signal.ITIMER_PROF, self._engine.compile_seconds or self._seconds)
        started = time.thread_time()
        try:
            new = self._engine.compile(data["schema"])
            is_guarded = hasattr(new(), "unguarded")
        except Exception as error:  # each engine has its own kinds
            refused = {"refused": f"{type(error).__name__}: {error}"[:500]}
            is_right = _says_unsatisfiable(error) and not any(case["valid"] for case in data["tests"])
            return {**refused, "unsatisfiable": True} if is_right else refused
        found["compile_ms"] = round((time.thread_time() - started) * 1e3, 3)
        signal.setitimer(signal.ITIMER_PROF, self._seconds)
        kind = jsonschema.validators.validator_for(data["schema"], default=jsonschema.Draft202012Validator)
        judge = kind(data["schema"], format_checker=kind.FORMAT_CHECKER)
        for case in data["tests"][: self._num_tests or None]:
            self._counted(found, lambda case=case: self._instance(new, case, judge, found))
        words = [word for case in data["tests"] if case["valid"] for word in _strings(case["data"])]
        words += dict.fromkeys(_words_of(data["schema"]))
        valid_lengths = [len(self._token_ids(case["data"])) for case in data["tests"] if case["valid"]]
        self._walk_tokens = WALK_TOKENS + 2 * max(valid_lengths, default=0)
        for index in range(self._num_walks):
            chooser = random.Random(f"{pathlib.Path(file).name}{index}")
            self._counted(found, lambda chooser=chooser: self._walk(new(), chooser, judge, words, found))
        signal.setitimer(signal.ITIMER_PROF, 0)
        return {
            **found,
            "guarded": is_guarded,
            "masks": self._masks.as_json(),
            "grammar_masks": self._grammar_masks.as_json(),
        }

    @staticmethod
    def _counted(found: dict[str, Any], trial: Callable[[], None]) -> None:
        """Counts a text that an engine gives up on, as llguidance does where its limits are exceeded."""
        try:
            trial()
        except TooSlow:
            found["slow_texts"] += 1
        except Exception as error:  # each engine has its own kinds
            found["failed"] += 1
            found["failure"] = f"{type(error).__name__}: {error}"[:300]

    # ---- instances ---------------------------------------------------------------------------------------------------

    def _instance(self, new: Callable[[], Matcher], case: dict[str, Any], judge: Any, found: dict[str, Any]) -> None:
        token_ids = self._token_ids(case["data"])
        found["valid" if case["valid"] else "invalid"] += 1
        accepted = self._writes(new(), token_ids)
        if case["valid"] and not accepted:
            found["valid_rejected"] += 1
            ordered = in_order(case["data"], judge.schema, lambda schema, value: _takes(judge, schema, value))
            if self._writes_text(new(), case["data"]):
                found["valid_rejected_for_spelling"] += 1
            elif self._writes(new(), self._token_ids(ordered)) or self._writes_text(new(), ordered):
                found["valid_rejected_for_order"] += 1
            elif _verdict(judge, case["data"]) is False:
                found["valid_rejected_as_jsonschema_does"] += 1
        elif accepted and not case["valid"]:
            found["invalid_accepted"] += 1
            found["invalid_accepted_as_jsonschema_does"] += _verdict(judge, case["data"]) is True
        if not case["valid"]:
            matcher = new()
            if hasattr(matcher, "unguarded"):
                found["invalid_accepted_by_grammar"] += self._writes(matcher.unguarded, token_ids)

    def _token_ids(self, instance: Any) -> list[int]:
        text = json.dumps(instance, ensure_ascii=False)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _writes(self, matcher: Matcher, token_ids: list[int]) -> bool:
        """Returns whether the engine lets a model write these tokens and end."""
        return all(self._follows(matcher, token_id) for token_id in token_ids) and matcher.is_accepting()

    def _writes_text(self, matcher: Matcher, instance: Any) -> bool:
        """Returns whether the engine lets a model write the instance, with numbers without exponents, in the longest
        tokens that it allows. llguidance allows no others where it forces a text; they need not be the tokenizer's.
        """
        text = _plain_json(read_json(json.dumps(instance))).encode()
        while text:
            try:
                self._fill(matcher)
            except DeadEnd:
                return False
            heads = (text[:length] for length in range(min(len(text), self._longest), 0, -1))
            token_ids = (token_id for head in heads if (token_id := self._ids.get(head)) is not None)
            token_id = next(filter(self._allows, token_ids), None)
            if token_id is None or not matcher.accept(token_id):
                return False
            text = text[len(self._vocabulary.tokens[token_id]) :]
        return matcher.is_accepting()

    def _follows(self, matcher: Matcher, token_id: int) -> bool:
        try:
            self._fill(matcher)
        except DeadEnd:
            return False
        return self._allows(token_id) and matcher.accept(token_id)

    def _allows(self, token_id: int) -> bool:
        return bool(self._row[token_id // 32] >> token_id % 32 & 1)

    def _fill(self, matcher: Matcher) -> None:
        if hasattr(matcher, "unguarded"):
            self._timed(matcher.unguarded, self._grammar_masks)
        self._timed(matcher, self._masks)

    def _timed(self, matcher: Matcher, times: Times) -> None:
        started = time.thread_time()
        try:
            matcher.fill(self._row)
        finally:
            seconds = time.thread_time() - started
            times.add(seconds)
        if seconds > MASK_SECONDS:
            raise TooSlow

    # ---- walks -------------------------------------------------------------------------------------------------------

    def _walk(
        self, matcher: Matcher, chooser: random.Random, judge: Any, words: list[str], found: dict[str, Any]
    ) -> None:
        """Writes a text of random tokens that the masks allow, and then one that heads for the end."""
        output, walker = bytearray(), Walker(self._vocabulary, chooser, words)
        found["walks"] += 1
        for index in range(self._walk_tokens):
            heads_for_end = index >= RANDOM_TOKENS
            if matcher.is_accepting() and (heads_for_end or chooser.random() < 0.3):
                break
            if not self._has_next(matcher):
                found["dead_ends"] += not matcher.is_accepting()
                break
            token_id = walker.drawn(self._row, heads_for_end)
            if not matcher.accept(token_id):
                break
            walker.accept(token_id)
            output += self._vocabulary.tokens[token_id]
        if not matcher.is_accepting():
            found["walks_without_end"] += 1
            found["walk"] = bytes(output[-300:]).decode(errors="replace")
            return
        verdict = _verdict_of_text(judge, bytes(output))
        found["walks_unjudged"] += verdict is None
        if verdict is False:
            found["walks_wrong"] += 1
            found["walk"] = bytes(output[-2000:]).decode(errors="replace")

    def _has_next(self, matcher: Matcher) -> bool:
        """Fills the mask. Returns whether it allows a token."""
        try:
            self._fill(matcher)
        except DeadEnd:
            return False
        self._vocabulary.set_tokens(self._row, self._ends, False)
        return bool(self._row.any())


class Walker:
    """Draws the tokens of a text: at random first, and then such as end it."""

    def __init__(self, vocabulary: Vocabulary, chooser: random.Random, words: list[str]) -> None:
        self._tokens, self._of_bytes = vocabulary.tokens, vocabulary.byte_token_ids()
        self._chooser = chooser
        self._words = words
        """Strings of valid instances, and those that the schema lists, of which all or an end is tried: a random text
        hardly ever matches a pattern, and is hardly ever a required name.
        """
        self._word: list[int] = []
        """Tokens that are left of the word which is being written."""
        self._in_string = self._is_escaped = False

    def drawn(self, row: np.ndarray, heads_for_end: bool) -> int:
        """Returns a token that the mask allows; it allows one."""

        def is_allowed(token_id: int) -> bool:
            return bool(row[token_id // 32] >> token_id % 32 & 1)

        if self._word and is_allowed(self._word[0]):
            return self._word.pop(0)
        self._word = []
        if self._chooser.random() < (0.8 if heads_for_end else 0.33):
            for group in self._groups(heads_for_end):
                if allowed := [token_id for token_id in group if is_allowed(token_id)]:
                    return self._chooser.choice(allowed)
        allowed_ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        return int(allowed_ids[self._chooser.randrange(len(allowed_ids))])

    def _groups(self, heads_for_end: bool) -> list[list[int]]:
        """Returns tokens that lead towards the end, the best ones first."""
        if not self._in_string:
            return [self._ids(b"}]"), self._ids(OPENING)]
        if not heads_for_end or not self._words or self._chooser.random() < 0.5:
            return [self._ids(b'"'), self._ids(LETTERS)]
        word = self._chooser.choice(self._words)
        start = self._chooser.choice((0, self._chooser.randrange(len(word) + 1)))
        text = json.dumps(word[start:], ensure_ascii=False).encode()
        first, *self._word = self._ids(text[1:])
        return [[first], self._ids(b'"')]

    def _ids(self, text: bytes) -> list[int]:
        return [self._of_bytes[byte] for byte in text if byte in self._of_bytes]

    def accept(self, token_id: int) -> None:
        for byte in self._tokens[token_id]:
            if self._is_escaped:
                self._is_escaped = False
            elif byte == ord("\\"):
                self._is_escaped = self._in_string
            elif byte == ord('"'):
                self._in_string = not self._in_string


def _plain_json(value: Any) -> str:
    """Returns the JSON of a value, whose numbers have no exponents."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_plain_json(name)}: {_plain_json(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_plain_json, value)) + "]"
    return plain_text(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False)


def _strings(value: Any) -> Iterator[str]:
    """Returns the strings anywhere in an instance."""
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings(item)


def _words_of(schema: Any) -> Iterator[str]:
    """Yields the names and strings that a schema lists."""
    if isinstance(schema, list):
        for item in schema:
            yield from _words_of(item)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            if name in ("required", "enum", "const"):
                yield from _strings([value])
            elif name == "properties" and isinstance(value, dict):
                yield from value
                yield from _words_of(list(value.values()))
            else:
                yield from _words_of(value)


def _says_unsatisfiable(error: Exception) -> bool:
    return isinstance(error, ConstraintError) and error.refusal.kind == "unsatisfiable"


def _takes(judge: Any, schema: Any, instance: Any) -> bool:
    """Returns whether a schema within the judge's takes a value; True if `jsonschema` cannot say."""
    return _verdict(judge.evolve(schema=schema), instance) is not False


def _verdict(judge: Any, instance: Any) -> bool | None:
    """Returns whether `jsonschema` takes the instance; None if it cannot say, as for a reference to nothing."""
    try:
        return bool(judge.is_valid(instance))
    except Exception:  # a strange schema raises any kind
        return None


def _verdict_of_text(judge: Any, text: bytes) -> bool | None:
    try:
        instance = json.loads(text)
    except RecursionError:
        return None
    except ValueError:
        return False
    return _verdict(judge, instance)


def main() -> None:
    name, folder, vocab_size, eos, tests, walks, seconds = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sys.set_int_max_str_digits(0)  # a walk may write more
    vocabulary = Vocabulary.load(folder, int(vocab_size), (int(eos),))
    trial = Trial(name, vocabulary, int(tests), int(walks), float(seconds))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(trial.run(json.loads(line)["file"])), flush=True)


if __name__ == "__main__":
    main()

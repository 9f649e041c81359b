"""Engines that turn JSON schemas into masks, each behind one face, and the process that tries one of them on schemas.

`python -m benchmarks.schema_engines NAME` reads lines of JSON, `{"file": ..., "tests": ..., "walks": ...}`, and answers
each with a line. A crash or a compilation without end then costs its parent one schema.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import random
import sys
import time
from collections.abc import Callable, Iterator
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
from manta.structured.constraint import ConstraintError, ConstraintSpec
from manta.structured.masks import row_words
from manta.structured.vocabulary import Vocabulary

MAX_TOKENS = 600
"""Tokens of the longest instance that is tried, and of a walk."""
CLOSING = b'"}]0'
"""First bytes of the tokens that a walk takes now and then, so that it ends."""


class Matcher(Protocol):
    def fill(self, row: np.ndarray) -> None:
        """Writes the mask: int32 `[ceil(vocab_size / 32)]`. Raises `DeadEnd`."""

    def accept(self, token_id: int) -> bool: ...
    def is_accepting(self) -> bool: ...


class Engine(Protocol):
    """Made once in each process."""

    def compile(self, schema: Any) -> Callable[[], Matcher]:
        """What makes matchers of the schema. Raises any exception if the engine refuses it."""


class MantaEngine:
    """Rewritten, guarded, and by the backend that `auto` chooses."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._backends = Backends(vocabulary)
        self._backends.warm_up()

    def compile(self, schema: Any) -> Callable[[], Session]:
        resolved = self._backends.resolve(ConstraintSpec(kind="json_schema", text=json.dumps(schema)))
        return self._backends.get(resolved.spec.backend).load(resolved.spec, resolved.compiled).session


class LLGuidanceEngine:
    """llguidance's own reading of a schema."""

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

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._backend = XGrammarBackend(vocabulary)

    def compile(self, schema: Any) -> Callable[[], Session]:
        spec = ConstraintSpec(kind="json_schema", text=json.dumps(schema), loose=True)
        return self._backend.load(spec, self._backend.compile(spec)).session


ENGINES: dict[str, Callable[[Vocabulary], Engine]] = {
    "manta": MantaEngine,
    "llguidance": LLGuidanceEngine,
    "xgrammar": XGrammarEngine,
}


class Trial:
    """Tries one engine on one schema after another."""

    def __init__(self, name: str, vocabulary: Vocabulary) -> None:
        self._engine = ENGINES[name](vocabulary)
        self._vocabulary = vocabulary
        self._tokenizer = Tokenizer.from_str(vocabulary.tokenizer_json)
        self._row = np.zeros(row_words(vocabulary.vocab_size), dtype=np.int32)
        self._closing = [vocabulary.byte_token_ids()[byte] for byte in CLOSING]

    def run(self, file: str, num_tests: int, num_walks: int) -> dict[str, Any]:
        """Counts and times, or only why the schema is refused."""
        data = json.loads(pathlib.Path(file).read_text())
        started = time.perf_counter()
        try:
            matcher = self._engine.compile(data["schema"])
            matcher()
        except Exception as error:  # each engine has its own kinds
            return {"refused": f"{type(error).__name__}: {error}"[:300]}
        seconds = time.perf_counter() - started
        found: dict[str, Any] = {"compile_ms": seconds * 1e3, "mask_us": [], "valid": 0, "forbidden": 0, "wrong": 0}
        found |= {"out_of_order": 0, "walks": 0, "dead_ends": 0, "rows_struck": 0, "rows": 0}
        kind = jsonschema.validators.validator_for(data["schema"], default=jsonschema.Draft202012Validator)
        judge = kind(data["schema"], format_checker=kind.FORMAT_CHECKER)
        found["failed"] = 0
        for case in data["tests"][:num_tests]:
            with self._counted(found):
                self._instance(matcher, case, judge, found)
        for index in range(num_walks):
            with self._counted(found):
                self._walk(matcher(), random.Random(f"{pathlib.Path(file).name}{index}"), judge, found)
        return found

    @contextlib.contextmanager
    def _counted(self, found: dict[str, Any]) -> Iterator[None]:
        """Counts a text that an engine gives up on, as llguidance does where its limits are exceeded."""
        try:
            yield
        except Exception:  # each engine has its own kinds
            found["failed"] += 1

    def _instance(self, new: Callable[[], Matcher], case: dict[str, Any], judge: Any, found: dict[str, Any]) -> None:
        token_ids = self._token_ids(case["data"])
        if len(token_ids) > MAX_TOKENS:
            return
        accepted = self._writes(new(), token_ids, found)
        if case["valid"] and not accepted:
            ordered = self._writes(new(), self._token_ids(in_order(case["data"], judge.schema)), found)
            found["out_of_order" if ordered else "forbidden"] += 1
        found["valid"] += case["valid"]
        found["wrong"] += accepted and not case["valid"] and not judge.is_valid(case["data"])

    def _token_ids(self, instance: Any) -> list[int]:
        return list(self._tokenizer.encode(json.dumps(instance, ensure_ascii=False)).ids)

    def _writes(self, matcher: Matcher, token_ids: list[int], found: dict[str, Any]) -> bool:
        """Returns whether the engine lets a model write these tokens and end."""
        return all(self._follows(matcher, token_id, found) for token_id in token_ids) and matcher.is_accepting()

    def _follows(self, matcher: Matcher, token_id: int, found: dict[str, Any]) -> bool:
        try:
            self._fill(matcher, found)
        except DeadEnd:
            found["dead_ends"] += 1
            return False
        is_allowed = bool(self._row[token_id // 32] >> token_id % 32 & 1)
        return is_allowed and matcher.accept(token_id)

    def _fill(self, matcher: Matcher, found: dict[str, Any]) -> None:
        started = time.perf_counter()
        matcher.fill(self._row)
        found["mask_us"].append(round((time.perf_counter() - started) * 1e6, 1))
        if hasattr(matcher, "unguarded"):
            wider = self._row.copy()
            matcher.unguarded.fill(wider)
            found["rows_struck"] += bool((wider & ~self._row).any())
        found["rows"] += 1

    def _walk(self, matcher: Matcher, chooser: random.Random, judge: Any, found: dict[str, Any]) -> None:
        """A text of random tokens that the masks allow, a third of them such that close something."""
        tokens, ends, output = self._vocabulary.tokens, set(self._vocabulary.eos_token_ids), b""
        found["walks"] += 1
        for _ in range(MAX_TOKENS):
            if matcher.is_accepting() and chooser.random() < 0.5:
                break
            try:
                self._fill(matcher, found)
            except DeadEnd:
                found["dead_ends"] += 1
                return
            allowed = np.flatnonzero(np.unpackbits(self._row.view(np.uint8), bitorder="little")).tolist()
            allowed = [token_id for token_id in allowed if token_id not in ends and token_id < len(tokens)]
            if not allowed:
                break
            closing = [token_id for token_id in self._closing if self._row[token_id // 32] >> token_id % 32 & 1]
            token_id = chooser.choice(closing if closing and chooser.random() < 0.33 else allowed)
            matcher.accept(token_id)
            output += tokens[token_id]
        if matcher.is_accepting():
            found["wrong"] += not _is_valid(output, judge)
        elif len(output) and not allowed:
            found["dead_ends"] += 1


def _is_valid(output: bytes, judge: Any) -> bool:
    try:
        return bool(judge.is_valid(json.loads(output)))
    except (ValueError, RecursionError):
        return False


def main() -> None:
    name, folder, vocab_size, eos = sys.argv[1:]
    trial = Trial(name, Vocabulary.load(folder, int(vocab_size), (int(eos),)))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(trial.run(job["file"], job["tests"], job["walks"])), flush=True)


if __name__ == "__main__":
    main()

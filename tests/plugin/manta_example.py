"""A grammar backend from outside the tree: what one looks like, and, in tests, one that misbehaves on request.

Its constraint is JSON in a spec of kind `regex`: `allowed` token ids, `length` of the output in tokens, `favour`: what
is added to logits by token id (beyond a bitmask), `at`: what to do at an output position (or in `compile`): `raise`,
`hang`, `exit`, another way to fail, a number of seconds to take, or `until FILE`, which hangs until that file is there,
and `on`: the same behind an output token. In `compile` also what the process does with its answer: write `half` of it
and end, `stall` behind that half, or write `garbage`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence

import numpy as np

from manta.structured.constraint import ConstraintError, ConstraintSpec
from manta.structured.vocabulary import Vocabulary

_FAILURES = {
    "quit": SystemExit("as it was told to"),
    "half a pair": RuntimeError("\ud800"),
    "out of memory": MemoryError(),
    "too deep": RecursionError("\0"),
}


def _answer_badly(how: str) -> None:
    """Replaces how the compile process that this runs in writes its answer."""
    from manta.structured.frames import frame

    def write(stream, data: bytes) -> None:
        stream.write(frame(b"\xc1") if how == "garbage" else frame(data)[:-1])
        stream.flush()
        if how == "half":
            os._exit(1)
        time.sleep(3600)

    vars(sys.modules["__main__"])["write_frame"] = write


def _misbehave(how: str | float | None) -> None:
    if how == "raise":
        raise RuntimeError("the example backend raises, as it was told to")
    if how == "exit":
        os._exit(1)
    if how in _FAILURES:
        raise _FAILURES[how]
    if how in ("half", "stall", "garbage"):
        _answer_badly(how)
        return
    if how == "hang":
        while True:
            time.sleep(0.1)
    if how == "grow":
        hoard = []
        while True:
            hoard.append(b"x" * 2**20)
            time.sleep(0.001)
    if isinstance(how, str) and how.startswith("until "):
        while not os.path.exists(how.removeprefix("until ")):
            time.sleep(0.01)
        return
    if how is not None:
        time.sleep(float(how))


class ExampleBackend:
    name = "example"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def compile(self, spec: ConstraintSpec) -> bytes:
        options = json.loads(spec.text)
        _misbehave(options.get("at", {}).get("compile"))
        if options.get("refuse"):
            raise ConstraintError.because("unfit", "regex", cause="refused, as it was told to")
        return spec.text.encode()

    def load(self, spec: ConstraintSpec, compiled: bytes) -> ExampleGrammar:
        return ExampleGrammar(json.loads(compiled))

    def not_enforced(self, spec: ConstraintSpec) -> list[str]:
        return []


class ExampleGrammar:
    num_bytes = 1000

    def __init__(self, options: dict) -> None:
        self.options = options

    def session(self) -> ExampleSession:
        return (JointExampleSession if "num_words" in self.options else ExampleSession)(self.options, 0)


class ExampleSession:
    def __init__(self, options: dict, position: int) -> None:
        self._options = options
        self._position = position

    def accept(self, token_id: int) -> bool:
        if token_id not in self._options["allowed"]:
            return False
        self._position += 1
        _misbehave(self._options.get("on", {}).get(str(token_id)))
        return True

    def fill(self, row: np.ndarray) -> None:
        _misbehave(self._options.get("at", {}).get(str(self._position)))
        row[:] = 0
        words = row.view(np.uint32)
        for token_id in self._options["allowed"]:
            words[token_id // 32] |= np.uint32(1 << (token_id % 32))

    def rollback(self, num_tokens: int) -> None:
        self._position -= num_tokens

    def fork(self) -> ExampleSession:
        return type(self)(self._options, self._position)

    def forced_tokens(self) -> list[int]:
        return []

    def is_accepting(self) -> bool:
        return self.is_finished()

    def is_finished(self) -> bool:
        return self._position >= self._options.get("length", 10**9)

    def adjustments(self) -> tuple[list[int], list[float]]:
        favour = self._options.get("favour", {})
        return [int(token_id) for token_id in favour], list(favour.values())


class JointExampleSession(ExampleSession):
    """With the option `num_words`, sessions are filled together; `returned` names positions whose error is returned
    instead of raised.
    """

    num_batches = 0
    """Calls of `fill_all` with two sessions or more in this process."""

    @staticmethod
    def fill_all(sessions: Sequence[JointExampleSession]) -> tuple[np.ndarray, list[Exception | None]]:
        JointExampleSession.num_batches += len(sessions) > 1
        rows = np.zeros((len(sessions), sessions[0]._options["num_words"]), dtype=np.int32)
        errors: list[Exception | None] = [None] * len(sessions)
        for index, session in enumerate(sessions):
            if session._position in session._options.get("returned", []):
                errors[index] = RuntimeError("returned, as it was told to")
            else:
                session.fill(rows[index])
        return rows, errors

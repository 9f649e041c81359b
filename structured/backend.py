"""The protocol of a grammar backend, and the registry that finds one by name.

A backend turns a `ConstraintSpec` into a grammar, and a grammar into sessions, one for each sequence. Built in:
llguidance and xgrammar (`structured/backends/`). Others register a class under the entry point group
`manta.grammar_backends`. Backends run in processes that import neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Protocol

import numpy as np

from structured.constraint import ConstraintError, ConstraintSpec
from structured.vocabulary import Vocabulary

ENTRY_POINT_GROUP = "manta.grammar_backends"

_BUILT_IN = {
    "llguidance": "structured.backends.llguidance:LLGuidanceBackend",
    "xgrammar": "structured.backends.xgrammar:XGrammarBackend",
}


class DeadEnd(Exception):
    """No token may follow, and the text may not end: what was written so far cannot be completed. A sampler could not
    have known, so the sequence ends as one that reaches `max_tokens` does.
    """


class Session(Protocol):
    """The state of one sequence under a grammar: a function of the output tokens that it accepted. Not thread-safe."""

    def accept(self, token_id: int) -> bool:
        """Advances by one sampled token. Returns False and leaves the state unchanged if the grammar refuses it.

        Never called with an end-of-sequence token: the sequence has ended by then.
        """

    def fill(self, row: np.ndarray) -> None:
        """Writes which tokens may come next: int32 `[ceil(width / 32)]`, token `t` is bit `t % 32` of word `t // 32`,
        1 allows. Writes every word. Padding beyond the vocabulary is 0; end-of-sequence bits are 1 if and only if
        `is_accepting()`. May raise `DeadEnd`, and is not asked again then.
        """

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last `num_tokens` accepted tokens. The caller never asks for more than were accepted."""

    def fork(self) -> Session:
        """An independent copy."""

    def forced_tokens(self) -> list[int]:
        """The tokens of the text that the grammar forces next, tokenised as the model would tokenise it. May be empty
        even if text is forced.

        The tokens are proposals: the model still draws each one under its mask. If it splits the text in another way,
        that costs time and nothing else. Called after every row, so it must be quick if nothing is forced.
        """

    def is_accepting(self) -> bool:
        """Whether the text may end here."""

    def is_finished(self) -> bool:
        """Whether only the end may follow."""


class Grammar(Protocol):
    """A compiled constraint; makes any number of sessions."""

    @property
    def num_bytes(self) -> int:
        """An upper bound of the memory that it holds; caches add these up. It may grow while sessions run. If it has
        grown too much, the grammar is loaded anew for the next session.
        """

    def session(self) -> Session: ...


class AdjustingSession(Session, Protocol):
    """A session that also changes logits, beyond allowing and refusing."""

    def adjustments(self) -> tuple[list[int], list[float]]:
        """For the next token: token ids, and the finite values that are added to their logits. At most
        `structured.masks.MAX_ADJUSTMENTS` of them.
        """


class Backend(Protocol):
    """Made once in each process: `Backend(vocabulary)`."""

    name: str

    def compile(self, spec: ConstraintSpec) -> bytes:
        """Does all the slow work. Runs in a process that can be killed; the bytes that it returns are sent to the
        processes that fill masks. Raises `Unsupported` if this backend does not enforce the constraint, and
        `ConstraintError` if the constraint is wrong.
        """

    def load(self, spec: ConstraintSpec, compiled: bytes) -> Grammar:
        """Builds the grammar from what `compile` returned, perhaps in another process. Cheap."""

    def not_enforced(self, spec: ConstraintSpec) -> list[str]:
        """Keywords of the constraint that this backend does not enforce: for a loose request whatever it lacks, for
        others only what the specification calls annotations. They are reported to the client.
        """


def backend_names() -> list[str]:
    """Built-in and registered names."""
    return sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))})


def make_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """Raises `ConstraintError` if the name is unknown; the message lists the known names."""
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)(vocabulary)
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return entry.load()(vocabulary)
    raise ConstraintError(f"grammar backend {name!r} is unknown; use auto or one of {', '.join(backend_names())}")

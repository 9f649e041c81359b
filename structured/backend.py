"""The protocol of a grammar backend, and the registry that finds one by name.

A backend compiles a `ConstraintSpec` to a grammar, which makes one session for each sequence. llguidance and xgrammar
are built in (`structured/backends/`); packages register others under the entry point group `manta.grammar_backends`.
Backends run in processes that import neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from manta.structured.constraint import ConstraintError, ConstraintSpec
from manta.structured.plugins import Plugins, imported
from manta.structured.vocabulary import Vocabulary

_BACKENDS = Plugins(
    "manta.grammar_backends",
    {
        "llguidance": "manta.structured.backends.llguidance:LLGuidanceBackend",
        "xgrammar": "manta.structured.backends.xgrammar:XGrammarBackend",
    },
)


class DeadEnd(Exception):
    """No token may follow and the text may not end. A sampler cannot foresee this, so the sequence ends like one that
    reaches `max_tokens`.
    """


class Session(Protocol):
    """The state of one sequence's constraint, a function of the tokens that it accepted. Not thread-safe."""

    def accept(self, token_id: int) -> bool:
        """Advances by one sampled token. Returns False and keeps the state if the grammar refuses the token.

        Never called with an end-of-sequence token.
        """

    def fill(self, row: np.ndarray) -> None:
        """Writes every word of the next token's mask: int32 `[ceil(width / 32)]`, bit `t % 32` of word `t // 32` is 1
        if token `t` is allowed.

        Padding beyond the vocabulary is 0. End-of-sequence bits are 1 if and only if `is_accepting()`. May raise
        `DeadEnd`, which ends the sequence.
        """

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last `num_tokens` accepted tokens, which exist."""

    def fork(self) -> Session:
        """An independent copy."""

    def forced_tokens(self) -> list[int]:
        """Tokens of the text that the grammar forces next, split as the model's tokenizer would. May be empty even if
        text is forced.

        They are proposals: the model draws each one under its mask, so another split only costs time. Called after
        every row, so it must be quick when nothing is forced.
        """

    def is_accepting(self) -> bool:
        """Whether the text may end here."""

    def is_finished(self) -> bool:
        """Whether only the end may follow."""


class Grammar(Protocol):
    """A compiled constraint, from which any number of sessions start."""

    @property
    def num_bytes(self) -> int:
        """Upper bound of its memory, for caches. It may grow while sessions run; a grammar that has grown too much is
        loaded anew for the next session.
        """

    def session(self) -> Session: ...


def begin(grammar: Grammar, begun: str, vocabulary: Vocabulary) -> Session:
    """A session behind the text `begun`, which was written before the output. Raises `ConstraintError` if no text that
    the constraint allows begins so.
    """
    session, of_bytes = grammar.session(), vocabulary.byte_token_ids()
    for num_bytes, byte in enumerate(begun.encode()):
        if byte not in of_bytes or not session.accept(of_bytes[byte]):
            num_fitting = len(begun.encode()[:num_bytes].decode(errors="ignore"))
            unfit = f"{begun[num_fitting : num_fitting + 20]!r} at character {num_fitting}"
            cause = f"the constraint does not allow {unfit}"
            if byte not in of_bytes:
                cause = f"the tokenizer has no token for the byte {byte} in {unfit}"
            remedy = "begin it as the constraint demands, or leave it out"
            raise ConstraintError.because("unfit", "the answer's beginning", cause=cause, remedy=remedy)
    return session


class AdjustingSession(Session, Protocol):
    """A session that also adjusts logits."""

    def adjustments(self) -> tuple[list[int], list[float]]:
        """Token ids, and the finite values to add to their logits for the next token: at most
        `manta.structured.masks.MAX_ADJUSTMENTS`.
        """


class JointSession(Session, Protocol):
    """A session whose masks can be filled together with those of others of its class. Each call of a backend that lets
    other Python threads run may wait for these threads when it returns, so one call for all rows of a step is worth
    more than the work that it saves.
    """

    @staticmethod
    def fill_all(sessions: Sequence[Any]) -> tuple[np.ndarray, list[Exception | None]]:
        """Returns the rows that `fill` would write for each session, int32 [num_sessions, words], and what it would
        raise, or None. After any exception, the caller fills the rows one by one.
        """


class Backend(Protocol):
    """Made once in each process, as `Backend(vocabulary)`."""

    name: str

    def compile(self, spec: ConstraintSpec) -> bytes:
        """Does all the slow work, in a process that can be killed. Returns what `load` needs in other processes. Raises
        `Unsupported` if this backend does not enforce the constraint, and `ConstraintError` if the constraint is wrong.
        """

    def load(self, spec: ConstraintSpec, compiled: bytes) -> Grammar:
        """Builds the grammar from the result of `compile`, perhaps in another process. Fast."""

    def not_enforced(self, spec: ConstraintSpec) -> list[str]:
        """Keywords that this backend does not enforce, which the client is told. Only a loose request may have others
        than the specification's annotations.
        """


def backend_names() -> list[str]:
    """Built-in and registered names."""
    return _BACKENDS.names()


def make_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """Raises `ConstraintError` with the known names if the name is unknown."""
    path = _BACKENDS.path(name)
    if path is None:
        raise ConstraintError.because("unknown_value", "backend", value=name, bound=("auto", *backend_names()))
    backend: Backend = imported(path)(vocabulary)
    return backend

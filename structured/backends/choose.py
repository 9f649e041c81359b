"""Decides which backend serves a constraint: here alone, once for each request, before it is admitted.

llguidance comes first: it compiles in a millisecond, bounds its work, and says what it does not support. A constraint
that it does not support goes to xgrammar, if that is proven to enforce it.
"""

from __future__ import annotations

import contextlib
import itertools

import msgspec
import numpy as np

from manta.structured.backend import Backend, DeadEnd, Grammar, begin, make_backend
from manta.structured.constraint import ConstraintError, ConstraintSpec, JsonObjects, Resolved, Unsupported
from manta.structured.masks import row_words
from manta.structured.regexes.regex_constraint import with_plain_regex
from manta.structured.vocabulary import Vocabulary

AUTO = ("llguidance", "xgrammar")
_FIRST = (
    ConstraintSpec(kind="json_schema", text='{"type": "object", "properties": {"name": {"type": "string"}}}'),
    ConstraintSpec(kind="json_schema", text='{"oneOf": [{"const": "a"}, {"const": "b"}]}'),
)
"""Constraints that make a backend's tables, and that load what rewrites schemas."""


class Backends:
    """The backends of one process, made when first asked for."""

    def __init__(self, vocabulary: Vocabulary, objects: JsonObjects = JsonObjects()) -> None:  # noqa: B008
        self._vocabulary = vocabulary
        self._objects = objects
        self._made: dict[str, Backend] = {}

    def warm_up(self) -> None:
        """Makes the backends that `auto` chooses from, and compiles first constraints with each. A backend that fails
        raises again, with its reason, when a constraint asks for it.
        """
        for name, first in itertools.product(AUTO, _FIRST):
            with contextlib.suppress(Exception):
                self.get(name).compile(first)

    def resolve(self, spec: ConstraintSpec) -> Resolved:
        """Compiles the constraint with the first backend that enforces all of it. A schema whose objects cannot be
        closed is enforced as it is. A loose constraint that no backend enforces is enforced in part. Raises
        `ConstraintError` if that is impossible too.

        Resolving the result's `spec` again, in another process say, gives the same result.
        """
        spec = self._objects.applied(spec)
        attempts = _attempts(spec)
        names = AUTO if spec.backend == "auto" else (spec.backend,)
        first: ConstraintError | None = None
        for attempt in attempts:
            for name in names:
                try:
                    return self._compile(attempt, name)
                except Unsupported as error:
                    if not attempt.reads_objects:  # then the next attempt says what the schema lacks
                        first = first or error
                except ConstraintError:
                    if attempt is attempts[-1]:
                        raise
                    break  # the loose attempt raises what is really wrong
        assert first is not None
        raise ConstraintError(msgspec.structs.replace(first.refusal, can_be_loose=not spec.loose))

    def _compile(self, spec: ConstraintSpec, name: str) -> Resolved:
        backend = self.get(name)
        spec = msgspec.structs.replace(spec, backend=name)
        plain = with_plain_regex(spec)
        compiled = backend.compile(plain)
        if spec.begun:
            self._check_beginning(backend.load(plain, compiled), plain)
        return Resolved(spec=spec, compiled=compiled, not_enforced=backend.not_enforced(plain))

    def _check_beginning(self, grammar: Grammar, spec: ConstraintSpec) -> None:
        """Raises `ConstraintError` if nothing that the grammar allows begins as the prompt ends."""
        session = begin(grammar, spec.begun, self._vocabulary)
        try:
            session.fill(np.zeros(row_words(self._vocabulary.vocab_size), dtype=np.int32))
        except DeadEnd as error:
            raise ConstraintError.because("unsatisfiable", "the answer's beginning") from error

    def get(self, name: str) -> Backend:
        """The backend, made if need be. Raises `ConstraintError` if the name is unknown, and what its making raises."""
        if name not in self._made:
            self._made[name] = make_backend(name, self._vocabulary)
        return self._made[name]


def _attempts(spec: ConstraintSpec) -> list[ConstraintSpec]:
    """The ways to read a constraint, the best one first: exactly and loosely, and of each as the request says of JSON
    objects, and as the schemas say.
    """
    exact = msgspec.structs.replace(spec, loose=False)
    readings = [exact, spec] if spec.loose else [exact]
    return [each for reading in readings for each in dict.fromkeys(_readings_of_objects(reading))]


def _readings_of_objects(spec: ConstraintSpec) -> list[ConstraintSpec]:
    if not spec.reads_objects:
        return [spec]
    opened = msgspec.structs.replace(spec, additional_properties="as_schema")
    return [spec, opened, msgspec.structs.replace(opened, property_order="schema")]

"""Which backend serves a constraint: the one place that decides, once a request, before it is admitted."""

from __future__ import annotations

import msgspec

from structured.backend import Backend, make_backend
from structured.constraint import ConstraintSpec, Resolved
from structured.vocabulary import Vocabulary


class Backends:
    """The backends of one process, made when first asked for."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._made: dict[str, Backend] = {}

    def get(self, name: str) -> Backend:
        if name not in self._made:
            self._made[name] = make_backend(name, self._vocabulary)
        return self._made[name]

    def resolve(self, spec: ConstraintSpec) -> Resolved:
        """Raises `ConstraintError` where no backend enforces the constraint."""
        name = "llguidance" if spec.backend == "auto" else spec.backend
        compiled = self.get(name).compile(spec)
        return Resolved(spec=msgspec.structs.replace(spec, backend=name), compiled=compiled)

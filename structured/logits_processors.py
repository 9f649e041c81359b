"""Logits processors of users: the spec in a request, the protocols, and the registry of factories.

A request holds names and arguments (`LogitsProcessorSpec`), which are plain data. A name stands for a factory, which
makes one instance for each sequence. Three ways register a factory: the operator's configuration, the entry point group
`manta.logits_processors`, and `LLM.register_logits_processor`.

The engine checks the specs at admission; `workers/sampling/logits_processors.py` keeps the instances. Factories are
trusted code: one that hangs also hangs its engine. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

import msgspec
import numpy as np

from manta.structured.plugins import Plugins, imported
from manta.structured.refusals import Bound, Kind, Refusal, RequestRefused

FIELD = "logits_processors"
"""The field of a request that names processors."""
MAX_LOGITS_PROCESSORS = 16
"""Maximum number of processors of one request."""

MAX_ARGUMENT_BYTES = 65_536
"""Maximum size of one processor's arguments as JSON, in bytes, because each `SequenceStart` carries them."""


class LogitsProcessorError(RequestRefused):
    """The request's processor cannot be used."""

    @classmethod
    def of(cls, name: str, kind: Kind, cause: str = "", remedy: str = "", bound: Bound = None) -> Self:
        """Returns the error for the processor `name`."""
        return cls(Refusal(kind, FIELD, name, bound, remedy, cause))


class LogitsProcessor(Protocol):
    """The state of one sequence, a function of its tokens. Called by one thread.

    Two methods are optional. `clone()` returns an independent copy for a fork; without it the factory makes the fork's
    instance from its tokens. `close()` is called once, when the sequence ends or the instance is replaced.
    """

    def __call__(self, output_token_ids: np.ndarray, logits: Any) -> Any:
        """Changes the logits of the next token: in place, returning None, or by returning a new tensor.

        `output_token_ids` is the output so far, int32 [n], read-only. `logits` is a torch tensor, float32 [vocab_size],
        on the model's device; -inf forbids a token. If the call raises, or gives NaN or +inf, only this sequence ends,
        with FINISHED_INTERNAL_ERROR.
        """


class LogitsProcessorFactory(Protocol):
    """Makes the instance of one sequence. A class whose constructor takes these arguments is a factory.

    Its optional method `check(arguments, vocab_size)` raises `ValueError` with bound and remedy for wrong arguments.
    The request is then refused (HTTP 400) before it runs.
    """

    def __call__(
        self,
        arguments: dict[str, Any],
        prompt_token_ids: np.ndarray,
        output_token_ids: np.ndarray,
        vocab_size: int,
    ) -> LogitsProcessor:
        """Token ids are int32 and read-only. `output_token_ids` is empty for a new sequence; after preemption, failover
        or a fork it is the output so far. `arguments` is a copy of the instance's own.
        """


class LogitsProcessorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The name and arguments of a processor. Raises `ValueError` if the arguments are not plain JSON or too long."""

    must_know_fields: ClassVar[bool] = True

    name: str
    arguments: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if not self.arguments:
            return
        try:
            text = json.dumps(self.arguments, allow_nan=False)
            msgspec.msgpack.encode(self.arguments)  # they travel to the ranks in this form
        except (TypeError, ValueError, RecursionError, OverflowError) as error:
            remedy = "give objects, lists, strings, finite numbers (integers of 64 bits), booleans and null only"
            raise self._wrong(f"are not plain JSON: {error}", remedy) from error
        if len(text) > MAX_ARGUMENT_BYTES:
            cause = f"have {len(text)} bytes as JSON and the limit is {MAX_ARGUMENT_BYTES}"
            raise self._wrong(cause, "shorten them", MAX_ARGUMENT_BYTES)
        msgspec.structs.force_setattr(self, "arguments", json.loads(text))  # a copy that the caller cannot change

    def _wrong(self, cause: str, remedy: str, bound: Bound = None) -> LogitsProcessorError:
        return LogitsProcessorError.of(self.name, "wrong_arguments", cause, remedy, bound)


class LogitsProcessorRegistry:
    """Factories by name. `configured` maps each of the operator's names to `module:attribute`, or to None for the entry
    point of that name.

    Raises `LogitsProcessorError` if a configured factory cannot be loaded.
    """

    def __init__(self, configured: Mapping[str, str | None] | None = None) -> None:
        self._plugins = Plugins("manta.logits_processors", configured or {})
        self._factories: dict[str, LogitsProcessorFactory] = {}
        for name in configured or {}:
            self.factory(name)

    def register(self, name: str, factory: LogitsProcessorFactory) -> None:
        """Raises `LogitsProcessorError` if the name is taken or `factory` is not callable."""
        if not callable(factory):
            raise LogitsProcessorError.of(name, "unfit", f"a {type(factory).__name__} is no factory")
        if name in self._factories:
            cause = "it is registered already, and running sequences may need it"
            raise LogitsProcessorError.of(name, "not_allowed", cause, "choose another name")
        self._factories[name] = factory

    def names(self) -> list[str]:
        """Configured, registered and installed names."""
        return sorted({*self._factories, *self._plugins.names()})

    def factory(self, name: str) -> LogitsProcessorFactory:
        """Raises `LogitsProcessorError` with the known names if `name` is unknown."""
        if name not in self._factories:
            path = self._plugins.path(name)
            if path is None:
                known = tuple(self.names()) or "none, for none is registered"
                raise LogitsProcessorError.of(name, "unknown_value", bound=known)
            self._factories[name] = _loaded(name, path)
        return self._factories[name]

    def check(self, specs: Sequence[LogitsProcessorSpec], vocab_size: int) -> None:
        """Raises `LogitsProcessorError` for an unknown name or arguments that the factory's `check` refuses."""
        for index, spec in enumerate(specs):
            check = getattr(self.factory(spec.name), "check", None)
            if check is None:
                continue
            try:
                check(own_arguments(spec), vocab_size)
            except Exception as error:
                what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                refusal = Refusal("unfit", f"{FIELD}[{index}]", spec.name, cause=what)
                raise LogitsProcessorError(refusal) from error


def own_arguments(spec: LogitsProcessorSpec) -> dict[str, Any]:
    """Returns a copy of the arguments, which the receiver may change."""
    return json.loads(json.dumps(spec.arguments)) if spec.arguments else {}


def _loaded(name: str, path: str) -> LogitsProcessorFactory:
    """Returns the factory at `module:attribute`. Raises `LogitsProcessorError` if it cannot be loaded."""
    try:
        factory: LogitsProcessorFactory = imported(path)
    except Exception as error:
        cause = f"{path!r} cannot be imported ({type(error).__name__}: {error})"
        raise LogitsProcessorError.of(name, "unfit", cause, "give module:attribute of an installed module") from error
    if not callable(factory):
        raise LogitsProcessorError.of(name, "unfit", f"{path!r} is a {type(factory).__name__}, no factory")
    return factory

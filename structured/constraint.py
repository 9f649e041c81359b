"""`ConstraintSpec`, the constraint of a request as plain immutable data, and the limits on it.

The ingress or `manta.cluster.llm.LLM` makes a spec; `structured/compiling/compiler.py` compiles it and chooses the
backend. Imports neither torch nor a backend.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal, Self

import msgspec

from manta.structured.refusals import Kind as RefusalKind
from manta.structured.refusals import Refusal, RequestRefused

FIELD = "constraint"
"""The field of a request that a refusal of its constraint is about, until the edge knows the body's own name."""
AdditionalProperties = Literal["as_schema", "closed"]
PropertyOrder = Literal["schema", "any"]
Kind = Literal["json_schema", "json_object", "regex", "choice", "lark", "ebnf", "structural_tag"]

HOLDING_SCHEMAS = frozenset(["json_schema", "lark", "structural_tag"])
"""Kinds of constraints that are, or may hold, JSON schemas."""


class ConstraintError(RequestRefused):
    """The constraint cannot be served. The refusal's field is "constraint", and its place is within the constraint."""

    @classmethod
    def because(cls, kind: RefusalKind, place: str, **details: Any) -> Self:
        """Returns the error for what is at `place`; `details` are the other fields of a `Refusal`."""
        return cls(Refusal(kind, FIELD, place=place, **details))


class Unsupported(ConstraintError):
    """The backend does not enforce what is at the refusal's place; another one may."""

    @classmethod
    def at(cls, place: str, cause: str = "", remedy: str = "") -> Self:
        return cls.because("not_enforced", place, cause=cause, remedy=remedy)


class ConstraintSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A constraint on the output of one sequence. Equal specs share one compiled grammar."""

    kind: Kind
    text: str = ""
    """The constraint in the language of its `kind`:

    - `json_schema`, `structural_tag`: JSON.
    - `choice`: a JSON array of strings.
    - `regex`, `lark`, `ebnf` (GBNF, rule `root`): the expression or grammar.
    - `json_object`: empty.
    """
    backend: str = "auto"
    """`auto`, `llguidance`, `xgrammar`, or the name of a registered backend. Compiling replaces `auto`, so that a
    rebuilt session has the same backend.
    """
    loose: bool = False
    """Accept a backend that does not enforce every keyword; the client is told which. In a grammar this holds for each
    `%json` schema without `"lenient": false` in its `x-guidance`.
    """
    any_whitespace: bool = True
    """JSON: allow whitespace between tokens, as RFC 8259 does. False fixes `", "` and `": "` without line breaks."""
    additional_properties: AdditionalProperties | None = None
    """JSON schemas, also those within a grammar: see `JsonObjects`. None takes the engine's option."""
    property_order: PropertyOrder | None = None
    """The order of properties; None takes the engine's option too."""
    begun: str = ""
    """Beginning of the constrained text that the prompt ends with. The output continues it."""
    begin_after: tuple[int, ...] = ()
    """Token ids, such as the end of a thinking section, after whose first occurrence the constraint begins. Empty: it
    begins at once.
    """

    @property
    def reads_objects(self) -> bool:
        """Whether objects are read otherwise than JSON Schema says, and properties than in the order of the schema."""
        return self.additional_properties == "closed" or self.property_order == "any"


class JsonObjects(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options for what a JSON schema leaves open about objects. They hold for requests that do not say it."""

    additional_properties: AdditionalProperties = "closed"
    """Properties of an object whose schema lists some and does not say whether there may be others. `closed`: there are
    no others, because models invent them. `as_schema`: any, as JSON Schema says.
    """
    property_order: PropertyOrder = "schema"
    """Order of an object's properties: that of the schema, or any."""

    def applied(self, spec: ConstraintSpec) -> ConstraintSpec:
        """Returns the spec with these options where it has none and holds schemas."""
        if spec.kind not in HOLDING_SCHEMAS:
            return spec
        return msgspec.structs.replace(
            spec,
            additional_properties=spec.additional_properties or self.additional_properties,
            property_order=spec.property_order or self.property_order,
        )


class ConstraintLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on the cost of one constraint. The two `compile_` budgets apply while it is compiled, the others
    before.
    """

    max_bytes: int = 1_000_000
    """Length of the schema, expression or grammar, in bytes of UTF-8."""
    max_nesting: int = 128
    """Depth of JSON objects and arrays, or of brackets in an expression or grammar."""
    max_alternatives: int = 10_000
    """Number of entries in a choice or in one `enum`, `anyOf`, `oneOf`, `allOf` or `properties`."""
    max_rules: int = 1000
    """Number of rules in one Lark or EBNF grammar. A parser may recurse through all of them on a bounded stack."""
    compile_seconds: float = 10.0
    """Processor seconds of one compilation. Its process is killed when they are spent, or after three times as long by
    the clock.
    """
    compile_memory_bytes: int = 2**31
    """Bytes of address space that one compilation may add."""
    max_waiting: int = 128
    """Number of constraints from HTTP requests that may wait for compilation, at most three quarters of them from one
    client. More are refused (HTTP 429).
    """


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint that compiles."""

    spec: ConstraintSpec
    """The requested spec, with `auto` replaced by the chosen backend, and the engine's `JsonObjects` where it had none.
    `loose` and `closed` are kept only if the backend makes use of them. Nothing else differs, and `compiled` is what
    this spec compiles to.
    """
    compiled: bytes
    not_enforced: list[str] = []
    """Keywords that are not enforced. Only a loose request has others than annotations."""


def check_form(spec: ConstraintSpec) -> None:
    """Raises `ConstraintError` if a field has the wrong type or holds text that UTF-8 cannot encode. Cheap."""
    try:
        hash(spec)
        msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ConstraintSpec)
    except UnicodeEncodeError as error:
        raise _half_a_pair(error) from error
    except (TypeError, OverflowError, msgspec.ValidationError) as error:
        raise ConstraintError.because("unfit", spec.kind, cause=f"it is no ConstraintSpec: {error}") from error


def check_size(spec: ConstraintSpec, limits: ConstraintLimits) -> None:
    """Raises `ConstraintError` if the text is too long. Cheap."""
    num_bytes = len(spec.text.encode())
    if num_bytes > limits.max_bytes:
        raise _too_much(spec.kind, num_bytes, "bytes", limits.max_bytes, "shorten it or raise max_bytes")


def _too_much(place: str, value: int, unit: str, bound: int, remedy: str) -> ConstraintError:
    return ConstraintError.because("over_limit", place, value=value, unit=unit, bound=bound, remedy=remedy)


def _half_a_pair(error: UnicodeEncodeError) -> ConstraintError:
    character = error.object[error.start]
    cause = f"it holds {character!a}, half of a surrogate pair"
    return ConstraintError.because("unfit", "", cause=cause, remedy="write the whole pair")


_RULE = {
    "lark": re.compile(r"^[ \t]*[?!]?\w[\w.]*(?:\[[^\]\n]*\]|\{[^}\n]*\})?[ \t]*:", re.MULTILINE),
    "ebnf": re.compile("::="),
}
"""The beginning of a rule, by kind of grammar."""


def check_limits(spec: ConstraintSpec, limits: ConstraintLimits) -> None:
    """Raises `ConstraintError` for malformed JSON, or if nesting, rules or alternatives exceed their bound. Takes time
    linear in the text's length.
    """
    depth = _nesting(spec.text)
    if depth > limits.max_nesting:
        raise _too_much(spec.kind, depth, "levels of nesting", limits.max_nesting, "flatten it or raise max_nesting")
    num_rules = len(_RULE[spec.kind].findall(spec.text)) if spec.kind in _RULE else 0
    if num_rules > limits.max_rules:
        raise _too_much(spec.kind, num_rules, "rules", limits.max_rules, "use fewer or raise max_rules")
    if spec.kind in ("json_schema", "choice", "structural_tag"):
        _check_json(spec, limits)


_OTHER_BYTES = bytes(byte for byte in range(256) if byte not in b"()[]{}")


def _nesting(text: str) -> int:
    """Depth of brackets. Brackets in JSON strings count too, so it is an upper bound."""
    depth = deepest = 0
    for byte in text.encode().translate(None, _OTHER_BYTES):
        if byte in b"([{":
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth = max(0, depth - 1)
    return deepest


def _check_json(spec: ConstraintSpec, limits: ConstraintLimits) -> None:
    try:
        value = json.loads(spec.text, parse_int=float, parse_constant=_no_number)
        if "\\u" in spec.text:
            json.dumps(value, ensure_ascii=False).encode()  # only an escape can write a lone surrogate
    except UnicodeEncodeError as error:
        raise _half_a_pair(error) from error
    except ValueError as error:
        raise ConstraintError.because("malformed", spec.kind, bound="JSON", cause=str(error)) from error
    if spec.kind == "choice":
        if not (isinstance(value, list) and value and all(isinstance(item, str) for item in value)):
            raise ConstraintError.because("wrong_value", "choice", bound="a list of at least one string")
        _check_count("choice", len(value), limits)
    elif not isinstance(value, dict | bool if spec.kind == "json_schema" else dict):
        raise ConstraintError.because("wrong_value", spec.kind, value=spec.text[:40], bound="a JSON object")
    else:
        _check_counts(value, "#", limits)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


_COUNTED = ("enum", "anyOf", "oneOf", "allOf", "properties", "patternProperties", "$defs", "definitions", "prefixItems")


_VALUES = ("enum", "const", "default", "examples")
"""Keywords whose members are values of the client's, not schemas."""
_NAMING = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose members have names of the client's, which may be those of keywords."""


def _check_counts(value: Any, path: str, limits: ConstraintLimits) -> None:
    """Recurses; `check_limits` has bounded the depth."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name in _COUNTED and isinstance(item, dict | list):
                _check_count(f"{path}/{name}", len(item), limits)
            if name in _NAMING and isinstance(item, dict):
                for inner, schema in item.items():
                    _check_counts(schema, f"{path}/{name}/{inner}", limits)
            elif name not in _VALUES:
                _check_counts(item, f"{path}/{name}", limits)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_counts(item, f"{path}/{index}", limits)


def _check_count(path: str, count: int, limits: ConstraintLimits) -> None:
    if count > limits.max_alternatives:
        raise _too_much(path, count, "entries", limits.max_alternatives, "use fewer or raise max_alternatives")

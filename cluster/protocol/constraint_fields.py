"""`response_format` and `structured_outputs` of a request body, and the `ConstraintSpec` that they ask for.

They are fields of the bodies in `cluster/protocol/requests.py`. Bodies of other APIs have `JsonObjectFields` too. The
engine decides whether a constraint can be enforced.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from manta.cluster.errors import TOO_DEEP, RequestRefused, refuse
from manta.cluster.protocol.body_size import json_within
from manta.structured.constraint import AdditionalProperties, ConstraintSpec, Kind, PropertyOrder


class JsonObjectFields(msgspec.Struct, kw_only=True):
    """Manta's own fields of a body about the JSON objects in its answer. They are for all schemas of the request."""

    additional_properties: AdditionalProperties | None = None
    """Whether objects whose schema lists properties may have others, if it does not say so; None takes the server's
    option.
    """
    property_order: PropertyOrder | None = None
    """Order of an object's properties; None takes the server's option."""


class ResponseText(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """No constraint."""


class ResponseJsonObject(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Any JSON object, or what a schema describes."""

    must_know_fields: ClassVar[bool] = True

    schema: dict[str, Any] | None = None
    """llama.cpp's name of a schema."""
    value: dict[str, Any] | None = None
    """TGI's name of a schema, which huggingface_hub sends in place of `json_schema`."""


class ResponseJson(msgspec.Struct, tag_field="type", tag="json", forbid_unknown_fields=True):
    """TGI's form of a JSON schema."""

    must_know_fields: ClassVar[bool] = True

    value: dict[str, Any]


class ResponseRegex(msgspec.Struct, tag_field="type", tag="regex", forbid_unknown_fields=True):
    """TGI's form of a regular expression."""

    must_know_fields: ClassVar[bool] = True

    value: str


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON schema. Unless `strict` is true, it may be enforced in part; the answer's header says what is left out."""

    must_know_fields: ClassVar[bool] = True

    name: str | None = None
    """Without effect. OpenAI requires it; clients of llama.cpp leave it out."""
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseJsonSchema(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    must_know_fields: ClassVar[bool] = True

    json_schema: JsonSchemaFormat | UnsetType = UNSET
    value: JsonSchemaFormat | UnsetType = UNSET
    """TGI's name of `json_schema`."""


ResponseFormat = ResponseText | ResponseJsonObject | ResponseJson | ResponseRegex | ResponseJsonSchema


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's field: exactly one constraint, and how it is enforced."""

    must_know_fields: ClassVar[bool] = True

    json: dict[str, Any] | bool | str | None = None
    """A JSON schema, or its text."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """A Lark grammar. A text that contains `::=` is EBNF in GBNF's dialect."""
    structural_tag: dict[str, Any] | str | None = None
    json_object: bool | None = None

    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    """vLLM's field: true asks for `additional_properties: closed`."""
    loose: bool = False
    """Whether a constraint that is enforced in part is accepted; the header `x-manta-not-enforced` lists the rest."""


_KINDS = ("json", "regex", "choice", "grammar", "structural_tag", "json_object")


def chosen_kind(given: StructuredOutputs) -> str:
    """Returns the name of the one constraint that is set. Raises `RequestRefused` if none or several are."""
    found = [name for name in _KINDS if getattr(given, name) not in (None, False)]
    if given.json is False:
        found.insert(0, "json")
    if len(found) != 1:
        value = " and ".join(found) or None
        refuse("wrong_value", "structured_outputs", value, f"exactly one of {', '.join(_KINDS)}")
    return found[0]


OLDER_CONSTRAINTS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}
"""Fields of vLLM's older clients and of llama.cpp's, and the fields of `StructuredOutputs` that mean the same."""


def requested_constraint(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
    older: Mapping[str, Any] = MappingProxyType({}),
    backend: str = "auto",
) -> tuple[ConstraintSpec | None, str]:
    """Returns the constraint and its field; None and an empty field without one. `older` has the fields of
    `OLDER_CONSTRAINTS` that are given, and `backend` is theirs. Raises `RequestRefused` for several fields at once, and
    for a constraint without meaning.
    """
    given = [*older, *(["structured_outputs"] if structured_outputs is not None else [])]
    if response_format is not None and not isinstance(response_format, ResponseText):
        given.append("response_format")
    if len(given) > 1:
        refuse("excludes", given[0], bound=given[1], remedy="leave one out")
    if structured_outputs is not None:
        return _from_structured_outputs(structured_outputs)
    for field, value in older.items():
        asked: dict[str, Any] = {OLDER_CONSTRAINTS[field]: value}
        try:
            spec, _ = _from_structured_outputs(StructuredOutputs(**asked, backend=backend))
        except RequestRefused as error:
            raise RequestRefused(msgspec.structs.replace(error.refusal, field=field)) from error
        return spec, field
    return _from_response_format(response_format)


def _from_response_format(given: ResponseFormat | None) -> tuple[ConstraintSpec | None, str]:
    match given:
        case ResponseJsonObject(schema=None, value=None):
            return ConstraintSpec(kind="json_object"), "response_format"
        case ResponseJsonObject(schema=None):
            return ConstraintSpec(kind="json_schema", text=json_text(given.value)), "response_format.value"
        case ResponseJsonObject():
            if given.value is not None:
                refuse("excludes", "response_format.schema", bound="response_format.value", remedy="leave one out")
            return ConstraintSpec(kind="json_schema", text=json_text(given.schema)), "response_format.schema"
        case ResponseJson():
            return ConstraintSpec(kind="json_schema", text=json_text(given.value)), "response_format.value"
        case ResponseRegex():
            return ConstraintSpec(kind="regex", text=given.value), "response_format.value"
        case ResponseJsonSchema():
            schema, field = given.json_schema, "response_format.json_schema"
            if schema is UNSET:
                schema, field = given.value, "response_format.value"
            elif given.value is not UNSET:
                refuse("excludes", field, bound="response_format.value", remedy="leave one out")
            if schema is UNSET:
                refuse("required", "response_format.json_schema")
            if schema.schema is None:
                return ConstraintSpec(kind="json_object"), field
            spec = ConstraintSpec(kind="json_schema", text=json_text(schema.schema), loose=not schema.strict)
            return spec, f"{field}.schema"
    return None, ""


def _from_structured_outputs(given: StructuredOutputs) -> tuple[ConstraintSpec, str]:
    name = chosen_kind(given)
    field, value = f"structured_outputs.{name}", getattr(given, name)
    kind: Kind
    text = ""
    if name == "json":
        kind, text = "json_schema", _as_json_text(value, field)
    elif name == "structural_tag":
        kind, text = "structural_tag", _as_json_text(value, field)
    elif name == "choice":
        if not value:
            refuse("empty", field, remedy="give at least one string")
        kind, text = "choice", json_text(value)
    elif name == "regex":
        kind, text = "regex", value
    elif name == "grammar":
        kind, text = "ebnf" if "::=" in value else "lark", value
    else:
        kind = "json_object"
    spec = ConstraintSpec(
        kind=kind,
        text=text,
        backend=given.backend,
        loose=given.loose,
        any_whitespace=not given.disable_any_whitespace,
        additional_properties="closed" if given.disable_additional_properties else None,
    )
    return spec, field


def _as_json_text(value: Any, field: str) -> str:
    """Returns `value` as JSON. A string is JSON already; it is checked."""
    if not isinstance(value, str):
        return json_text(value)
    json_within(value, field)
    return value


def json_text(value: Any) -> str:
    """Returns `value` as JSON, with keys in the given order."""
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError as error:
        raise RequestRefused(TOO_DEEP) from error

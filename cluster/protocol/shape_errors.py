"""Turns errors that msgspec finds in a body into refusals with its field and the values that the field may have."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from manta.cluster.errors import RequestRefused
from manta.cluster.struct_fields import field_types
from manta.structured.refusals import Refusal

_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(.*)`", re.DOTALL)


def shape_error(error: msgspec.ValidationError, kind: Any = None) -> RequestRefused:
    """Returns msgspec's `Expected ..., got ... - at `$.path`` as an error that names the field.

    `kind` is the struct of the body. Its `fields_elsewhere`, if any, holds advice about fields of other bodies, under
    their paths without indices.
    """
    text, _, place = str(error).partition(" - at ")
    path = place.removeprefix("`key` in ").strip("`").removeprefix("$").removeprefix(".").replace("[...]", "")
    if isinstance(error.__cause__, RequestRefused):  # a struct within the body refuses its own values
        return RequestRefused(msgspec.structs.replace(error.__cause__.refusal, field=path))
    if match := _UNKNOWN_FIELD.fullmatch(text):
        return RequestRefused(_unknown_field(_below(path, match[1]), path, kind))
    if match := _MISSING_FIELD.fullmatch(text):
        return RequestRefused(Refusal("required", _below(path, match[1])))
    is_choice = text.startswith(("Invalid enum value", "Invalid value"))
    choices = _choices_at(kind, path) if is_choice and path else ()
    remedy = f"use one of {', '.join(choices)}" if choices else ""
    cause = f"{text[:1].lower()}{text[1:]}"
    return RequestRefused(Refusal("wrong_type", path, None, choices or None, remedy, cause))


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _unknown_field(field: str, path: str, kind: Any) -> Refusal:
    elsewhere = getattr(kind, "fields_elsewhere", {})
    if advice := elsewhere.get(re.sub(r"\[\d+\]", "", field)):
        return Refusal("unknown_field", field, remedy=advice)
    near = [] if path else _near(field, getattr(kind, "__struct_fields__", ()))
    return Refusal("unknown_field", field, remedy=f"did you mean {near[0]}?" if near else "remove it")


def _near(name: str, known: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(name, known, n=1, cutoff=0.8)


def _choices_at(kind: Any, path: str) -> tuple[str, ...]:
    """Returns the values that the field at `path`, such as `tools[0].type`, may have; none if the type does not list
    them.
    """
    kinds = [kind]
    for name in re.sub(r"\[[^\]]*\]", "", path).split("."):
        kinds = [found for each in kinds for found in _field(each, name)]
    return tuple(dict.fromkeys(value for each in kinds for value in _values(each)))


def _field(kind: Any, name: str) -> Iterator[Any]:
    """Yields the types that a field of a struct may have. For the field that names a tagged struct, yields the tag."""
    for struct in _structs(kind):
        config = struct.__struct_config__
        if config.tag_field == name:
            yield typing.Literal[config.tag]
        elif name in struct.__struct_fields__:
            yield field_types(struct)[name]


def _structs(kind: Any) -> Iterator[Any]:
    """Yields the structs in a type, including those in unions and lists."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for each in typing.get_args(kind):
        yield from _structs(each)


def _values(kind: Any) -> Iterator[str]:
    if typing.get_origin(kind) is typing.Literal:
        yield from map(str, typing.get_args(kind))
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        for each in typing.get_args(kind):
            yield from _values(each)

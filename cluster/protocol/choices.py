"""Finds the values that a field may have in the type of a body, for the error about another value."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec


def choices_at(kind: Any, path: str) -> list[str]:
    """Returns the values that the field at `path`, such as `tools[0].type`, may have; none if the type does not list
    them.
    """
    kinds = [kind]
    for name in re.sub(r"\[[^\]]*\]", "", path).split("."):
        kinds = [found for each in kinds for found in _field(each, name)]
    return list(dict.fromkeys(value for each in kinds for value in _values(each)))


def _field(kind: Any, name: str) -> Iterator[Any]:
    """Yields the types that a field of a struct may have. For the field that names a tagged struct, yields the tag."""
    for struct in _structs(kind):
        config = struct.__struct_config__
        if config.tag_field == name:
            yield typing.Literal[config.tag]
        elif name in struct.__struct_fields__:
            yield typing.get_type_hints(struct)[name]


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

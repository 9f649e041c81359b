"""The fields of other people's clients, as the types of their Python packages declare them, with values for each."""

from __future__ import annotations

import collections.abc
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

import anthropic.types.message_create_params as anthropic_params
import ollama
import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import openai.types.responses.response_create_params as response_params
import pydantic
import typing_extensions

HELLO = [{"role": "user", "content": "Hello"}]
ROUTES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (chat_params.CompletionCreateParamsNonStreaming, {"messages": HELLO}),
    "/v1/completions": (completion_params.CompletionCreateParamsNonStreaming, {"prompt": "Hello"}),
    "/v1/responses": (response_params.ResponseCreateParamsNonStreaming, {"input": "Hello"}),
    "/v1/messages": (anthropic_params.MessageCreateParamsNonStreaming, {"messages": HELLO, "max_tokens": 2}),
    "/api/chat": (ollama._types.ChatRequest, {"messages": HELLO, "stream": False}),
    "/api/generate": (ollama._types.GenerateRequest, {"prompt": "Hello", "stream": False}),
}
"""The type of each route's body in its client's package, and the fields that it must have besides the model."""
_LISTS = (list, collections.abc.Iterable, collections.abc.Sequence, typing_extensions.Iterable)
_OPEN = (dict, collections.abc.Mapping)
MAX_DEPTH = 5
"""Levels of objects and lists within a value."""


def fields_of(kind: Any) -> dict[str, Any]:
    """The types of a body's fields."""
    if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    return typing_extensions.get_type_hints(kind, include_extras=False)


def members_of(kind: Any) -> list[Any]:
    """The types that a type stands for: the members of a union, without null."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing_extensions.Required, typing_extensions.NotRequired, typing.Annotated):
        return members_of(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return [found for each in arguments for found in members_of(each)]
    return [] if kind is type(None) else [kind]


def values_of(kind: Any, depth: int = 0) -> list[Any]:
    """Values of a type that ask for something: one for each form that it has, with the fields that an object must
    have.
    """
    return [value for member in members_of(kind) for value in _values(member, depth)]


def _values(kind: Any, depth: int) -> list[Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return list(arguments)
    if kind is bool:
        return [True]
    if kind in (int, float, str, object, Any):
        return [{int: 1, float: 0.5}.get(kind, "x")]
    if depth > MAX_DEPTH:
        return []
    if origin in _LISTS:
        return [[item] for item in values_of(arguments[0], depth + 1)]
    if origin in (dict, collections.abc.Mapping):
        return [{"1": value} for value in values_of(arguments[1], depth + 1)]
    if kind in _OPEN:
        return [{"1": "x"}]
    if typing_extensions.is_typeddict(kind) or (isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)):
        return _objects(kind, depth)
    return []


def _objects(kind: Any, depth: int) -> list[Any]:
    """Objects with their required fields, each of which takes all of its forms in turn. Near the top of a body an
    optional field is added too.
    """
    forms = {name: values_of(each, depth + 1) for name, each in required_fields(kind).items()}
    if not all(forms.values()):
        return []
    least = {name: values[0] for name, values in forms.items()}
    found = [least, *({**least, name: value} for name, values in forms.items() for value in values[1:])]
    others = {name: each for name, each in fields_of(kind).items() if name not in forms} if depth <= 1 else {}
    for name, each in others.items():
        found += [{**least, name: value} for value in values_of(each, depth + 2)[:1]]
    return found if least or len(found) == 1 else found[1:]


def required_fields(kind: Any) -> dict[str, Any]:
    if not typing_extensions.is_typeddict(kind):
        return {name: each.annotation for name, each in kind.model_fields.items() if each.is_required()}
    hints = typing_extensions.get_type_hints(kind, include_extras=True)
    required = typing_extensions.Required
    return {name: each for name, each in hints.items() if typing.get_origin(each) is required}


def optional_fields(path: str) -> Iterator[tuple[str, Any]]:
    """Yields each field that a body may leave out, and its type."""
    kind, given = ROUTES[path]
    for name, each in sorted(fields_of(kind).items()):
        if name not in given and name not in ("model", "stream"):
            yield name, each


def all_fields(path: str) -> list[str]:
    """The fields of a body but the model and whether it streams, which is asked otherwise."""
    return sorted(fields_of(ROUTES[path][0]).keys() - {"model", "stream"})


def asks(path: str, name: str) -> list[Any]:
    """Values for the field which ask for something."""
    return values_of(fields_of(ROUTES[path][0])[name])


def no_ops(path: str, name: str) -> list[Any]:
    """Values for the field which ask for nothing: null, and what is empty or false if its type has that."""
    members = members_of(fields_of(ROUTES[path][0])[name])
    empty = [[] for each in members if typing.get_origin(each) in _LISTS]
    empty += [{} for each in members if typing.get_origin(each) in (dict, collections.abc.Mapping)]
    return [None, *([False] if bool in members else []), *empty[:1]]

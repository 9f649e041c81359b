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
_ABSENT = object()


def fields_of(kind: Any) -> dict[str, Any]:
    """The types of a body's fields."""
    if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    return typing_extensions.get_type_hints(kind, include_extras=False)


def value_of(kind: Any, depth: int = 0) -> Any:
    """A value of a type that asks for something, where the type has one; `_ABSENT` if none is found."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing_extensions.Required, typing_extensions.NotRequired, typing.Annotated):
        return value_of(arguments[0], depth)
    if origin in (typing.Union, types.UnionType):
        found = (value_of(each, depth) for each in arguments if each is not type(None))
        return next((value for value in found if value is not _ABSENT), _ABSENT)
    if origin is Literal:
        return arguments[-1]
    if kind is bool:
        return True
    if kind in (int, float, str, object, Any):
        return {int: 1, float: 0.5, str: "x"}.get(kind, "x")
    if depth > 4:
        return _ABSENT
    if origin in (list, collections.abc.Iterable, collections.abc.Sequence, typing_extensions.Iterable):
        item = value_of(arguments[0], depth + 1)
        return _ABSENT if item is _ABSENT else [item]
    if origin in (dict, collections.abc.Mapping):
        return {"x": value_of(arguments[1], depth + 1)}
    if typing_extensions.is_typeddict(kind):
        required = {name: each for name, each in fields_of(kind).items() if name in kind.__required_keys__}
        return {name: value_of(each, depth + 1) for name, each in required.items()}
    if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
        fields = kind.model_fields.items()
        return {name: value_of(each.annotation, depth + 1) for name, each in fields if each.is_required()}
    return _ABSENT


def optional_fields(path: str) -> Iterator[tuple[str, Any]]:
    """Yields each field that a body may leave out, and its type."""
    kind, given = ROUTES[path]
    for name, each in sorted(fields_of(kind).items()):
        if name not in given and name not in ("model", "stream"):
            yield name, each


def asks(path: str, name: str) -> Any:
    """A value for the field which asks for something; None if its type has none."""
    value = value_of(fields_of(ROUTES[path][0])[name])
    return None if value is _ABSENT else value

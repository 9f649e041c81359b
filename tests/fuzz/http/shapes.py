"""Bodies made from the types of the routes: with every field, every alternative, and one value of another JSON type.

`bodies` yields good ones for a struct, and `cases` those in which one value is replaced too. What a type leaves open,
such as the items of a conversation, is in `FREE`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

from msgspec import inspect

from manta.cluster.http.routes import MESSAGE, ROUTES
from manta.cluster.http.websockets import ResponseCancelEvent

JSON_TYPES: dict[str, Any] = {
    "null": None,
    "a boolean": True,
    "an integer": 5,
    "a number": 1.5,
    "a huge integer": 10**4000,
    "a string": "x",
    "a list": [],
    "a list of one": [5],
    "an object": {},
}
"""A value of each JSON type, which takes the place of another one."""

_CALL = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
_CUSTOM_CALL = {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c", "name": "g", "input": "a"}
_OUTPUT = {"call_id": "c", "output": "b"}
_GRAMMAR = {"syntax": "lark", "definition": 'start: /a+/ "b"'}
_TEXT = {"type": "text", "text": "a"}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_FUNCTION = {"name": "f", "description": "a", "parameters": _SCHEMA, "strict": True}
FREE: dict[str, list[Any]] = {
    "input": [
        [{"role": "user", "content": "a"}],
        [{"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "a"}]}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]}],
        [{"role": "user", "content": "a"}, _CALL, {"type": "function_call_output", "call_id": "c", "output": "b"}],
        [
            {"role": "user", "content": "a"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
        ],
        [{"type": "compaction", "encrypted_content": "manta1.a.b"}, {"role": "user", "content": "a"}],
        [{"role": "user", "content": "a"}, _CUSTOM_CALL, {**_OUTPUT, "type": "custom_tool_call_output"}],
        [{"role": "user", "content": "a"}, {"type": "item_reference", "id": f"msg_{'0' * 48}"}],
    ],
    "tools": [
        [{"type": "function", **_FUNCTION}],
        [{"type": "function", "function": _FUNCTION}],
        [{"type": "custom", "name": "g", "description": "a", "format": {"type": "grammar", **_GRAMMAR}}],
    ],
    "tool_choice": [
        {"type": "custom", "name": "g"},
        {"type": "function", "name": "f"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    ],
    "format": [
        {"type": "json_object"},
        {"type": "json_schema", "name": "f", "schema": _SCHEMA, "strict": True},
        _SCHEMA,
    ],
    "options": [{"temperature": 0.5, "stop": ["b"], "num_predict": 3, "num_ctx": 5, "mirostat": 0}],
    "content": [[_TEXT]],
    "parameters": [_SCHEMA],
    "input_schema": [_SCHEMA],
    "schema": [_SCHEMA],
    "json": [_SCHEMA],
    "arguments": [{"a": 1}],
    "chat_template_kwargs": [{"enable_thinking": True}],
    "metadata": [{"a": "b"}],
    "stream_options": [{"include_usage": True}],
    "prompt_cache_options": [{"mode": "implicit"}],
}
"""Values of fields whose types are open, by the field's name."""
_NAMED = {
    "definition": "start: /a+/",
    "role": "user",
    "arguments": "{}",
    "endpoint": "/v1/completions",
    "completion_window": "24h",
    "regex": "a",
}
"""Texts that a field of this name needs for its body to be read on."""
_NEEDED = frozenset({"content"})
"""Fields with defaults without which a body is refused before anything else is read."""


class Case(NamedTuple):
    """A body for a path; a path that begins with `ws:` takes it as a message on a WebSocket connection."""

    path: str
    place: str
    fields: Any

    def __str__(self) -> str:
        return f"{self.path} {self.place}"


_LIMITS: dict[str, tuple[str, Any]] = {
    "/v1/chat/completions": ("max_completion_tokens", 2),
    "/v1/responses": ("max_output_tokens", 2),
    "/api/chat": ("options", {"num_predict": 2}),
    "/api/generate": ("options", {"num_predict": 2}),
}
"""By path, a field that bounds the answer, and its value."""


def short(case: Case) -> Any:
    """Returns the body of a case, with a bound for its answer unless it has one."""
    name, value = _LIMITS.get(case.path.removeprefix("ws:"), ("", None))
    return {name: value, **case.fields} if name and isinstance(case.fields, dict) else case.fields


def cases(model: str) -> Iterator[Case]:
    """Yields, for every type of body, good bodies and all that differ from one in one value."""
    kinds: list[tuple[str, Any]] = [(route.path, route.body) for route in ROUTES if route.body is not None]
    kinds += [(f"ws:{MESSAGE.path}", MESSAGE.body), (f"ws:{MESSAGE.path}", ResponseCancelEvent)]
    for path, kind in kinds:
        seen: set[str] = set()
        for good in bodies(kind, model):
            for place, fields in _replaced(good):
                if place not in seen:
                    seen.add(place)
                    yield Case(path, place, fields)
        for name, value in JSON_TYPES.items():
            yield Case(path, f"the body is {name}", value)


def bodies(kind: Any, model: str) -> list[Any]:
    """Returns bodies of a struct with its required fields and at most one other, in every form that its type allows, or
    lists of one such struct.
    """
    found = _examples(inspect.type_info(kind), "")
    return [body | {"model": model} if "model" in body else body for body in found]


def _examples(kind: Any, name: str) -> list[Any]:
    """Returns values of a type for a field of this name, one for each form."""
    match kind:
        case inspect.UnionType():
            return [each for member in kind.types for each in _examples(member, name)]
        case inspect.StructType():
            return _structs(kind)
        case inspect.ListType() | inspect.VarTupleType():
            if isinstance(kind.item_type, inspect.DictType | inspect.AnyType) and name in FREE:
                return FREE[name]
            return [[each] for each in _examples(kind.item_type, name)]
        case inspect.DictType() | inspect.AnyType():
            return FREE.get(name, [{"1": 1}])
        case inspect.LiteralType():
            return [kind.values[0]]
        case inspect.StrType():
            return [_NAMED.get(name, "a")]
        case inspect.IntType():
            return [1]
        case inspect.FloatType():
            return [0.5]
        case inspect.BoolType():
            return [True, False]
    return []  # null, and what is left out


def _structs(kind: inspect.StructType) -> list[Any]:
    tag = {} if kind.tag_field is None else {kind.tag_field: kind.tag}
    forms = {field.encode_name: _examples(field.type, field.encode_name) for field in kind.fields}
    needed = [field.encode_name for field in kind.fields if field.required or field.encode_name in _NEEDED]
    least = tag | {name: forms[name][0] for name in needed}
    others = [least | {name: value} for name, values in forms.items() for value in values if least.get(name) != value]
    return [least, *others]


def _replaced(good: Any) -> Iterator[tuple[str, Any]]:
    """Yields a body, and each that lacks one of its values or has one of another type there. A place has the same name
    in all bodies in which it has the same meaning.
    """
    yield f"as it is with {sorted(good)}", good
    for keys in _paths(good):
        place = _name(good, keys)
        for name, value in JSON_TYPES.items():
            yield f"{place} is {name}", _with(good, keys, value)
        yield f"{place} is missing", _with(good, keys, None, is_missing=True)


def _name(body: Any, keys: tuple[Any, ...]) -> str:
    """Returns the name of a place: its keys, with the type that an object says it has, and without indices."""
    names = []
    for key in keys:
        kind = body.get("type") if isinstance(body, dict) and key != "type" else None
        names.append(("*" if isinstance(key, int) else str(key)) + (f" of {kind}" if isinstance(kind, str) else ""))
        body = body[key]
    return ".".join(names)


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (key,)
        yield from ((key, *rest) for rest in _paths(item))


def _with(body: Any, keys: tuple[Any, ...], value: Any, is_missing: bool = False) -> Any:
    body = holder = copy.deepcopy(body)
    for key in keys[:-1]:
        holder = holder[key]
    if is_missing:
        del holder[keys[-1]]
    else:
        holder[keys[-1]] = value
    return body

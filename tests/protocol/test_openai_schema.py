"""Every field that the types of `openai` and `anthropic` know is served, or refused with a sentence about that field.

A newer package may bring a field or a value that nobody has decided about. Then a test here fails.
"""

from __future__ import annotations

import collections.abc
import json
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import typing_extensions
from anthropic.types import message_count_tokens_params as counts
from anthropic.types import message_create_params as messages
from anthropic.types.beta import message_count_tokens_params as beta_counts
from anthropic.types.beta import message_create_params as beta_messages
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats
from openai.types.responses import response_create_params as responses

from manta.cluster.errors import RequestRefused
from manta.cluster.http.access.request_admission import decode
from manta.cluster.protocol.anthropic import CountTokensRequest, MessagesRequest
from manta.cluster.protocol.requests import ChatCompletionRequest, CompletionRequest
from manta.cluster.protocol.responses_api import ResponsesRequest

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
BODIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "chat": (ChatCompletionRequest, chats.CompletionCreateParamsStreaming, CHAT),
    "completion": (CompletionRequest, completions.CompletionCreateParamsStreaming, {"model": "m", "prompt": "x"}),
    "response": (ResponsesRequest, responses.ResponseCreateParamsStreaming, {"model": "m", "input": "x"}),
    "message": (MessagesRequest, messages.MessageCreateParamsStreaming, CHAT | {"max_tokens": 1}),
    "beta-message": (MessagesRequest, beta_messages.MessageCreateParamsStreaming, CHAT | {"max_tokens": 1}),
    "count": (CountTokensRequest, counts.MessageCountTokensParams, CHAT),
    "beta-count": (CountTokensRequest, beta_counts.MessageCountTokensParams, CHAT),
}
"""Each body with the type that its client's package has of it, and its least example."""
HEADERS = {"betas"}
"""Keys of these types that the clients send as headers."""
UNDECIDED = re.compile("is unknown; remove it|expected `")
"""What a refusal says about a field or a type that no code expects."""


def fields(kind: Any) -> dict[str, Any]:
    """Returns the types of a TypedDict's keys; that of a required one is `Required[...]`."""
    return typing.get_type_hints(kind, include_extras=True)


def values(kind: Any, depth: int = 0) -> Iterator[Any]:
    """Yields values of a type, at least one for each alternative, for each value of an enumeration and for each key of
    a dictionary.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if typing_extensions.is_typeddict(kind):
        yield from dictionaries(kind, depth)
    elif origin is typing.Literal:
        yield from arguments
    elif origin is typing.Union:
        for each in arguments:
            yield from values(each, depth)
    elif origin in (typing.Required, typing.NotRequired):
        yield from values(arguments[0], depth)
    elif origin in (list, collections.abc.Iterable, collections.abc.Sequence):
        yield from ([each] for each in values(arguments[0], depth))
    elif origin is dict:
        yield from ({"1": each} for each in values(arguments[1], depth) if arguments[1] is not object)
        yield {}
    else:
        yield {str: "x", int: 1, float: 1.0, bool: True, type(None): None}.get(kind, {})


def dictionaries(kind: Any, depth: int) -> Iterator[dict[str, Any]]:
    """Yields the least value of a TypedDict, then one with each value of each of its keys."""
    hints = fields(kind)
    required = (name for name in hints if typing.get_origin(hints[name]) is typing.Required)
    least = {name: next(values(hints[name], depth + 1)) for name in required}
    yield least
    for name, hint in hints.items() if depth < 6 else ():
        yield from (least | {name: value} for value in values(hint, depth + 1))


def refusal(body: Any, given: dict[str, Any]) -> RequestRefused | None:
    try:
        decode(body, json.dumps(given).encode())
    except RequestRefused as error:
        return error
    return None


CASES = [(body, name) for body, (_, kind, _) in BODIES.items() for name in fields(kind) if name not in HEADERS]


@pytest.mark.parametrize(("body", "name"), CASES, ids=[f"{body}-{name}" for body, name in CASES])
def test_each_field_is_served_or_refused(body: str, name: str) -> None:
    decoded, kind, least = BODIES[body]
    for value in values(fields(kind)[name]):
        given = least | {name: value}
        if name == "stream_options":
            given["stream"] = True
        error = refusal(decoded, given)
        if error is not None:
            assert not UNDECIDED.search(str(error)), (value, str(error))
            assert error.refusal.field.startswith(name), (value, str(error))

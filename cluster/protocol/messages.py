"""The messages of a chat body, as clients send them and as chat templates read them.

They are part of the bodies in `cluster/protocol/requests.py` and of `/tokenize`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from manta.cluster.errors import refuse
from manta.cluster.protocol.body_size import json_within
from manta.cluster.protocol.foreign_fields import ignore
from manta.cluster.protocol.tools import INPUT, KINDS
from manta.cluster.text.call_arguments import arguments_of


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str | None = None
    """Arguments as JSON text, which may end early if the answer was cut. Blank or null means none, as some servers
    answer for a function without parameters.
    """


class CalledCustom(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    input: str | None = None


class MessageToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call that an assistant message made, as a response brought it."""

    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    """Call of a custom tool. Which of the two counts is what `type` says."""
    id: str | None = None
    type: str = "function"
    index: int | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message; its parts are checked by `template_message`."""

    role: str
    content: str | list[dict[str, Any]] | UnsetType | None = UNSET
    """Null is empty. Only a message of the assistant may leave it out."""
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of `reasoning_content`, which some servers and clients use."""
    refusal: str | None = None
    """Text of an assistant that declined. It stands in place of a content that is empty."""
    annotations: list[Any] | None = None
    audio: Any = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


def check_continuation(messages: list[ChatMessage], continues: bool, adds_generation_prompt: bool) -> None:
    """Checks `continue_final_message`. Raises `RequestRefused` if there is nothing to continue."""
    if not continues:
        return
    field = "continue_final_message"
    if adds_generation_prompt:
        refuse("excludes", field, bound="add_generation_prompt", remedy="send add_generation_prompt: false")
    last = messages[-1]
    if last.role != "assistant" or last.tool_calls or not last.content:
        remedy = f"add one, or leave {field} out"
        refuse("requires", field, bound="a text of the assistant as the last message", remedy=remedy)


_ROLES = ("system", "developer", "user", "assistant", "tool")


def template_message(message: ChatMessage, path: str) -> dict[str, Any]:
    """Returns a message for the chat template, with its content as plain text and the arguments of its calls parsed.
    Raises `RequestRefused` for content that the model would not see.
    """
    _check_role(message, path)
    if message.audio is not None:
        refuse("unsupported", f"{path}.audio", remedy="leave it out")
    if message.content is UNSET and message.role != "assistant":
        refuse("missing", f"{path}.content", remedy="give a string or a list of text parts")
    parts = ASSISTANT_PARTS if message.role == "assistant" else TEXT_PARTS
    content = content_text(message.content or message.refusal or "", f"{path}.content", parts)
    result: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        result["name"] = message.name
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning is not None:
        result["reasoning_content"] = reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            _template_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    return result


def _check_role(message: ChatMessage, path: str) -> None:
    role = message.role
    if role not in _ROLES:
        refuse("unknown_value", f"{path}.role", role, _ROLES)
    if message.function_call is not None:
        refuse("unsupported", f"{path}.function_call", remedy="use tool_calls")
    if message.tool_calls and role != "assistant":
        refuse("requires", f"{path}.tool_calls", bound="role 'assistant'", cause=f"the role is {role!r}")
    if role == "tool" and message.tool_call_id is None:
        refuse("missing", f"{path}.tool_call_id", remedy="give the id of the call that this answers")
    if role != "tool" and message.tool_call_id is not None:
        refuse("requires", f"{path}.tool_call_id", bound="role 'tool'", cause=f"the role is {role!r}")


def _template_call(call: MessageToolCall, path: str) -> dict[str, Any]:
    """Returns a call for the chat template, which writes the arguments itself and so gets them as an object. Templates
    know functions alone.
    """
    function: dict[str, Any]
    if call.type == "custom" and call.custom is not None:
        function = {"name": call.custom.name, "arguments": {INPUT: call.custom.input or ""}}
    elif call.type == "function" and call.function is not None:
        text = call.function.arguments or ""
        arguments = json_within(text, f"{path}.function.arguments", arguments_of)
        function = {"name": call.function.name, "arguments": arguments}
    elif call.type in KINDS:
        refuse("required", f"{path}.{call.type}")
    else:
        refuse("unsupported", f"{path}.type", call.type, KINDS, f"use one of {', '.join(KINDS)}")
    result = {"type": "function", "function": function}
    return result if call.id is None else {"id": call.id, **result}


TEXT_PARTS = ("text",)
ASSISTANT_PARTS = ("text", "refusal")
"""Types of the parts of a content. Each part has its text in a field of that name."""


def content_text(content: str | list[dict[str, Any]], path: str, parts: Sequence[str] = TEXT_PARTS) -> str:
    """Returns a content as one text; its parts become lines. Raises `RequestRefused` for a part of a type that is not
    one of `parts`.
    """
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(part, f"{path}[{index}]", parts) for index, part in enumerate(content))


def _part_text(part: dict[str, Any], path: str, parts: Sequence[str]) -> str:
    kind = str(part.get("type"))
    if kind not in parts:
        refuse("unsupported", f"{path}.type", kind, "text", "give text parts only")
    for name in part.keys() - {"type", kind}:
        ignore(f"{path}.{name}")
    if not isinstance(part.get(kind), str):
        refuse("wrong_value", f"{path}.{kind}", bound="a string")
    return part[kind]


MAX_TEMPLATE_KWARGS = 1024
"""Most values of `chat_template_kwargs`. Published templates read a dozen at most."""
_RESERVED_TEMPLATE_KWARGS = frozenset({"self", "messages", "tools", "documents", "add_generation_prompt"})


def check_template_kwargs(given: dict[str, Any] | None) -> None:
    """Refuses `chat_template_kwargs` that would replace the body's own fields, and more than any template reads: each
    call on their way to it copies them.
    """
    if given and len(given) > MAX_TEMPLATE_KWARGS:
        unit, remedy = "values", "leave out what the template does not read"
        refuse("over_limit", "chat_template_kwargs", len(given), MAX_TEMPLATE_KWARGS, remedy, unit=unit)
    reserved = _RESERVED_TEMPLATE_KWARGS & set(given or ())
    if reserved:
        name = min(reserved)
        refuse("not_allowed", f"chat_template_kwargs.{name}", remedy="use the body's own field")

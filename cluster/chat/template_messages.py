"""Messages in the form that a chat template takes: names of earlier reasoning, answers of tools, system messages.

Clients write all of them as OpenAI's API has it. A template that knows another name or place would leave text out, show
it in another form than the model was trained on, or refuse the request. So the messages are changed for it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from manta.cluster.chat.reasoning import detect_reasoning

Message = dict[str, Any]

_USUAL = "reasoning_content"
_OTHER_NAMES = ("thinking", "reasoning")
_OF_TOOL = re.compile(r"""role\b["'\])]*\s*==\s*["']tool["']""")
"""Part of a chat template that knows messages of tools."""
_BETWEEN = "\n\n"
"""Text between two messages that become one."""


def with_reasoning(messages: list[Message], template: str) -> list[Message]:
    """Returns messages with their reasoning under the name by which a template looks for it. Most templates read
    `reasoning_content`, others `thinking` or `reasoning`.
    """
    name = _name_in(template)
    if name == _USUAL or all(message.get(_USUAL) is None for message in messages):
        return messages
    form = detect_reasoning(template)
    return [_renamed(message, name, form is not None and form.is_channel) for message in messages]


def _name_in(template: str) -> str:
    if _USUAL in template:
        return _USUAL
    found = (name for name in _OTHER_NAMES if re.search(rf"""\.{name}\b|["']{name}["']""", template))
    return next(found, _USUAL)


def _renamed(message: Message, name: str, is_channel: bool) -> Message:
    """Returns a message whose reasoning has another name. The template of gpt-oss takes one text beside calls, and
    shows it as reasoning. So what the answer said beside its calls follows its reasoning there.
    """
    reasoning = message.get(_USUAL)
    if reasoning is None:
        return message
    renamed = {key: value for key, value in message.items() if key != _USUAL} | {name: reasoning}
    if is_channel and message.get("tool_calls") and reasoning and message["content"]:
        renamed |= {name: f"{reasoning}{_BETWEEN}{message['content']}", "content": ""}
    return renamed


def with_tool_responses(messages: list[Message], template: str) -> list[Message]:
    """Returns messages for a template like Gemma 4's first one, which reads answers of tools as `tool_responses` of the
    message with the calls. What the model says after them belongs to that message too.
    """
    if "tool_responses" not in template or _OF_TOOL.search(template):
        return messages
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else {}
        responses = last.get("tool_responses", [])
        if message["role"] == "tool" and last.get("tool_calls"):
            if last["content"] and not responses:  # the template shows calls before a content
                found[-1:] = [
                    {key: value for key, value in last.items() if key != "tool_calls"},
                    {"role": last["role"], "content": "", "tool_calls": last["tool_calls"]},
                ]
            found[-1] = found[-1] | {"tool_responses": [*responses, _response(message, last["tool_calls"])]}
        elif message["role"] == "assistant" and responses and not last["content"] and not message.get("tool_calls"):
            found[-1] = last | {"content": message["content"]}
        else:
            found.append(message)
    return found


def _response(message: Message, calls: list[Message]) -> Message:
    """Returns the answer of a tool with the name of the function; one that is no object of JSON is a text."""
    names = [call["function"]["name"] for call in calls if call.get("id") == message["tool_call_id"]]
    try:
        response = json.loads(message["content"])
    except (ValueError, RecursionError):
        response = None
    known = {"name": names[0]} if names else {}
    return known | {"response": response if isinstance(response, dict) else message["content"]}


def late_system_texts(messages: list[Message]) -> list[str]:
    """Returns the texts of system messages behind the first message, which some templates refuse or leave out."""
    return [message["content"].strip() for message in messages[1:] if message["role"] == "system"]


def with_one_system_message(messages: list[Message]) -> list[Message]:
    """Returns messages for a template that takes a system message at the beginning only. Those that begin the
    conversation become one. A later one becomes the user's and stays in its place, so that the prompt before it is the
    same as without it: it is part of the message before it if that is the user's, because some templates refuse two.
    """
    found: list[Message] = []
    for message in messages:
        is_first = all(each["role"] == "system" for each in found)
        role = "user" if message["role"] == "system" and not is_first else message["role"]
        if role in ("system", "user") and found and found[-1]["role"] == role:
            content = _BETWEEN.join(filter(None, (found[-1]["content"], message["content"])))
            found[-1] = found[-1] | {"content": content}
        else:
            found.append(message | {"role": role})
    return found

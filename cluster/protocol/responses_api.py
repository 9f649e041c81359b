"""The request and response bodies of OpenAI's Responses API, and the chat body that asks the same.

Source: https://platform.openai.com/docs/api-reference/responses. Items and tools that need more than text and functions
are refused by name. `cluster/http/endpoints/responses_api.py` answers; `stored_responses.py` beside it keeps answers.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from manta.cluster.errors import refuse
from manta.cluster.protocol.constraint_fields import JsonObjectFields
from manta.cluster.protocol.foreign_fields import ignore
from manta.cluster.protocol.requests import ChatCompletionRequest
from manta.cluster.protocol.response_items import chat_messages, check_references
from manta.cluster.protocol.tools import KINDS, is_foreign
from manta.cluster.protocol.translated import as_openai

MAX_EVENT_ID = 512
"""Longest id of a message on a WebSocket connection, in characters, as in OpenAI's Realtime API."""
_REFUSED = {
    "conversation": "send previous_response_id, or the whole conversation as input",
    "prompt": "send instructions and input",
    "moderation": "leave it out",
    "top_logprobs": "ask /v1/chat/completions for log-probabilities",
}
"""Fields that may be null, false or 0 only, and what to do instead."""
_RENAMED = {
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "thinking_token_budget": "reasoning.max_tokens",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
"""Fields of the chat body whose name here is another one."""


class TextOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: dict[str, Any] | None = None
    """`{"type": "text"}`, `{"type": "json_object"}` or `{"type": "json_schema", "name": ..., "schema": {...}}`."""
    verbosity: str | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    effort: str | None = None
    """Given to chat templates that know `reasoning_effort`. "none" turns thinking off."""
    max_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    """The most tokens of thinking, as in OpenRouter's API. Answers repeat it if it was given."""
    summary: str | None = None
    """Accepted; the reasoning itself is reported."""
    generate_summary: str | None = None


class ResponsesRequest(JsonObjectFields, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/responses`."""

    fields_elsewhere: ClassVar[dict[str, str]] = {
        "messages": "belong to /v1/chat/completions; here the conversation is the input",
        "max_tokens": "belongs to /v1/chat/completions; here it is max_output_tokens",
        "response_format": "belongs to /v1/chat/completions; here it is text.format",
    }

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    """A field of Open Responses, as is the next one. OpenAI's API has both for chats only."""
    frequency_penalty: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    """Accepted; it bounds tools that a server runs, and there are none."""
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    truncation: str | None = None
    include: list[str] | None = None
    """Accepted; what can be included is included, or does not occur."""
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None

    background: bool | None = None
    """Whether the answer is generated without a reader."""
    previous_response_id: str | None = None
    """Stored response whose conversation this one continues."""
    store: bool | None = None
    """Whether the response is kept. None keeps it if the server has a storage."""
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    top_logprobs: Any = None

    def check(self) -> None:
        """Raises `RequestRefused` naming the field of the first mistake."""
        for name, remedy in _REFUSED.items():
            if getattr(self, name):
                refuse("unsupported", name, remedy=remedy)
        if self.truncation not in (None, "disabled", "auto"):
            refuse("unknown_value", "truncation", self.truncation, ("disabled", "auto"))
        if self.context_management:
            ignore("context_management")
        if not (self.input or self.previous_response_id or (self.prewarms and self.instructions)):
            refuse("empty", "input", remedy="give text or a list of items")
        if not isinstance(self.input, str):
            check_references(self.input)
        chat_messages(self.instructions, self.input)
        _tools(self)

    @property
    def prewarms(self) -> bool:
        """Whether the input is only computed, and the answer has no output."""
        return False

    def as_openai(self) -> ChatCompletionRequest:
        """Returns the chat body that asks the same. Raises `RequestRefused` naming the field of this one."""
        given: dict[str, Any] = {
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "stream": self.stream,
            "user": self.user,
            "tools": _tools(self) or None,
            "tool_choice": _tool_choice(self),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "thinking_token_budget": self._thinking_budget(),
            "verbosity": self.text and self.text.verbosity,
            "response_format": self.text and _response_format(self.text.format),
            "additional_properties": self.additional_properties,
            "property_order": self.property_order,
        }
        fields = {name: value for name, value in given.items() if value is not None}
        fields |= {"model": self.model, "messages": chat_messages(self.instructions, self.input)}
        found: ChatCompletionRequest = as_openai(fields, ChatCompletionRequest, self)
        return found

    def _thinking_budget(self) -> int | None:
        budget = None if self.reasoning is None else self.reasoning.max_tokens
        return None if budget is msgspec.UNSET else budget

    def field_of(self, param: str) -> str:
        """Returns this body's name of a field of the chat body."""
        if param.startswith("messages"):  # their numbers are others there
            return "input"
        if param == "max_completion_tokens":
            return "max_output_tokens"
        if param.startswith("tools["):
            return param.replace(".function", "").replace(".custom", "").replace(".format.grammar", ".format")
        return _RENAMED.get(param, param.replace(".function", "").replace(".custom", ""))


class ResponseCreateEvent(ResponsesRequest, forbid_unknown_fields=True, kw_only=True):
    """`response.create`, a message on a WebSocket connection to `/v1/responses`. It is always streamed."""

    type: Literal["response.create"]
    event_id: str | None = None
    """Name that an error repeats, as in OpenAI's Realtime API."""
    generate: bool | None = None
    """False has the input computed, so that a later message finds it in the prefix cache, and answers without output.
    """
    stream_id: str | None = None

    def check(self) -> None:
        _check_event_id(self.event_id)
        if self.background:
            cause = "this is a WebSocket connection"
            refuse("unsupported", "background", remedy="send it to POST /v1/responses", cause=cause)
        if self.stream_id is not None:
            cause = "a connection answers one response after the other"
            remedy = "leave it out, and open a connection for each conversation"
            refuse("unsupported", "stream_id", remedy=remedy, cause=cause)
        self.stream = True
        super().check()

    @property
    def prewarms(self) -> bool:
        return self.generate is False


class ResponseCancelEvent(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`response.cancel`, a message that ends a response on its connection. OpenAI has it in the Realtime API only."""

    must_know_fields: ClassVar[bool] = True

    type: Literal["response.cancel"]
    event_id: str | None = None
    response_id: str | None = None
    """The running response; None means the response to the latest message before this one."""

    def check(self) -> None:
        _check_event_id(self.event_id)


def _check_event_id(event_id: str | None) -> None:
    if event_id is not None and len(event_id) > MAX_EVENT_ID:
        refuse("over_limit", "event_id", len(event_id), MAX_EVENT_ID, "shorten it", unit="characters")


class CompactRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/responses/compact`."""

    model: str
    input: str | list[dict[str, Any]] | None = None
    """Conversation to compact, after that of `previous_response_id` if there is one."""
    instructions: str | None = None
    """System message for the model that writes the summary; the compacted conversation does not hold it."""
    previous_response_id: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None

    def check(self) -> None:
        """Raises `RequestRefused` naming the field of the first mistake."""
        if not self.input and self.previous_response_id is None:
            refuse("empty", "input", remedy="give a conversation, or previous_response_id")
        if isinstance(self.input, list):
            check_references(self.input)
        chat_messages(self.instructions, self.input or [])


# ---- tools and formats -------------------------------------------------------------------------------------------


_TOOL_FIELDS = {
    "function": ("name", "description", "parameters", "strict"),
    "custom": ("name", "description", "format"),
}
"""Fields of the tools that a client runs itself, by type."""


def _tools(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Returns the tools that may be called, as the chat body has them."""
    found: list[dict[str, Any]] = []
    for index, tool in enumerate(body.tools or []):
        path = f"tools[{index}]"
        if is_foreign(tool, path):
            continue
        kind = tool.get("type")
        if not isinstance(kind, str):
            refuse("missing", f"{path}.type", remedy="send function or custom")
        for name in tool.keys() - {"type", *_TOOL_FIELDS[kind]}:
            ignore(f"{path}.{name}")
        fields = {name: tool[name] for name in _TOOL_FIELDS[kind] if name in tool}
        found.append({"type": kind, kind: _with_chat_format(fields) if kind == "custom" else fields})
    choice = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = _allowed_tools(choice)
        given = [(tool["type"], tool[tool["type"]].get("name")) for tool in found]
        for kind, missing in allowed:
            if (kind, missing) not in given:
                refuse("names_nothing", "tool_choice", str(missing), "the tools", "add it to tools")
        found = [tool for tool, name in zip(found, given, strict=True) if name in allowed]
    return found


def _with_chat_format(custom: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a custom tool as the chat body has them, which puts a grammar one level deeper."""
    form = custom.get("format")
    if not isinstance(form, dict) or form.get("type") != "grammar":
        return custom
    return {**custom, "format": {"type": "grammar", "grammar": {k: v for k, v in form.items() if k != "type"}}}


def _allowed_tools(choice: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Returns the types and names in a choice of several tools. Raises `RequestRefused` if it lists no tools."""
    tools = choice.get("tools")
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        refuse("wrong_value", "tool_choice.tools", bound='a list such as [{"type": "function", "name": ...}]')
    return [(each.get("type", "function"), each.get("name")) for each in tools]


def _tool_choice(body: ResponsesRequest) -> str | dict[str, Any] | None:
    choice = body.tool_choice
    if not body.tools:
        return None
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") == "allowed_tools":
        return str(choice.get("mode", "auto"))
    kind = choice.get("type")
    if kind not in KINDS:
        refuse("unsupported", "tool_choice", str(kind), KINDS, "name a function or a custom tool")
    return {"type": kind, kind: {"name": choice.get("name")}}


def _response_format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    if form is None or form.get("type") != "json_schema":
        return form
    schema = {name: value for name, value in form.items() if name in ("name", "description", "schema", "strict")}
    return {"type": "json_schema", "json_schema": schema}


def shown_tools(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Returns the tools as an answer repeats them: with all fields, and OpenAI's defaults."""
    defaults: dict[str, dict[str, Any]] = {
        "function": {"description": None, "parameters": None, "strict": True},
        "custom": {"format": {"type": "text"}},
    }
    own = (tool for tool in body.tools or [] if tool.get("type") in KINDS)
    given = ({name: value for name, value in tool.items() if value is not None} for tool in own)
    return [{**defaults[tool["type"]], **tool} for tool in given]


def shown_tool_choice(body: ResponsesRequest) -> str | dict[str, Any]:
    """Returns the choice of tools as an answer repeats it, with the fields that OpenAI's schema knows."""
    choice = body.tool_choice or "auto"
    if isinstance(choice, str):
        return choice
    if choice.get("type") != "allowed_tools":
        return {"type": choice.get("type"), "name": choice.get("name")} if body.tools else "auto"
    tools = [{"type": kind, "name": name} for kind, name in _allowed_tools(choice)]
    return {"type": "allowed_tools", "mode": choice.get("mode", "auto"), "tools": tools}


def shown_text(body: ResponsesRequest) -> TextOptions:
    """Returns the text options as an answer repeats them, with OpenAI's defaults."""
    text = body.text or TextOptions()
    return TextOptions(format=text.format or {"type": "text"}, verbosity=text.verbosity or "medium")


# ---- answers -----------------------------------------------------------------------------------------------------


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    id: str
    status: str = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    id: str
    status: str = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    id: str
    status: str = "in_progress"
    call_id: str
    name: str
    arguments: str = ""
    """JSON text."""


class CustomToolCallItem(msgspec.Struct, tag_field="type", tag="custom_tool_call", kw_only=True):
    id: str
    status: str = "in_progress"
    call_id: str
    name: str
    input: str = ""


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem


class ResponsesUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class CompactedResponse(msgspec.Struct, kw_only=True):
    """A compacted conversation."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[dict[str, Any]]
    """The user's messages, and last the compaction item."""
    usage: ResponsesUsage


class ResponseError(msgspec.Struct):
    """The reason why a background response failed."""

    code: str
    message: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """An answer, and in a stream what there is of it."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: str = "in_progress"
    """`in_progress`, `completed` or `incomplete`; in the background also `queued`, `failed` or `cancelled`."""
    incomplete_details: dict[str, str] | None = None
    error: ResponseError | None = None
    model: str
    output: list[OutputItem] = []
    usage: ResponsesUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Reasoning
    background: bool
    store: bool
    service_tier: str = "default"
    temperature: float
    text: TextOptions
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int = 0
    top_p: float
    truncation: str = "disabled"
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

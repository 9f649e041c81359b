"""The request and response bodies of Anthropic's Messages API, and the OpenAI body that asks the same.

Source: https://docs.anthropic.com/en/api/messages. Blocks and tools that need more than text are refused by name. What
only Anthropic's own service could act on (`cache_control`, `service_tier`, `speed`) is accepted and has no effect.
`cluster/http/endpoints/anthropic.py` answers.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from manta.cluster.errors import refuse
from manta.cluster.protocol.constraint_fields import JsonObjectFields
from manta.cluster.protocol.foreign_fields import ignore
from manta.cluster.protocol.requests import ChatCompletionRequest
from manta.cluster.protocol.tools import leave_out_foreign_tools
from manta.cluster.protocol.translated import as_openai

BILLING_NOTE = "x-anthropic-billing-header:"
"""Begins a block that some agents put into the system prompt. It is addressed to Anthropic's service and changes with
every request, so it would keep all that follows out of the prefix cache. It never reaches the model here.
"""
_RENAMED = {
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
    "continue_final_message": "messages",
}
"""Fields of OpenAI's body whose name here is another one."""
_UNSUPPORTED = (
    "billing_policy",
    "compaction",
    "fallback_credit_token",
    "fallbacks",
    "mcp_servers",
)
"""Fields that ask Anthropic's service to act. Only null, or an empty value, is accepted."""


class TextBlock(msgspec.Struct, tag_field="type", tag="text", omit_defaults=True, forbid_unknown_fields=True):
    text: str
    cache_control: Any = None
    citations: Any = None


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", omit_defaults=True, forbid_unknown_fields=True):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", forbid_unknown_fields=True):
    tool_use_id: str
    content: str | list[dict[str, Any]] = ""
    is_error: bool = False
    cache_control: Any = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking", forbid_unknown_fields=True):
    """Thinking that another service has encrypted. It is left out of the prompt."""

    data: str


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]
    clear_at: Any = None
    output_config: Any = None

    def check(self, path: str) -> None:
        """Raises `RequestRefused` naming a field below `path` that is not supported."""
        if self.clear_at not in (None, "never"):
            refuse("unsupported", f"{path}.clear_at", str(self.clear_at), "never", "give 'never' or remove it")
        if self.output_config:
            refuse("unsupported", f"{path}.output_config", remedy="give output_config to the request")


class MessagesTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    """True refuses a schema that cannot be enforced, as in OpenAI's body."""
    cache_control: Any = None


class MessagesToolChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    """The most tokens of thinking. It has no effect on a model that does not think."""
    display: str | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    effort: str | None = None
    """Given to chat templates that know `reasoning_effort`."""
    format: OutputFormat | None = None


class Metadata(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    user_id: str | None = None


class _Prompt(JsonObjectFields, forbid_unknown_fields=True, kw_only=True):
    """The fields that make the prompt, and those about JSON objects, which do not change it."""

    model: str | None = None
    messages: list[Message]
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    billing_policy: Any = None
    compaction: Any = None
    context_management: Any = None
    mcp_servers: Any = None

    @staticmethod
    def leave_out(body: dict[str, Any]) -> None:
        """Leaves out of a decoded JSON body the tools that Anthropic's service would run or describe."""
        leave_out_foreign_tools(body, ("custom",))

    def check(self) -> None:
        """Raises `RequestRefused` naming the field of the first mistake."""
        if not self.messages:
            refuse("empty", "messages", remedy="give at least one message")
        for index, message in enumerate(self.messages):
            message.check(f"messages[{index}]")
        for name in _UNSUPPORTED:
            if getattr(self, name, None):
                refuse("unsupported", name, remedy="leave it out")
        if self.context_management:
            ignore("context_management")
        for index, tool in enumerate(self.tools or []):
            if tool.input_schema is None:
                refuse("missing", f"tools[{index}].input_schema", remedy="give the JSON schema of its arguments")
        choice = self.tool_choice
        if choice is not None and choice.type in ("any", "tool") and not self.tools:
            refuse("requires", "tool_choice", choice.type, "tools", "add some")
        if choice is not None and choice.type == "tool" and choice.name is None:
            refuse("missing", "tool_choice.name", remedy="name the tool that is to be called")

    @property
    def thinks(self) -> bool:
        return self.thinking is not None and self.thinking.type != "disabled"

    def _prompt_fields(self) -> dict[str, Any]:
        """Fields of OpenAI's chat body."""
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": _openai_messages(self.system, self.messages),
            "chat_template_kwargs": {"enable_thinking": self.thinks},
            "include_reasoning": self.thinks,
        }
        if self.thinking is not None and self.thinks and self.thinking.budget_tokens is not None:
            fields["thinking_token_budget"] = self.thinking.budget_tokens
        last = self.messages[-1]
        if last.role == "assistant":
            fields["continue_final_message"] = True
        if self.tools:
            fields["tools"] = [_openai_tool(tool) for tool in self.tools]
            choice = self.tool_choice or MessagesToolChoice(type="auto")
            fields["tool_choice"] = _openai_choice(choice)
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if self.output_config is not None:
            if self.output_config.effort is not None:
                fields["reasoning_effort"] = self.output_config.effort
            if self.output_config.format is not None:
                # Anthropic's API promises an answer that fits, and refuses what it cannot enforce.
                schema = {"name": "format", "schema": self.output_config.format.schema, "strict": True}
                fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    def field_of(self, param: str) -> str:
        """Returns this body's name of a field of OpenAI's body."""
        if param.startswith("messages"):  # their numbers are others there
            return "messages"
        if param.startswith("response_format"):
            return "output_config.format"
        return _RENAMED.get(param, param.replace(".function.parameters", ".input_schema").replace(".function", ""))


class CountTokensRequest(_Prompt, kw_only=True):
    """`POST /v1/messages/count_tokens`."""

    def as_openai(self) -> ChatCompletionRequest:
        """Returns the same conversation in OpenAI's body. Raises `RequestRefused` naming the field of this one."""
        found: ChatCompletionRequest = as_openai(self._prompt_fields(), ChatCompletionRequest, self)
        return found


class MessagesRequest(_Prompt, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    container: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    fallbacks: Any = None
    fallback_credit_token: Any = None
    thread: Any = None

    def check(self) -> None:
        """Raises `RequestRefused` naming the field of the first mistake."""
        if self.thread:
            cause, remedy = "the server stores no conversation", "send all messages without it"
            refuse("unsupported_thread", "thread", remedy=remedy, cause=cause)
        super().check()

    def as_openai(self) -> ChatCompletionRequest:
        """Returns OpenAI's body that asks the same. Raises `RequestRefused` naming the field of this one."""
        given = {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences or None,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "user": self.metadata and self.metadata.user_id,
            "additional_properties": self.additional_properties,
            "property_order": self.property_order,
        }
        fields = self._prompt_fields() | {name: value for name, value in given.items() if value is not None}
        found: ChatCompletionRequest = as_openai(fields, ChatCompletionRequest, self)
        return found


def _openai_messages(system: str | list[TextBlock] | None, messages: list[Message]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    blocks = [TextBlock(system)] if isinstance(system, str) else system or []
    texts = [block.text for block in blocks if not block.text.startswith(BILLING_NOTE)]
    if any(texts):
        found.append({"role": "system", "content": "\n".join(texts)})
    for index, message in enumerate(messages):
        given = message.content
        content: list[Block] = [TextBlock(given)] if isinstance(given, str) else given
        write = _assistant_messages if message.role == "assistant" else _user_messages
        found += write(content, f"messages[{index}].content", message.role)
    return found


def _user_messages(content: list[Block], path: str, role: str) -> list[dict[str, Any]]:
    """Returns the answers of tools, then the text of the user or the system, as OpenAI's messages."""
    found: list[dict[str, Any]] = []
    texts = []
    for index, block in enumerate(content):
        if isinstance(block, TextBlock):
            texts.append({"type": "text", "text": block.text})
        elif isinstance(block, ToolResultBlock):
            text = _result_text(block, f"{path}[{index}].content")
            found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        else:
            refuse("requires", f"{path}[{index}].type", bound="role 'assistant'", cause=f"the role is {role!r}")
    if texts or not found:
        found.append({"role": role, "content": texts})
    return found


def _result_text(block: ToolResultBlock, path: str) -> str:
    parts = [{"type": "text", "text": block.content}] if isinstance(block.content, str) else block.content
    for index, part in enumerate(parts):
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            refuse("unsupported", f"{path}[{index}].type", str(part.get("type")), "text", "send text")
    text = "\n".join(part["text"] for part in parts)
    return f"Error: {text}" if block.is_error else text


def _assistant_messages(content: list[Block], path: str, role: str) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": role}
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(content):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                refuse("requires", f"{path}[{index}].type", bound="role 'user'", cause="it answers a call")
    message["content"] = "\n".join(texts)
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _openai_tool(tool: MessagesTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _openai_choice(choice: MessagesToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


# ---- answers -----------------------------------------------------------------------------------------------------
# Anthropic's schema requires also what is always null or empty here.


class AnswerText(msgspec.Struct, tag_field="type", tag="text"):
    text: str
    citations: tuple[()] = ()
    """Always empty: the schema takes null too, but some clients read a list or nothing."""


class DirectCaller(msgspec.Struct, tag_field="type", tag="direct", frozen=True):
    """The model itself made the call."""


class AnswerToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller = DirectCaller()


AnswerBlock = AnswerText | AnswerToolUse | ThinkingBlock


class MessagesUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    """Prompt tokens that were computed; those of the prefix cache are counted apart."""
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_creation: None = None
    inference_geo: None = None
    output_tokens_details: None = None
    server_tool_use: None = None
    service_tier: None = None


class MessageAnswer(msgspec.Struct, kw_only=True):
    """An answer, and in a stream its beginning, with no content yet."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None
    """`end_turn`, `max_tokens`, `stop_sequence` or `tool_use`."""
    stop_sequence: str | None
    stop_details: None = None
    container: None = None
    usage: MessagesUsage


class TokenCount(msgspec.Struct):
    input_tokens: int


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: MessageAnswer


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: AnswerBlock


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnding(msgspec.Struct):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: MessageEnding
    usage: MessagesUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass

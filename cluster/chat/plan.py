"""Plans of chats: the conversation as a prompt, and how the text of the answer is constrained and read.

`plan_chat` makes one plan for each request; `cluster/chat/reader.py` reads the answer by that plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import msgspec

from manta.cluster.chat.argument_forms import ArgumentForms, argument_forms
from manta.cluster.chat.channels import CHANNEL_MARKS
from manta.cluster.chat.reasoning import (
    NOT_THINKING,
    ReasoningFormat,
    budget_of,
    detect_reasoning,
    section_is_closed,
    section_is_open,
)
from manta.cluster.chat.template_messages import (
    late_system_texts,
    with_one_system_message,
    with_reasoning,
    with_tool_responses,
)
from manta.cluster.chat.tool_formats import ToolFormat, detect_format, shown_format
from manta.cluster.chat.tool_grammar import FormatRefused, calls_grammar
from manta.cluster.errors import RequestRefused, refuse
from manta.cluster.protocol.constraint_fields import json_text
from manta.cluster.protocol.error_bodies import under_field
from manta.cluster.protocol.foreign_fields import ignore
from manta.cluster.protocol.messages import content_text
from manta.cluster.protocol.requests import NO_EFFORT, ChatCompletionRequest
from manta.cluster.protocol.tools import AnyTool, CustomTool, arguments_schema, must_call, named_tool
from manta.cluster.text.chat_template import TemplateError
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.constraint import ConstraintSpec, JsonObjects
from manta.structured.refusals import Refusal
from manta.workers.sampling_params import SamplingParams

_END = "END_OF_FINAL_MESSAGE "
"""Text that marks the end of the last message in a rendered conversation. A template that strips contents removes the
space at its end, which reveals such a template.
"""


_UNKNOWN_FORMAT = "the format of calls of this model's chat template, which is none of those known here"
"""A response names this as not enforced if calls are read in another format than the model was trained on."""


class Conversation(Protocol):
    """A body that holds messages."""

    add_generation_prompt: bool | None
    continue_final_message: bool

    def template_messages(self) -> list[dict[str, Any]]:
        """Returns the messages as chat templates read them."""

    def template_kwargs(self) -> dict[str, Any]:
        """Returns the variables that the chat template gets beside messages and tools."""


class ChatPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt of one chat request, and the way to read its answer."""

    prompt: str
    params: SamplingParams
    tool_format: ToolFormat | None = None
    """Format of tool calls; None if nothing in the answer is read as a call."""
    tools: dict[str, ArgumentForms] = {}
    """The tools that the answer may call, by name, each with the form of its arguments."""
    custom: frozenset[str] = frozenset()
    """Names of the custom tools among them, whose calls hold one text."""
    not_enforced: tuple[str, ...] = ()
    """Demands in the schemas of tools without `strict: true` that the format cannot carry."""
    has_whole_marks: bool = False
    """Whether each mark that begins calls is one token, so that no text is the beginning of a mark."""
    only_calls: bool = False
    """Whether the answer has no text beside calls."""
    is_named: bool = False
    """Whether the request named the tool to call."""
    reasoning: ReasoningFormat | None = None
    """Format of the thinking section; None if the answer has none."""
    is_thinking: bool = False
    """Whether the prompt ends inside the thinking section."""
    include_reasoning: bool = True
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that the text must show, because they mark its parts."""


def render(tokenizer: Tokenizer, conversation: Conversation, tools: list[dict[str, Any]] | None = None) -> str:
    """Returns the conversation as the model reads it. Raises `RequestRefused` if the chat template refuses the
    conversation.
    """
    template = tokenizer.chat_template_source(bool(tools))
    messages = with_tool_responses(with_reasoning(conversation.template_messages(), template), template)
    if conversation.continue_final_message:
        messages[-1]["content"] += _END

    def rendered(given: list[dict[str, Any]]) -> str:
        adds_prompt = bool(conversation.add_generation_prompt)
        return tokenizer.render_chat_template(given, adds_prompt, tools or None, **conversation.template_kwargs())

    try:
        text = _with_all_messages(rendered, messages)
    except TemplateError as error:
        raise RequestRefused(Refusal("unfit", "messages", cause=str(error))) from error
    return _until_final_message(text) if conversation.continue_final_message else text


def _with_all_messages(rendered: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]]) -> str:
    """Returns the rendered messages. If the template refuses system messages behind the first message, or leaves them
    out, it gets them in places that it knows. Raises `TemplateError`.
    """
    late = late_system_texts(messages)
    try:
        text = rendered(messages)
    except TemplateError:
        if late:
            with contextlib.suppress(TemplateError):
                return rendered(with_one_system_message(messages))
        raise
    if not all(each in text for each in late):
        with contextlib.suppress(TemplateError):
            return rendered(with_one_system_message(messages))
    return text


def _until_final_message(text: str) -> str:
    """Returns the rendered conversation up to the end of its last message, as transformers cuts it."""
    kept, found, rest = text.rpartition(_END.rstrip())
    if not found:
        field = "continue_final_message"
        cause = "this model's chat template leaves the last message out"
        refuse("unsupported", field, remedy=f"leave {field} out", cause=cause)
    return kept if rest.startswith(" ") else kept.rstrip()


def plan_chat(
    request: ChatCompletionRequest, params: SamplingParams, tokenizer: Tokenizer, prompt: str, objects: JsonObjects
) -> ChatPlan:
    """Plans the answer to a rendered conversation, `prompt`. `objects` are the engine's options for what the request
    does not say.

    Raises `RequestRefused` if the request needs something that the model's chat template does not know.
    """
    template = tokenizer.chat_template_source(bool(request.callable_tools()))
    _note_ignored(request, params, template)
    tool_format = _tool_format(request, template)
    constraint = params.constraint
    left_out: list[str] = []
    if tool_format is not None:
        constraint = _tool_constraint(request, tool_format, tokenizer, constraint, left_out, objects)
        if shown_format(template) is None:
            left_out.append(_UNKNOWN_FORMAT)
    if constraint is not None and request.continue_final_message:
        constraint = msgspec.structs.replace(constraint, begun=_begun(request, template, prompt))
    reasoning = detect_reasoning(template) if request.add_generation_prompt else None
    is_thinking = False
    if reasoning is not None:
        if reasoning.is_channel:
            is_thinking = False  # the header of its first message says what the answer begins with
        elif section_is_closed(reasoning, prompt):
            reasoning = None
        elif section_is_open(reasoning, prompt):
            is_thinking = True
        elif constraint is not None and reasoning.enabler not in prompt:
            prompt += reasoning.opening + reasoning.end
            reasoning = None
        elif constraint is not None:
            # Left to itself the model might think or not; a constraint has to know where the answer begins.
            prompt += reasoning.opening
            is_thinking = True
    budget = _budget(request, params)
    held_by_calls = tool_format is not None and tool_format.is_channel
    thinking = None
    if reasoning is not None and (budget is not None or (constraint is not None and not held_by_calls)):
        thinking = reasoning.section(tokenizer, budget, is_thinking, is_within_grammar=held_by_calls)
    marks = list(tool_format.parts) if tool_format is not None else []
    marks += _marks(reasoning) if reasoning is not None else []
    return ChatPlan(
        prompt=prompt,
        params=msgspec.structs.replace(params, constraint=constraint, thinking=thinking),
        tool_format=tool_format,
        tools={tool.name: argument_forms(arguments_schema(tool)) for tool in request.callable_tools()},
        custom=frozenset(tool.name for tool in request.callable_tools() if isinstance(tool, CustomTool)),
        not_enforced=tuple(left_out),
        has_whole_marks=tool_format is not None
        and all(tokenizer.token_to_id(begin) is not None for begin in tool_format.begins),
        only_calls=tool_format is not None and not tool_format.is_channel and must_call(request.tool_choice),
        is_named=named_tool(request.tool_choice) is not None,
        reasoning=reasoning,
        is_thinking=is_thinking,
        include_reasoning=request.shows_reasoning,
        shown_ids=_shown_ids(tokenizer, marks),
    )


def _note_ignored(request: ChatCompletionRequest, params: SamplingParams, template: str) -> None:
    """Notes what a request says of thinking that the template cannot do."""
    can_think = detect_reasoning(template) is not None
    turns_off = request.reasoning_effort == NO_EFFORT and can_think
    if request.reasoning_effort is not None and "reasoning_effort" not in template and not turns_off:
        ignore("reasoning_effort", "leave it out; this model's chat template does not know it")
    if budget_of(params) is not None and not can_think:
        ignore("thinking_token_budget", NOT_THINKING)


def _budget(request: ChatCompletionRequest, params: SamplingParams) -> int | None:
    """Returns the most tokens of thinking. The effort "none" allows none, also where a template cannot turn it off."""
    budget = budget_of(params)
    return 0 if budget is None and request.reasoning_effort == NO_EFFORT else budget


def _begun(request: ChatCompletionRequest, template: str, prompt: str) -> str:
    """Returns the beginning of the answer that `prompt` ends with: the last message without its thinking section, with
    the white space that the template leaves.
    """
    content = content_text(request.messages[-1].content or "", f"messages[{len(request.messages) - 1}].content")
    reasoning = detect_reasoning(template)
    if reasoning is not None:
        content = content.rpartition(reasoning.end)[2]
    found = next(filter(prompt.endswith, (content, content.rstrip(), content.lstrip(), content.strip())), None)
    if found is None:
        cause = "this model's chat template changes the last message"
        refuse("unsupported", "continue_final_message", remedy="leave it or the constraint out", cause=cause)
    return found


def _marks(reasoning: ReasoningFormat) -> list[str]:
    return [reasoning.begin, reasoning.end, *(CHANNEL_MARKS if reasoning.is_channel else [])]


def _shown_ids(tokenizer: Tokenizer, marks: list[str]) -> frozenset[int]:
    """Returns the special tokens that are part of the marks."""
    texts = {token: tokenizer.token_text(token) for token in tokenizer.special_ids}
    return frozenset(token for token, text in texts.items() if text and any(text in mark for mark in marks))


def _tool_format(request: ChatCompletionRequest, template: str) -> ToolFormat | None:
    if not request.callable_tools():
        return None
    found = detect_format(template)
    if found is None:
        cause = "this model's chat template has no place for tools"
        refuse("unsupported", "tools", remedy="leave them out", cause=cause)
    return found


def _tool_constraint(
    request: ChatCompletionRequest,
    tool_format: ToolFormat,
    tokenizer: Tokenizer,
    answer: ConstraintSpec | None,
    left_out: list[str],
    objects: JsonObjects,
) -> ConstraintSpec:
    """Returns the grammar of the allowed answers.

    `answer` constrains the text that is not a call. A demand that the format cannot carry, and that is not strict, is
    appended to `left_out`.
    """
    tools, choice = request.callable_tools(), request.tool_choice
    named = named_tool(choice)
    if named is not None:
        tools = [tool for tool in tools if tool.name == named]
    answer_schema = None
    if answer is not None:
        answer_schema = answer.text or json_text({"type": "object"})
    try:
        grammar = calls_grammar(
            tool_format,
            tools,
            tokenizer.token_to_id,
            parallel=request.parallel_tool_calls is not False and named is None,
            required=must_call(choice),
            answer_schema=answer_schema,
            left_out=left_out,
            closes=(request.additional_properties or objects.additional_properties) == "closed",
        )
    except FormatRefused as error:
        _refuse_tool(request, tools, error)
    loose = any(tool.is_loose for tool in tools) or (answer is not None and answer.loose)
    return request.with_json_objects(ConstraintSpec(kind="lark", text=grammar, loose=loose))


def _refuse_tool(request: ChatCompletionRequest, tools: list[AnyTool], error: FormatRefused) -> NoReturn:
    if error.tool is None:
        refuse("unsupported", "tools", remedy="leave them out", cause=error.cause)
    tool = tools[error.tool]
    field = f"tools[{request.shown_tools().index(tool)}].{tool.demands}"
    can_be_loose = not isinstance(tool, CustomTool)
    refusal = error.refusal or Refusal("not_enforced", cause=error.cause, can_be_loose=can_be_loose)
    raise RequestRefused(under_field(refusal, field)) from error

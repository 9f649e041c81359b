"""A chat answer's parts: what the request and the chat template ask of the model's text, and how the text is split.

`plan_chat` decides once a request; a `ChatReader` then turns text into reasoning, content and tool calls, for whole
answers and streams alike. Called by `cluster/http/endpoints/generation.py` and
`cluster/http/answers.py`.
"""

from __future__ import annotations

import secrets

import msgspec
from msgspec import UNSET

from cluster.engine.request import FinishStatus
from cluster.errors import refuse
from cluster.http.protocol.constraints import json_text
from cluster.http.protocol.requests import ChatCompletionRequest
from cluster.http.protocol.responses import ChatDelta, ChatResponseMessage, FunctionDelta, ToolCallDelta
from cluster.http.protocol.tools import NamedToolChoice, calls_grammar
from cluster.text.reasoning import (
    ReasoningFormat,
    ReasoningSplitter,
    detect_reasoning,
    section_is_closed,
    section_is_open,
)
from cluster.text.tokenizer import Tokenizer
from cluster.text.tool_formats import ToolFormat, detect_format
from cluster.text.tool_parser import Piece, ToolCallParser
from structured.constraint import ConstraintSpec
from workers.sampling_params import SamplingParams


class ChatPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How one chat request is put to the model, and how its answer is read."""

    prompt: str
    params: SamplingParams
    tool_format: ToolFormat | None = None
    """None if nothing in the answer is read as a call."""
    tool_names: frozenset[str] = frozenset()
    is_named: bool = False
    """The request named the function to call."""
    reasoning: ReasoningFormat | None = None
    """None if the answer has no thinking section."""
    is_thinking: bool = False
    """The prompt ends inside the section."""
    include_reasoning: bool = True
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that the text must show, because they mark its parts."""


def plan_chat(request: ChatCompletionRequest, params: SamplingParams, tokenizer: Tokenizer, prompt: str) -> ChatPlan:
    """Plans the answer to a rendered conversation, `prompt`.

    Raises `RequestRefused` for what the model's chat template does not know.
    """
    template = tokenizer.chat_template_source(bool(request.callable_tools()))
    if request.reasoning_effort is not None and "reasoning_effort" not in template:
        refuse("reasoning_effort", "reasoning_effort is unknown to this model's chat template; leave it out")
    tool_format = _tool_format(request, template)
    constraint = params.constraint
    if tool_format is not None:
        constraint = _tool_constraint(request, tool_format, tokenizer, constraint)
    reasoning = detect_reasoning(template) if request.add_generation_prompt else None
    is_thinking = False
    if reasoning is not None:
        if section_is_closed(reasoning, prompt):
            reasoning = None
        elif section_is_open(reasoning, prompt):
            is_thinking = True
        elif constraint is not None:
            # Left to itself the model might think or not; a constraint has to know where the answer begins.
            prompt += reasoning.opening
            is_thinking = True
    if reasoning is not None and constraint is not None:
        end = tuple(tokenizer.encode(reasoning.end, add_special_tokens=False))
        constraint = msgspec.structs.replace(constraint, begin_after=end)
    marks = [tool_format.begin, tool_format.end] if tool_format is not None else []
    marks += [reasoning.begin, reasoning.end] if reasoning is not None else []
    return ChatPlan(
        prompt=prompt,
        params=msgspec.structs.replace(params, constraint=constraint),
        tool_format=tool_format,
        tool_names=frozenset(tool.function.name for tool in request.callable_tools()),
        is_named=isinstance(request.tool_choice, NamedToolChoice),
        reasoning=reasoning,
        is_thinking=is_thinking,
        include_reasoning=request.include_reasoning,
        shown_ids=frozenset(token for token in tokenizer.special_ids if tokenizer.token_text(token) in marks),
    )


def _tool_format(request: ChatCompletionRequest, template: str) -> ToolFormat | None:
    if not request.callable_tools():
        return None
    found = detect_format(template)
    if found is None:
        refuse("tools", "tools: this model's chat template has no place for tools; leave them out")
    return found


def _tool_constraint(
    request: ChatCompletionRequest, tool_format: ToolFormat, tokenizer: Tokenizer, answer: ConstraintSpec | None
) -> ConstraintSpec:
    """The grammar of what the request may be answered with. `answer` constrains the text that is no call."""
    tools, choice = request.callable_tools(), request.tool_choice
    if isinstance(choice, NamedToolChoice):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    answer_schema = None
    if answer is not None:
        answer_schema = answer.text or json_text({"type": "object"})
    grammar = calls_grammar(
        tool_format,
        tools,
        tokenizer.token_to_id,
        parallel=request.parallel_tool_calls is not False and not isinstance(choice, NamedToolChoice),
        required=choice not in (None, "auto"),
        answer_schema=answer_schema,
    )
    loose = any(tool.function.strict is False for tool in tools) or (answer is not None and answer.loose)
    return ConstraintSpec(kind="lark", text=grammar, loose=loose)


class ChatReader:
    """Splits the text of one answer, as it grows, into reasoning, content and tool calls."""

    def __init__(self, plan: ChatPlan) -> None:
        self._plan = plan
        self._splitter = None
        if plan.reasoning is not None:
            # A constraint of the client's own, say a regex, may be about line breaks too.
            strip_answer = plan.params.constraint is None or plan.tool_format is not None
            self._splitter = ReasoningSplitter(plan.reasoning, plan.is_thinking, strip_answer)
        self._parser = None if plan.tool_format is None else ToolCallParser(plan.tool_format, plan.tool_names)

    def feed(self, text: str, final: bool) -> list[ChatDelta]:
        """The deltas that new text brings; with `final` also what was held back."""
        deltas = self._read(text)
        if final:
            if self._splitter is not None:
                deltas += self._answer(*self._splitter.finish())
            if self._parser is not None:
                deltas += map(_delta, self._parser.finish())
        return deltas

    def finish_reason(self, finish: FinishStatus) -> str:
        """OpenAI's finish reason: "tool_calls" if the model stopped after a call that the request did not name."""
        called = self._parser is not None and self._parser.num_calls > 0 and not self._plan.is_named
        return "tool_calls" if called and finish is FinishStatus.FINISHED_STOPPED else finish.value

    def _read(self, text: str) -> list[ChatDelta]:
        return self._answer(*(("", text) if self._splitter is None else self._splitter.feed(text)))

    def _answer(self, reasoning: str, content: str) -> list[ChatDelta]:
        deltas = [ChatDelta(reasoning_content=reasoning)] if reasoning and self._plan.include_reasoning else []
        if self._parser is not None:
            deltas += map(_delta, self._parser.feed(content))
        elif content:
            deltas.append(ChatDelta(content=content))
        return deltas


def _delta(piece: Piece) -> ChatDelta:
    if piece.call is None:
        return ChatDelta(content=piece.text)
    if piece.name is None:
        call = ToolCallDelta(index=piece.call, function=FunctionDelta(arguments=piece.arguments))
    else:
        call = ToolCallDelta(
            index=piece.call,
            id=f"call_{secrets.token_hex(12)}",
            type="function",
            function=FunctionDelta(name=piece.name, arguments=""),
        )
    return ChatDelta(tool_calls=[call])


class MessageBuilder:
    """Joins deltas into the message of an answer that is not streamed."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[ToolCallDelta, list[str]]] = []

    def add(self, deltas: list[ChatDelta]) -> None:
        for delta in deltas:
            self._content.append(delta.content or "")
            self._reasoning.append(delta.reasoning_content or "")
            for call in delta.tool_calls or []:
                if call.id is not None:
                    self._calls.append((call, []))
                self._calls[-1][1].append(call.function.arguments or "")

    def message(self) -> ChatResponseMessage:
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        calls = [
            ToolCallDelta(id=call.id, type=call.type, function=FunctionDelta(call.function.name, "".join(arguments)))
            for call, arguments in self._calls
        ]
        return ChatResponseMessage(
            content=content or (None if calls else ""),
            reasoning_content=reasoning or UNSET,
            tool_calls=calls or UNSET,
        )

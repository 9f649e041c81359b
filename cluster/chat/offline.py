"""Chats without a server: makes OpenAI's messages the prompt of an offline request, and the generated text the next
message.

The parts of a chat body, its template, constraint, tools and reasoning, are those of `cluster/http/`, so that
`manta.cluster.llm.LLM.chat` and `/v1/chat/completions` answer alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from manta.cluster.chat.plan import ChatPlan, plan_chat, render
from manta.cluster.chat.reader import ChatReader, MessageBuilder
from manta.cluster.chat.reasoning import budget_of, require_reasoning
from manta.cluster.errors import RequestRefused, refuse
from manta.cluster.protocol.requests import ChatCompletionRequest
from manta.cluster.protocol.shape_errors import shape_error
from manta.cluster.protocol.tools import name_types, template_tools
from manta.cluster.text.tokenizer import TextError, Tokenizer
from manta.structured.constraint import JsonObjects
from manta.structured.refusals import Refusal
from manta.workers.sampling_params import SamplingParams

Message = dict[str, Any]

OPTIONS = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "additional_properties",
    "property_order",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)
"""Fields of a chat body that are not sampling parameters."""


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation as the engine gets it."""

    prompt: list[int]
    plan: ChatPlan
    """The prompt as text, and the sampling parameters with the constraint."""

    def message(self, text: str, is_cut: bool = False) -> Message:
        """Returns the answer `text` as an assistant message, which may be appended to the conversation. `is_cut` says
        that something else than the model ended the text.
        """
        reader, builder = ChatReader(self.plan), MessageBuilder()
        builder.add(reader.feed(text, final=True, is_cut=is_cut))
        message = msgspec.to_builtins(builder.message())
        return {key: value for key, value in message.items() if key != "refusal"}


def plan_offline(
    messages: Sequence[Message],
    params: SamplingParams,
    tokenizer: Tokenizer,
    options: dict[str, Any],
    objects: JsonObjects,
) -> Chat:
    """Returns the chat of these messages. `options` are some of `OPTIONS`, and `objects` the engine's. Raises
    `RequestRefused` naming the field at fault.
    """
    for name in options:
        if name not in OPTIONS:
            remedy = f"sampling parameters go into SamplingParams, and the options are {', '.join(OPTIONS)}"
            refuse("unknown_field", name, remedy=remedy, place="an option of a chat")
    given = {name: value for name, value in options.items() if value is not None}
    try:
        body = {"model": "", "messages": list(messages), **given}
        name_types(body)
        request = msgspec.convert(body, ChatCompletionRequest)
        request.check()
        if request.response_format is not None:
            if params.constraint is not None:
                refuse("excludes", "constraint", bound="response_format", remedy="leave one out")
            constraint, _ = request.requested_constraint()
            params = msgspec.structs.replace(params, constraint=constraint)
        if budget_of(params) is not None:
            require_reasoning(tokenizer.chat_template_source(bool(request.callable_tools())))
        text = render(tokenizer, request, template_tools(request.shown_tools()))
        plan = plan_chat(request, params, tokenizer, text, objects)
        return Chat(prompt=tokenizer.encode(plan.prompt, add_special_tokens=False), plan=plan)
    except msgspec.ValidationError as error:
        raise shape_error(error, ChatCompletionRequest) from error
    except TextError as error:
        raise RequestRefused(Refusal("unfit", "messages", cause=str(error))) from error

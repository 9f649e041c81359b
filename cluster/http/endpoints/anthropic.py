"""Anthropic's Messages API: each body becomes one of OpenAI's chats, and the answer is written as blocks.

`cluster/protocol/anthropic.py` has the shapes. Refusals are those of the chat endpoint, under the names of this API's
fields and in its shape of errors.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec

from manta.cluster.chat.plan import ChatPlan
from manta.cluster.chat.reader import ChatReader, MessageBuilder, whole_arguments
from manta.cluster.errors import RequestRefused
from manta.cluster.http.endpoints import generation
from manta.cluster.http.exchange.codec import NAMED_EVENTS, encode, named_event
from manta.cluster.http.exchange.engines import Event, Generation
from manta.cluster.http.exchange.exchange import Exchange, Identity
from manta.cluster.http.exchange.state import AppState
from manta.cluster.protocol.anthropic import (
    AnswerBlock,
    AnswerText,
    AnswerToolUse,
    BlockDelta,
    BlockStart,
    BlockStop,
    CountTokensRequest,
    InputDelta,
    MessageAnswer,
    MessageDelta,
    MessageEnding,
    MessagesRequest,
    MessageStart,
    MessageStop,
    MessagesUsage,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    TokenCount,
)
from manta.cluster.protocol.responses import ChatDelta
from manta.cluster.protocol.translated import renamed

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
"""Anthropic's reasons for an end, by OpenAI's."""


async def messages(state: AppState, exchange: Exchange, body: MessagesRequest) -> None:
    def answer_with(
        request: Any, identity: Identity, model: str, tokenizer: Any, plan: ChatPlan, prompt: list[int]
    ) -> MessagesAnswer:
        return MessagesAnswer(identity, model, plan, len(prompt))

    request = await state.apart(exchange, body.as_openai)
    try:
        await generation.chat(state, exchange, request, answer_with)
    except RequestRefused as error:
        raise renamed(error, body) from error


async def count_tokens(state: AppState, exchange: Exchange, body: CountTokensRequest) -> TokenCount:
    """Counts the prompt's tokens as `messages` would use them."""
    request = await state.apart(exchange, body.as_openai)
    state.admission.check_model(request.model)
    try:
        _, prompt = await generation.prompted(state, exchange, request)
        return TokenCount(len(prompt))
    except RequestRefused as error:
        raise renamed(error, body) from error


class MessagesAnswer:
    """An answer of `/v1/messages`, whole or as a stream of named events."""

    form = NAMED_EVENTS

    def __init__(self, identity: Identity, model: str, plan: ChatPlan, num_prompt_tokens: int) -> None:
        self._id = identity.new_id("msg_")
        self._model = model
        self._reader = ChatReader(plan, identity.source)
        self._num_prompt_tokens = num_prompt_tokens

    async def whole(self, generation: Generation) -> bytes:
        builder = MessageBuilder()
        async for event in generation:
            builder.add(self._read(event))
            last = event
        message = builder.message()
        content: list[AnswerBlock] = []
        if message.reasoning_content:
            content.append(ThinkingBlock(message.reasoning_content))
        if message.content:
            content.append(AnswerText(message.content))
        content += (
            AnswerToolUse(_call_id(call.id), call.name, arguments)
            for call in message.tool_calls or []
            if (arguments := whole_arguments(call)) is not None
        )
        ending = self._ending(last)
        return encode(self._message(content, ending.stop_reason, ending.stop_sequence, _usage(generation)))

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        blocks = BlockWriter()
        begun = False
        async for event in generation:
            if not begun:
                usage = MessagesUsage(input_tokens=self._num_prompt_tokens, output_tokens=0)
                yield _event(MessageStart(self._message([], None, None, usage)))
                begun = True
            for delta in self._read(event):
                for part in blocks.write(delta):
                    yield _event(part)
            last = event
        for part in blocks.close():
            yield _event(part)
        yield _event(MessageDelta(self._ending(last), _usage(generation)))
        yield _event(MessageStop())

    def _read(self, event: Event) -> list[ChatDelta]:
        return self._reader.feed(event.text, event.finish is not None, event.is_cut)

    def _ending(self, last: Event) -> MessageEnding:
        assert last.finish is not None
        if isinstance(last.stop_reason, str):
            return MessageEnding("stop_sequence", last.stop_reason)
        if self._reader.ends_with_call(last.finish):
            return MessageEnding("tool_use", None)
        return MessageEnding(STOP_REASONS.get(last.finish.value, last.finish.value), None)

    def _message(
        self, content: list[AnswerBlock], stop_reason: str | None, stop_sequence: str | None, usage: MessagesUsage
    ) -> MessageAnswer:
        return MessageAnswer(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=usage,
        )


class BlockWriter:
    """Writes deltas as blocks that follow each other: each begins, grows and stops before the next one begins."""

    def __init__(self) -> None:
        self._index = -1
        self._open: type[AnswerBlock] | None = None

    def write(self, delta: ChatDelta) -> Iterator[msgspec.Struct]:
        """Returns the events of one delta."""
        if delta.reasoning_content:
            yield from self._open_as(ThinkingBlock(""))
            yield BlockDelta(self._index, ThinkingDelta(delta.reasoning_content))
        if delta.content:
            yield from self._open_as(AnswerText(""))
            yield BlockDelta(self._index, TextDelta(delta.content))
        for call in delta.tool_calls or []:
            if call.id is not None:
                yield from self.close()
                yield from self._open_as(AnswerToolUse(_call_id(call.id), call.name, {}))
            if call.text:
                yield BlockDelta(self._index, InputDelta(call.text))

    def close(self) -> Iterator[msgspec.Struct]:
        """Returns the event that stops the open block, if there is one."""
        if self._open is not None:
            self._open = None
            yield BlockStop(self._index)

    def _open_as(self, block: AnswerBlock) -> Iterator[msgspec.Struct]:
        if self._open is not type(block):
            yield from self.close()
            self._index, self._open = self._index + 1, type(block)
            yield BlockStart(self._index, block)


def _event(part: msgspec.Struct) -> bytes:
    return named_event(str(part.__struct_config__.tag), encode(part))


def _usage(generation: Generation) -> MessagesUsage:
    (usage,) = generation.usages
    return MessagesUsage(
        input_tokens=usage.num_prompt_tokens - usage.num_cached_tokens,
        cache_read_input_tokens=usage.num_cached_tokens,
        output_tokens=usage.num_output_tokens,
    )


def _call_id(call_id: str | None) -> str:
    return f"toolu_{(call_id or '').removeprefix('call_')}"

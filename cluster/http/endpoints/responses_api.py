"""OpenAI's Responses API: each body becomes a chat, and the answer is written as items.

`cluster/protocol/responses_api.py` has the shapes. Refusals are those of the chat endpoint, under the names of this
API's fields.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from cluster.chat.plan import ChatPlan
from cluster.chat.reader import ChatReader
from cluster.engine.request import FinishStatus
from cluster.errors import RequestRefused
from cluster.http.endpoints import generation
from cluster.http.exchange.codec import NAMED_EVENTS, encode
from cluster.http.exchange.engines import Event, Generation
from cluster.http.exchange.exchange import Exchange
from cluster.http.exchange.identity import Identity
from cluster.http.exchange.state import AppState
from cluster.protocol.responses import ChatDelta
from cluster.protocol.responses_api import (
    FunctionCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    Reasoning,
    ReasoningItem,
    ReasoningText,
    ResponseObject,
    ResponsesRequest,
    ResponsesUsage,
    shown_text,
    shown_tools,
)
from cluster.protocol.translated import renamed


async def create(state: AppState, exchange: Exchange, body: ResponsesRequest) -> None:
    def answer_with(
        request: Any, identity: Identity, model: str, tokenizer: Any, plan: ChatPlan, prompt: list[int]
    ) -> ResponsesAnswer:
        return ResponsesAnswer(body, identity, model, plan)

    try:
        await generation.chat(state, exchange, body.as_openai(), answer_with)
    except RequestRefused as error:
        raise renamed(error, body) from error


class ResponsesAnswer:
    """An answer of `/v1/responses`, whole or as a stream of named and numbered events."""

    form = NAMED_EVENTS

    def __init__(self, body: ResponsesRequest, identity: Identity, model: str, plan: ChatPlan) -> None:
        self._reader = ChatReader(plan, identity.source)
        self._items = ItemWriter(identity)
        self._num_events = 0
        self._num_reasoning_tokens = 0
        params = plan.params
        self._response = ResponseObject(
            id=identity.new_id("resp_", 16),
            created_at=identity.created,
            model=model,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning=body.reasoning or Reasoning(),
            temperature=params.temperature,
            text=shown_text(body),
            tool_choice=body.tool_choice or "auto",
            tools=shown_tools(body),
            top_p=params.top_p,
            user=body.user,
            safety_identifier=body.safety_identifier,
            prompt_cache_key=body.prompt_cache_key,
        )

    async def whole(self, generation: Generation) -> bytes:
        async for event in generation:
            for _ in self._read(event):
                pass
            last = event
        for _ in self._items.close(_status(last)):
            pass
        self._end(last, generation)
        return encode(self._response)

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        begun = False
        async for event in generation:
            if not begun:
                yield self._event("response.created", response=self._response)
                yield self._event("response.in_progress", response=self._response)
                begun = True
            for name, fields in self._read(event):
                yield self._event(name, **fields)
            last = event
        for name, fields in self._items.close(_status(last)):
            yield self._event(name, **fields)
        self._end(last, generation)
        yield self._event(f"response.{self._response.status}", response=self._response)

    def _read(self, event: Event) -> Iterator[tuple[str, dict[str, Any]]]:
        for delta in self._reader.feed(event.text, event.finish is not None):
            yield from self._items.write(delta)
        if isinstance(self._items.open, ReasoningItem):
            self._num_reasoning_tokens += len(event.token_ids)

    def _end(self, last: Event, generation: Generation) -> None:
        (usage,) = generation.usages
        response = self._response
        response.output = self._items.items
        response.status = _status(last)
        response.completed_at = generation.ended_at
        if response.status == "incomplete":
            response.incomplete_details = {"reason": "max_output_tokens"}
        response.usage = ResponsesUsage(
            input_tokens=usage.num_prompt_tokens,
            input_tokens_details={"cached_tokens": usage.num_cached_tokens},
            output_tokens=usage.num_output_tokens,
            output_tokens_details={"reasoning_tokens": self._num_reasoning_tokens},
            total_tokens=usage.num_prompt_tokens + usage.num_output_tokens,
        )

    def _event(self, event: str, **fields: Any) -> bytes:
        body = encode({"type": event, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: " + event.encode() + b"\ndata: " + body + b"\n\n"


def _status(last: Event) -> str:
    return "incomplete" if last.finish is FinishStatus.FINISHED_LENGTH else "completed"


class ItemWriter:
    """Writes deltas as items that follow each other: each is added, grows and is done before the next one is added.

    Its methods return events, each a name and its fields, and put the same into `items`.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self.items: list[OutputItem] = []
        self.open: OutputItem | None = None
        self._text: list[str] = []
        """The pieces of the open item's text or arguments."""

    def write(self, delta: ChatDelta) -> Iterator[tuple[str, dict[str, Any]]]:
        if delta.reasoning_content:
            if not isinstance(self.open, ReasoningItem):
                yield from self._add(ReasoningItem(id=self._new_id("rs")), ReasoningText(""))
            yield self._grow("response.reasoning_text.delta", delta.reasoning_content)
        if delta.content:
            if not isinstance(self.open, MessageItem):
                yield from self._add(MessageItem(id=self._new_id("msg")), OutputText(""))
            yield self._grow("response.output_text.delta", delta.content, logprobs=[])
        for call in delta.tool_calls or []:
            if call.id is not None:
                yield from self._add(
                    FunctionCallItem(id=self._new_id("fc"), call_id=call.id, name=call.function.name or "")
                )
            if call.function.arguments:
                yield self._grow("response.function_call_arguments.delta", call.function.arguments)

    def close(self, status: str = "completed") -> Iterator[tuple[str, dict[str, Any]]]:
        """Ends the open item, if there is one."""
        item, text = self.open, "".join(self._text)
        if item is None:
            return
        if isinstance(item, FunctionCallItem):
            item.arguments = text
            yield self._at("response.function_call_arguments.done", arguments=text, name=item.name)
        else:
            part: Any = OutputText(text) if isinstance(item, MessageItem) else ReasoningText(text)
            item.content = [part]
            name = "output_text" if isinstance(item, MessageItem) else "reasoning_text"
            more: dict[str, Any] = {"logprobs": []} if isinstance(item, MessageItem) else {}
            yield self._at(f"response.{name}.done", content_index=0, text=text, **more)
            yield self._at("response.content_part.done", content_index=0, part=part)
        item.status = status
        self.items.append(item)
        self.open = None
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def _add(self, item: OutputItem, part: Any = None) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from self.close()
        self.open, self._text = item, []
        yield "response.output_item.added", {"output_index": len(self.items), "item": item}
        if part is not None:
            yield self._at("response.content_part.added", content_index=0, part=part)

    def _grow(self, name: str, text: str, **more: Any) -> tuple[str, dict[str, Any]]:
        self._text.append(text)
        index = {} if isinstance(self.open, FunctionCallItem) else {"content_index": 0}
        return self._at(name, delta=text, **index, **more)

    def _at(self, event: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        assert self.open is not None
        return event, {"item_id": self.open.id, "output_index": len(self.items), **fields}

    def _new_id(self, prefix: str) -> str:
        return self._identity.new_id(f"{prefix}_", 16)

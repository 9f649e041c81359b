"""OpenAI's Responses API: each body becomes a chat, and the answer is written as items.

`cluster/protocol/responses_api.py` has the shapes. Refusals are those of the chat endpoint, under the names of this
API's fields.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from manta.cluster.chat.plan import ChatPlan
from manta.cluster.chat.reader import ChatReader
from manta.cluster.engine.request import FinishStatus
from manta.cluster.errors import QueueFull, RequestRefused, ServingError, refuse
from manta.cluster.http.endpoints import generation
from manta.cluster.http.endpoints.stored_responses import Keeping, prepared
from manta.cluster.http.exchange.answers import Scored
from manta.cluster.http.exchange.codec import NAMED_EVENTS, encode, named_event
from manta.cluster.http.exchange.engines import Event, Generation
from manta.cluster.http.exchange.exchange import Exchange, GenerationExchange, Identity
from manta.cluster.http.exchange.state import AppState
from manta.cluster.protocol.response_items import NUM_RANDOM_BYTES, item_id_start
from manta.cluster.protocol.responses import ChatDelta, ToolCallDelta
from manta.cluster.protocol.responses_api import (
    CustomToolCallItem,
    FunctionCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    Reasoning,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponsesRequest,
    ResponsesUsage,
    shown_text,
    shown_tool_choice,
    shown_tools,
)
from manta.cluster.protocol.translated import renamed

_ERROR_CODES: dict[type[ServingError], str] = {RequestRefused: "invalid_prompt", QueueFull: "rate_limit_exceeded"}
"""OpenAI's codes of failed responses; of other errors it is `server_error`."""


async def create(state: AppState, exchange: GenerationExchange, body: ResponsesRequest) -> None:
    body, keeping = await prepared(state, exchange, body)
    background = keeping if keeping is not None and keeping.in_background else None

    def answer_with(
        request: Any, identity: Identity, model: str, tokenizer: Any, plan: ChatPlan, prompt: list[int]
    ) -> ResponsesAnswer:
        if keeping is not None:
            keeping.prompt, keeping.cache_salt = prompt, request.cache_salt
        answer = ResponsesAnswer(body, identity, model, plan, keeping)
        if background is not None:
            background.keep_before(answer.response)
        return answer

    try:
        request = await state.apart(exchange, body.as_openai)
        await generation.chat(state, exchange, request, answer_with, 1 if body.prewarms else None)
    except ServingError as error:
        if background is not None:
            await background.undo()
        if isinstance(error, RequestRefused):
            raise renamed(error, body) from error
        raise


async def connect(state: AppState, exchange: Exchange, _: None) -> None:
    """Opens a WebSocket connection, whose messages `create` answers."""
    if not exchange.incoming.is_websocket:
        remedy = "connect as one, or send the request as a POST"
        refuse("no_websocket", remedy=remedy, place=f"GET {exchange.incoming.url_path}")
    if state.server.drains:
        refuse("unavailable", remedy="connect again", cause="this server is about to stop")
    await exchange.reply.send_empty([], status=101)


class ResponsesAnswer:
    """An answer of `/v1/responses`, whole or as a stream of named and numbered events.

    `keeping` keeps it; None keeps nothing. A whole answer in the background is the response as it was created.
    """

    form = NAMED_EVENTS

    def __init__(
        self,
        body: ResponsesRequest,
        identity: Identity,
        model: str,
        plan: ChatPlan,
        keeping: Keeping | None,
    ) -> None:
        self._keeping = keeping
        self._reader = ChatReader(plan, identity.source)
        self._items = ItemWriter(identity)
        self._num_events = 0
        self._num_reasoning_tokens = 0
        self._prewarms = body.prewarms
        params = plan.params
        self.response = ResponseObject(
            id=identity.response_id,
            created_at=identity.created,
            status="queued" if body.background else "in_progress",
            background=bool(body.background),
            store=bool(body.store),
            previous_response_id=body.previous_response_id,
            model=model,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning=body.reasoning or Reasoning(),
            temperature=params.temperature,
            text=shown_text(body),
            tool_choice=shown_tool_choice(body),
            tools=shown_tools(body),
            top_p=params.top_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            user=body.user,
            safety_identifier=body.safety_identifier,
            prompt_cache_key=body.prompt_cache_key,
        )

    async def whole(self, generation: Generation) -> bytes:
        if self._keeping is None or not self._keeping.in_background:
            async for _ in self._events(generation):
                pass
        return encode(self.response)

    async def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        async for name, fields in self._events(generation):
            yield self._event(name, **fields)

    async def _events(self, generation: Generation) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yields the names and fields of the stream's events. After the last one `response` is complete."""
        response, last = self.response, None
        if self._prewarms:
            generation = Scored(generation)
        if response.background:
            yield "response.created", {"response": response}
            yield "response.queued", {"response": response}
        try:
            async for event in generation:
                if last is None:
                    response.status = "in_progress"
                    if not response.background:
                        yield "response.created", {"response": response}
                    yield "response.in_progress", {"response": response}
                for each in self._read(event):
                    yield each
                last = event
        except ServingError as error:
            if not response.background:
                raise
            self._fail(error)
        else:
            assert last is not None
            self._end(last, generation)
        for each in self._items.close("completed" if response.status == "completed" else "incomplete"):
            yield each
        response.output = self._items.items
        if self._keeping is not None:
            await self._keeping.end(response)
        name = "failed" if response.status == "cancelled" else response.status
        yield f"response.{name}", {"response": response}

    def _read(self, event: Event) -> Iterator[tuple[str, dict[str, Any]]]:
        for delta in self._reader.feed(event.text, event.finish is not None, event.is_cut):
            yield from self._items.write(delta)
        if isinstance(self._items.open, ReasoningItem):
            self._num_reasoning_tokens += len(event.token_ids)

    def _end(self, last: Event, generation: Generation) -> None:
        response = self.response
        is_cut = last.finish is FinishStatus.FINISHED_LENGTH and not self._prewarms
        response.status = "incomplete" if is_cut else "completed"
        response.completed_at = generation.ended_at
        if response.status == "incomplete":
            response.incomplete_details = {"reason": "max_output_tokens"}
        response.usage = usage_of(generation, self._num_reasoning_tokens)

    def _fail(self, error: ServingError) -> None:
        if error.refusal.kind == "cancelled":
            self.response.status = "cancelled"
            return
        self.response.status = "failed"
        code = next((code for kind, code in _ERROR_CODES.items() if isinstance(error, kind)), "server_error")
        self.response.error = ResponseError(code, str(error))

    def _event(self, event: str, **fields: Any) -> bytes:
        body = encode({"type": event, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return named_event(event, body)


def usage_of(generation: Generation, num_reasoning_tokens: int) -> ResponsesUsage:
    """Returns the usage of an answer to one prompt."""
    (usage,) = generation.usages
    return ResponsesUsage(
        input_tokens=usage.num_prompt_tokens,
        input_tokens_details={"cached_tokens": usage.num_cached_tokens},
        output_tokens=usage.num_output_tokens,
        output_tokens_details={"reasoning_tokens": num_reasoning_tokens},
        total_tokens=usage.num_prompt_tokens + usage.num_output_tokens,
    )


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
                yield from self._add(self._call_item(call, call.id))
            if call.text:
                kind = "function_call_arguments" if call.custom is None else "custom_tool_call_input"
                yield self._grow(f"response.{kind}.delta", call.text)

    def close(self, status: str = "completed") -> Iterator[tuple[str, dict[str, Any]]]:
        """Ends the open item, if there is one."""
        item, text = self.open, "".join(self._text)
        if item is None:
            return
        if isinstance(item, FunctionCallItem):
            item.arguments = text
            yield self._at("response.function_call_arguments.done", arguments=text, name=item.name)
        elif isinstance(item, CustomToolCallItem):
            item.input = text
            yield self._at("response.custom_tool_call_input.done", input=text)
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
        index = {} if isinstance(self.open, FunctionCallItem | CustomToolCallItem) else {"content_index": 0}
        return self._at(name, delta=text, **index, **more)

    def _at(self, event: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        assert self.open is not None
        return event, {"item_id": self.open.id, "output_index": len(self.items), **fields}

    def _call_item(self, call: ToolCallDelta, call_id: str) -> FunctionCallItem | CustomToolCallItem:
        if call.custom is not None:
            return CustomToolCallItem(id=self._new_id("ctc"), call_id=call_id, name=call.name)
        return FunctionCallItem(id=self._new_id("fc"), call_id=call_id, name=call.name)

    def _new_id(self, prefix: str) -> str:
        return self._identity.new_id(item_id_start(prefix, self._identity.response_id), NUM_RANDOM_BYTES)

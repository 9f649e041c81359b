"""`POST /v1/responses/compact`: a conversation becomes the user's messages and one compaction item.

The model writes a summary of its own answers, its calls and their outputs. Where these are no longer than a summary,
the item holds them whole, and no model runs. `cluster/protocol/compaction.py` says what an item contains.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from manta.cluster.chat.plan import ChatPlan
from manta.cluster.chat.reader import ChatReader
from manta.cluster.errors import RequestRefused, refuse
from manta.cluster.http.endpoints import generation
from manta.cluster.http.endpoints.item_references import with_referenced
from manta.cluster.http.endpoints.responses_api import usage_of
from manta.cluster.http.endpoints.stored_responses import check_storage, earlier_items
from manta.cluster.http.exchange.codec import NAMED_EVENTS, encode
from manta.cluster.http.exchange.engines import Generation
from manta.cluster.http.exchange.exchange import Exchange, Identity
from manta.cluster.http.exchange.state import AppState
from manta.cluster.protocol.compaction import Compacted, encode_compacted
from manta.cluster.protocol.response_items import (
    Item,
    chat_messages,
    check_calls,
    expanded_items,
    input_items,
    is_users,
)
from manta.cluster.protocol.responses_api import (
    CompactedResponse,
    CompactRequest,
    ResponsesRequest,
    ResponsesUsage,
)
from manta.cluster.protocol.translated import renamed

SUMMARY_TOKENS = 1024
"""Most tokens of a summary, reasoning included: a page, which a model can write in seconds."""
MIN_SUMMARY_TOKENS = 64
"""Fewest tokens that must be left for a summary; a shorter one would lose the conversation."""
KEPT_WHOLE_CHARACTERS = 4000
"""Characters of answers, calls and outputs up to which they are kept whole: about those of `SUMMARY_TOKENS`."""
SUMMARY_REQUEST = (
    "Write a summary of our conversation so far, from which you can continue without it. State what I want, what was "
    "decided and done, names, numbers, paths and results of tools that still matter, and what is open. My own messages "
    "are kept, so do not repeat them. Write the summary only."
)
_NO_USAGE = ResponsesUsage(
    input_tokens=0,
    input_tokens_details={"cached_tokens": 0},
    output_tokens=0,
    output_tokens_details={"reasoning_tokens": 0},
    total_tokens=0,
)


async def compact(state: AppState, exchange: Exchange, body: CompactRequest) -> CompactedResponse | None:
    state.admission.check_model(body.model)
    check_storage(state, exchange, body)
    earlier = []
    if body.previous_response_id is not None:
        earlier = await earlier_items(state, exchange, body.previous_response_id)
    given = await with_referenced(state, exchange, body.input or [])
    items = await state.apart(exchange, _conversation, earlier, given, exchange.identity.response_id)
    if await state.apart(exchange, _num_characters, items) <= KEPT_WHOLE_CHARACTERS:
        return await state.apart(exchange, _compacted, exchange.identity, items, None, _NO_USAGE)
    model = await state.model_info()

    def answer_with(
        request: Any, identity: Identity, name: str, tokenizer: Any, plan: ChatPlan, prompt: list[int]
    ) -> SummaryAnswer:
        left = model.max_model_len - len(prompt)
        if left < MIN_SUMMARY_TOKENS:
            unit, remedy = "tokens with the request for a summary", "compact earlier, or leave items out"
            most = model.max_model_len - MIN_SUMMARY_TOKENS
            refuse("over_limit", "input", len(prompt), most, remedy, unit=unit)
        write = functools.partial(state.apart, exchange, _written, identity, items)
        return SummaryAnswer(write, identity, plan)

    asked = ResponsesRequest(
        model=body.model, instructions=body.instructions, input=_with_request(items), temperature=0.0
    )
    try:
        request = await state.apart(exchange, asked.as_openai)
        await generation.chat(state, exchange, request, answer_with, most_tokens=SUMMARY_TOKENS)
    except RequestRefused as error:
        raise renamed(error, asked) from error
    return None


def _conversation(earlier: list[Item], given: str | list[Item], response_id: str) -> list[Item]:
    """Returns the items of the conversation that is to be compacted, without ids and without compaction items."""
    items = [*earlier, *input_items(given, response_id)]
    check_calls(items)
    return [_without_id(item) for item in expanded_items(items)]


class SummaryAnswer:
    """Reads the model's summary. `write` writes the compacted conversation with it; None keeps all items."""

    form = NAMED_EVENTS

    def __init__(
        self, write: Callable[[str | None, ResponsesUsage], Awaitable[bytes]], identity: Identity, plan: ChatPlan
    ) -> None:
        self._write = write
        self._reader = ChatReader(plan, identity.source)

    async def whole(self, generation: Generation) -> bytes:
        texts, num_reasoning_tokens = [], 0
        async for event in generation:
            deltas = self._reader.feed(event.text, event.finish is not None, event.is_cut)
            texts += [delta.content for delta in deltas if delta.content]
            if any(delta.reasoning_content for delta in deltas):
                num_reasoning_tokens += len(event.token_ids)
        summary = "".join(texts).strip() or None
        return await self._write(summary, usage_of(generation, num_reasoning_tokens))

    def stream(self, generation: Generation) -> AsyncIterator[bytes]:
        raise AssertionError("a compacted conversation is never streamed")


def _written(identity: Identity, items: list[Item], summary: str | None, usage: ResponsesUsage) -> bytes:
    return encode(_compacted(identity, items, summary, usage))


def _compacted(identity: Identity, items: list[Item], summary: str | None, usage: ResponsesUsage) -> CompactedResponse:
    kept = items if summary is None else [item for item in items if not _is_summarised(item)]
    content = encode_compacted(Compacted(kept, summary))
    users = [item for item in items if is_users(item)]
    return CompactedResponse(
        id=identity.response_id,
        created_at=identity.created,
        output=input_items([*users, {"type": "compaction", "encrypted_content": content}], identity.response_id),
        usage=usage,
    )


def _with_request(items: list[Item]) -> list[Item]:
    """Returns the conversation with the request for a summary, within the user's last message if that ends it: some
    chat templates refuse two messages of one side in a row.
    """
    request = {"type": "input_text", "text": SUMMARY_REQUEST}
    if items and is_users(items[-1]):
        last = copy.copy(items[-1])
        last["content"] = [*last["content"], request]
        return [*items[:-1], last]
    return [*items, {"role": "user", "content": [request]}]


def _num_characters(items: list[Item]) -> int:
    """Returns the length of the items that a summary would replace."""
    messages = chat_messages(None, [item for item in items if _is_summarised(item)])
    return sum(len(msgspec.json.encode(message)) for message in messages)


def _is_summarised(item: Item) -> bool:
    """Returns whether a summary replaces an item: everything except the messages of user, system and developer."""
    return item.get("type", "message") != "message" or item.get("role") == "assistant"


def _without_id(item: Item) -> Item:
    return {name: value for name, value in item.items() if name not in ("id", "status")}

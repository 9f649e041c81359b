"""References to stored items: what an `item_reference` in the input of a response stands for.

The id of an item begins with that of the response which brought it, so one read finds it. A stored response holds its
whole conversation. The references of a conversation are therefore looked up from the last one on, which mostly finds
all of them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from manta.cluster.errors import refuse
from manta.cluster.http.exchange.exchange import GenerationExchange
from manta.cluster.http.exchange.state import AppState
from manta.cluster.protocol.response_items import Item, is_reference, response_of_item
from manta.cluster.storage.kept_responses import KeptResponses

MAX_RESPONSES = 256
"""Most stored responses to whose items one input may refer; each may be read."""


async def with_referenced(state: AppState, exchange: GenerationExchange, given: str | list[Item]) -> str | list[Item]:
    """Returns an input with stored items of the caller in place of references. Raises `RequestRefused` naming the first
    reference to no such item.
    """
    if isinstance(given, str) or not any(map(is_reference, given)):
        return given
    wanted = [(index, item["id"]) for index, item in enumerate(given) if is_reference(item)]
    remembered = {} if exchange.remembered is None else exchange.remembered.items_by_id()
    kept = state.server.responses
    found = {} if kept is None else await asyncio.to_thread(_stored, kept, exchange.caller.owner, wanted)
    for index, item_id in wanted:
        if item_id not in found and item_id not in remembered:
            known = "your stored items" if kept is not None else "the items of this connection, for none are stored"
            refuse("names_nothing", f"input[{index}].id", item_id, known, "send the item itself")
    return [found.get(item["id"]) or remembered[item["id"]] if is_reference(item) else item for item in given]


def _stored(kept: KeptResponses, owner: str, wanted: list[tuple[int, str]]) -> dict[str, Item]:
    """Returns the stored items that are wanted, by id. Items of a deleted response are none of them."""
    origins = {item_id: response_of_item(item_id) for _, item_id in wanted}
    responses = {origin for origin in origins.values() if origin is not None}
    if len(responses) > MAX_RESPONSES:
        unit, remedy = "responses that are referred to", "send items, or previous_response_id"
        refuse("over_limit", "input", len(responses), MAX_RESPONSES, remedy, unit=unit)
    deleted = {origin for origin in responses if kept.is_deleted(owner, origin)}
    found: dict[str, Item] = {}
    for item_id, origin in reversed(origins.items()):
        if origin is not None and origin not in deleted and item_id not in found:
            found |= _items_of(kept, owner, origin)
    return {
        item_id: found[item_id] for item_id, origin in origins.items() if item_id in found and origin not in deleted
    }


def _items_of(kept: KeptResponses, owner: str, response_id: str) -> dict[str, Any]:
    """Returns the items of a response's conversation by id, its output included; none if it is not stored."""
    stored = kept.find(owner, response_id)
    if stored is None:
        return {}
    ended = None if stored.opening is None else kept.ended(owner, response_id)
    output = (ended or stored).response.output
    return {item["id"]: item for item in [*stored.items, *msgspec.to_builtins(output)]}

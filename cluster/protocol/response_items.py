"""The items of the Responses API's conversations: as chat messages, with ids, and in place of a compaction item."""

from __future__ import annotations

import itertools
import re
import secrets
from collections import Counter
from collections.abc import Iterable
from typing import Any

from msgspec import UNSET

from manta.cluster.errors import refuse
from manta.cluster.protocol.compaction import Compacted, decode_compacted

Item = dict[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "compaction": "cmp",
}
"""Beginnings of the ids of items, by type."""
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = tuple(f"{call}_output" for call in _CALLS)
MAX_COMPACTIONS = 8
"""Most compaction items of one input. One is enough, because it stands for those before it; each costs a search."""
SUMMARY_OPENING = "Summary of our conversation so far:\n"
"""Words in front of a summary, in the assistant's message that stands for what was left out."""


# ---- as chat messages --------------------------------------------------------------------------------------------


def chat_messages(instructions: str | None, given: str | list[Item]) -> list[dict[str, Any]]:
    """Returns the instructions and an input as chat messages. Raises `RequestRefused` naming the field of a mistake."""
    found: list[dict[str, Any]] = []
    if instructions is not None:
        found.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*found, {"role": "user", "content": given}]
    turn: dict[str, Any] | None = None  # of the assistant, to which reasoning, text and calls belong
    for path, item in _expanded(given):
        if is_reference(item):
            continue  # it is checked before, and another item takes its place before the conversation is used
        kind = item.get("type", "message")
        _check_names(kind, item, path)
        if kind == "message" and item["role"] != "assistant":
            turn = None
            found.append({"role": item["role"], "content": content_text(item, "content", path)})
        elif kind in _OUTPUTS:
            turn = None
            call_id, output = _text(item, "call_id", path), content_text(item, "output", path)
            found.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind in ("message", "reasoning", *_CALLS):
            if turn is None or (kind not in _CALLS and ("tool_calls" in turn or turn["content"])):
                found.append(turn := {"role": "assistant", "content": ""})
            _add_to_turn(turn, kind, item, path)
        else:
            known = tuple(_ID_PREFIXES)
            refuse("unsupported", f"{path}.type", str(kind), known, f"send items of type {', '.join(known)}")
    return found


def _check_names(kind: Any, item: Item, path: str) -> None:
    """Checks what an item says of itself: its id, and the role of a message."""
    for field in ("id", "status"):
        if not isinstance(item.get(field), str | None):
            refuse("wrong_value", f"{path}.{field}", bound="text")
    if kind != "message":
        return
    role = item.get("role")
    if role is None:
        refuse("missing", f"{path}.role", remedy=f"give one of {', '.join(_ROLES)}")
    if role not in _ROLES:
        refuse("unknown_value", f"{path}.role", str(role), _ROLES)


def _add_to_turn(turn: dict[str, Any], kind: str, item: Item, path: str) -> None:
    if kind == "message":
        turn["content"] = content_text(item, "content", path)
    elif kind == "reasoning":
        before = turn.get("reasoning_content")
        turn["reasoning_content"] = "\n\n".join(filter(None, (before, _reasoning_text(item, path))))
    else:
        called, text = ("function", "arguments") if kind == "function_call" else ("custom", "input")
        fields = {"name": _text(item, "name", path), text: _text(item, text, path)}
        call = {"id": _text(item, "call_id", path), "type": called, called: fields}
        turn.setdefault("tool_calls", []).append(call)


def _reasoning_text(item: Item, path: str) -> str:
    """Returns the text of a reasoning item. Parts without text, such as encrypted ones, add none."""
    content = item.get("content")
    if content is None:
        return ""
    if not isinstance(content, list):
        refuse("wrong_value", f"{path}.content", bound="a list of parts")
    texts = []
    for index, part in enumerate(content):
        text = part.get("text", "") if isinstance(part, dict) else None
        if not isinstance(text, str):
            refuse("wrong_value", f"{path}.content[{index}]", bound='a part such as {"type": "reasoning_text", ...}')
        texts.append(text)
    return "".join(texts)


def content_text(item: Item, field: str, path: str) -> str:
    """Returns the text of a message or of a call's output. Null is empty."""
    content = item.get(field, UNSET)
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        refuse("missing", f"{path}.{field}", remedy="give text or a list of parts")
    texts = []
    for index, part in enumerate(content):
        place = f"{path}.{field}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            refuse("unsupported", f"{place}.type", str(kind), _TEXT_PARTS, f"send text ({_TEXT_PARTS[0]})")
        texts.append(_text(part, "refusal" if kind == "refusal" else "text", place))
    return "\n".join(texts)


def _text(item: Item, field: str, path: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        refuse("wrong_value", f"{path}.{field}", bound="text")
    return value


def check_calls(items: Iterable[Item]) -> None:
    """Raises `RequestRefused` for the output of a call that no item before it makes."""
    calls = set()
    for path, item in _expanded(items):
        kind = item.get("type")
        if kind in _CALLS:
            calls.add((kind, item["call_id"]))
        elif kind in _OUTPUTS and (call := kind.removesuffix("_output"), item["call_id"]) not in calls:
            remedy = "send the call too, or continue the response that made it"
            refuse(
                "names_nothing", f"{path}.call_id", item["call_id"], f"the {call.replace('_', ' ')}s before it", remedy
            )


# ---- references --------------------------------------------------------------------------------------------------

_REFERENCE = {"id", "type"}
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{38})[0-9a-f]{10}(?:_[0-9]+)?")
NUM_RANDOM_BYTES = 5
"""Random bytes at the end of an item's id, behind the 38 digits of its response."""


def is_reference(item: Item) -> bool:
    """Returns whether an item stands for a stored one. As in OpenAI's API, its type may be left out."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and item.keys() <= _REFERENCE)


def check_references(items: Iterable[Item]) -> None:
    """Raises `RequestRefused` for a reference without an id."""
    for index, item in enumerate(items):
        if is_reference(item):
            _text(item, "id", f"input[{index}]")


def item_id_start(prefix: str, response_id: str) -> str:
    """Returns the beginning of the id of an item that a response brings."""
    return f"{prefix}_{response_id.removeprefix('resp_')}"


def response_of_item(item_id: str) -> str | None:
    """Returns the id of the response that brought an item, whose conversation holds it; None for a client's own id."""
    found = _ITEM_ID.fullmatch(item_id)
    return None if found is None else f"resp_{found[1]}"


# ---- compaction items --------------------------------------------------------------------------------------------


def _expanded(items: Iterable[Item]) -> list[tuple[str, Item]]:
    """Returns each item with its path, and in place of a compaction item those for which it stands.

    The output of `/v1/responses/compact` lists the user's messages in front of the compaction item, which holds them
    too. They are used once.
    """
    found: list[tuple[str, Item]] = []
    num_compactions = 0
    for index, item in enumerate(items):
        path = f"input[{index}]"
        if item.get("type") != "compaction":
            found.append((path, item))
            continue
        num_compactions += 1
        if num_compactions > MAX_COMPACTIONS:
            remedy, unit = "leave out what is before the last one", "compaction items up to here"
            refuse("over_limit", path, num_compactions, MAX_COMPACTIONS, remedy, unit=unit)
        path = f"{path}.encrypted_content"
        compacted = decode_compacted(item.get("encrypted_content"), path)
        repeated = Counter(content_text(each, "content", path) for each in compacted.items if is_users(each))
        found = [(place, each) for place, each in found if not _is_repeated(each, place, repeated)]
        found += [(path, each) for each in _restored(compacted, path)]
    return found


def expanded_items(items: Iterable[Item]) -> list[Item]:
    """Returns items without compaction items; see `_expanded`."""
    return [item for _, item in _expanded(items)]


def is_users(item: Item) -> bool:
    """Returns whether an item is a message of the user."""
    return item.get("type", "message") == "message" and item.get("role") == "user"


def _is_repeated(item: Item, path: str, repeated: Counter[str]) -> bool:
    """Returns whether an item is one of the `repeated` messages of the user, and counts it there."""
    if not is_users(item):
        return False
    text = content_text(item, "content", path)
    repeated[text] -= 1
    return repeated[text] >= 0


def _restored(compacted: Compacted, path: str) -> list[Item]:
    """Returns the items for which a compaction item stands. With a summary, the user's messages become one, because
    some chat templates refuse two messages of one side in a row.
    """
    if compacted.summary is None:
        return compacted.items
    others = [item for item in compacted.items if not is_users(item)]
    texts = [content_text(item, "content", path) for item in compacted.items if is_users(item)]
    asked = [{"role": "user", "content": "\n\n".join(texts)}] if texts else []
    return [*others, *asked, {"role": "assistant", "content": f"{SUMMARY_OPENING}{compacted.summary}"}]


# ---- with ids ----------------------------------------------------------------------------------------------------


def input_items(given: str | list[Item], response_id: str) -> list[Item]:
    """Returns an input as items with ids, as `GET /v1/responses/{response_id}/input_items` shows them. New ids begin
    with that of the response.
    """
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_with_id(item, response_id) for item in items]


def with_distinct_ids(items: list[Item]) -> list[Item]:
    """Returns the items of a conversation, in which a client may repeat an item, so that no two have one id. The first
    keeps its id; the others get the same ones each time.
    """
    taken = {item["id"] for item in items}
    seen = {""}  # an empty id is no cursor
    found = []
    for item in items:
        shown = item["id"]
        if shown in seen:
            shown = next(new for count in itertools.count(2) if (new := f"{item['id']}_{count}") not in taken)
            taken.add(shown)
        seen.add(shown)
        found.append(item | {"id": shown})
    return found


def _with_id(item: Item, response_id: str) -> Item:
    kind = item.get("type", "message")
    new_id = item_id_start(_ID_PREFIXES[kind], response_id) + secrets.token_hex(NUM_RANDOM_BYTES)
    shown = {"id": new_id, "type": kind}
    if kind != "compaction":
        shown["status"] = "completed"
    shown |= {name: value for name, value in item.items() if value is not None}
    if kind == "message" and isinstance(shown.setdefault("content", ""), str):
        part = {"type": "output_text", "annotations": []} if shown["role"] == "assistant" else {"type": "input_text"}
        shown["content"] = [part | {"text": shown["content"]}]
    return shown

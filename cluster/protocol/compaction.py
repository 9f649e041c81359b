"""Compaction items of the Responses API: a conversation in one item, which clients keep and send back.

OpenAI calls the content encrypted. Here it is encoded only: a version, a digest that reveals damage, and JSON in
base64. It needs no secret, so any server accepts it, also after a restart. A client that writes such an item by hand
gains nothing, because it could send the same conversation as plain items.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any, NoReturn

import msgspec

from manta.cluster.errors import refuse
from manta.cluster.protocol.body_size import check_body_size
from manta.cluster.serve_limits import BodyLimits

VERSION = "manta1"
"""Beginning of the content. Another one is needed as soon as `Compacted` changes."""
DIGEST_CHARACTERS = 32
MAX_COMPACTED_ITEMS = 2**16
"""Most items that one content stands for, at some microseconds each: 16 times those of a body."""
_SHOWN_CHARACTERS = 20
"""Characters of a wrong content that the refusal repeats."""


class Compacted(msgspec.Struct, forbid_unknown_fields=True):
    """Conversation that a compaction item stands for."""

    items: list[dict[str, Any]]
    """Items in the conversation's order: all of them, or without the model's and the tools' if there is a summary."""
    summary: str | None = None
    """The model's summary of the items that were left out. None if none were."""


def encode_compacted(compacted: Compacted) -> str:
    """Returns the `encrypted_content` of a compaction item."""
    content = msgspec.json.encode(compacted)
    return f"{VERSION}.{_digest(content)}.{base64.urlsafe_b64encode(content).decode()}"


def decode_compacted(content: Any, field: str) -> Compacted:
    """Returns what a content stands for. Raises `RequestRefused` naming `field` if this server wrote no such content.

    The content counts as a body of its own: its values are bounded before they are decoded.
    """
    if not isinstance(content, str):
        refuse("wrong_value", field, bound="text: the content of a compaction item that this server gave")
    version, _, rest = content.partition(".")
    digest, _, encoded = rest.partition(".")
    if version != VERSION:
        shown = content[:_SHOWN_CHARACTERS]
        _refuse(field, f"begins with {shown!r} and not with {VERSION!r}, so it comes from another server or version")
    try:
        data = base64.b64decode(encoded.encode("ascii"), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error):
        _refuse(field, "is damaged: it is not base64")
    if digest != _digest(data):
        _refuse(field, "is damaged: it does not fit its digest")
    check_body_size(data, BodyLimits(), field)
    try:
        compacted = msgspec.json.decode(data, type=Compacted)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        _refuse(field, f"holds no conversation: {error}")
    if len(compacted.items) > MAX_COMPACTED_ITEMS:
        unit, remedy = "items of a conversation", "begin a new one"
        refuse("over_limit", field, len(compacted.items), MAX_COMPACTED_ITEMS, remedy, unit=unit)
    if any(item.get("type") == "compaction" for item in compacted.items):
        _refuse(field, "holds another compaction item")
    return compacted


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGEST_CHARACTERS]


def _refuse(field: str, reason: str) -> NoReturn:
    remedy = "send the item as /v1/responses/compact gave it, or the conversation itself"
    refuse("foreign_item", field, remedy=remedy, cause=reason)

"""Responses of `/v1/responses` in a storage, for clients that continue or fetch them.

    responses/OWNER/ID          a `StoredResponse`; without it the response does not exist
    responses/OWNER/ID.ended    claimed: the `EndedResponse` of a background response
    deleted/OWNER/ID            the time of a deletion; with it the response does not exist, whatever else is there

Ids begin with the time, so an object's name tells its age. Ingresses write without a lock: an object is created once,
and the first of several writers wins. Each ingress counts what it has written for a client, and lists the client's
objects after a sixteenth of a bound. So one ingress keeps the bounds, and each further one may exceed them by a
sixteenth. `cluster/http/endpoints/stored_responses.py` decides what is kept.

A deletion is written before it is answered. Writers look for it before and after they write, because a process may
return late with a response that was deleted meanwhile. It is kept for longer than any such process may take.
"""

from __future__ import annotations

import re
import time
from typing import Any

import msgspec

from manta.cluster.config import ServeConfig
from manta.cluster.errors import refuse
from manta.cluster.protocol.responses_api import ResponseObject
from manta.cluster.storage.file_records import age_s, decoded
from manta.cluster.storage.storage import Storage

_ID = re.compile(r"resp_[0-9a-f]{38}")
_ENDED = ".ended"
_SLACK = 16
"""The part of a bound, as a divisor, that is written between two listings."""
DELETED_S = 86_400.0
"""Seconds for which a deletion is kept beyond the time of the longest recording and request. A WebSocket connection,
which remembers a response, is open for an hour; the rest is for clocks that differ.
"""


class StoredResponse(msgspec.Struct):
    response: ResponseObject
    """The response as it ended; a background response as it was created."""
    items: list[dict[str, Any]]
    """The conversation that it answers, earlier turns included."""
    opening: bytes | None = None
    """The encoded opening of the recorded stream, from which a background response can be run again; else None."""
    block_hashes: list[bytes] = []
    """Hashes of the blocks of its prompt, if engines may keep them in files, so that they go when it is deleted."""


class EndedResponse(msgspec.Struct):
    """The end of a background response."""

    response: ResponseObject
    entries: list[bytes]
    """The encoded entries of its recorded stream, from which its events are written again."""


class KeptResponses:
    """The responses of every client of one storage. Every method may wait for the storage."""

    def __init__(self, storage: Storage, config: ServeConfig) -> None:
        self._storage = storage
        self._limits = config.responses
        self._keep_deleted_s = DELETED_S + config.streams.max_unread_s + config.request_timeout_s
        self._unlisted: dict[str, tuple[int, int]] = {}
        """Responses and bytes written since an owner's objects were last listed."""

    def create(self, owner: str, stored: StoredResponse) -> None:
        """Stores a response unless it is stored or was deleted. Raises `RequestRefused` if it alone exceeds a bound."""
        response_id = stored.response.id
        path, content = _path(owner, response_id), msgspec.json.encode(stored)
        if self._storage.has(path) or self.is_deleted(owner, response_id):
            return
        self._make_room(owner, 1, len(content))
        self._storage.claim(path, content)
        if self.is_deleted(owner, response_id):
            self.remove(owner, response_id)

    def end(self, owner: str, ended: EndedResponse) -> None:
        """Stores the end of a background response, unless it has one or the response was removed."""
        path = _path(owner, ended.response.id)
        if not self._storage.has(path) or self._storage.has(f"{path}{_ENDED}"):
            return
        content = msgspec.json.encode(ended)
        self._make_room(owner, 0, len(content))
        self._storage.claim(f"{path}{_ENDED}", content)
        if not self._storage.has(path):
            self._storage.remove(f"{path}{_ENDED}")

    def find(self, owner: str, response_id: str) -> StoredResponse | None:
        """Returns a response; None if there is none, if it has expired, was deleted or belongs to another client."""
        if not _ID.fullmatch(response_id) or age_s(response_id) > self._limits.keep_s:
            return None
        if self.is_deleted(owner, response_id):
            return None
        return decoded(self._storage.read(_path(owner, response_id)), StoredResponse)

    def ended(self, owner: str, response_id: str) -> EndedResponse | None:
        """Returns the end of a background response; None while it has none."""
        return decoded(self._storage.read(f"{_path(owner, response_id)}{_ENDED}"), EndedResponse)

    def delete(self, owner: str, response_id: str) -> None:
        """Removes a response for good: nobody stores it again."""
        self._storage.write(_deleted_path(owner, response_id), str(int(time.time())).encode())
        self.remove(owner, response_id)

    def is_deleted(self, owner: str, response_id: str) -> bool:
        is_id = _ID.fullmatch(response_id) is not None
        return is_id and self._storage.has(_deleted_path(owner, response_id))

    def remove(self, owner: str, response_id: str) -> None:
        path = _path(owner, response_id)
        self._storage.remove(path)
        self._storage.remove(f"{path}{_ENDED}")

    def remove_expired(self) -> None:
        """Removes every client's expired responses, and the deletions that nobody need be told of any more."""
        for owner in self._storage.sizes("responses"):
            for name in self._sizes(owner):
                if age_s(name) > self._limits.keep_s:
                    self._storage.remove(f"responses/{owner}/{name}")
        for owner in self._storage.sizes("deleted"):
            for response_id in filter(_ID.fullmatch, self._storage.sizes(f"deleted/{owner}")):
                self._forget_deletion(owner, response_id)

    def _forget_deletion(self, owner: str, response_id: str) -> None:
        """Removes a deletion that is old enough, and before it what a writer that died may have left behind."""
        deleted_at = self._storage.read(_deleted_path(owner, response_id)) or b""
        if deleted_at.isdigit() and time.time() > int(deleted_at) + self._keep_deleted_s:
            self.remove(owner, response_id)
            self._storage.remove(_deleted_path(owner, response_id))

    def _sizes(self, owner: str) -> dict[str, int]:
        """Returns the size in bytes of each object of an owner, without files that are not ours."""
        found = self._storage.sizes(f"responses/{owner}")
        return {name: size for name, size in found.items() if _ID.fullmatch(name.removesuffix(_ENDED))}

    def _make_room(self, owner: str, num_responses: int, num_bytes: int) -> None:
        """Removes an owner's oldest responses until so many more responses and bytes fit."""
        max_responses, max_bytes = self._limits.max_responses, self._limits.max_stored_bytes
        if num_bytes > max_bytes:
            remedy = "send store: false, begin a new conversation, or raise responses.max_stored_bytes"
            refuse("over_limit", "input", num_bytes, max_bytes, remedy, unit="bytes with its response")
        new_responses, new_bytes = self._unlisted.get(owner, (max_responses, max_bytes))
        new_responses, new_bytes = new_responses + num_responses, new_bytes + num_bytes
        self._unlisted[owner] = new_responses, new_bytes
        if new_responses * _SLACK < max_responses and new_bytes * _SLACK < max_bytes:
            return
        sizes: dict[str, int] = {}
        for name, size in self._sizes(owner).items():
            response_id = name.removesuffix(_ENDED)
            sizes[response_id] = sizes.get(response_id, 0) + size
        total = sum(sizes.values())
        most_responses = max_responses - max_responses // _SLACK
        most_bytes = max(max_bytes - max_bytes // _SLACK, num_bytes)
        while sizes and (len(sizes) + num_responses > most_responses or total + num_bytes > most_bytes):
            oldest = min(sizes)
            self.remove(owner, oldest)
            total -= sizes.pop(oldest)
        self._unlisted[owner] = num_responses, num_bytes


def _path(owner: str, response_id: str) -> str:
    return f"responses/{owner}/{response_id}"


def _deleted_path(owner: str, response_id: str) -> str:
    return f"deleted/{owner}/{response_id}"

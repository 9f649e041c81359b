"""`/v1/batches`: files of requests that are answered when the engines have room. These handlers store batches and
report their state; `cluster/batch/batch_runner.py` runs them.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from manta.cluster.errors import refuse
from manta.cluster.http.endpoints.files import not_found, records_of
from manta.cluster.http.exchange.codec import decode_query
from manta.cluster.http.exchange.exchange import Exchange
from manta.cluster.http.exchange.state import AppState
from manta.cluster.protocol.batches_api import URLS, Batch
from manta.cluster.storage.records import BATCH_ID, ENDED, Records
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

MAX_METADATA = 16
"""Most metadata pairs of a batch, as in OpenAI's API."""
MAX_METADATA_KEY = 64
"""Most characters of a metadata key, as in OpenAI's API."""
MAX_METADATA_VALUE = 512
"""Most characters of a metadata value, as in OpenAI's API."""
MAX_WINDOW_S = 7 * 86_400
"""Longest completion window, in seconds."""
_WINDOW = re.compile(r"([1-9]\d{0,5})([mhd])", re.ASCII)
_UNIT_S = {"m": 60, "h": 3600, "d": 86_400}


class CreateBatchRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    """Number of minutes (m), hours (h) or days (d), up to a week. OpenAI accepts `24h` only."""
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = None
    """Accepted for OpenAI's clients and ignored; results are kept for `batches.keep_s`."""

    def check(self) -> None:
        if self.endpoint not in URLS:
            cause = f"a batch serves {' and '.join(URLS)}"
            refuse("unsupported", "endpoint", self.endpoint, tuple(URLS), cause=cause)
        if not 60 <= self.window_s <= MAX_WINDOW_S:
            refuse("wrong_value", "completion_window", self.completion_window, "like 24h, and at most 7d")
        pairs = self.metadata or {}
        if len(pairs) > MAX_METADATA:
            refuse("over_limit", "metadata", len(pairs), MAX_METADATA, "leave some out", unit="pairs")
        for key, value in pairs.items():
            if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
                bound = f"{MAX_METADATA_KEY} characters at most, and its value {MAX_METADATA_VALUE}"
                refuse("wrong_value", "metadata", key[:MAX_METADATA_KEY], bound)

    @property
    def window_s(self) -> int:
        """Length of the window in seconds; 0 if it cannot be parsed."""
        found = _WINDOW.fullmatch(self.completion_window)
        return 0 if found is None else int(found[1]) * _UNIT_S[found[2]]


class BatchList(msgspec.Struct):
    data: list[Batch]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None
    object: Literal["list"] = "list"


class BatchQuery(msgspec.Struct):
    """The query of `GET /v1/batches`."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


async def create(state: AppState, exchange: Exchange, request: CreateBatchRequest) -> Batch:
    records = records_of(state)
    file = await asyncio.to_thread(records.files.find, exchange.caller.owner, request.input_file_id)
    if file is None or file.purpose != "batch":
        bound, remedy = "your files with purpose 'batch'", "upload it to /v1/files"
        refuse("names_nothing", "input_file_id", request.input_file_id, bound, remedy)
    return await asyncio.to_thread(
        records.create_batch,
        exchange.caller.owner,
        endpoint=request.endpoint,
        input_file_id=file.id,
        completion_window=request.completion_window,
        expires_at=int(time.time()) + request.window_s,
        metadata=request.metadata,
    )


async def list_batches(state: AppState, exchange: Exchange, _: None) -> BatchList:
    records, query = records_of(state), decode_query(BatchQuery, exchange.incoming.query)
    ids = await asyncio.to_thread(records.batch_ids, exchange.caller.owner)
    if query.after is not None:
        if not BATCH_ID.fullmatch(query.after):
            refuse("names_nothing", "after", query.after, "the ids in this list", "give the last_id of a page")
        ids = [each for each in ids if each < query.after]  # the batch itself may be gone since
    page = ids[: query.limit]
    reading = (asyncio.to_thread(_listed, records, exchange.caller.owner, each) for each in page)
    found = [batch for batch in await asyncio.gather(*reading) if batch is not None]
    return BatchList(found, len(ids) > query.limit, page[0] if page else None, page[-1] if page else None)


def _listed(records: Records, owner: str, batch_id: str) -> Batch | None:
    """Returns a batch, or None if it cannot be read now, so that the list shows the others."""
    try:
        return records.batch(owner, batch_id)
    except Exception:
        logger.exception("batch %s is left out of a list", batch_id)
        return None


async def one_batch(state: AppState, exchange: Exchange, _: None) -> Batch:
    batch = await asyncio.to_thread(records_of(state).batch, exchange.caller.owner, exchange.incoming.path_parameter)
    return batch if batch is not None else not_found("batch", exchange.incoming.path_parameter)


async def cancel(state: AppState, exchange: Exchange, _: None) -> Batch:
    """Cancels a batch. The runner gives up its unanswered lines, and makes files of the answers that exist."""
    batch = await one_batch(state, exchange, None)
    if batch.status in ENDED:
        refuse("batch_has_ended", "", batch.status, place=batch.id)
    await asyncio.to_thread(records_of(state).cancel, exchange.caller.owner, batch.id)
    return await one_batch(state, exchange, None)

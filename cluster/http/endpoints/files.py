"""`/v1/files`: the inputs and results of batches, each client's own.

The handlers move contents between connection and storage in pieces; no file is ever in memory as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, BinaryIO, Literal, NoReturn, TypeVar

import msgspec
from msgspec import Meta

from manta.cluster.errors import refuse
from manta.cluster.http.endpoints.lists import page_of
from manta.cluster.http.exchange.codec import decode_query
from manta.cluster.http.exchange.exchange import Exchange
from manta.cluster.http.exchange.state import AppState
from manta.cluster.http.exchange.uploads import MAX_FORM_BYTES, UploadParser
from manta.cluster.protocol.batches_api import FileObject
from manta.cluster.storage.file_records import Upload
from manta.cluster.storage.records import Records

PIECE_BYTES = 1 << 20
"""Bytes of a file that a thread writes or reads at a time."""
PARSED_BYTES = 16 * 2**10
"""Bytes of all uploads together that are parsed in one turn of the event loop. Content that resembles boundaries costs
the parser 0.1 us per byte, and every other client waits meanwhile.
"""
MIN_KEEP_S = 3600
"""Least `expires_after`, in seconds, as in OpenAI's API."""

Result = TypeVar("Result")


class FileList(msgspec.Struct):
    data: list[FileObject]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None
    object: Literal["list"] = "list"


class FileDeleted(msgspec.Struct):
    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


class FileQuery(msgspec.Struct):
    """The query of `GET /v1/files`."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


def records_of(state: AppState) -> Records:
    """Returns the server's files and batches. Refuses with 404 if it keeps none."""
    if state.server.records is None:
        refuse(
            "no_storage",
            remedy="whoever operates it can set batch_storage to a folder",
            cause="keeps no files and runs no batches",
        )
    return state.server.records


def not_found(kind: str, name: str) -> NoReturn:
    refuse("unknown_object", f"{kind}_id", name, unit=kind)


async def upload(state: AppState, exchange: Exchange, _: None) -> FileObject:
    files = records_of(state).files
    parser = UploadParser(exchange.headers.get("content-type", ""))
    begun = await _in_storage(state, files.begin_upload, exchange.caller.owner, _max_bytes(state, exchange))
    try:
        async with exchange.incoming.room(exchange.caller.sharer, PIECE_BYTES):
            await _receive(state, exchange, parser, begun)
        return await _in_storage(state, begun.commit, parser.filename or "", _checked_fields(parser.fields))
    except BaseException:
        await asyncio.shield(_in_storage(state, begun.discard))
        raise


def _max_bytes(state: AppState, exchange: Exchange) -> int:
    """Returns the most bytes that the uploaded file can have."""
    limit = state.config.batches.max_file_bytes + MAX_FORM_BYTES
    length = exchange.headers.get("content-length", "")
    return min(int(length), limit) if length.isascii() and length.isdigit() else limit


async def _in_storage(state: AppState, function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls `function` in a thread. Refuses with 503 if the storage takes longer than `request_timeout_s`."""
    limit = state.config.request_timeout_s
    try:
        async with asyncio.timeout(limit) as timeout:
            return await asyncio.to_thread(function, *arguments)
    except TimeoutError:
        if not timeout.expired():
            raise
        cause = f"the batch storage did not answer within {limit:g} s (request_timeout_s)"
        refuse("unavailable", bound=limit, remedy="retry later", cause=cause)


async def _receive(state: AppState, exchange: Exchange, parser: UploadParser, begun: Upload) -> None:
    waiting = bytearray()
    async for piece in exchange.incoming.pieces(state.config.batches.max_file_bytes + MAX_FORM_BYTES):
        for begin in range(0, len(piece), PARSED_BYTES):
            async with state.server.parsing:
                waiting += parser.feed(piece[begin : begin + PARSED_BYTES])
                await asyncio.sleep(0)
        if len(waiting) >= PIECE_BYTES:
            await _in_storage(state, begun.write, bytes(waiting))
            waiting.clear()
    await _in_storage(state, begun.write, bytes(waiting))
    parser.finish()


def _checked_fields(fields: dict[str, str]) -> float | None:
    """Returns the seconds for which the form asks to keep the file; None if it does not.

    Raises `RequestRefused` for a value out of bounds.
    """
    purpose = fields.get("purpose")
    if purpose != "batch":
        refuse("unsupported", "purpose", str(purpose), "batch", "send 'batch'")
    seconds = fields.get("expires_after[seconds]")
    if seconds is None:
        return None
    if not seconds.isascii() or not seconds.isdigit() or int(seconds) < MIN_KEEP_S:
        refuse("wrong_value", "expires_after", seconds, f"a number of at least {MIN_KEEP_S}", place="seconds")
    return float(seconds)


async def list_files(state: AppState, exchange: Exchange, _: None) -> FileList:
    files, query = records_of(state).files, decode_query(FileQuery, exchange.incoming.query)
    found = await asyncio.to_thread(files.all_of, exchange.caller.owner)
    if query.order == "asc":
        found.reverse()
    by_id = {file.id: file for file in found if query.purpose in (None, file.purpose)}
    page, has_more = page_of(list(by_id), query.after, query.limit, "the ids in this list")
    return FileList([by_id[each] for each in page], has_more, page[0] if page else None, page[-1] if page else None)


async def one_file(state: AppState, exchange: Exchange, _: None) -> FileObject:
    file = await asyncio.to_thread(
        records_of(state).files.find, exchange.caller.owner, exchange.incoming.path_parameter
    )
    return file if file is not None else not_found("file", exchange.incoming.path_parameter)


async def content(state: AppState, exchange: Exchange, _: None) -> None:
    file = await one_file(state, exchange, None)
    try:
        opened = await asyncio.to_thread(records_of(state).files.content, exchange.caller.owner, file.id)
    except FileNotFoundError:
        not_found("file", file.id)
    with opened:
        async with exchange.incoming.room(exchange.caller.sharer, PIECE_BYTES):
            await exchange.reply.send_pieces(_pieces(state, opened), file.bytes, "application/octet-stream")


async def _pieces(state: AppState, opened: BinaryIO) -> AsyncIterator[bytes]:
    while piece := await _in_storage(state, opened.read, PIECE_BYTES):
        yield piece


async def delete_file(state: AppState, exchange: Exchange, _: None) -> FileDeleted:
    file = await one_file(state, exchange, None)
    await asyncio.to_thread(records_of(state).files.remove, exchange.caller.owner, file.id)
    return FileDeleted(file.id)

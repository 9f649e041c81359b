"""Stored responses: what `POST /v1/responses` keeps, the endpoints that fetch it, and responses in the background.

A background response is a recorded stream that nobody need read. It is stored twice: before it begins with everything
from which it can be run again, and with its recording when it has ended. The process that ran it stores its end. If all
processes died before that, whoever asks for it next runs it again, with the same seed.

Who reads a recorded stream again stores nothing. The stream of a deleted response is gone with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterator
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from manta.cluster.engine.kv_blocks import hash_blocks
from manta.cluster.engine.request import chain_root
from manta.cluster.errors import ServingError, Unavailable, refuse
from manta.cluster.http.access.request_admission import Caller, decode
from manta.cluster.http.endpoints.item_references import with_referenced
from manta.cluster.http.endpoints.lists import page_of
from manta.cluster.http.endpoints.streams import RESPONSES_PATH, write_again
from manta.cluster.http.exchange.apart import is_small
from manta.cluster.http.exchange.codec import decode_query, encode
from manta.cluster.http.exchange.exchange import (
    Exchange,
    GenerationExchange,
    Identity,
    new_stream_id,
    response_id,
)
from manta.cluster.http.exchange.recorded_engines import RecordedEngines, ReplayedEngines, record
from manta.cluster.http.exchange.recordings import Opening, Recording, decode_opening, encode_opening
from manta.cluster.http.exchange.reply import WholeReply
from manta.cluster.http.exchange.state import AppState
from manta.cluster.protocol.response_items import check_calls, input_items, with_distinct_ids
from manta.cluster.protocol.responses_api import ResponseObject, ResponsesRequest
from manta.cluster.storage.kept_responses import EndedResponse, KeptResponses, StoredResponse
from manta.structured.refusals import Refusal
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

STORE_TIMEOUT_S = 10.0
"""Seconds that storing an end may take before the answer goes out without it."""
STORE_MARGIN_S = 60.0
"""Seconds for which a background response is kept in memory beyond its deadline, so that its end can be stored."""
LOOKS, LOOK_PAUSE_S = 3, 0.5
"""Number of looks for a background response's run before it counts as lost, and the seconds between two looks. Its
recording may be on its way from one engine to another.
"""
CANCEL_TIMEOUT_S = 10.0
"""Seconds within which the process that runs a cancelled response must have ended it."""
_WITHOUT_STORAGE = {
    "previous_response_id": "send the whole conversation as input",
    "background": "leave it out",
    "store": "leave it out or send false",
}
"""Fields that need a storage, and what to do without one."""


class ResponseQuery(msgspec.Struct):
    """The query of `GET /v1/responses/{response_id}`."""

    stream: bool = False
    starting_after: Annotated[int, Meta(ge=-1)] = -1
    """Sequence number of the last event that the client has. -1 begins with the first event."""


class ItemQuery(msgspec.Struct):
    """The query of `GET /v1/responses/{response_id}/input_items`."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


class ItemList(msgspec.Struct):
    data: list[dict[str, Any]]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class ResponseDeleted(msgspec.Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


# ---- what a request keeps ------------------------------------------------------------------------------------------


class Keeping:
    """Keeps the response of one request: in the storage `kept`, if there is one, and in the memory of the connection on
    which the request came, if it came on one. `items` is the conversation that it answers. `background` are the engines
    of a response in the background; None for another one.
    """

    def __init__(
        self,
        state: AppState,
        kept: KeptResponses | None,
        exchange: GenerationExchange,
        items: list[dict[str, Any]],
        background: RecordedEngines | None,
    ) -> None:
        self._state = state
        self._kept = kept
        self._exchange = exchange
        self._items = items
        self._background = background
        self.prompt: list[int] = []
        """The tokens of the prompt; empty until it is rendered."""
        self.cache_salt: str | None = None

    @property
    def in_background(self) -> bool:
        return self._background is not None

    def keep_before(self, response: ResponseObject) -> None:
        """Has a background response stored before it begins."""
        assert self._background is not None
        self._background.before = functools.partial(self._begin, response)

    async def _begin(self, response: ResponseObject, opening: Opening) -> None:
        """Raises `RequestRefused` if the response is too large."""
        assert self._kept is not None
        await asyncio.to_thread(self._store, response, encode_opening(opening))

    def _store(self, response: ResponseObject, opening: bytes | None = None) -> None:
        assert self._kept is not None
        state, owner = self._state, self._exchange.caller.owner
        root = chain_root(state.server.prefix_scope.root(owner, self.cache_salt), self._exchange.adapter_key)
        hashes = _block_hashes(state, root, self.prompt)
        self._kept.create(owner, StoredResponse(response, self._items, opening, hashes))

    async def undo(self) -> None:
        """Removes a background response that was refused after it had been stored."""
        assert self._kept is not None
        exchange = self._exchange
        await asyncio.to_thread(self._kept.remove, exchange.caller.owner, response_id(exchange.identity.stream_id))

    async def end(self, response: ResponseObject) -> None:
        """Keeps a response that has ended; the process that ran a background response does it itself (`keep_ended`). If
        storing fails, the answer says `store: false` and the log says why.
        """
        if self._exchange.remembered is not None:
            self._exchange.remembered.note(response.id, [*self._items, *response.output])
        if self._kept is None or response.background:
            return
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await asyncio.to_thread(self._store, response)
        except Exception:
            logger.exception("response %s is not stored", response.id)
            response.store = False


async def prepared(
    state: AppState, exchange: GenerationExchange, body: ResponsesRequest
) -> tuple[ResponsesRequest, Keeping | None]:
    """Returns the body with the whole conversation as its input and with `store` decided, and what keeps its response;
    None if nothing does.

    Raises `RequestRefused` if the body asks for something to be kept that this server cannot keep.
    """
    if isinstance(exchange.engines, ReplayedEngines):  # the recorded body is prepared, and its response is kept
        return body, None
    kept = state.server.responses
    if body.background:
        exchange.identity = Identity(new_stream_id())  # ids of items begin with it
    items, is_complete = await conversation(state, exchange, body)
    if body.background and body.store is False:
        refuse("requires", "background", bound="a stored response", remedy="leave store out, or send store: true")
    stores = kept is not None and body.store is not False
    body = msgspec.structs.replace(body, store=stores)
    recorded = exchange.engines if isinstance(exchange.engines, RecordedEngines) else None
    if not is_complete or body.background or recorded is not None:
        body = msgspec.structs.replace(body, input=items)
        encoded = await state.apart(exchange, _checked, state, body)
        if body.background:
            recorded = record(state, exchange, encoded, state.config.request_timeout_s + STORE_MARGIN_S)
        elif recorded is not None:
            recorded.body = encoded
    keeps = stores or exchange.remembered is not None
    background = recorded if body.background else None
    return body, Keeping(state, kept if stores else None, exchange, items, background) if keeps else None


def _block_hashes(state: AppState, root: bytes, prompt: list[int]) -> list[bytes]:
    """Returns the hashes of a prompt's blocks if engines may keep them in files; else nothing. They keep a block only
    if it is in the prompt of a request, so the blocks of an output are among those of the next turn's prompt.
    """
    engine = state.config.engine
    if not engine.prefix_store_bytes:
        return []
    return hash_blocks(prompt, len(prompt) // engine.block_size, engine.block_size, root=root)


async def conversation(
    state: AppState, exchange: GenerationExchange, body: ResponsesRequest
) -> tuple[list[dict[str, Any]], bool]:
    """Returns the whole conversation as items, and whether the body's input holds all of it."""
    given = await with_referenced(state, exchange, body.input)
    items = await state.apart(exchange, input_items, given, exchange.identity.response_id)
    check_storage(state, exchange, body)
    if body.previous_response_id is not None:
        items = [*await earlier_items(state, exchange, body.previous_response_id), *items]
    await state.apart(exchange, check_calls, items)
    return items, given is body.input and body.previous_response_id is None


def check_storage(state: AppState, exchange: GenerationExchange, body: Any) -> None:
    """Raises `RequestRefused` if a field of the body needs a storage and this server has none."""
    if state.server.responses is None:
        for name, remedy in _WITHOUT_STORAGE.items():
            is_remembered = name == "previous_response_id" and exchange.remembered is not None
            if getattr(body, name, None) and not is_remembered:
                remedy = f"{remedy}, or ask whoever operates it to set batch_storage to a folder"
                refuse("unsupported", name, remedy=remedy, cause="this server stores no responses")


def _checked(state: AppState, body: ResponsesRequest) -> bytes:
    """Returns an encoded body with its whole conversation. Raises `RequestRefused` if it is too long."""
    encoded, limit = encode(body), state.config.max_body_bytes
    if len(encoded) > limit:
        unit, remedy = "bytes with its earlier turns", "begin a new conversation, or raise max_body_bytes"
        refuse("over_limit", "input", len(encoded), limit, remedy, unit=unit)
    decode(type(body), encoded, state.config.body)
    return encoded


async def earlier_items(state: AppState, exchange: GenerationExchange, previous: str) -> list[dict[str, Any]]:
    """Returns the conversation up to an earlier response, its output included: the latest one of the connection, or a
    stored one.
    """
    remembered, kept = exchange.remembered, state.server.responses
    items = None if remembered is None else remembered.items(previous)
    is_deleted = kept is not None and await asyncio.to_thread(kept.is_deleted, exchange.caller.owner, previous)
    if items is not None and not is_deleted:
        return _grown(exchange, items)
    stored = None if kept is None else await asyncio.to_thread(kept.find, exchange.caller.owner, previous)
    if stored is None:
        known = [] if remembered is None else ["the latest response of this connection"]
        known += [] if kept is None else ["your stored responses, of which some may have expired"]
        remedy = "send the whole conversation"
        refuse("unknown_previous_response", "previous_response_id", previous, " and ".join(known), remedy)
    response = await _current(state, exchange, stored)
    if response.status not in ("completed", "incomplete"):
        cause = f"it is {response.status}, and only an answered response can be continued"
        refuse("unfit", "previous_response_id", previous, cause=cause)
    return _grown(exchange, [*stored.items, *msgspec.to_builtins(response.output)])


def _grown(exchange: GenerationExchange, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns items that the conversation of an exchange gets in addition. It may be long now."""
    exchange.is_small = exchange.is_small and is_small(encode(items))
    return items


def keep_ended(state: AppState, recording: Recording) -> None:
    """Stores the response of a recorded stream that has ended in this process, unless it is not to be kept. A stream
    that was aborted because nobody read it has no response.
    """
    if state.server.responses is None or recording.opening.path != RESPONSES_PATH or not recording.is_ended:
        return
    stays = contextlib.ExitStack()
    if state.models.on_demand is not None:  # the model may be leaving, and its tokenizer writes the response
        stays.enter_context(state.models.on_demand.using(recording.opening.model))
    task = asyncio.ensure_future(_keep(state, recording))
    state.server.storing.add(task)
    task.add_done_callback(state.server.storing.discard)
    task.add_done_callback(lambda _: stays.close())


async def _keep(state: AppState, recording: Recording) -> None:
    try:
        body = await asyncio.to_thread(decode, ResponsesRequest, recording.opening.body, state.config.body)
        if body.store:
            await _written(state, recording)
    except ServingError:
        pass  # it failed, and only background responses are kept then
    except Exception:
        logger.exception("the response of stream %s is not stored", recording.opening.stream_id)


async def _written(state: AppState, recording: Recording) -> ResponseObject:
    """Returns the response of a recording that has ended, and stores it unless it was deleted."""
    opening, kept = recording.opening, state.server.responses
    assert kept is not None
    client, timeout_s = opening.generation.engine.client, state.config.request_timeout_s
    reply, caller = WholeReply(), Caller(client, owner=opening.owner)
    exchange = GenerationExchange(opening.stream_id, {}, caller, state.engines, reply, timeout_s)
    await write_again(state, cast(Exchange, exchange), recording, streams=False)
    response = msgspec.json.decode(reply.answer, type=ResponseObject)
    if response.background:
        ended = EndedResponse(response, [*recording.entries])
        await asyncio.to_thread(kept.end, opening.owner, ended)
        state.server.streams.may_forget(recording)
    else:
        body = await asyncio.to_thread(decode, ResponsesRequest, opening.body, state.config.body)
        items = await state.apart(exchange, input_items, body.input, response.id)
        (prompt,) = opening.generation.prompts
        hashes = _block_hashes(state, opening.generation.engine.chain_root, prompt)
        stored = StoredResponse(response, items, block_hashes=hashes)
        await asyncio.to_thread(kept.create, opening.owner, stored)
    return response


# ---- endpoints -----------------------------------------------------------------------------------------------------


async def retrieve(state: AppState, exchange: Exchange, _: None) -> ResponseObject | None:
    """Returns a response as it is now, or sends the events of a background response from a number on."""
    query = decode_query(ResponseQuery, exchange.incoming.query)
    kept, stored = await _found(state, exchange)
    if not query.stream:
        return await _current(state, exchange, stored)
    opening = _opening_of(stored, "read again as events")
    ended = await asyncio.to_thread(kept.ended, exchange.caller.owner, stored.response.id)
    if ended is None:
        recording = await _running(state, exchange, kept, opening)
    else:
        recording = Recording(opening)
        recording.entries, recording.is_ended = ended.entries, True
        recording.make_safe(len(ended.entries))
    await write_again(state, exchange, recording, query.starting_after)
    return None


async def list_items(state: AppState, exchange: Exchange, _: None) -> ItemList:
    query = decode_query(ItemQuery, exchange.incoming.query)
    _kept, stored = await _found(state, exchange)
    by_id = {item["id"]: item for item in with_distinct_ids(stored.items)}
    ids = list(by_id) if query.order == "asc" else list(by_id)[::-1]
    page, has_more = page_of(ids, query.after, query.limit, "this response's items")
    data = [by_id[each] for each in page]
    return ItemList(data, has_more, page[0] if page else None, page[-1] if page else None)


async def delete(state: AppState, exchange: Exchange, _: None) -> ResponseDeleted:
    """Removes a response, its stream and what engines keep of its prompt, and ends it if it runs in the background."""
    kept, stored = await _found(state, exchange)
    has_ended = stored.opening is None
    has_ended = has_ended or await asyncio.to_thread(kept.ended, exchange.caller.owner, stored.response.id) is not None
    await asyncio.to_thread(kept.delete, exchange.caller.owner, stored.response.id)
    if not has_ended:
        assert stored.opening is not None
        with contextlib.suppress(ServingError):  # a run that cannot be reached ends by its deadline, and is not kept
            recording = await state.server.streams.find(decode_opening(stored.opening).stream_id, exchange.caller.owner)
            if recording is not None:
                await state.server.streams.cancel(recording)
    if stored.block_hashes:
        await state.engines.drop_kept(stored.block_hashes)
    return ResponseDeleted(stored.response.id)


async def cancel(state: AppState, exchange: Exchange, _: None) -> ResponseObject:
    """Ends a background response, and returns it with what it has. One that has ended is returned as it is."""
    kept, stored = await _found(state, exchange)
    opening = _opening_of(stored, "cancelled")
    response = await _current(state, exchange, stored)
    if response.status not in ("queued", "in_progress"):
        return response
    recording = await _running(state, exchange, kept, opening)
    with _followed(state, recording) as recording:
        await state.server.streams.cancel(recording)
        try:
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                await recording.until_complete()
        except TimeoutError as error:
            cause = f"response {response.id} has not ended {CANCEL_TIMEOUT_S:g} s after it was told to"
            raise Unavailable(Refusal("unavailable", remedy="ask again", cause=cause)) from error
        return await _written(state, recording)


async def _found(state: AppState, exchange: Exchange) -> tuple[KeptResponses, StoredResponse]:
    """Returns the response that the path names. Refuses with 404 with the same words for one that never was, has
    expired, was deleted or belongs to another key.
    """
    kept = state.server.responses
    if kept is None:
        remedy = "whoever operates it can set batch_storage to a folder"
        refuse("no_storage", remedy=remedy, cause="keeps no responses")
    stored = await asyncio.to_thread(kept.find, exchange.caller.owner, exchange.incoming.path_parameter)
    if stored is None:
        refuse("unknown_response", "", exchange.incoming.path_parameter)
    return kept, stored


def _opening_of(stored: StoredResponse, what: str) -> Opening:
    if stored.opening is None:
        cause = f"only one that was created with background: true can be {what}"
        refuse("unfit", place=f"response {stored.response.id}", cause=cause)
    return decode_opening(stored.opening)


# ---- the present state of a response -------------------------------------------------------------------------------


async def _current(state: AppState, exchange: GenerationExchange, stored: StoredResponse) -> ResponseObject:
    """Returns a response as it is now. A background response whose run is lost is run again."""
    response = stored.response
    if stored.opening is None:
        return response
    assert state.server.responses is not None
    ended = await asyncio.to_thread(state.server.responses.ended, exchange.caller.owner, response.id)
    if ended is not None:
        return ended.response
    recording = await _running(state, exchange, state.server.responses, decode_opening(stored.opening))
    with _followed(state, recording) as recording:
        if recording.is_complete:
            return await _written(state, recording)
        response.status = "in_progress" if recording.entries else "queued"
        return response


async def _running(state: AppState, exchange: GenerationExchange, kept: KeptResponses, opening: Opening) -> Recording:
    """Returns the recording of a background response. If no process has it, begins it again, with a new deadline, once
    its model is loaded.

    Refuses with 404 if the response was deleted meanwhile.
    """
    for look in range(LOOKS):
        if look:
            await asyncio.sleep(LOOK_PAUSE_S)
        recording = await state.server.streams.find(opening.stream_id, opening.owner)
        if recording is not None:
            return recording
    lost = response_id(opening.stream_id)
    if await asyncio.to_thread(kept.is_deleted, opening.owner, lost):
        refuse("unknown_response", "", lost)
    logger.warning("response of stream %s was lost while it ran; it is run again", opening.stream_id)
    engine = msgspec.structs.replace(opening.generation.engine, deadline_s=state.config.request_timeout_s)
    generation = msgspec.structs.replace(opening.generation, engine=engine)
    async with state.models.named(opening.model).in_use(exchange):
        return state.server.streams.begin(msgspec.structs.replace(opening, generation=generation), is_repeated=True)


@contextlib.contextmanager
def _followed(state: AppState, recording: Recording) -> Iterator[Recording]:
    """Yields a recording that is kept up to date within the `with`, also if another process runs its request."""
    recording = state.server.streams.follow(recording)
    recording.begin_reading()
    try:
        yield recording
    finally:
        recording.end_reading()

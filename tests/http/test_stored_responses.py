"""OpenAI's Python client against responses that a live server keeps: conversations, background runs and restarts."""

from __future__ import annotations

import contextlib
import json
import pathlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import httpx
import httpx2
import msgspec
import openai
import pytest

from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.engine.kv_blocks import hash_blocks
from manta.cluster.errors import GenerationFailed, RequestRefused
from manta.cluster.http.access.keys import ApiKeys
from manta.cluster.http.app import HttpApp
from manta.cluster.http.exchange.engines import Event, Generation
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.http.exchange.recordings import NoStreams, Opening, Recording
from manta.cluster.protocol.responses_api import Reasoning, ResponseObject, TextOptions
from manta.cluster.serve_limits import ResponseLimits
from manta.cluster.storage.kept_responses import DELETED_S, EndedResponse, KeptResponses, StoredResponse
from manta.cluster.storage.storage import Storage
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.refusals import Refusal
from manta.workers.model_info import AdapterInfo
from tests.async_tests import async_test
from tests.http.test_routes import MODEL, RepeatingEngines
from tests.local_server import ThreadedServer
from tests.patience import PATIENCE_S, wait_until

KEYS = ("mine:a-secret-of-the-test", "other:another-secret-of-it")
OWNER = ApiKeys(KEYS).owner_of("mine")


def serving(storage: pathlib.Path, *settings: str) -> ThreadedServer:
    return ThreadedServer(f"batch_storage={storage}", f"api_keys={json.dumps(KEYS)}", *settings)


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("responses")


@pytest.fixture(scope="module")
def server(storage: pathlib.Path) -> Iterator[ThreadedServer]:
    started = serving(storage)
    yield started
    started.stop()


def client(server: ThreadedServer, key: str = KEYS[0]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key.partition(":")[2], max_retries=0)


def create(server: ThreadedServer, **body: Any) -> Any:
    given = {"model": server.model, "input": "Count.", "max_output_tokens": 8, "temperature": 0, **body}
    return client(server).responses.create(**given)


def ended(server: ThreadedServer, response_id: str) -> Any:
    """Polls a background response until it has ended."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        response = client(server).responses.retrieve(response_id)
        if response.status not in ("queued", "in_progress"):
            return response
        time.sleep(0.02)
    raise AssertionError(f"{response_id} is still {response.status}")


def endless(server: ThreadedServer, **body: Any) -> Any:
    """Returns a background response that goes on for long: the format cannot be completed in a few tokens."""
    schema = {"type": "string", "minLength": 100_000}
    form = {"format": {"type": "json_schema", "name": "long", "schema": schema, "strict": True}}
    return create(server, background=True, text=form, max_output_tokens=100, **body)


# ---- conversations -------------------------------------------------------------------------------------------------


def test_a_conversation_continues_by_id(server: ThreadedServer) -> None:
    first = create(server, instructions="Be brief.")
    assert first.store is True
    second = create(server, input="On.", previous_response_id=first.id)
    third = create(server, input=[{"role": "user", "content": "Stop."}], previous_response_id=second.id)
    assert third.previous_response_id == second.id
    turns: Any = [{"role": "user", "content": "Count."}, *first.output, {"role": "user", "content": "On."}]
    same = create(server, input=turns, store=False)
    assert (same.output_text, same.usage.input_tokens) == (second.output_text, second.usage.input_tokens)
    turns += [*second.output, {"role": "user", "content": "Stop."}]
    same = create(server, input=turns, store=False)
    assert (same.output_text, same.usage.input_tokens) == (third.output_text, third.usage.input_tokens)

    client(server).responses.delete(first.id)  # what follows has its conversation with it
    assert create(server, input="Stop.", previous_response_id=second.id).output_text == third.output_text


def test_a_stored_conversation_continues_over_a_websocket(server: ThreadedServer) -> None:
    first = create(server)
    given: Any = {"model": server.model, "input": "On.", "max_output_tokens": 8, "temperature": 0}
    with client(server).responses.connect() as connection:
        connection.response.create(previous_response_id=first.id, **given)
        event: Any = None
        while event is None or event.type not in ("response.completed", "response.incomplete", "error"):
            event = connection.recv()
    second = event.response
    assert (second.store, second.previous_response_id) == (True, first.id)
    turns: Any = [{"role": "user", "content": "Count."}, *first.output, {"role": "user", "content": "On."}]
    assert second.output[0].content[0].text == create(server, input=turns).output_text
    assert client(server).responses.retrieve(second.id).output_text == create(server, input=turns).output_text


def test_a_stored_conversation_is_compacted(server: ThreadedServer) -> None:
    first = create(server)
    compacted = client(server).responses.compact(model=server.model, input="On.", previous_response_id=first.id)
    turns: Any = [{"role": "user", "content": "Count."}, *first.output, {"role": "user", "content": "On."}]
    answer, whole = create(server, input=compacted.output), create(server, input=turns)
    assert (answer.output_text, answer.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)
    listed = client(server).responses.input_items.list(answer.id).data
    assert listed[0].type == "compaction"
    with pytest.raises(openai.BadRequestError, match="none of your stored responses"):
        client(server, KEYS[1]).responses.compact(model=server.model, previous_response_id=first.id)


def test_a_stored_response_equals_the_answer(server: ThreadedServer) -> None:
    answer = create(server, metadata={"a": "b"})
    assert client(server).responses.retrieve(answer.id).model_dump() == answer.model_dump()
    *_, last = create(server, stream=True)
    assert client(server).responses.retrieve(last.response.id).model_dump() == last.response.model_dump()


def test_input_items_come_in_pages(server: ThreadedServer) -> None:
    first = create(server, input=[{"role": "user", "content": text} for text in ("a", "b", "c")])
    second = create(server, input="d", previous_response_id=first.id)
    items = client(server).responses.input_items
    answered = first.output_text
    texts = [item.content[0].text for item in items.list(second.id, order="asc", limit=2)]  # type: ignore[union-attr]
    assert texts == ["a", "b", "c", answered, "d"]
    page = items.list(second.id, limit=2)
    assert [item.content[0].text for item in page.data] == ["d", answered]  # type: ignore[union-attr]
    assert page.has_more
    rest = items.list(second.id, after=page.data[-1].id or "")
    assert [item.content[0].text for item in rest.data] == ["c", "b", "a"]  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="none of this response's items"):
        items.list(second.id, after="msg_1")


def test_deleted_foreign_expired_and_unknown_are_the_same(server: ThreadedServer, storage: pathlib.Path) -> None:
    kept, deleted = create(server), create(server)
    client(server).responses.delete(deleted.id)
    expired = f"resp_{0:014x}{kept.id[-24:]}"
    folder = storage / "responses" / OWNER
    (folder / expired).write_bytes((folder / kept.id).read_bytes())
    names = {kept.id: KEYS[1], deleted.id: KEYS[0], expired: KEYS[0], "resp_1": KEYS[0], "../files": KEYS[0]}
    for name, key in names.items():
        asked = client(server, key).responses
        calls: list[Any] = [asked.retrieve, asked.delete, asked.cancel, asked.input_items.list]
        for call in calls:
            with pytest.raises(openai.NotFoundError) as caught:
                call(name)
            assert caught.value.code in ("response_not_found", "unknown_url")
        with pytest.raises(openai.BadRequestError) as refused:
            asked.create(model=server.model, input="a", previous_response_id=name)
        assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    assert client(server).responses.retrieve(kept.id).id == kept.id


def test_unstored_responses_leave_nothing_behind(server: ThreadedServer) -> None:
    answer = create(server, store=False)
    assert answer.store is False
    with pytest.raises(openai.NotFoundError):
        client(server).responses.retrieve(answer.id)
    with pytest.raises(openai.BadRequestError, match="background is only allowed with a stored response"):
        create(server, store=False, background=True)
    with pytest.raises(openai.BadRequestError, match="max_body_bytes"):
        create(server, input="a" * (ServeConfig().max_body_bytes - 300), background=True)


def test_a_resumable_stream_is_stored_without_its_reader(server: ThreadedServer) -> None:
    body = {"model": server.model, "input": "Count.", "max_output_tokens": 40, "temperature": 0, "stream": True}
    headers = {"authorization": f"Bearer {KEYS[0].partition(':')[2]}", "x-resumable-s": "60"}
    with httpx.stream("POST", f"{server.url}/v1/responses", json=body, headers=headers) as answer:
        stream_id = answer.headers["x-stream-id"]
    until, found = time.monotonic() + PATIENCE_S, None
    while found is None and time.monotonic() < until:
        with contextlib.suppress(openai.NotFoundError):
            found = client(server).responses.retrieve(stream_id.replace("strm_", "resp_"))
    assert found is not None
    assert found.output_text == create(server, max_output_tokens=40).output_text


# ---- deletion ------------------------------------------------------------------------------------------------------


def resumable(server: ThreadedServer, **body: Any) -> str:
    """Asks for a stream that can be resumed, and returns its id once it has ended."""
    given = {"model": server.model, "input": "Count.", "max_output_tokens": 8, "stream": True, **body}
    with httpx.stream("POST", f"{server.url}/v1/responses", json=given, headers=resuming()) as answer:
        events = b"".join(answer.iter_bytes())
        assert b"event: response.completed" in events or b"event: response.incomplete" in events
        return answer.headers["x-stream-id"]


def resuming() -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[0].partition(':')[2]}", "x-resumable-s": "60"}


def assert_gone(server: ThreadedServer, response_id: str) -> None:
    """Neither the response nor its stream is there, and no conversation continues it."""
    stream = response_id.replace("resp_", "strm_")
    for _ in range(2):
        for path in (f"/v1/streams/{stream}", f"/v1/responses/{response_id}", f"/v1/responses/{response_id}?stream=1"):
            assert httpx.get(f"{server.url}{path}", headers=resuming()).status_code == 404, path
        again = httpx.post(
            f"{server.url}/v1/responses",
            json={"model": server.model, "input": "Count.", "stream": True},
            headers={**resuming(), "last-event-id": f"{stream}:0"},
        )
        assert again.status_code == 404
        with pytest.raises(openai.BadRequestError) as refused:
            create(server, previous_response_id=response_id)
        assert refused.value.code == "previous_response_not_found"


def test_a_deleted_response_does_not_come_back_with_its_stream(server: ThreadedServer) -> None:
    stream = resumable(server)
    found = client(server).responses.retrieve(stream.replace("strm_", "resp_"))
    later = create(server, input="On.", previous_response_id=found.id)
    client(server).responses.delete(found.id)
    assert_gone(server, found.id)
    assert create(server, input="Stop.", previous_response_id=later.id).status in ("completed", "incomplete")


def test_a_deleted_background_response_has_no_stream(server: ThreadedServer) -> None:
    begun, done = endless(server), create(server, background=True)
    ended(server, done.id)
    for each in (begun, done):
        client(server).responses.delete(each.id)
        assert_gone(server, each.id)


def test_a_stream_that_is_read_again_writes_nothing(server: ThreadedServer, storage: pathlib.Path) -> None:
    stream = resumable(server)
    stored = storage / "responses" / OWNER / stream.replace("strm_", "resp_")

    def only_reads() -> bool:
        stored.unlink(missing_ok=True)  # as if others had taken its room
        for _ in range(2):
            assert httpx.get(f"{server.url}/v1/streams/{stream}", headers=resuming()).status_code == 200
        return not stored.exists()

    wait_until(only_reads)  # the process that ran the stream may still write what it ended with


def test_a_connection_does_not_remember_a_deleted_response(server: ThreadedServer) -> None:
    given: Any = {"model": server.model, "input": "On.", "max_output_tokens": 8, "temperature": 0}
    with client(server).responses.connect() as connection:
        connection.response.create(**given)
        event: Any = None
        while event is None or event.type not in ("response.completed", "response.incomplete"):
            event = connection.recv()
        client(server).responses.delete(event.response.id)
        connection.response.create(previous_response_id=event.response.id, **given)
        refused: Any = connection.recv()
        assert (refused.type, refused.error.code) == ("error", "previous_response_not_found")


# ---- background ----------------------------------------------------------------------------------------------------


def test_a_background_response_runs_without_a_reader(server: ThreadedServer) -> None:
    begun = create(server, background=True)
    assert (begun.status, begun.output, begun.background) == ("queued", [], True)
    found = ended(server, begun.id)
    expected = create(server)
    assert (found.output_text, found.status) == (expected.output_text, expected.status)
    assert found.usage == expected.usage
    continued = create(server, input="On.", previous_response_id=begun.id)
    assert continued.output_text == create(server, input="On.", previous_response_id=expected.id).output_text
    assert client(server).responses.cancel(begun.id).status == found.status


def test_background_events_are_read_from_any_number(server: ThreadedServer) -> None:
    live = list(create(server, background=True, stream=True, max_output_tokens=20))
    assert [event.type for event in live[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.sequence_number for event in live] == list(range(len(live)))
    response_id = live[0].response.id
    final = ended(server, response_id)
    assert live[-1].response.model_dump() == final.model_dump()
    asked = client(server).responses
    for after in (0, 5, len(live) - 2):
        rest = list(asked.retrieve(response_id, stream=True, starting_after=after))
        assert [event.model_dump() for event in rest] == [event.model_dump() for event in live[after + 1 :]]
    assert len(list(asked.retrieve(response_id, stream=True))) == len(live)

    begun = endless(server)
    text = ""
    for event in asked.retrieve(begun.id, stream=True):
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert ended(server, begun.id).output_text == text


def test_a_background_response_is_cancelled_and_deleted(server: ThreadedServer) -> None:
    begun = endless(server)
    cancelled = client(server).responses.cancel(begun.id)
    assert cancelled.status in ("cancelled", "incomplete")  # it may have ended just before
    assert ended(server, begun.id).status == cancelled.status
    *_, last = client(server).responses.retrieve(begun.id, stream=True)
    assert last.response.status == cancelled.status  # type: ignore[union-attr]

    begun = endless(server)
    client(server).responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        client(server).responses.retrieve(begun.id)
    plain = create(server)
    with pytest.raises(openai.BadRequestError, match="background: true"):
        client(server).responses.cancel(plain.id)
    with pytest.raises(openai.BadRequestError, match="background: true"):
        client(server).responses.retrieve(plain.id, stream=True)


def test_a_refused_background_response_is_not_stored(server: ThreadedServer, storage: pathlib.Path) -> None:
    folder = storage / "responses" / OWNER
    create(server)
    before = {each.name for each in folder.iterdir()}
    with pytest.raises(openai.BadRequestError):
        create(server, background=True, temperature=9)
    schema = {"type": "json_schema", "name": "a", "schema": {"$ref": "#/nowhere"}}
    with pytest.raises(openai.BadRequestError, match="nowhere"):
        create(server, background=True, text={"format": schema})
    assert {each.name for each in folder.iterdir()} == before


def test_another_server_runs_lost_responses_again(server: ThreadedServer, storage: pathlib.Path) -> None:
    """It has the storage and no recordings, like a server after a restart."""
    folder = storage / "responses" / OWNER
    plain = create(server)
    done = create(server, background=True, temperature=1, max_output_tokens=20)
    expected = ended(server, done.id)
    (folder / f"{done.id}.ended").unlink()  # as if the first server had been killed before it ended
    limits = ("responses.keep_s=1000", "responses.max_responses=3", "responses.max_stored_bytes=100000")
    second = serving(storage, *limits, "streams.max_client_bytes=16000")
    try:
        assert client(second).responses.retrieve(plain.id).model_dump() == plain.model_dump()
        again = client(second).responses.retrieve(done.id)
        assert again.status in ("queued", "in_progress", expected.status)
        found = ended(second, done.id)
        assert (found.output_text, found.status) == (expected.output_text, expected.status)
        assert [item.id for item in found.output] == [item.id for item in expected.output]
        with pytest.raises(openai.RateLimitError, match="or leave background out"):  # it takes all the room
            create(second, background=True, input="Count. " * 500)
        ended(second, create(second, background=True).id)  # the other one ended and is stored, so it gives way
        kept = [create(second) for _ in range(3)]
        assert {each.name for each in folder.iterdir()} == {each.id for each in kept}
    finally:
        second.stop()


def test_a_run_of_another_version_is_refused_in_words(server: ThreadedServer, storage: pathlib.Path) -> None:
    done = create(server, background=True)
    ended(server, done.id)
    path = storage / "responses" / OWNER / done.id
    stored = msgspec.json.decode(path.read_bytes(), type=StoredResponse)
    stored.opening = msgspec.msgpack.encode({"stream_id": done.id.replace("resp_", "strm_")})
    path.write_bytes(msgspec.json.encode(stored))
    assert client(server).responses.retrieve(done.id).id == done.id
    path.with_name(f"{done.id}.ended").unlink()
    with pytest.raises(openai.InternalServerError, match="another version of this server"):
        client(server).responses.retrieve(done.id)
    client(server).responses.delete(done.id)
    with pytest.raises(openai.NotFoundError):
        client(server).responses.retrieve(done.id)


class Failing:
    """A generation that ends in an error after its first event."""

    num_choices, usages, ended_at = 1, (), 1

    async def __aiter__(self) -> AsyncIterator[Event]:
        yield Event(index=0, text="abc", token_ids=[1])
        raise GenerationFailed(Refusal("engine_failed", cause="the engine failed twice"))

    def close(self) -> None:
        pass


class FailingStreams(NoStreams):
    """Recorded streams that have failed as soon as they begin."""

    def begin(self, opening: Opening, meter: Any = None, is_repeated: bool = False) -> Recording:
        self.recording = Recording(opening)
        self.recording.is_ended = True
        return self.recording

    async def find(self, stream_id: str, owner: str) -> Recording | None:
        return self.recording

    def follow(self, recording: Recording) -> Recording:
        return recording

    def read(self, recording: Recording) -> Generation:
        return cast(Generation, Failing())


@async_test
async def test_a_deleted_response_takes_its_kept_blocks_along(tmp_path: pathlib.Path) -> None:
    """Those of its prompt, and so those of the answers in it."""
    engine = EngineConfig(model="demo", prefix_store_bytes=1 << 20, block_size=8, adapters={"tuned": "folder"})
    config, engines = ServeConfig(engine=engine, batch_storage=str(tmp_path)), RepeatingEngines()
    tuned = AdapterInfo(path="folder", digest="ab" * 16, rank=8, num_bytes=1)
    engines.loaded = msgspec.structs.replace(MODEL, adapters={"tuned": tuned})
    app = HttpApp(config, Tokenizer("demo"), engines, Metrics("demo"))
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(cast(Any, app)), trust_env=False)
    asked = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)
    for model, fields in (("demo", {}), ("demo", {"stream": True}), ("tuned", {})):
        response = await asked.responses.create(model=model, input="Count to ten. " * 5, **cast(Any, fields))
        response_id = [event async for event in response][-1].response.id if "stream" in fields else response.id
        (prompt,), root = engines.request.prompts, engines.request.engine.chain_root
        engines.dropped = ()
        await asked.responses.delete(response_id)
        assert engines.dropped == tuple(hash_blocks(prompt, len(prompt) // 8, 8, root=root))
        assert engines.dropped


@async_test
async def test_a_background_response_that_fails_says_why(tmp_path: pathlib.Path) -> None:
    config = ServeConfig(engine=EngineConfig(model="demo"), batch_storage=str(tmp_path))
    app = HttpApp(config, Tokenizer("demo"), RepeatingEngines(), Metrics("demo"), streams=FailingStreams())
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(cast(Any, app)), trust_env=False)
    asked = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)
    begun = await asked.responses.create(model="demo", input="Count.", background=True)
    assert begun.status == "queued"
    for _ in range(2):  # the second time from the storage
        found = await asked.responses.retrieve(begun.id)
        assert (found.status, found.output_text) == ("failed", "abc")
        assert found.error is not None
        assert (found.error.code, found.error.message) == ("server_error", "the engine failed twice")
        names = [event.type async for event in await asked.responses.retrieve(begun.id, stream=True)]
        assert (names[0], names[-1]) == ("response.created", "response.failed")
    with pytest.raises(openai.BadRequestError, match="is failed"):
        await asked.responses.create(model="demo", input="On.", previous_response_id=begun.id)


# ---- bounds --------------------------------------------------------------------------------------------------------


def response(number: int, age_s: float = 0.0) -> ResponseObject:
    """Returns a response with a greater id for a greater number."""
    at = int((time.time() - age_s) * 1e6) + number
    return ResponseObject(
        id=f"resp_{at:014x}{number:024x}",
        created_at=0,
        model="m",
        instructions=None,
        max_output_tokens=None,
        max_tool_calls=None,
        metadata={},
        parallel_tool_calls=True,
        previous_response_id=None,
        reasoning=Reasoning(),
        background=True,
        store=True,
        temperature=1.0,
        text=TextOptions(),
        tool_choice="auto",
        tools=[],
        top_p=1.0,
        user=None,
        safety_identifier=None,
        prompt_cache_key=None,
    )


def limited(**limits: Any) -> ServeConfig:
    return ServeConfig(responses=ResponseLimits(**limits))


def test_the_oldest_responses_make_room(tmp_path: pathlib.Path) -> None:
    kept = KeptResponses(Storage(str(tmp_path)), limited(max_responses=40, max_stored_bytes=80_000))
    given = [response(number) for number in range(100)]
    items = [{"type": "message", "role": "user", "content": "a" * 2000}]
    folder = tmp_path / "responses" / "me"
    for each in given:
        kept.create("me", StoredResponse(each, items))
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 80_000
        assert len(list(folder.iterdir())) <= 40
    names = sorted(path.name for path in folder.iterdir())
    assert names == [each.id for each in given[-len(names) :]]
    assert len(names) > 20
    kept.create("another", StoredResponse(given[0], items))  # has room of its own
    assert kept.find("another", given[0].id) is not None
    with pytest.raises(RequestRefused, match="max_stored_bytes"):
        kept.create("me", StoredResponse(response(101), [{"content": "a" * 80_000}]))


def test_expired_responses_are_removed(tmp_path: pathlib.Path) -> None:
    kept = KeptResponses(Storage(str(tmp_path)), limited(keep_s=3600))
    old, new = response(1, age_s=4000), response(2, age_s=3000)
    for each in (old, new):
        kept.create("me", StoredResponse(each, [], b"opening"))
        kept.end("me", EndedResponse(each, []))
    assert kept.find("me", old.id) is None
    kept.remove_expired()
    assert sorted(path.name for path in (tmp_path / "responses" / "me").iterdir()) == [new.id, f"{new.id}.ended"]


def test_a_late_end_restores_no_deleted_response(tmp_path: pathlib.Path) -> None:
    kept = KeptResponses(Storage(str(tmp_path)), limited())
    begun = response(1)
    kept.create("me", StoredResponse(begun, [], b"opening"))
    kept.remove("me", begun.id)
    kept.end("me", EndedResponse(begun, []))
    assert not list((tmp_path / "responses" / "me").iterdir())


def test_a_late_writer_restores_no_deleted_response(tmp_path: pathlib.Path) -> None:
    kept = KeptResponses(Storage(str(tmp_path)), limited())
    deleted = response(1)
    opened = StoredResponse(deleted, [])
    kept.create("me", opened)
    kept.delete("me", deleted.id)
    kept.create("me", opened)
    (tmp_path / "responses" / "me" / deleted.id).write_bytes(msgspec.json.encode(opened))  # its writer died after that
    assert kept.find("me", deleted.id) is None
    kept.create("another", opened)  # another client's response of this id has nothing to do with it
    assert kept.find("another", deleted.id) is not None


def test_a_deletion_is_forgotten_with_what_a_late_writer_left(tmp_path: pathlib.Path) -> None:
    kept = KeptResponses(Storage(str(tmp_path)), limited())
    old, new = response(1), response(2)
    for each in (old, new):
        kept.delete("me", each.id)
        (tmp_path / "responses" / "me").mkdir(parents=True, exist_ok=True)
        (tmp_path / "responses" / "me" / each.id).write_bytes(msgspec.json.encode(StoredResponse(each, [])))
    config = limited()
    longest_s = DELETED_S + config.streams.max_unread_s + config.request_timeout_s
    (tmp_path / "deleted" / "me" / old.id).write_text(str(int(time.time() - longest_s - 1)))
    kept.remove_expired()
    assert [path.name for path in (tmp_path / "deleted" / "me").iterdir()] == [new.id]
    assert [kept.find("me", each.id) for each in (old, new)] == [None, None]

"""WebSocket connections to `/v1/responses`: OpenAI's client and the `websockets` client against live servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode

from manta.cluster.http import websockets as websockets_module
from manta.cluster.http.exchange.remembered import RememberedResponses
from manta.cluster.serve_limits import KeyLimits, ListenerLimits
from tests.async_tests import async_test
from tests.local_server import LocalServer, answer, local_server
from tests.patience import PATIENCE_S, until
from tests.server import shared_server

KEY = "a-secret-of-the-test"
LONG: Any = {
    "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "string", "minLength": 10**5}}},
    "max_output_tokens": 100,
}
"""Fields of a request whose answer cannot end before its 100 tokens."""
MISSING_CALL: Any = [{"type": "function_call_output", "call_id": "call_1", "output": "none"}]


# ---- OpenAI's client ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened() -> Iterator[Any]:
    client = openai.OpenAI(base_url=f"{shared_server().url}/v1", api_key="none", max_retries=0)
    with client.responses.connect() as connection:
        yield connection


def request(**body: Any) -> dict[str, Any]:
    """Returns a short greedy request with other fields."""
    given = {"input": "Count.", "temperature": 0, "max_output_tokens": 8, "store": False}
    return {"model": shared_server().model, **given, **body}


def ask(connection: Any, **body: Any) -> list[Any]:
    """Sends a request and returns its events."""
    connection.response.create(**request(**body))
    return until_end(connection)


def ask_with(connection: Any, more: dict[str, Any], **body: Any) -> list[Any]:
    """The same, with fields that OpenAI's client does not know."""
    connection.send_raw(json.dumps({"type": "response.create", **request(**body), **more}))
    return until_end(connection)


def until_end(connection: Any) -> list[Any]:
    events = []
    for event in connection:
        events.append(event)
        if event.type in ("response.completed", "response.incomplete", "response.failed", "error"):
            break
    return events


def by_post(**body: Any) -> Any:
    client = openai.OpenAI(base_url=f"{shared_server().url}/v1", api_key="none", max_retries=0)
    return client.responses.create(**request(**body))


def told(events: list[Any]) -> Any:
    """Returns what events tell: their types, deltas of one text as one, and the answer without what two equal answers
    do not share.
    """
    types = list(dict.fromkeys(event.type for event in events))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    drawn = {"id": True, "created_at": True, "completed_at": True, "output": {"__all__": {"id"}}, "usage": True}
    return types, text, events[-1].response.model_dump(exclude=drawn)


def test_the_events_are_those_of_the_stream() -> None:
    streamed = list(by_post(stream=True))
    with opened() as connection:
        events = ask(connection)
    assert told(events) == told(streamed)
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_messages_are_answered_one_after_the_other() -> None:
    texts = ["Count.", "Stop.", "On."]
    expected = [by_post(input=text).output_text for text in texts]
    with opened() as connection:
        for text in texts:
            connection.response.create(
                model=shared_server().model, input=text, temperature=0, max_output_tokens=8, store=False
            )
        answers = [until_end(connection)[-1].response for _ in texts]
    assert [answer.output[0].content[0].text for answer in answers] == expected
    assert len({answer.id for answer in answers}) == 3


def test_a_connection_continues_its_latest_response() -> None:
    with opened() as connection:
        first = ask(connection)[-1].response
        second = ask(connection, input="On.", previous_response_id=first.id)[-1].response
        assert (second.previous_response_id, second.store) == (first.id, False)
        turns: Any = [{"role": "user", "content": "Count."}, *first.output, {"role": "user", "content": "On."}]
        whole = by_post(input=turns)
        assert second.output_text == whole.output_text
        assert second.usage.input_tokens == whole.usage.input_tokens
        (refused,) = ask(connection, input="On.", previous_response_id=first.id)
        assert (refused.status, refused.error.code) == (400, "previous_response_not_found")
        assert "send the whole conversation" in refused.error.message
        third = ask(connection, input="Stop.", previous_response_id=second.id)[-1].response
    with opened() as other:
        (refused,) = ask(other, input="On.", previous_response_id=third.id)
        assert refused.error.code == "previous_response_not_found"


def test_items_of_the_latest_response_can_be_referred_to() -> None:
    with opened() as connection:
        first = ask(connection)[-1].response
        turns: Any = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "On."}]
        second = ask(connection, input=turns)[-1].response
        whole = by_post(input=[*first.output, {"role": "user", "content": "On."}])
        assert (second.output_text, second.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)
    with opened() as other:
        (refused,) = ask(other, input=turns)
        assert (refused.status, refused.error.param) == (400, "input[0].id")


def test_a_prewarm_fills_the_prefix_cache_and_says_nothing() -> None:
    text = "Count to nine, and then count back to one, as slowly as you can."
    with opened() as connection:
        events = ask_with(connection, {"generate": False}, input=text)
        first = events[-1].response
        assert [event.type for event in events] == ["response.created", "response.in_progress", "response.completed"]
        assert (first.output, first.usage.output_tokens) == ([], 0)
        second = ask_with(connection, {"generate": False}, input=[], instructions="Be brief.")[-1]
        assert second.type == "response.completed"
        third = ask(connection, input=text)[-1].response
        assert third.usage.input_tokens_details.cached_tokens > 0
        warm = ask_with(connection, {"generate": False}, input=[{"role": "user", "content": text}])[-1].response
        fourth = ask(connection, input=[], previous_response_id=warm.id)[-1].response
        assert fourth.output_text == third.output_text


def test_unknown_fields_are_named_in_the_first_event() -> None:
    with opened() as connection:
        events = ask_with(connection, {"colour": "red", "client_metadata": {"a": "b"}})
        assert events[0].model_extra["x-manta-ignored"] == "colour, client_metadata"
        assert "x-manta-ignored" not in (events[1].model_extra or {})


def test_what_is_not_enforced_is_named_in_the_first_event() -> None:
    schema = {"type": "object", "properties": {"a": {"$dynamicRef": "#nowhere"}}}
    with opened() as connection:
        events = ask(connection, text={"format": {"type": "json_schema", "name": "n", "schema": schema}})
        assert "$dynamicRef" in events[0].model_extra["x-manta-not-enforced"]
        assert "x-manta-not-enforced" not in (events[1].model_extra or {})


def test_a_failed_continuation_is_forgotten() -> None:
    with opened() as connection:
        first = ask(connection)[-1].response
        (refused,) = ask(connection, temperature=9)  # another conversation
        assert refused.error.param == "temperature"
        (refused,) = ask(connection, input=MISSING_CALL, previous_response_id=first.id)
        assert (refused.status, refused.error.param) == (400, "input[2].call_id")
        assert "none of the function calls before it" in refused.error.message
        (refused,) = ask(connection, input="On.", previous_response_id=first.id)
        assert refused.error.code == "previous_response_not_found"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"background": True}, "background", "POST"),
        ({"stream_id": "a"}, "stream_id", "open a connection"),
        ({"model": "other"}, "model", "is not served"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "exceeds"),
    ],
)
def test_refusals_are_error_events(body: dict[str, Any], param: str, words: str) -> None:
    with opened() as connection:
        (refused,) = ask(connection, **body)
        assert refused.type == "error"
        assert refused.status == (404 if param == "model" else 400)
        assert refused.error.param == param
        assert words in refused.error.message
        assert refused.error.code
        assert ask(connection)[-1].type in ("response.completed", "response.incomplete")


# ---- messages and their limits -----------------------------------------------------------------------------------


def url_of(server: LocalServer) -> str:
    return f"ws://127.0.0.1:{server.port}/v1/responses"


def message(server: LocalServer, **body: Any) -> str:
    """Returns a request whose greedy answer is longer than its 4 tokens; one that is drawn may end before them."""
    given = {"type": "response.create", "model": server.model, "input": "Count.", "max_output_tokens": 4}
    return json.dumps({**given, "temperature": 0, **body})


async def received(client: ClientConnection) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        return json.loads(await client.recv())


async def ended(client: ClientConnection) -> Any:
    """Returns the last event of the response that is running."""
    while (event := await received(client))["type"] not in ("response.completed", "response.incomplete", "error"):
        pass
    return event


async def begun(server: LocalServer, client: ClientConnection) -> None:
    """Sends a request with a long answer, and returns once it runs."""
    await client.send(message(server, **LONG))
    while (event := await received(client))["type"] != "response.output_text.delta":
        assert event["type"] != "error", event


async def closed(client: ClientConnection) -> tuple[int, str]:
    """Returns code and reason with which the server closes a connection, after what it still sends."""
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(ConnectionClosed):
            while True:
                await client.recv()
        await client.wait_closed()
    assert client.close_code is not None
    return client.close_code, client.close_reason or ""


@async_test
async def test_whoever_leaves_ends_the_generation() -> None:
    async with local_server() as server:
        async with connect(url_of(server)) as client:
            await begun(server, client)
        await server.until_idle()
        assert await server.num_aborted() == 1
        await until(lambda: server.num_connections == 0)


@async_test
async def test_a_cancelled_response_ends_and_the_connection_goes_on() -> None:
    async with local_server() as server, connect(url_of(server)) as client:
        await client.send(json.dumps({"type": "response.cancel"}))  # nothing runs
        await client.send(message(server, store=False))
        first = (await ended(client))["response"]
        await begun(server, client)
        await client.send(json.dumps({"type": "response.cancel"}))
        event = await ended(client)
        assert (event["type"], event["error"]["code"]) == ("error", "response_cancelled")
        await server.until_idle()
        assert await server.num_aborted() == 1
        await client.send(message(server, previous_response_id=first["id"], store=False))
        assert (await ended(client))["response"]["previous_response_id"] == first["id"]


# ---- which response a message means ------------------------------------------------------------------------------

CANCEL = json.dumps({"type": "response.cancel"})


def send_together(client: ClientConnection, *messages: str) -> None:
    """Sends messages in one TCP segment, if they are short."""
    frames = (Frame(Opcode.TEXT, each.encode()).serialize(mask=True) for each in messages)
    client.transport.write(b"".join(frames))


@async_test
async def test_a_cancel_ends_the_response_whose_message_came_just_before_it() -> None:
    async with local_server() as server, connect(url_of(server)) as client:
        for number in range(5):
            send_together(client, message(server, event_id=f"mine_{number}", **LONG), CANCEL)
            event = await ended(client)
            assert (event["error"]["code"], event["error"]["event_id"]) == ("response_cancelled", f"mine_{number}")
        send_together(client, message(server), message(server, event_id="second", **LONG), CANCEL, message(server))
        lasts = [await ended(client) for _ in range(3)]
        assert [each["type"] for each in lasts] == ["response.incomplete", "error", "response.incomplete"]
        assert lasts[1]["error"]["event_id"] == "second"
        await server.until_idle()


@async_test
async def test_a_cancel_of_a_response_that_has_ended_does_nothing() -> None:
    async with local_server() as server, connect(url_of(server)) as client:
        for _ in range(20):
            await client.send(message(server))
            event = await ended(client)
            assert event["type"] == "response.incomplete"
            late = json.dumps({"type": "response.cancel", "response_id": event["response"]["id"]})
            send_together(client, *random.choice(((CANCEL, message(server)), (message(server), late))))
            assert (await ended(client))["type"] == "response.incomplete"


@async_test
async def test_a_cancel_may_name_the_running_response() -> None:
    async with local_server() as server, connect(url_of(server)) as client:
        await client.send(message(server, **LONG))
        created = (await received(client))["response"]["id"]
        cancel = json.dumps({"type": "response.cancel", "response_id": created})
        send_together(client, message(server), cancel)
        event = await ended(client)
        assert (event["error"]["code"], event["response_id"]) == ("response_cancelled", created)
        assert (await ended(client))["type"] == "response.incomplete"


WRONG_CANCELS: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"response_id": 5}, "response_id", "expected `str | null`"),
    ({"response": "resp_1"}, "response", "unknown"),
    ({"event_id": "a" * 513}, "event_id", "512"),
)


@async_test
async def test_a_wrong_cancel_is_refused_in_its_turn() -> None:
    async with local_server() as server, connect(url_of(server)) as client:
        for fields, param, words in WRONG_CANCELS:
            send_together(client, message(server, **LONG), json.dumps({"type": "response.cancel", **fields}))
            assert (await ended(client))["type"] == "response.incomplete"
            event = await received(client)
            assert (event["status"], event["error"]["param"]) == (400, param)
            assert words in event["error"]["message"]


class RandomClient:
    """Sends random messages in segments of random lengths, and knows how the answer to each may end."""

    def __init__(self, server: LocalServer, client: ClientConnection, draw: random.Random) -> None:
        self._server = server
        self._client = client
        self._draw = draw
        self._num_sent = 0
        self._expected: deque[tuple[str, set[str]]] = deque()
        """The event id of each message that is still to be answered, and the codes of the errors with which it may end.
        "" stands for a response.
        """
        self._seen = ["resp_never"]
        """Ids of responses."""

    def send(self) -> None:
        kinds, segment = (self._create, self._create, self._cancel, self._cancel, self._wrong), list[str]()
        for _ in range(self._draw.randint(1, 6)):
            segment.append(self._draw.choice(kinds)(is_first=not segment))
        send_together(self._client, *segment)

    @property
    def num_waiting(self) -> int:
        return len(self._expected)

    async def read(self, at_most: int) -> None:
        """Reads the last events of up to `at_most` messages, and checks whom they answer."""
        for _ in range(min(at_most, len(self._expected))):
            name, codes = self._expected.popleft()
            event = await self._last_event()
            error = event.get("error", {"code": "", "event_id": name})
            assert (error["event_id"], error["code"] in codes) == (name, True), (name, codes, event)

    async def _last_event(self) -> Any:
        last = ("response.completed", "response.incomplete", "error")
        while (event := await received(self._client))["type"] not in last:
            if event["type"] == "response.created":
                self._seen.append(event["response"]["id"])
        return event

    def _create(self, is_first: bool) -> str:
        fields = {**LONG, "max_output_tokens": 20} if self._draw.random() < 0.5 else {}
        return message(self._server, event_id=self._expect(""), store=False, **fields)

    def _wrong(self, is_first: bool) -> str:
        if self._draw.random() < 0.5:
            return message(self._server, event_id=self._expect("invalid_value"), temperature=9)
        return json.dumps({"type": "response.cancel", "event_id": self._expect("unknown_parameter"), "id": "a"})

    def _cancel(self, is_first: bool) -> str:
        if self._draw.random() < 0.3:  # a response that has ended, that runs, or that never was
            for _, codes in self._expected:
                codes.add("response_cancelled")
            return json.dumps({"type": "response.cancel", "response_id": self._draw.choice(self._seen)})
        if self._expected:
            codes = self._expected[-1][1]
            codes.add("response_cancelled")
            if not is_first:  # its message is in this segment, so that it cannot have ended
                codes.discard("")
        return CANCEL

    def _expect(self, code: str) -> str:
        self._num_sent += 1
        self._expected.append((f"event_{self._num_sent}", {code}))
        return f"event_{self._num_sent}"


@async_test
async def test_each_message_has_one_last_event_in_the_order_of_the_messages() -> None:
    draw = random.Random(1)
    async with local_server() as server, connect(url_of(server)) as client:
        sender = RandomClient(server, client, draw)
        for _ in range(30):
            sender.send()
            await sender.read(at_most=draw.randint(0, 10))
            await sender.read(at_most=sender.num_waiting - 8)
        await sender.read(at_most=1000)
        await server.until_idle()


WRONG: tuple[tuple[str | bytes, str | None, str], ...] = (
    ("{", None, "not valid JSON"),
    ("[]", None, "object"),
    ('{"type": "session.update"}', "type", "session.update"),
    ('{"type": "response.create", "model": "a", "input": [], "generate": false}', "input", "empty"),
    (b"\xff\xfe", None, "UTF-8"),
)


@async_test
async def test_a_wrong_message_leaves_the_connection_open() -> None:
    async with narrow() as server, connecting(server) as client:
        for sent, param, words in WRONG:
            await client.send(sent)
            event = await received(client)
            assert (event["type"], event["status"], event["error"]["param"]) == ("error", 400, param)
            assert words in event["error"]["message"]
        await client.send(message(server))
        assert (await ended(client))["type"] != "error"


@contextlib.asynccontextmanager
async def narrow(**options: Any) -> AsyncIterator[LocalServer]:
    """A server with a key, small messages and little patience."""
    given: dict[str, Any] = {"api_keys": (f"mine:{KEY}",), "max_body_bytes": 1000, "client_timeout_s": 1.0}
    async with local_server(**{**given, **options}) as server:
        yield server


def connecting(server: LocalServer, key: str = KEY, **options: Any) -> connect:
    return connect(url_of(server), additional_headers={"authorization": f"Bearer {key}"}, **options)


@async_test
async def test_a_handshake_is_checked_like_a_request() -> None:
    async with narrow() as server:
        for client, status, code in (
            (connecting(server, "another-key-of-nobody"), 401, "invalid_api_key"),
            (connecting(server, origin="https://evil.example"), 403, "forbidden_origin"),  # type: ignore[arg-type]
            (connect(url_of(server).replace("responses", "nothing")), 404, "unknown_url"),
            (connect(url_of(server).replace("responses", "messages")), 405, "method_not_allowed"),
        ):
            with pytest.raises(InvalidStatus) as caught:
                await client
            assert caught.value.response.status_code == status
            assert json.loads(caught.value.response.body)["error"]["code"] == code
        status, body = await server.get("/v1/responses")
        assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
        await until(lambda: server.num_connections == 0)
    async with local_server() as server:
        status, body = await server.get("/v1/responses")
        assert (status, json.loads(body)["error"]["code"]) == (426, "upgrade_required")
        server.ingress._app.begin_drain()
        with pytest.raises(InvalidStatus) as caught:
            await connect(url_of(server))
        assert caught.value.response.status_code == 503


HEAD = "GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
SECURED = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
WRONG_HANDSHAKES = (
    (f"{HEAD}\r\n", 400, "must be '13'"),
    (f"{HEAD}Sec-WebSocket-Version: 13\r\n\r\n", 400, "Sec-WebSocket-Key"),
    (f"{HEAD}{SECURED}X-Long: {'a' * 9000}\r\n\r\n", 431, "the limit is 8000"),
    (f"{HEAD}{SECURED}\r\n".replace("/v1/responses", f"/v1/responses?{'a' * 8100}"), 431, "the limit is 8000"),
    (f"{HEAD}{SECURED}\r\n".replace("GET", "POST"), 400, "not POST over 1.1"),
    (f"{HEAD}{SECURED}\r\n".replace("HTTP/1.1", "HTTP/1.0"), 400, "not GET over 1.0"),
)


@async_test
async def test_a_wrong_handshake_is_refused() -> None:
    async with local_server() as server:
        for sent, status, words in WRONG_HANDSHAKES:
            reader, writer = await server.connect()
            writer.write(sent.encode())
            found, body = await answer(reader, writer)
            assert found == status, body
            assert words in json.loads(body)["error"]["message"]
        reader, writer = await server.connect()
        writer.write(f"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n{HEAD}{SECURED}\r\n".encode())
        await asyncio.wait_for(reader.read(-1), PATIENCE_S)  # either is refused, and the connection ends
        writer.close()
        await until(lambda: server.num_connections == 0)


@async_test
async def test_rate_limits_count_each_message() -> None:
    async with narrow(key_limits={"mine": KeyLimits(requests_per_minute=1)}) as server, connecting(server) as client:
        await client.send(message(server))
        assert (await ended(client))["type"] != "error"
        await client.send(message(server))
        event = await ended(client)
        assert (event["status"], event["error"]["code"]) == (429, "rate_limit_exceeded")


@async_test
async def test_messages_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websockets_module, "MAX_WAITING", 2)
    async with narrow() as server:
        async with connecting(server) as client:  # the limit is one byte less
            await client.send("x" * 1001)
            code, reason = await closed(client)
            assert (code, "1001" in reason) == (1009, True)
        async with connecting(server) as client:
            await begun(server, client)
            for _ in range(2):  # together they would exceed the limit
                await client.send(message(server, user="x" * 500))
            await client.send(message(server, event_id="third"))
            assert [(await ended(client))["type"] for _ in range(2)] == ["response.incomplete"] * 2
            event = await received(client)
            assert (event["status"], event["error"]["code"]) == (429, "too_many_messages")
            assert "max_body_bytes" in event["error"]["message"]
            event = await received(client)
            assert (event["status"], event["error"]["event_id"]) == (429, "third")
            assert "2 messages" in event["error"]["message"]
        monkeypatch.setattr(websockets_module, "MAX_REFUSED", 3)
        async with connecting(server) as client:
            await begun(server, client)
            send_together(client, *[message(server)] * 6)
            code, reason = await closed(client)
            assert (code, "5 messages" in reason) == (1008, True)
            await server.until_idle()
        async with connecting(server) as client:  # the first frame of a message whose rest never comes
            client.transport.write(b"\x01\x82\x00\x00\x00\x00ab")
            code, reason = await closed(client)
            assert (code, "client_timeout_s" in reason) == (1008, True)
        await until(lambda: server.num_connections == 0)
    async with narrow(max_body_bytes=8000, max_bodies_bytes=3000) as server, connecting(server) as client:
        client.transport.write(b"\x01\xfe\x0f\xa0\x00\x00\x00\x00" + b"a" * 3500)
        code, reason = await closed(client)
        assert (code, "max_bodies_bytes" in reason) == (1013, True)


@async_test
async def test_a_connection_ends_after_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websockets_module, "MAX_OPEN_S", 0.2)
    async with local_server() as server, connect(url_of(server)) as client:
        event = await received(client)
        assert (event["status"], event["error"]["code"]) == (400, "websocket_connection_limit_reached")
        assert (await closed(client))[0] == 1000


@async_test
async def test_a_resting_connection_gives_way_to_a_new_one() -> None:
    two = ListenerLimits(max_connections_per_address=2)
    async with (
        local_server(listener=two) as server,
        connect(url_of(server)) as resting,
        connect(url_of(server)) as running,
    ):
        await begun(server, running)
        status, _ = await server.post(max_tokens=1)
        assert status == 200
        assert (await closed(resting))[0] == 1013
        assert (await ended(running))["type"] == "response.incomplete"


@async_test
async def test_a_server_that_stops_finishes_the_response() -> None:
    async with local_server() as server, connect(url_of(server)) as resting, connect(url_of(server)) as running:
        await begun(server, running)
        closing = asyncio.ensure_future(server.ingress._listener.close())
        assert (await closed(resting))[0] == 1012
        assert (await ended(running))["type"] == "response.incomplete"
        assert (await closed(running))[0] == 1012
        await closing


def test_memories_have_a_bound_together() -> None:
    others = RememberedResponses(max_bytes=133)
    first, second = others.of_connection("one"), others.of_connection("one")
    first.note("resp_1", [{"content": "a" * 30}])
    second.note("resp_2", [{"content": "b" * 30}])
    assert (first.items("resp_1"), second.items("resp_1")) == ([{"content": "a" * 30}], None)
    second.note("resp_3", [{"content": "c" * 40}])
    assert (first.items("resp_1"), second.items("resp_2")) == (None, None)
    assert second.items("resp_3") == [{"content": "c" * 40}]
    second.note("resp_4", [{"content": "d" * 200}])
    assert second.items("resp_4") is None
    assert others.num_bytes == 0

"""No body makes the application fail, whatever stands in the place of one of its values.

The suite sends a sample, `make prove` every body, and `make fuzz ARGS=--http` sends them to a live server.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import random
from collections.abc import AsyncIterator

import pytest

from benchmarks.processes import free_port
from manta.cluster.config import ServeConfig
from manta.cluster.http.routes import ROUTES
from manta.cluster.serve.listening.listener import Listener
from tests.async_tests import async_test
from tests.conftest import PROVE
from tests.fuzz.http import shapes, sockets
from tests.fuzz.http.connection import Connection, connect, encoded, request
from tests.http.test_routes import App

NUM_BODIES, NUM_MESSAGES = 300, 30
SEED = 3


@contextlib.asynccontextmanager
async def served(folder: pathlib.Path) -> AsyncIterator[int]:
    app = App(batch_storage=str(folder), log_requests=False)
    listener = Listener(app.app, ServeConfig(port=free_port()))
    await listener.ensure_listening()
    yield listener.config.port
    listener.force_exit = True
    await listener.close()


def drawn(are_messages: bool, count: int) -> list[shapes.Case]:
    """Returns a sample that the seed determines, or everything."""
    found = [case for case in shapes.cases("demo") if case.path.startswith("ws:") == are_messages]
    return found if PROVE else random.Random(SEED).sample(found, count)


@async_test
async def test_a_value_of_another_type_is_answered_or_refused(tmp_path: pathlib.Path) -> None:
    async with served(tmp_path) as port:
        for case in drawn(are_messages=False, count=NUM_BODIES):
            connection = await connect(port, [])
            await connection.send(request(case.path, encoded(shapes.short(case))))
            answer = await connection.answer()
            assert answer.status < 500, (str(case), answer.body[:300])
            if answer.status == 200 and case.path == "/v1/responses":
                await check_stored(connection, json.loads(answer.body.partition(b"event:")[0] or b"{}").get("id"))
            connection.close()


async def check_stored(connection: Connection, response_id: str | None) -> None:
    """Checks that a stored response can be read again with its conversation."""
    for path in (f"/v1/responses/{response_id}", f"/v1/responses/{response_id}/input_items") if response_id else ():
        await connection.send(request(path, b"", "GET"))
        assert (await connection.answer()).status == 200, path


@async_test
async def test_a_message_with_a_value_of_another_type_is_answered_or_refused(tmp_path: pathlib.Path) -> None:
    async with served(tmp_path) as port:
        for case in drawn(are_messages=True, count=NUM_MESSAGES):
            event = await sockets.last_event(port, encoded(shapes.short(case)), [])
            assert sockets.status_of(event) < 500, (str(case), event)


@async_test
async def test_frames_of_all_kinds_leave_the_server_answering(tmp_path: pathlib.Path) -> None:
    async with served(tmp_path) as port:
        generator = random.Random(SEED)
        for _ in range(15):
            await sockets.send_frames(port, generator, [])
        event = await sockets.last_event(port, b'{"type": "response.create", "model": "demo", "input": "a"}', [])
        assert sockets.status_of(event) == 200, event


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/responses", {"input": [{"content": "a"}]}, "input[0].role"),
        ("/v1/responses", {"input": [{"role": "nobody", "content": "a"}]}, "input[0].role"),
        ("/v1/responses", {"input": [{"role": "user", "content": "a", "id": []}]}, "input[0].id"),
        ("/v1/responses", {"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"),
        ("/v1/responses", {"input": [{"type": "reasoning", "content": [{"text": 5}]}]}, "input[0].content[0]"),
        ("/v1/responses/compact", {"input": [{"content": "a"}]}, "input[0].role"),
        (
            "/v1/responses",
            {"input": "a", "tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "allowed_tools"}},
            "tool_choice.tools",
        ),
    ],
)
@async_test
async def test_what_failed_is_refused_by_name(path: str, fields: dict, param: str, tmp_path: pathlib.Path) -> None:
    async with served(tmp_path) as port:
        connection = await connect(port, [])
        await connection.send(request(path, encoded({"model": "demo", **fields})))
        answer = await connection.answer()
        connection.close()
    assert (answer.status, json.loads(answer.body)["error"]["param"]) == (400, param), answer.body


@async_test
async def test_a_message_without_content_is_shown_with_an_empty_one(tmp_path: pathlib.Path) -> None:
    async with served(tmp_path) as port:
        connection = await connect(port, [])
        fields = {"model": "demo", "input": [{"role": "user", "content": None}]}
        await connection.send(request("/v1/responses", encoded(fields)))
        response_id = json.loads((await connection.answer()).body)["id"]
        await connection.send(request(f"/v1/responses/{response_id}/input_items", b"", "GET"))
        (item,) = json.loads((await connection.answer()).body)["data"]
        connection.close()
    assert item["content"] == [{"type": "input_text", "text": ""}]


def test_every_type_of_body_has_its_shapes() -> None:
    found = {case.path.removeprefix("ws:") for case in shapes.cases("demo")}
    assert found == {route.path for route in ROUTES if route.body is not None}
    names = {case.place for case in shapes.cases("demo") if case.path == "/v1/responses"}
    for place in (
        "input.*.content of reasoning is an integer",
        "input.*.role is missing",
        "tools.*.name of function is a list",
    ):
        assert any(name.startswith(place) for name in names), sorted(names)[:50]

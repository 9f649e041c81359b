"""No body holds the ingress's event loop: the largest of every type are worked on elsewhere, or refused."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec import inspect

from benchmarks.processes import free_port
from manta.cluster.config import ServeConfig
from manta.cluster.errors import RequestRefused
from manta.cluster.http.routes import ROUTES
from manta.cluster.protocol.body_size import body_size, check_body_size
from manta.cluster.serve.listening.listener import Listener
from manta.cluster.serve_limits import BodyLimits
from tests.conftest import PROVE
from tests.fuzz.http.shapes import bodies
from tests.http.test_routes import MODEL, App
from tests.local_server import local_server
from tests.loop_turns import TurnClock, timed
from tests.patience import PATIENCE_S

TURN_S = 0.1
"""Most processor seconds of one turn of the event loop. Bodies that held it took seconds."""
PART = 1 if PROVE else 16
"""The suite sends bodies of this part of the largest size."""
MOST_BYTES = (8 * 2**20 - 1000) // PART
MOST_CHARACTERS = MOST_BYTES if PROVE else 50_000
"""Tokenising a text takes long, but never in the event loop (`tests/http/test_small_bodies.py`)."""
MOST_VALUES, MOST_MEMBERS = 2**20 // PART - 100, 2**19 // PART - 100


# ---- what is counted -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, "b": [1, 2, {"c": None}]},
        ["a,b", 'c":{', "\\", '\\"', "\\\\", '","', ""],
        {'"': {"\\": ['"']}, "": [[], {}, [[]]]},
        ["{[:,", {"a:b": "c,d"}] * 20_000,
        "x" * 100_000,
        ['"' * 3, "\\" * 5] * 10_000,
    ],
)
def test_values_and_members_are_counted_as_a_decoder_finds_them(value: Any) -> None:
    def num(value: Any) -> tuple[int, int]:
        items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        inner = [num(item) for item in items]
        if not isinstance(value, dict | list):
            return 0, 0
        values = 1 + max(0, len(items) - 1) + sum(each[0] for each in inner)
        return values, 1 + len(items) * isinstance(value, dict) + sum(each[1] for each in inner)

    for text in (json.dumps(value), json.dumps(value, indent=2), json.dumps(value, ensure_ascii=False)):
        assert tuple(body_size(text.encode())) == num(value)


def test_what_a_text_holds_is_no_value() -> None:
    code = "if (a[0] < {b: c[1], d}) { return [1, 2, 3]; }\n" * 100_000
    check_body_size(json.dumps({"prompt": code}).encode(), BodyLimits())
    with pytest.raises(RequestRefused, match="lists, objects and members of objects") as caught:
        check_body_size(json.dumps([[]] * 2**19).encode(), BodyLimits())
    assert caught.value.refusal.bound == 2**19


# ---- what the event loop does meanwhile ----------------------------------------------------------------------------


class Server(NamedTuple):
    port: int
    clock: TurnClock

    def post(self, path: str, body: bytes) -> tuple[int, bytes, float]:
        """Returns status and body of the answer, and the longest turn of the event loop meanwhile."""
        self.clock.reset()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.request("POST", path, body)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, content, self.clock.longest_s


@contextlib.asynccontextmanager
async def served(folder: str) -> AsyncIterator[int]:
    """Serves the application with a model of long contexts, whose answers cost nothing."""
    app = App(batch_storage=folder, log_requests=False)
    app.engines.loaded = msgspec.structs.replace(MODEL, max_model_len=2**20)
    listener = Listener(app.app, ServeConfig(port=free_port()))
    await listener.ensure_listening()
    yield listener.config.port
    await listener.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = str(tmp_path_factory.mktemp("stored"))
    with timed(lambda: served(folder)) as (port, clock):
        yield Server(port, clock)


def largest(kind: Any) -> Iterator[str]:
    """Yields the largest JSON texts that may stand for a type, one for each of its forms."""
    match kind:
        case inspect.UnionType():
            for member in kind.types:
                yield from largest(member)
        case inspect.StrType():
            yield json.dumps("a, b " * (MOST_CHARACTERS // 5))
        case inspect.ListType() | inspect.VarTupleType():
            yield from _lists(kind.item_type)
        case inspect.DictType():
            yield "{" + ",".join(f'"{number}":1' for number in range(MOST_MEMBERS)) + "}"
        case inspect.AnyType():
            yield "[" + ",".join(["[]"] * MOST_MEMBERS) + "]"


def _lists(kind: Any) -> Iterator[str]:
    for name, item in (("IntType", "5"), ("StrType", '"b"'), ("ListType", "[5]")):
        kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
        if any(type(each).__name__ == name for each in kinds):
            num_items = min(MOST_MEMBERS if "[" in item else MOST_VALUES, MOST_BYTES // (len(item) + 1))
            yield "[" + ",".join([item] * num_items) + "]"
    if isinstance(kind, inspect.DictType | inspect.AnyType | inspect.StructType):
        yield "[" + ",".join(["{}"] * MOST_MEMBERS) + "]"
        yield "[" + ",".join(['{"role":"user","content":"a"}'] * (MOST_MEMBERS // 4)) + "]"


def largest_bodies() -> list[Any]:
    """Returns, for every field of every route's body that may be long, a body with the most of it."""
    found = []
    for route in ROUTES:
        if route.body is None:
            continue
        info = inspect.type_info(route.body)
        if isinstance(info, inspect.ListType):
            texts = enumerate(largest(info))
            found += [pytest.param(route.path, text.encode(), id=f"{route.path} {number}") for number, text in texts]
            continue
        assert isinstance(info, inspect.StructType)
        least = bodies(route.body, "demo")[0]
        for field in info.fields:
            for number, text in enumerate(largest(field.type)):
                rest = json.dumps({name: value for name, value in least.items() if name != field.encode_name})
                body = f'{{"{field.encode_name}":{text},{rest[1:]}'.replace(",}", "}")
                found.append(pytest.param(route.path, body.encode(), id=f"{route.path} {field.encode_name} {number}"))
    return found


@pytest.mark.few(8)
@pytest.mark.parametrize("path", [route.path for route in ROUTES if route.body is not None])
def test_the_largest_bodies_of_every_type_leave_the_event_loop_free(server: Server, path: str) -> None:
    for case in largest_bodies():
        if case.values[0] != path:
            continue
        status, content, longest_s = server.post(path, case.values[1])
        assert status < 500, (case.id, content[:300])
        assert longest_s < TURN_S, case.id


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"])
def test_fields_that_nobody_knows_leave_the_event_loop_free(server: Server, path: str) -> None:
    """Many of them are refused at the top of a body, and ignored within."""
    least = bodies(next(route.body for route in ROUTES if route.path == path), "demo")[0]
    unknown = {f"unknown{number}": 1 for number in range(MOST_MEMBERS // 2)}
    status, content, longest_s = server.post(path, json.dumps({**least, **unknown}).encode())
    assert (status, longest_s < TURN_S) == (400, True), (content[:300], longest_s)
    if isinstance(least.get("messages"), list):
        within = {**least, "messages": [{**least["messages"][0], **unknown}]}
        status, content, longest_s = server.post(path, json.dumps(within).encode())
        assert (status < 500, longest_s < TURN_S) == (True, True), (content[:300], longest_s)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"f{number}",
            "parameters": {"type": "object", "properties": {f"p{each}": {"type": "string"} for each in range(100)}},
        },
    }
    for number in range(128)
]
TURNS = [{"role": role, "content": "Hello there."} for role in ("user", "assistant")]
ADMISSIBLE: dict[str, tuple[str, dict[str, Any]]] = {
    "4,000 messages": ("/v1/chat/completions", {"messages": TURNS * 2000}),
    "4,000 messages of Anthropic": ("/v1/messages", {"messages": [*TURNS * 1999, TURNS[0]], "max_tokens": 2}),
    "counted messages": ("/v1/messages/count_tokens", {"messages": [*TURNS * 1999, TURNS[0]]}),
    "4,000 messages of Ollama": ("/api/chat", {"messages": TURNS * 2000, "stream": False}),
    "4,000 messages as tokens": ("/tokenize", {"messages": TURNS * 2000, "return_token_strs": True}),
    "a text as tokens": ("/tokenize", {"prompt": "some words " * 100_000, "return_token_strs": True}),
    "tokens as text": ("/detokenize", {"tokens": [5, 9, 17] * 100_000}),
    "128k token ids": ("/v1/completions", {"prompt": [5, 9] * 2**16}),
    "1,024 prompts": ("/v1/completions", {"prompt": ["Hello there."] * 1024, "n": 2}),
    "2,048 items": ("/v1/responses", {"input": TURNS * 1024}),
    "2,048 items to compact": ("/v1/responses/compact", {"input": TURNS * 1024}),
    "tools": ("/v1/chat/completions", {"messages": TURNS[:1], "tools": TOOLS, "tool_choice": "none"}),
    "equal stop tokens": ("/v1/completions", {"prompt": "a", "n": 100, "stop_token_ids": [7] * 1_000_000}),
    "template values": (
        "/v1/chat/completions",
        {"messages": TURNS[:1], "chat_template_kwargs": {f"k{number}": 1 for number in range(1024)}},
    ),
}


@pytest.mark.parametrize("name", ADMISSIBLE)
def test_long_requests_are_answered_and_leave_the_event_loop_free(server: Server, name: str) -> None:
    path, fields = ADMISSIBLE[name]
    status, content, longest_s = server.post(path, json.dumps({"model": "demo", **fields}).encode())
    assert status == 200, content[:300]
    assert longest_s < TURN_S


def test_long_requests_leave_the_engines_event_loop_free() -> None:
    """The ingress sends them on, and an engine's process takes them, in one event loop here."""
    with timed(lambda: local_server(max_num_sequences=128)) as (local, clock):
        server = Server(local.port, clock)
        for fields in (
            {"prompt": [5, 9], "n": 100, "stop_token_ids": [7] * 1_000_000},
            {"prompt": [5, 9], "n": 100, "stop_token_ids": [*range(1, 300)] * 20},
            {"prompt": [5, 9], "n": 100, "allowed_token_ids": [*range(300)] * 2000},
            {"prompt": [[5, 9]] * 512, "n": 2},
        ):
            body = json.dumps(local.body(**fields, max_tokens=1)).encode()
            status, content, longest_s = server.post("/v1/completions", body)
            assert status == 200, content[:300]
            assert longest_s < TURN_S

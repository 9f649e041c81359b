"""An endpoint is a row of the route table and its handler: one that only this test has is served in this process, with
the real application and tokenizer, without Ray. No engine serves it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest

from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.engine.engine import Engine
from manta.cluster.engine.request import FinishStatus, Usage
from manta.cluster.engine.stats import EngineStats
from manta.cluster.errors import Unavailable, refuse
from manta.cluster.http.app import HttpApp
from manta.cluster.http.exchange.engines import Event, GenerationRequest
from manta.cluster.http.exchange.exchange import Exchange
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.http.exchange.state import AppState, Route
from manta.cluster.http.routes import ROUTES
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.constraint import ConstraintSpec
from manta.structured.refusals import Refusal
from manta.workers.model_info import ModelInfo
from manta.workers.step import TokenLogprobs
from tests.checkpoints import checkpoint

MODEL = ModelInfo(
    folder="demo",
    vocab_size=512,
    max_model_len=128,
    eos_token_ids=(0,),
    num_blocks=1,
    block_size=16,
    kv_cache_bytes=1,
    kv_cache_dtype="float32",
    dtype="float32",
    platform="none",
    kernels="none",
    load_seconds=0.0,
)


NUM_SCORED = 100
"""Tokens of a prompt whose probabilities the engines below give."""


class Repeating:
    """Answers each prompt with `text`, twice, in `n` choices, and if it `scores` with the probabilities of the prompt's
    last tokens.
    """

    ended_at = 1

    def __init__(self, prompts: list[list[int]], text: str, n: int = 1, scores: bool = False) -> None:
        self.num_choices = n * len(prompts)
        self.usages = [Usage(len(prompt), 2, 0) for prompt in prompts]
        self._text = text
        self._scores = [TokenLogprobs(1, -1.0, 1, [], [])] * NUM_SCORED if scores else None

    async def __aiter__(self) -> AsyncIterator[Event]:
        for index in range(self.num_choices):
            yield Event(index=index, text=self._text, token_ids=[1], prompt_logprobs=self._scores)
            yield Event(index=index, text=self._text, token_ids=[1], finish=FinishStatus.FINISHED_LENGTH)

    def close(self) -> None:
        pass


class RepeatingEngines:
    """In place of engines: they say one text, and nobody watches them. `request` is the last one, and `dropped` are
    the hashes of the blocks that were to be removed.
    """

    request: GenerationRequest

    loaded = MODEL

    async def submit(self, request: GenerationRequest, meter: Any = None) -> Repeating:
        self.request = request
        params = request.engine.params
        return Repeating(request.prompts, "abc", params.n, scores=params.prompt_logprobs == 0)

    async def resolve(self, spec: ConstraintSpec, client: str = "") -> tuple[ConstraintSpec, list[str]]:
        return spec, []

    async def model(self) -> ModelInfo:
        return self.loaded

    dropped: tuple[bytes, ...] = ()

    async def drop_kept(self, hashes: list[bytes]) -> None:
        self.dropped = (*self.dropped, *hashes)

    num_held = 0
    answering: list[EngineStats] | None = None

    async def stats(self) -> list[EngineStats]:
        if self.answering is None:
            raise Unavailable(Refusal("unavailable", cause="no engine answers: there is none"))
        return self.answering

    async def check_reachable(self) -> None:
        pass


class CountRequest(msgspec.Struct, forbid_unknown_fields=True):
    text: str

    def check(self) -> None:
        if not self.text:
            refuse("empty", "text", remedy="give at least one character")


class CountResponse(msgspec.Struct):
    name: str
    num_tokens: int


async def count(state: AppState, exchange: Exchange, request: CountRequest) -> CountResponse:
    if exchange.incoming.path_parameter == "nobody":
        refuse("unknown_object", "name", exchange.incoming.path_parameter, unit="counter")
    return CountResponse(exchange.incoming.path_parameter, len(state.tokenizer.encode(request.text)))


COUNT = Route(
    "POST",
    "/v1/count/{name}",
    count,
    "Tokens of a text",
    body=CountRequest,
    answer=CountResponse,
    errors=(404,),
    logged=True,
)
KEY = {"authorization": "Bearer a-secret-of-the-test"}
ERROR = {"message": "wrong", "type": "not_found_error", "param": None, "code": None}
FOR_OPERATORS = dataclasses.replace(COUNT, path="/v1/operators/{name}", for_operators=True)


class App:
    """The application with the route of this test, asked without a socket, perhaps below a prefix."""

    def __init__(self, root_path: str = "", **options: Any) -> None:
        self.root_path = root_path
        config = self.config = ServeConfig(engine=EngineConfig(model="demo"), **options)
        self.tokenizer = Tokenizer("demo")
        self.engines = RepeatingEngines()
        self.metrics = Metrics("demo")
        routes = (*ROUTES, COUNT, FOR_OPERATORS)
        self.app = HttpApp(config, self.tokenizer, self.engines, self.metrics, routes=routes)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        return asyncio.run(self.send(method, path, body, **headers))

    async def send(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, root_path=self.root_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", trust_env=False) as client:
            content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            return await client.request(method, path, content=content, headers=headers)


def test_a_row_is_all_that_an_endpoint_needs() -> None:
    app = App()
    answer = app.ask("POST", "/v1/count/a/b", {"text": "hello there"})
    expected = {"name": "a/b", "num_tokens": len(app.tokenizer.encode("hello there"))}
    assert (answer.status_code, answer.json()) == (200, expected)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize(
    ("body", "param"), [({"text": ""}, "text"), ({"texts": "a"}, "texts"), ({}, "text"), (b"{", None)]
)
def test_its_body_is_decoded_and_checked(body: Any, param: str | None) -> None:
    answer = App().ask("POST", "/v1/count/x", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_its_errors_are_answered_in_one_shape() -> None:
    app = App(max_body_bytes=100)
    for method, path, body, status in (
        ("POST", "/v1/count/nobody", {"text": "a"}, 404),
        ("GET", "/v1/count/x", None, 405),
        ("POST", "/v1/counted/x", {"text": "a"}, 404),
        ("POST", "/v1/count/x", {"text": "a" * 100}, 413),
    ):
        answer = app.ask(method, path, body)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}], "stream": False}),
    ],
)
def test_a_request_takes_the_models_sampling_parameters_unless_it_names_its_own(path: str, body: dict) -> None:
    app = App()
    app.engines.loaded = msgspec.structs.replace(
        MODEL, sampling_defaults={"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    )
    assert app.ask("POST", path, body | {"model": "demo"}).status_code == 200
    params = app.engines.request.engine.params
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.9, 20)
    own = {"options": {"temperature": 0.0}} if path.startswith("/api/") else {"temperature": 0.0}
    assert app.ask("POST", path, body | own | {"model": "demo"}).status_code == 200
    params = app.engines.request.engine.params
    assert (params.temperature, params.top_p, params.top_k) == (0.0, 0.9, 20)


def test_it_is_documented() -> None:
    document = App().ask("GET", "/openapi.json").json()
    operation = document["paths"]["/v1/count/{name}"]["post"]
    assert operation["summary"] == COUNT.summary
    assert set(operation["responses"]) == {
        "200",
        "400",
        "401",
        "403",
        "404",
        "405",
        "415",
        "408",
        "413",
        "429",
        "500",
        "503",
    }
    assert [parameter["name"] for parameter in operation["parameters"]] == ["name"]
    for content, value in (
        (operation["requestBody"]["content"], {"text": "a"}),
        (operation["responses"]["200"]["content"], {"name": "a", "num_tokens": 1}),
        (operation["responses"]["404"]["content"], {"error": ERROR}),
    ):
        schema = {**content["application/json"]["schema"], "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(value)


def test_public_routes_need_no_key_others_do() -> None:
    app = App(api_keys=("team:a-secret-of-the-test",))
    assert app.ask("POST", "/v1/count/x", {"text": "a"}).status_code == 401
    assert app.ask("POST", "/v1/count/x", {"text": "a"}, **KEY).status_code == 200
    assert app.ask("GET", "/health").status_code == 503  # no engine answers
    assert app.ask("GET", "/openapi.json").status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_says_what_the_engines_do(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the start of the first engine to its end."""
    app = App()
    fine = Engine(EngineConfig(model=str(checkpoint("llama")), kv_cache_bytes=2**20)).stats()
    answers = []
    for engines in ([], [fine], [], [msgspec.structs.replace(fine, alive=False)]):
        monkeypatch.setattr(RepeatingEngines, "answering", engines)
        answer = app.ask("GET", path)
        answers.append(answer.json()["error"]["message"] if answer.status_code == 503 else answer.json()["status"])
    assert answers == [
        "no engine has answered this server yet: Serve starts one",
        "ok",
        "no engine answers any more: those that ran have ended, and Serve starts another one",
        "every engine that answers has failed, and Serve replaces it",
    ]


def test_only_marked_routes_are_logged() -> None:
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    app, handler = App(), Handler()
    logger = logging.getLogger("manta.requests")
    logger.addHandler(handler)
    try:
        app.ask("POST", "/v1/count/x", {"text": "a"})
        app.ask("POST", "/v1/count/x", {})
        app.ask("POST", "/tokenize", {"prompt": "a"})
        app.ask("GET", "/v1/models")
        App(root_path="/two").ask("POST", "/two/v1/count/x", {"text": "a"})
    finally:
        logger.removeHandler(handler)
    logged = [(line["path"], line["status"]) for line in map(json.loads, lines)]
    assert logged == [("/v1/count/x", 200), ("/v1/count/x", 400), ("/two/v1/count/x", 200)]


@pytest.mark.parametrize("given", ["/two", "/two/", "/v1"])
def test_every_path_works_below_a_prefix(given: str) -> None:
    """As Serve's proxies tell an application with a `route_prefix`, and any ASGI server one that is mounted."""
    app, root = App(root_path=given), given.rstrip("/")
    body = {"model": "demo", "prompt": "a"}
    assert app.ask("POST", f"{root}/v1/completions", body).json()["choices"][0]["text"] == "abcabc"
    assert app.ask("GET", f"{root}/v1/models/demo").json()["id"] == "demo"
    assert app.ask("POST", f"{root}/v1/count/{root[1:]}", {"text": "a"}).json()["name"] == root[1:]
    assert app.ask("OPTIONS", f"{root}/v1/models").headers["allow"] == "GET, POST, HEAD, OPTIONS"
    nothing = app.ask("GET", f"{root}/nothing")
    assert nothing.status_code == 404
    assert f"there is nothing at {root}/nothing" in nothing.json()["error"]["message"]
    assert f"POST {root}/v1/completions" in nothing.json()["error"]["message"]
    wrong = app.ask("DELETE", f"{root}/v1/models")
    assert (wrong.status_code, wrong.json()["error"]["message"][: len(root) + 10]) == (405, f"{root}/v1/models")


def test_below_a_prefix_every_link_leads_below_it() -> None:
    app = App(root_path="/two")
    home = app.ask("GET", "/two").json()
    assert home == app.ask("GET", "/two/").json()
    assert "GET /two/v1/models" in home["endpoints"]
    assert "curl http://localhost/two/v1/chat/completions" in home["example"]
    for path in (home["docs"], home["openapi"]):
        assert path.startswith("/two/")
        assert app.ask("GET", path).status_code == 200
    document = app.ask("GET", "/two/openapi.json").json()
    assert document["servers"] == [{"url": "/two"}]
    assert "servers" not in App().ask("GET", "/openapi.json").json()
    for page in ("/two", "/two/docs"):
        text = app.ask("GET", page, accept="text/html").text
        links = re.findall(r'href="([^"]+)"', text)
        assert links
        assert all(link.startswith("/two/") for link in links)
    assert "POST /two/v1/completions" in text


def test_a_proxy_that_strips_the_prefix_is_understood() -> None:
    answered = []

    async def ask() -> None:
        async def send(message: dict[str, Any]) -> None:
            answered.append(message)

        scope = {"type": "http", "method": "GET", "path": "/v1/models", "root_path": "/two", "headers": []}
        await App().app(scope, ask_nothing, send)

    messages = iter([{"type": "http.request", "body": b"", "more_body": False}])

    async def ask_nothing() -> dict[str, Any]:
        for message in messages:
            return message
        return await asyncio.Future()  # the client stays

    asyncio.run(ask())
    assert answered[0]["status"] == 200


def test_the_application_answers_without_a_cluster() -> None:
    app = App()
    body = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}
    whole = app.ask("POST", "/v1/chat/completions", body).json()
    assert whole["choices"][0]["message"]["content"] == "abcabc"
    assert whole["usage"]["completion_tokens"] == 2
    streamed = app.ask("POST", "/v1/completions", {"model": "demo", "prompt": "a", "stream": True})
    chunks = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    assert chunks.pop() == "[DONE]"
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == "abcabc"
    assert app.ask("GET", "/v1/models/demo").json()["max_model_len"] == MODEL.max_model_len

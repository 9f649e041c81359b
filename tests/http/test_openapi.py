"""`/openapi.json` beside a live server: each error that can be provoked is documented, and its body fits the schema.

`tests/serve/test_serve_command.py` asks while an engine is dead.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest
import torch

from tests.checkpoints import VOCAB_SIZE
from tests.documented import Document
from tests.local_server import ThreadedServer
from tests.patience import PATIENCE_S, wait_until
from tests.server import Client, shared_server

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 4, **HELLO},
    "/v1/completions": {"max_tokens": 4, "prompt": "hello"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1, 2]},
}
GETS = ("/v1/models", "/v1/models/{model}", "/health", "/status", "/metrics", "/openapi.json")
OPEN = ("/health", "/status", "/metrics", "/openapi.json")
GENERATING = ("/v1/chat/completions", "/v1/completions")


class Failing:
    """A logits processor that always fails."""

    def __init__(
        self, arguments: dict[str, Any], prompt_token_ids: np.ndarray, output_token_ids: np.ndarray, vocab_size: int
    ) -> None:
        pass

    def __call__(self, output_token_ids: np.ndarray, logits: torch.Tensor) -> None:
        raise RuntimeError("this processor always fails")


class Slow(Failing):
    """A logits processor that takes 20 ms a token."""

    def __call__(self, output_token_ids: np.ndarray, logits: torch.Tensor) -> None:
        time.sleep(0.02)


class Documented:
    """A server asked through its own document."""

    def __init__(self, server: Client, **headers: str) -> None:
        self.server = server
        self.http = httpx.Client(base_url=server.url, headers=headers, trust_env=False, timeout=PATIENCE_S)
        self.document = self.http.get("/openapi.json").json()

    def ask(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> int:
        """The status, which `path` (a path of the document) documents with a schema that the body fits."""
        url = path.replace("{model}", self.server.model) if "{model}" in path else path
        content = json.dumps(body) if isinstance(body, dict) else body
        method = method or ("GET" if body is None else "POST")
        response = self.http.request(method, url, content=content, headers=headers)
        self._check(path, response)
        return response.status_code

    def ask_url(self, path: str, url: str) -> int:
        response = self.http.get(url)
        self._check(path, response)
        return response.status_code

    def _check(self, path: str, response: httpx.Response) -> None:
        judge = Document(self.document)
        judge.check(path, response.status_code, response.headers["content-type"], response.content)


@pytest.fixture(scope="module")
def shared() -> Documented:
    return Documented(shared_server())


@pytest.fixture(scope="module")
def narrow() -> Iterator[Documented]:
    """A server with a key, little patience, room for one request, a processor that fails and one that takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MANTA_API_KEYS", "a-secret-of-the-test")
        server = ThreadedServer(
            "request_timeout_s=1",
            "max_body_bytes=10000",
            "health_bound_s=0.000001",
            "engine.max_num_sequences=1",
            "engine.max_num_waiting=0",
            f"engine.logits_processors={{failing: {__name__}:Failing, slow: {__name__}:Slow}}",
        )
    yield Documented(server, authorization="Bearer a-secret-of-the-test")
    server.stop()


def test_the_document_is_valid_with_one_error_schema_for_each_api(shared: Documented) -> None:
    schemas = set()
    for path, methods in shared.document["paths"].items():
        for operation in methods.values():
            failures = {status: answer for status, answer in operation["responses"].items() if int(status) >= 400}
            assert {"405", "500"} <= set(failures), path
            schemas |= {answer["content"]["application/json"]["schema"]["$ref"] for answer in failures.values()}
    assert schemas == {f"#/components/schemas/{name}" for name in ("ErrorBody", "MessagesError", "OllamaError")}
    for schema in shared.document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_good_answers_fit_their_schemas(shared: Documented) -> None:
    model = shared.server.model
    for path, body in BODIES.items():
        assert shared.ask(path, {"model": model, **body}) == 200
    for path in GENERATING:
        assert shared.ask(path, {"model": model, **BODIES[path], "stream": True}) == 200
    for path in GETS:
        assert shared.ask(path) == 200


@pytest.mark.parametrize("path", BODIES)
def test_wrong_bodies_and_methods_are_documented(shared: Documented, path: str) -> None:
    good = {"model": shared.server.model, **BODIES[path]}
    for body in (
        b"{not json",
        b"\xff\xfe",
        b"[]",
        b"",
        {**good, "max_unknown": 1},
        {**good, next(iter(BODIES[path])): {}},
    ):
        assert shared.ask(path, body) == 400
    assert shared.ask(path, {**good, "model": "gpt-9"}) == 404
    assert shared.ask(path, method="GET") == 405
    assert shared.ask(path, method="DELETE") == 405
    too_long = b'{"model": "' + b"x" * (9 * 2**20) + b'"}'
    assert shared.ask(path, too_long) == 413


def test_wrong_methods_models_and_token_ids_are_documented(shared: Documented) -> None:
    for path in GETS:
        assert shared.ask(path, method="PUT") == 405
    assert shared.ask_url("/v1/models/{model}", "/v1/models/gpt-9") == 404
    assert shared.ask("/detokenize", {"tokens": [VOCAB_SIZE + 10**6]}) == 400
    for schema in ({"type": "object", "not": {}}, {"type": "nothing"}):
        strict = {"name": "a", "schema": schema, "strict": True}
        constrained = {"response_format": {"type": "json_schema", "json_schema": strict}}
        for path in GENERATING:
            assert shared.ask(path, {"model": shared.server.model, **BODIES[path], **constrained}) == 400


def test_a_missing_key_is_documented_where_required(narrow: Documented) -> None:
    for path in [*BODIES, *GETS]:
        body = {"model": narrow.server.model, **BODIES[path]} if path in BODIES else None
        assert narrow.ask(path, body, authorization="Bearer wrong") == (200 if path in OPEN else 401)
        entry = next(iter(narrow.document["paths"][path].values()))
        assert ("401" in entry["responses"]) == (path not in OPEN)


def test_timeouts_full_queues_and_internal_errors_are_documented(narrow: Documented) -> None:
    model = narrow.server.model
    slow = {"max_tokens": 450, "ignore_eos": True, "logits_processors": [{"name": "slow"}]}  # 9 s
    for path in GENERATING:
        failing = {"model": model, **BODIES[path], "logits_processors": [{"name": "failing"}]}
        # On a busy machine its deadline may come first.
        wait_until(lambda failing=failing, path=path: narrow.ask(path, failing) == 500)
        occupying = {"model": model, **BODIES[path], **slow}
        statuses: list[int] = []

        def occupy(path: str = path, body: dict[str, Any] = occupying, statuses: list[int] = statuses) -> None:
            statuses.append(narrow.ask(path, body))

        threads = [threading.Thread(target=occupy) for _ in range(12)]
        for thread in threads:
            thread.start()
        health = {narrow.ask("/health") for _ in range(20)}
        for thread in threads:
            thread.join()
        assert {408, 429} <= set(statuses)
        assert 503 in health, "no engine steps a million times a second"

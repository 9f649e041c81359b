"""`manta models` beside a stand-in for the server: what it asks, what it prints, and how it waits for a model."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from manta.cluster.cli.__main__ import main

KEY = "a-secret-of-the-test-1"


class Server(http.server.BaseHTTPRequestHandler):
    """Takes every change, keeps what it was asked, and tells each of `cards` once, the last one for ever."""

    asked: list[tuple[str, str, Any]]
    keys: list[str | None]
    cards: list[dict[str, Any]]
    refusal: dict[str, Any] | None

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer({"object": "list", "data": self.cards})
            return
        card = self.cards.pop(0) if len(self.cards) > 1 else self.cards[0]
        self._answer(card, 200 if card else 404)

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        self.asked.append((self.command, self.path, body))
        self.keys.append(self.headers.get("authorization"))
        if self.refusal is not None:
            self._answer({"error": self.refusal}, 409)
        else:
            self._answer({"id": "qwen", "object": "model"})

    do_PATCH = do_DELETE = do_POST

    def _answer(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """A test prints nothing."""


def card(name: str, **fields: Any) -> dict[str, Any]:
    return {"id": name, "created": 1, "root": name, **fields}


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    Server.asked, Server.keys, Server.refusal = [], [], None
    Server.cards = [card("qwen", state="loaded")]
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setenv("MANTA_API_KEY", KEY)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield str(server.server_port)
    server.shutdown()
    server.server_close()


def test_a_model_is_added_and_awaited(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    progress = {"stages": ["text_model"], "current": "text_model", "value": 0.426}
    loading = card("qwen", state="loading")
    Server.cards = [{}, loading, loading, loading | {"progress": progress}, card("qwen", state="loaded")]
    options = ("--set", "engine.kv_cache_bytes=8MiB", "--set", "aliases=[q]")
    assert main(["models", "add", "qwen=Qwen2.5-0.5B", "--on-demand", "--port", port, *options]) == 0
    engine = {"model": "Qwen2.5-0.5B", "kv_cache_bytes": "8MiB"}
    body = {"name": "qwen", "aliases": ["q"], "on_demand": True, "engine": engine}
    assert Server.asked == [("POST", "/v1/models", body)]
    assert Server.keys == [f"Bearer {KEY}"]
    assert capsys.readouterr().out.splitlines() == ["qwen: loading", "qwen: loading (text_model 43%)", "qwen: loaded"]


def test_an_update_waits_for_the_new_engines(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    Server.cards = [card("qwen", state="loaded", updating=True), card("qwen", state="loaded")]
    assert main(["models", "update", "org/qwen", "--port", port, "--set", "engine.max_model_len=300"]) == 0
    assert Server.asked == [("PATCH", "/v1/models/org/qwen", {"engine": {"max_model_len": 300}})]
    assert capsys.readouterr().out.splitlines() == ["org/qwen: updating", "org/qwen: loaded"]


@pytest.mark.parametrize("state", ["failed", "loaded"])
def test_a_model_that_was_not_loaded_says_why(state: str, port: str, capsys: pytest.CaptureFixture[str]) -> None:
    Server.cards = [card("qwen", state=state, reason="its files are gone")]
    assert main(["models", "update", "qwen", "--port", port]) == 1
    assert "its files are gone" in capsys.readouterr().err


def test_a_model_is_removed(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "remove", "qwen", "--port", port]) == 0
    assert Server.asked == [("DELETE", "/v1/models/qwen", None)]
    assert capsys.readouterr().out.startswith("qwen ")


def test_models_are_listed(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    Server.cards = [
        card("qwen", state="loaded", updating=True),
        card("q") | {"root": "qwen"},
        card("style") | {"root": "qwen", "parent": "qwen"},
        card("broken", state="failed", reason="its files are gone"),
    ]
    assert main(["models", "list", "--port", port]) == 0
    heading, qwen, broken, reason = capsys.readouterr().out.splitlines()
    assert heading.split()[:2] == ["model", "state"]
    assert (qwen.split(), broken.split()) == (["qwen", "updating", "q,", "style"], ["broken", "failed"])
    assert reason == "broken: its files are gone"


def test_the_servers_refusal_is_shown(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    Server.refusal = {"message": "name 'qwen' is taken", "code": "name_taken"}
    assert main(["models", "add", "qwen", "--port", port]) == 2
    assert "name 'qwen' is taken" in capsys.readouterr().err


def test_options_that_contradict_each_other_are_refused(port: str) -> None:
    for arguments in (
        ["add", "qwen", "--set", "engine.model=other"],
        ["update", "qwen", "--set", "engine=5", "--set", "engine.dtype=float32"],
        ["add", "=qwen"],
    ):
        assert main(["models", *arguments, "--port", port]) == 2
    assert Server.asked == []

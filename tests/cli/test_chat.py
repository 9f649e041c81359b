"""`manta chat` in a terminal and in pipes: messages over several lines, reasoning, settings, limits and figures."""

from __future__ import annotations

import http.server
import json
import pathlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from manta.cluster.cli.chat_settings import NAMES, ChatSettings
from manta.cluster.cli.refusal import Refusal
from tests.patience import PATIENCE_S
from tests.server import shared_server
from tests.terminal import Terminal


class Replies(http.server.BaseHTTPRequestHandler):
    """Says what it was told to in three tokens, and keeps what it was asked."""

    bodies: list[dict[str, Any]]
    asked: list[str]
    deltas: list[dict[str, str]]
    ending: str

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "thinker"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        self.asked.append(body["messages"][-1]["content"])
        choices = [{"delta": delta, "finish_reason": None} for delta in self.deltas]
        choices.append({"delta": {}, "finish_reason": self.ending})
        chunks: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
        chunks.append({"choices": [], "usage": {"completion_tokens": 3}})
        events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        self._send(f"{events}data: [DONE]\n\n".encode())

    def _send(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """A test prints nothing."""


@pytest.fixture
def replies() -> Iterator[http.server.ThreadingHTTPServer]:
    Replies.bodies, Replies.asked, Replies.deltas, Replies.ending = [], [], [{"content": "Yes."}], "stop"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Replies)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_pasted_lines_are_one_message_and_thoughts_dim(replies: http.server.ThreadingHTTPServer) -> None:
    Replies.deltas = [{"reasoning_content": "hmm"}, {"content": "Yes."}]
    terminal = Terminal("chat", "--port", str(replies.server_port))
    terminal.wait_for("> ")
    terminal.type("def f():\n    return 1\n\nWhat is it?\n")
    terminal.wait_for("\x1b[2mhmm\x1b[0m")
    terminal.wait_for("Yes.")
    terminal.wait_for("\x1b[2m(3 tokens in ")
    terminal.wait_for(" tokens/s)\x1b[0m")
    terminal.wait_for("> ")
    terminal.type("and now?\n")
    terminal.wait_for("Yes.")
    terminal.wait_for("> ")
    terminal.end("/exit\n")
    assert Replies.asked == ["def f():\n    return 1\n\nWhat is it?", "and now?"]


def _chat(port: int, typed: str, *words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `manta chat` without a terminal."""
    command = [sys.executable, "-m", "manta.cluster.cli", "chat", "--port", str(port), *words]
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=PATIENCE_S)
    return done.returncode, done.stdout, done.stderr


def test_without_a_terminal_there_are_answers_only(replies: http.server.ThreadingHTTPServer) -> None:
    assert _chat(replies.server_port, "Is it?\nReally?\n") == (0, "Yes.\nYes.\n", "")
    assert _chat(replies.server_port, "", "Is it?") == (0, "Yes.\n", "")
    assert Replies.asked == ["Is it?", "Really?", "Is it?"]
    code, printed, notes = _chat(replies.server_port, "/help\n")
    assert (code, printed) == (0, "")
    assert "/system TEXT sets" in notes


def test_multiline_messages_work_and_truncated_replies_say_so(replies: http.server.ThreadingHTTPServer) -> None:
    Replies.ending = "length"
    code, printed, notes = _chat(replies.server_port, 'one \\\ntwo\n"""\nthree\n\nfour\n"""\n/exit\n')
    assert Replies.asked == ["one \ntwo", "three\n\nfour"]
    assert (code, printed) == (0, "Yes.\nYes.\n")
    assert "(cut here: the conversation fills the model's context; /reset starts again)" in notes


def test_a_full_context_says_how_to_restart_chat() -> None:
    server = shared_server()
    code, printed, notes = _chat(server.port, f"{'word ' * 2000}\n/exit\n")
    assert (code, printed) == (1, "")
    assert "(the conversation is longer than the model's context; /reset starts again)" in notes
    assert "max_model_len" not in notes


def test_set_and_json_go_into_each_request(replies: http.server.ThreadingHTTPServer, tmp_path: pathlib.Path) -> None:
    schema = tmp_path / "a schema.json"
    schema.write_text('{"enum": [1, 2]}')
    typed = f"""/set
/set temperature 0.3
/set seed 7
one
/set seed
/json {schema}
/set
two
/json
three
"""
    code, printed, notes = _chat(replies.server_port, typed)
    assert (code, printed) == (0, "Yes.\nYes.\nYes.\n")
    answer = {"name": "answer", "schema": {"enum": [1, 2]}, "strict": True}
    given = [
        {name: body[name] for name in ("temperature", "seed", "response_format") if name in body}
        for body in Replies.bodies
    ]
    assert given == [
        {"temperature": 0.3, "seed": 7},
        {"temperature": 0.3, "response_format": {"type": "json_schema", "json_schema": answer}},
        {"temperature": 0.3},
    ]
    assert notes.splitlines() == [
        f"(nothing is set; /set NAME VALUE sets one of {', '.join(NAMES)})",
        "(temperature is 0.3)",
        "(seed is 7)",
        "(seed is the server's default)",
        f"(answers fit the schema of {schema}; /json alone ends this)",
        "(temperature is 0.3)",
        "(answers are free text)",
    ]


def test_wrong_settings_are_named_and_change_nothing(tmp_path: pathlib.Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "broken.json").write_text('{"type": ')
    settings = ChatSettings()
    settings.set("min_tokens 5")
    for text, words in (
        ("temprature 1", "/set does not know 'temprature' (did you mean temperature?); it knows temperature, top_p"),
        ("n 2", "/set does not know 'n'"),
        ("temperature hot", "temperature 'hot' is not a number between 0 and 2"),
        ("temperature 3", "temperature 3.0 must be between 0 and 2; 0 is greedy"),
        ("temperature nan", "temperature nan must be between 0 and 2"),
        ("max_tokens 2.5", "max_tokens '2.5' is not a whole number between 1 and"),
        ("max_tokens 0", "max_tokens 0 must be between 1 and"),
        ("max_tokens 4", "min_tokens 5 exceeds max_tokens 4"),
        ("top_p 0", "top_p 0 keeps no token"),
    ):
        with pytest.raises(Refusal, match=re.escape(words)):
            settings.set(text)
    for name, words in (
        ("none.json", "cannot be read: No such file"),
        ("list.json", "holds no JSON object"),
        ("broken.json", "is not JSON: Expecting value: line 1 column 10"),
    ):
        with pytest.raises(Refusal, match=re.escape(f"{tmp_path / name} {words}")):
            settings.hold_to(str(tmp_path / name))
    assert settings.fields() == {"min_tokens": 5}


def test_a_refused_setting_ends_a_pipe(replies: http.server.ThreadingHTTPServer) -> None:
    code, printed, notes = _chat(replies.server_port, "/set temperature 3\nIs it?\n")
    assert (code, printed) == (1, "Yes.\n")
    assert notes == "(temperature 3.0 must be between 0 and 2; 0 is greedy)\n"


def test_a_live_server_obeys_the_settings(tmp_path: pathlib.Path) -> None:
    """The schema allows one answer, which the random model does not write by itself."""
    schema = tmp_path / "schema.json"
    schema.write_text('{"const": "exactly this"}')
    typed = ["/set max_tokens 2", "/set min_tokens 2", "one", "/set min_tokens", "/set max_tokens", f"/json {schema}"]
    code, printed, notes = _chat(shared_server().port, "\n".join([*typed, "two", ""]))
    assert code == 0, notes
    assert printed.endswith('\n"exactly this"\n')
    assert notes.count("(cut here: max_tokens is 2; /set max_tokens puts the default back)") == 1

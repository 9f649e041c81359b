"""Each door by which a stranger's text gets to a terminal or a log: none controls a terminal or forges a line."""

from __future__ import annotations

import http.server
import io
import json
import logging
import pathlib
import shutil
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest

from manta.cluster.cli.__main__ import main
from manta.cluster.cli.request_lines import MAX_SHOWN_PATH, RequestLog
from manta.cluster.serve.starting import start_failure
from manta.cluster.telemetry.request_log import MAX_PATH, keep_request_log, log_folder
from manta.structured.visible_logs import MAX_PER_MINUTE, logger_of
from manta.structured.visible_text import MAX_LINE, MAX_TEXT, MAX_VALUE, pass_on, say, visible, visible_lines
from tests.checkpoints import checkpoint
from tests.cli.hostile_text import HOSTILE, LONG, SURROGATE, unsafe
from tests.cli.test_chat import Replies
from tests.gguf_files import write_gguf
from tests.http.test_routes import App
from tests.patience import PATIENCE_S
from tests.terminal import Terminal

EVERYTHING = "".join(f"[{text}]" for text in HOSTILE.values())
"""All of them in one text; ends without a line of its own."""
texts = pytest.mark.parametrize("text", [*HOSTILE.values(), SURROGATE, LONG], ids=[*HOSTILE, "surrogate", "long"])


def check_printed(printed: str, num_lines: int | None = None) -> None:
    """Asserts that a printed text controls nothing, and has no line that is longer or newer than Manta's."""
    assert unsafe(printed) == ""
    lines = printed.splitlines()
    assert max(map(len, lines)) <= MAX_LINE + 40
    assert num_lines in (None, len(lines))


@texts
def test_a_value_is_a_part_of_one_line_and_says_what_it_was(text: str) -> None:
    shown = visible(text)
    assert unsafe(shown, breaks="") == ""
    assert len(shown) <= MAX_VALUE + 40
    if text != LONG:
        assert shown == visible(shown), "what is visible stays as it is"
        assert all(each.encode("unicode_escape").decode() in shown for each in unsafe(text, breaks=""))


def test_scripts_that_people_write_stay_as_they_are() -> None:
    for text in ("مرحبا", "می‌خواهم", "हिन्दी", "日本語　全角", "👩‍👩‍👧 ❤️", "naïve “so”", "C:\\new\\x1b"):
        assert visible(text) == text


@texts
def test_a_text_of_several_lines_forges_none(text: str) -> None:
    shown = visible_lines(f"manta: first\n{text}")
    check_printed(shown)
    assert len(shown) <= MAX_TEXT + MAX_LINE
    assert [line for line in shown.splitlines() if not line.startswith(("  ", "manta: first"))] == []


def test_what_an_encoding_lacks_is_escaped() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    say("{} of {:,} é", "日本", 1000, file=stream, flush=True)
    assert stream.buffer.getvalue() == b"\\u65e5\\u672c of 1,000 \\xe9\n"  # type: ignore[attr-defined]


# ---- the server's console and its logs ------------------------------------------------------------------------------


@pytest.fixture
def console(tmp_path: pathlib.Path) -> Iterator[RequestLog]:
    """The console of a server whose ingress is this process."""
    logger = logging.getLogger("manta.requests")
    before = logger.handlers[:]
    console = RequestLog(tmp_path, "manta")
    keep_request_log(log_folder(tmp_path, "manta") / "ingress-one.jsonl")
    yield console
    logger.handlers[:] = before


@texts
@pytest.mark.parametrize("headers", [{}, {"origin": "https://evil.example"}], ids=["unknown", "cross-origin"])
def test_a_path_forges_no_line_of_the_console(text: str, headers: dict[str, str], console: RequestLog) -> None:
    path = urllib.parse.quote(f"/{text[:8000]}", errors="replace")
    assert App().ask("POST", path, {}, **headers).status_code == (403 if headers else 404)
    (line,) = console.news()
    check_printed(line, 1)
    assert len(line) < MAX_SHOWN_PATH + MAX_PATH + 120


def test_unknown_paths_cost_a_counter_and_one_line(console: RequestLog, tmp_path: pathlib.Path) -> None:
    app = App()
    for number in range(10):
        app.ask("POST", f"/nothing/{number}/{'x' * 8000}", {})
    app.ask("POST", "/nothing", {}, origin="https://evil.example")
    app.ask("DELETE", "/v1/models")
    (line,) = console.news()
    assert "  404  /nothing/0/xxx" in line
    assert sum(path.stat().st_size for path in log_folder(tmp_path, "manta").iterdir()) < 2000
    shown = app.metrics.render([]).decode()
    assert [line for line in shown.splitlines() if line.startswith("manta:unrouted_requests_total")] == [
        'manta:unrouted_requests_total{model_name="demo",status="404"} 10.0',
        'manta:unrouted_requests_total{model_name="demo",status="403"} 1.0',
        'manta:unrouted_requests_total{model_name="demo",status="405"} 1.0',
    ]


def test_the_request_log_is_rotated(console: RequestLog, tmp_path: pathlib.Path) -> None:
    folder = log_folder(tmp_path, "manta")
    keep_request_log(folder / "ingress-one.jsonl", max_bytes=4000)
    app, num_lines = App(), 0
    for _ in range(100):
        app.ask("POST", "/v1/count/x", {"text": "a"})
        num_lines += len(console.news())
    assert num_lines == 100
    files = sorted(folder.iterdir())
    assert [path.name for path in files] == ["ingress-one.jsonl", *(f"ingress-one.jsonl.{n}" for n in (1, 2, 3))]
    assert all(path.stat().st_size <= 4000 for path in files)


WORST = r"""
import sys
from manta.structured.visible_logs import guard_process
from manta.cluster.telemetry.request_log import log_event, log_request, open_request_log
guard_process()
open_request_log()
for text in ("\U0001f600" * 10_000, "\x1b\n" * 10_000):
    log_request("r" * 128, text, client="c" * 200, status=404, message=text, param=text, code=text)
    log_event("failed", "r" * 128 + "-0123abcd-0", reason=text)
"""
"""A replica whose requests have the longest texts."""


def test_the_longest_line_of_the_request_log_is_json() -> None:
    done = subprocess.run([sys.executable, "-c", WORST], capture_output=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert unsafe(done.stdout.decode()) == ""
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.get("event") for line in lines] == [None, "failed"] * 2
    assert all(line.get("path", "").endswith(("", " (10,000 characters)", " (20,000 characters)")) for line in lines)


@texts
def test_a_log_line_and_its_traceback_are_visible(text: str) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logger_of("manta.tests.hostile")
    logger.addHandler(handler)
    try:
        try:
            raise ValueError(text)
        except ValueError:
            logger.exception("%s failed %d times: %r", text, 3, text)
    finally:
        logger.removeHandler(handler)
    printed = stream.getvalue()
    check_printed(printed)
    first, *others = printed.splitlines()
    assert " failed 3 times: " in first
    assert [line for line in others if line[:1] not in ("T", " ")] == []
    assert "ValueError: " in printed


def test_a_place_that_logs_without_end_is_bounded() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logger_of("manta.tests.storm")
    logger.addHandler(handler)
    try:
        for number in range(3 * MAX_PER_MINUTE + 1):
            logger.warning("a stranger came: %d", number)
    finally:
        logger.removeHandler(handler)
    assert len(stream.getvalue().splitlines()) <= 2 * MAX_PER_MINUTE  # a minute may have ended meanwhile


GUARDED = """
import asyncio, logging, sys, threading, warnings
from manta.structured.visible_logs import guard_process
guard_process()
text = sys.stdin.read()
logging.getLogger("library").warning("text: " + text)
logging.getLogger("library").warning("text: %s", text)
warnings.warn(text)
thread = threading.Thread(target=lambda: int(text))
thread.start()
thread.join()
raise RuntimeError(text)
"""
"""A process of Manta's in which a library logs, warns and fails."""


def test_a_guarded_process_shows_what_libraries_say() -> None:
    command = [sys.executable, "-c", GUARDED]
    done = subprocess.run(command, input=EVERYTHING.encode(), capture_output=True, timeout=PATIENCE_S)
    printed = done.stderr.decode()
    check_printed(printed)
    assert done.returncode == 1
    for words in ("text: [\\x1b[31mred", "UserWarning: ", "ValueError: invalid literal", "RuntimeError: ["):
        assert words in printed


@texts
def test_a_failed_start_is_told_visibly(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    failure = str(start_failure.unexpected(RuntimeError(text)))
    log = pathlib.Path(failure.rpartition("The whole story is in ")[2])
    check_printed(log.read_text())
    log.unlink()


TYPED = {name: text for name, text in HOSTILE.items() if "\0" not in text}
"""Texts that a command line can hold."""

# ---- commands -------------------------------------------------------------------------------------------------------


@pytest.mark.axes_in_turns
@pytest.mark.parametrize("text", TYPED.values(), ids=TYPED)
@pytest.mark.parametrize(
    "command",
    [
        ["{}"],
        ["bench", "{}"],
        ["top", "--interval", "{}"],
        ["top", "--{}"],
        ["chat", "--port", "{}"],
        ["chat", "--url", "http://{}/"],
        ["serve", "--config", "{}"],
        ["check", "--config", "{}"],
        ["check", "--set", "engine.{}=1"],
        ["check", "--set", "engine.dtype={}"],
        ["check", "/{}"],
        ["batch", "/{}", "/nowhere/out"],
    ],
    ids=" ".join,
)
def test_errors_quote_visibly(command: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([word.format(text) for word in command])
    except SystemExit as end:
        code = int(end.code or 0)
    printed = capsys.readouterr()
    assert code in (1, 2)
    check_printed(printed.out + printed.err)


FIELDS = {
    "architecture": {"architectures": [EVERYTHING]},
    "type": {"hidden_act": EVERYTHING},
    "number": {"hidden_size": EVERYTHING},
    "rope": {"rope_parameters": {"rope_type": EVERYTHING, EVERYTHING: 1}},
    "quantisation": {"quantization_config": {"quant_method": EVERYTHING}},
    "long": {"architectures": [LONG]},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_check_quotes_a_checkpoint_visibly(
    fields: dict[str, Any], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / HOSTILE["colour"].replace("/", "")
    shutil.copytree(checkpoint("llama"), folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    capsys.readouterr()  # the progress with which transformers made the checkpoint
    assert main(["check", str(folder)]) == 1
    check_printed(capsys.readouterr().err, 1)


@pytest.mark.usefixtures("trials_here")
def test_a_report_shows_a_checkpoints_texts_visibly(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of a model that can be served: a key that nobody knows, and a token that ends every answer."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {EVERYTHING: 1}))
    stop = config["eos_token_id"]
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    for token in tokenizer["added_tokens"]:
        if token["id"] == stop:
            tokenizer["model"]["vocab"].pop(token["content"], None)
            token["content"] = EVERYTHING
    file.write_text(json.dumps(tokenizer))
    capsys.readouterr()  # the progress with which transformers made the checkpoint
    code = main(["check", str(folder), "--set", "engine.kv_cache_bytes=1048576"])
    printed = capsys.readouterr()
    check_printed(printed.out + printed.err)
    assert code == 0
    assert "\\x1b[31m" in printed.out


def test_check_quotes_a_gguf_file_visibly(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its keys, and the names of its tensors: "gguf-dump" of llama.cpp printed both as they are."""
    file = write_gguf(checkpoint("llama"), tmp_path / "model.gguf", lambda name: "F32", **{f"llama.{EVERYTHING}": 1})
    name = b"output_norm.weight"
    file.write_bytes(file.read_bytes().replace(name, b"\x1b[31m\x07\r\nnorm.weig"))
    capsys.readouterr()
    assert main(["check", str(file)]) == 1
    printed = capsys.readouterr()
    check_printed(printed.out + printed.err)
    assert "\\x1b[31m" in printed.err


class Statuses(http.server.BaseHTTPRequestHandler):
    """A server that says hostile things of itself."""

    def do_GET(self) -> None:
        engine = {
            **dict.fromkeys(("replica", "node"), EVERYTHING),
            "state": "idle",
            **dict.fromkeys(("num_running", "num_waiting", "waiting_tokens"), 0),
            "kv_usage": 0.5,
            "cache_hit_rate": None,
            "ttft_s": 0.1,
            "requests_per_s": 1.0,
            "start_seconds": {EVERYTHING: 1.0},
        }
        status = {
            "version": EVERYTHING,
            "uptime_s": 1.0,
            "num_held": 0,
            "problem": EVERYTHING,
            "engines": [engine],
            "deployments": [
                {"name": EVERYTHING, "status": EVERYTHING, "replicas": {EVERYTHING: 1}, "note": EVERYTHING}
            ],
            "nodes": [{"address": EVERYTHING, "alive": True, "resources": {EVERYTHING: 1.0}}],
        }
        metrics = 'manta:spec_decode_num_draft_tokens_total{proposer="\x1b[31m\x9b\u202e"} 1\n'
        data = json.dumps(status, ensure_ascii=False) if self.path == "/status" else metrics
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data.encode())

    def log_message(self, *_: object) -> None:
        """A test prints nothing."""


@pytest.fixture
def status_port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Statuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize("command", [["status"], ["top", "--interval", "0.2"]], ids=" ".join)
def test_a_status_is_shown_visibly(command: list[str], status_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--port", str(status_port)]) == 0
    printed = capsys.readouterr().out
    check_printed(printed)
    assert "\\x1b[31m" in printed


def test_a_terminal_gets_json_visibly(status_port: int) -> None:
    terminal = Terminal("status", "--json", "--port", str(status_port))
    printed = terminal.wait_for('"nodes"')
    assert unsafe(printed.replace("\r\n", "\n")) == ""
    terminal.end("")


@pytest.fixture
def chat_port() -> Iterator[int]:
    """The port of a server that answers with `Replies.deltas`."""
    Replies.bodies, Replies.asked, Replies.ending = [], [], "stop"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Replies) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_a_models_answer_controls_no_terminal(chat_port: int) -> None:
    answer = [*EVERYTHING, "\n", SURROGATE, "end of it"]
    Replies.deltas = [{"reasoning_content": EVERYTHING}, *({"content": piece} for piece in answer)]
    terminal = Terminal("chat", "--port", str(chat_port))
    terminal.wait_for("> ")
    terminal.type("hello\n")
    printed = terminal.wait_for("end of it")
    printed = printed.rpartition("hello\r\n")[2].replace("\x1b[2m", "").replace("\x1b[0m", "")
    assert unsafe(printed.replace("\r\n", "\n")) == ""
    assert "\\x1b]52;c;" in printed
    terminal.wait_for("> ")
    terminal.end("/exit\n")


def test_a_models_answer_goes_into_a_pipe_as_it_is(chat_port: int) -> None:
    Replies.deltas = [{"content": piece} for piece in EVERYTHING]
    command = [sys.executable, "-m", "manta.cluster.cli", "chat", "--port", str(chat_port), "hello"]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == f"{EVERYTHING}\n".encode()


def test_half_a_pair_ends_no_chat(capsys: pytest.CaptureFixture[str]) -> None:
    pass_on(SURROGATE)
    assert capsys.readouterr().out == "half \\ud83d of a pair"

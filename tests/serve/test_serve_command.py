"""`manta serve` and `manta chat` as a newcomer uses them: real processes, the printed lines pasted, then Ctrl-C."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.processes import free_port
from tests.checkpoints import checkpoint
from tests.conftest import PROVE
from tests.documented import Document
from tests.patience import PATIENCE_S, wait_until
from tests.processes import kill_tree, running_below

COMES_BACK_S = 6.0
"""Seconds from an ingress's death to the first answer of the next one, on an idle machine."""
LINGER_S = 120.0
"""Seconds that a process may take to end on a busy machine."""
REQUEST_LINE = r"^\d\d:\d\d:\d\d  200  /v1/chat/completions  [\d,]+ \+ [\d,]+ tokens in [\d.]+ s, [\d,]+ tokens/s$"


class Serve:
    """A `manta serve` process and everything that it printed."""

    def __init__(self, model: pathlib.Path, port: int, **environment: str) -> None:
        command = [sys.executable, "-m", "manta.cluster.cli", "serve", "--model", str(model), "--port", str(port)]
        command += ["--set", "engine.kv_cache_bytes=8388608", "--set", "engine.num_threads=1"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
            # A shell starts background jobs deaf to Ctrl-C, and their children inherit it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.printed = ""

    @property
    def url(self) -> str:
        """Of the endpoint, as it is printed."""
        found = re.search(r"http://127\.0\.0\.1:\d+", self.printed)
        assert found is not None
        return found.group()

    def wait_for(self, text: str) -> None:
        while text not in self.printed:
            self.wait_for_more()

    def wait_for_lines(self, pattern: str, count: int) -> None:
        while len(re.findall(pattern, self.printed, re.MULTILINE)) < count:
            self.wait_for_more()

    def wait_for_more(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"manta serve ended: {self.printed}"
        self.printed += line

    def started(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, number: signal.Signals) -> list[psutil.Process]:
        """Sends the signal, waits for the end, and returns the processes that outlived it."""
        started = self.started()
        self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=PATIENCE_S)
        self.printed += rest
        return psutil.wait_procs(started, timeout=LINGER_S)[1]

    def kill(self) -> None:
        if self.process.poll() is None:
            kill_tree(self.process.pid)
            self.process.communicate()


@pytest.fixture
def serve() -> Iterator[Serve]:
    started = Serve(checkpoint("llama"), free_port())
    yield started
    started.kill()


@pytest.fixture(scope="module")
def running() -> Iterator[Serve]:
    """One that serves, until the last of its tests has stopped it."""
    started = Serve(checkpoint("llama"), free_port())
    started.wait_for("Ctrl-C stops it.")
    yield started
    started.kill()


def test_what_serve_prints_can_be_pasted(running: Serve) -> None:
    curl = re.search(r"^  curl .*?(?=\n\n)", running.printed, re.DOTALL | re.MULTILINE)
    assert curl is not None
    pasted = subprocess.run(["bash", "-c", curl.group() + " --silent"], capture_output=True, text=True, check=True)
    reply = json.loads(pasted.stdout)
    assert reply["choices"][0]["message"]["role"] == "assistant"

    snippet = re.search(r"or in Python.*?\n\n(.*?)\n\nor in another", running.printed, re.DOTALL)
    assert snippet is not None
    subprocess.run([sys.executable, "-c", textwrap.dedent(snippet.group(1))], check=True, timeout=PATIENCE_S)

    chat = subprocess.run(
        [sys.executable, "-m", "manta.cluster.cli", "chat", "--url", running.url],
        input="hello\n/reset\n/system Be brief.\nand again\n/reset\n/fly\n/exit\n",
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert chat.returncode == 0, chat.stderr
    assert chat.stdout.strip()
    assert not {"Talking to", "> "} & {*chat.stdout.split("\n")}
    assert "the server answered" not in chat.stderr
    assert "/fly is unknown" in chat.stderr

    unknown = subprocess.run(
        [sys.executable, "-m", "manta.cluster.cli", "chat", "--url", running.url, "--model", "gpt-9"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert unknown.returncode == 2
    assert "does not serve 'gpt-9'" in " ".join(unknown.stderr.split())

    running.wait_for_lines(REQUEST_LINE, 4)  # curl, Python, and two messages of the chat

    assert len(running_below(running.process.pid, "ray::ServeReplica")) == 2
    for needless in ("ProxyActor", "log_monitor", "autoscaler", "dashboard.py"):
        assert not running_below(running.process.pid, needless), "each holds up every step when it wakes"

    logs = re.search(r"^Logs: (.+)$", running.printed, re.MULTILINE)
    assert logs is not None
    told = running.printed.replace("Starting Ray", "").replace(logs[1], "")
    assert "ray" not in told, "Ray's own messages tell a newcomer nothing"


def client(serve: Serve) -> httpx.Client:
    """For tests that ask again and again: one call of `httpx.get` takes tens of milliseconds of the processor."""
    return httpx.Client(base_url=serve.url, verify=False, trust_env=False, timeout=PATIENCE_S)


def test_a_killed_ingress_returns_on_its_port(running: Serve, record_property: Any) -> None:
    http = client(running)

    def answers() -> bool:
        try:
            return http.get("/v1/models").status_code == 200
        except httpx.TransportError:
            return False

    (ingress,) = running_below(running.process.pid, "manta:ingress")
    assert answers()
    ingress.kill()
    ingress.wait(PATIENCE_S)
    died = time.monotonic()
    while not answers():
        assert running.process.poll() is None
        time.sleep(0.05)
    seconds = time.monotonic() - died
    record_property("seconds until the next ingress answers", round(seconds, 1))
    assert not PROVE or seconds < COMES_BACK_S


def test_answers_during_an_engines_death_are_documented(running: Serve) -> None:
    """Until Serve has replaced it. Each body fits the schema of its status in `/openapi.json`."""
    http = client(running)
    judge = Document(http.get("/openapi.json").json())

    def ask(path: str) -> int:
        answer = http.get(path)
        judge.check(path, answer.status_code, answer.headers["content-type"], answer.content)
        return answer.status_code

    (engine,) = running_below(running.process.pid, "manta:engine")
    engine.kill()
    statuses: set[int] = set()

    def is_replaced() -> bool:
        health, metrics = ask("/health"), ask("/metrics")
        statuses.update([health, metrics])
        return 503 in statuses and health == metrics == 200

    wait_until(is_replaced, poll_s=0.1)


def test_ctrl_c_leaves_nothing(running: Serve) -> None:
    assert running.end(signal.SIGINT) == []
    assert running.process.returncode == 0
    assert running.printed.rstrip().endswith("Stopped.")
    assert "Traceback" not in running.printed
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", int(running.url.rsplit(":", 1)[1])))


@pytest.fixture
def without_a_compiler(tmp_path: pathlib.Path) -> dict[str, str]:
    """The environment of a process that finds none."""
    if importlib.util.find_spec("ziglang"):
        pytest.skip("the package ziglang brings a compiler")
    for program in ("sh", "bash", "env", "uname"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    return {"PATH": str(tmp_path), "CXX": ""}


LOST = r"no C\+\+ compiler was found, .*several times slower; install one: apt install g\+\+"
ENGINE = """
import sys
from manta.cluster.cli.serve import model_message
from manta.cluster.llm import LLM, SamplingParams
llm = LLM(sys.argv[1], kv_cache_bytes=1 << 23, num_threads=1)
(output,) = llm.generate(["The manta"], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
assert len(output.outputs[0].token_ids) == 4
print(model_message(llm.engine.model))
"""


@pytest.mark.prove
def test_without_a_compiler_an_engine_warns_with_remedy(
    without_a_compiler: dict[str, str],
) -> None:
    command = [sys.executable, "-c", ENGINE, str(checkpoint("llama", dtype="bfloat16"))]
    done = subprocess.run(command, env=os.environ | without_a_compiler, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "(kernels: torch)" in done.stdout
    assert re.search(LOST, done.stdout)


@pytest.mark.prove
def test_without_a_compiler_it_serves_and_warns(
    without_a_compiler: dict[str, str],
) -> None:
    serve = Serve(checkpoint("llama", dtype="bfloat16"), free_port(), **without_a_compiler)
    try:
        serve.wait_for("Ctrl-C stops it.")
        assert "(kernels: torch)" in serve.printed
        assert re.search(LOST, serve.printed)
        name = httpx.get(f"{serve.url}/v1/models", trust_env=False).json()["data"][0]["id"]
        body = {"model": name, "prompt": "The manta", "max_tokens": 4, "ignore_eos": True}
        reply = httpx.post(f"{serve.url}/v1/completions", json=body, trust_env=False, timeout=PATIENCE_S)
        assert reply.json()["usage"]["completion_tokens"] == 4
    finally:
        serve.kill()


@pytest.mark.prove  # `test_sigterm_during_a_start_prints_no_stack` ends one a little later
def test_sigterm_while_starting_leaves_nothing(serve: Serve) -> None:
    serve.wait_for("Starting Ray")
    while not serve.started():
        assert serve.process.poll() is None
        time.sleep(0.1)
    assert serve.end(signal.SIGTERM) == []
    assert serve.process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in serve.printed

"""What an installation of Manta must do in a user's folder, without a checkout: the commands, `LLM`, and the server.

The folder has packages of the user's own with the names of Manta's parts, and the index's package `cluster` is
installed beside Manta.

`tests/house/test_package.py` looks at the wheel so, with the dependencies that are there, and `make package` at one in
an environment of its own: `python -m tests.installed VENV`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Collection, Iterator
from typing import Any

from benchmarks.processes import free_port
from tests import bare_names
from tests.patience import PATIENCE_S, wait_until

QUESTION = "What is Manta?"
PAGE_TITLE = "<title>Manta</title>"
ANSWER = "Manta serves language models on a Ray cluster"
OFFLINE = f"""
import pathlib, sys
from manta import LLM, SamplingParams, cluster, specdecode, structured, workers
for package in (cluster, specdecode, structured, workers):
    assert pathlib.Path(package.__file__).is_relative_to(sys.prefix), package.__file__
(output,) = LLM().chat([{{"role": "user", "content": "{QUESTION}"}}], SamplingParams(temperature=0, max_tokens=60))
print(output.outputs[0].text)
"""
BATCH_LINE = {
    "custom_id": "first",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0},
}


SERVE_FILE = """
applications:
  - name: manta
    route_prefix: /
    import_path: manta.cluster.serve.app:build
    args: {num_ingress_replicas: 1, num_engine_replicas: 1, engine: {model: demo, num_threads: 1}}
http_options: {host: 127.0.0.1, port: %d}
"""

USERS_FOLDERS = {
    "workers/__init__.py": "TOKEN_ID = 40\n",
    "cluster/__init__.py": "raise RuntimeError('this is the user's own')\n",
    "structured/__init__.py": "raise RuntimeError('this is the user's own')\n",
    "mine.py": """from workers import TOKEN_ID

class OneToken:
    def __init__(self, *_):
        pass

    def __call__(self, output_token_ids, logits):
        kept = logits[TOKEN_ID].clone()
        logits.fill_(float("-inf"))
        logits[TOKEN_ID] = kept
""",
}
"""A user's own modules, which Python finds before those of the environment. Manta uses `mine` alone."""
PROCESSOR = "engine.logits_processors={mine: mine:OneToken}"
PROCESSED = {"prompt": "Manta", "max_tokens": 6, "ignore_eos": True, "logits_processors": [{"name": "mine"}]}
BESIDE = """
import importlib.util, pathlib, manta.cluster
beside = pathlib.Path(importlib.util.find_spec("cluster").origin).parent
assert (beside / "linkage.py").exists(), "the index's package is installed beside Manta"
assert not (beside / "config.py").exists() and pathlib.Path(manta.cluster.__file__).with_name("config.py").exists()
"""


class Installation:
    """The environment in `venv`, used from the folder `empty`. It prints each command and what that command prints."""

    def __init__(self, venv: pathlib.Path, empty: pathlib.Path) -> None:
        self._bin = venv.resolve() / "bin"
        self._empty = empty
        ours = ("PYTHONPATH", "MANTA_UNDER_MAKE", bare_names.VARIABLE)
        kept = {name: value for name, value in os.environ.items() if name not in ours}
        self._environment = {**kept, "PATH": f"{self._bin}:{kept['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}
        self._environment["RAY_AUTH_MODE"] = "disabled"  # for the commands of Ray alone; Manta's own Ray has a token
        for name, text in USERS_FOLDERS.items():
            (empty / name).parent.mkdir(exist_ok=True)
            (empty / name).write_text(text)

    def run(self, program: str, *arguments: str) -> str:
        """Returns what a program of the environment prints. Raises `AssertionError` if it fails."""
        print(f"$ {shlex.join([program, *arguments])}", flush=True)
        done = subprocess.run(
            [self._bin / program, *arguments],
            cwd=self._empty,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, f"{program} {arguments}: {done.stdout}\n{done.stderr}"
        print(done.stdout, end="", flush=True)
        return done.stdout

    def works(self, program: str, *arguments: str) -> bool:
        """Returns whether a program of the environment ends with 0."""
        command = [self._bin / program, *arguments]
        done = subprocess.run(command, cwd=self._empty, env=self._environment, capture_output=True, timeout=PATIENCE_S)
        return done.returncode == 0

    @contextlib.contextmanager
    def serving(self, ready: str, *command: str, codes: Collection[int] = (0,)) -> Iterator[None]:
        """Runs a server, which has printed `ready`, in this context. Ctrl-C ends it, with one of these exit codes."""
        print(f"$ {shlex.join(command)} &", flush=True)
        server = subprocess.Popen(
            [self._bin / command[0], *command[1:]],
            cwd=self._empty,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            assert server.stdout is not None
            printed = ""
            while ready not in printed:
                line = server.stdout.readline()
                assert line, f"the server ended: {printed}"
                printed += line
            print(printed, end="", flush=True)
            yield
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=PATIENCE_S)
        assert server.returncode in codes

    def check_offline(self) -> None:
        """The version, the check of the demo model, and `LLM()`."""
        assert self.run("manta", "--version").startswith("manta ")
        assert "demo" in self.run("manta", "check")
        assert ANSWER in self.run("python", "-c", OFFLINE)

    def check_neighbour(self) -> None:
        """The index's package `cluster` is installed too, and neither replaces the other."""
        self.run("python", "-P", "-c", BESIDE)

    def check_commands(self) -> None:
        """`manta batch`, `manta serve` with `manta chat` and `manta status` beside it, and Serve's own command."""
        (self._empty / "in.jsonl").write_text(json.dumps(BATCH_LINE) + "\n")
        self.run("manta", "batch", "in.jsonl", "out.jsonl")
        assert ANSWER in (self._empty / "out.jsonl").read_text()
        port = str(free_port())
        with self.serving("Ctrl-C stops it.", "manta", "serve", "--port", port, "--set", PROCESSOR):
            asked = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps({"model": "demo", **PROCESSED}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
                check_processed(json.load(answer))
            assert ANSWER in self.run("manta", "chat", "--port", port, QUESTION)
            assert "engine" in self.run("manta", "status", "--port", port)
            for path in ("", "docs", "playground/app.js"):
                asked = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", headers={"accept": "text/html,*/*"})
                with urllib.request.urlopen(asked, timeout=PATIENCE_S) as page:
                    assert page.status == 200
                    assert path or PAGE_TITLE in page.read().decode()
        self.check_import_path()
        self.check_cluster()

    def check_cluster(self) -> None:
        """On a Ray cluster: `serve deploy`, and a batch as a job whose folder has the user's own packages."""
        ports = {name: free_port() for name in ("port", "dashboard-port", "dashboard-agent-listen-port")}
        address, port = f"http://127.0.0.1:{ports['dashboard-port']}", free_port()
        (self._empty / "serve.yaml").write_text(SERVE_FILE % port)
        line = BATCH_LINE | {"url": "/v1/completions", "body": {"model": "demo", **PROCESSED}}
        (self._empty / "in.jsonl").write_text(json.dumps(line) + "\n")
        output = self._empty.parent / "job.jsonl"
        with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # Ray's sockets lie there, and paths have a limit
            head = ["ray", "start", "--head", "--block", "--num-cpus=4", f"--temp-dir={folder}"]
            head += [f"--{name}={number}" for name, number in ports.items()]
            try:
                with self.serving("Ray runtime started", *head, codes=(0, 1, 130)):
                    wait_until(lambda: self.works("ray", "job", "list", "--address", address), poll_s=0.5)
                    # First, because a batch starts Serve without proxies, and one that runs gets none later.
                    self.run("serve", "deploy", "--address", address, "serve.yaml")
                    wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), poll_s=0.5)
                    assert ANSWER in self.run("manta", "chat", "--port", str(port), QUESTION)
                    words = [
                        "manta",
                        "batch",
                        "in.jsonl",
                        str(output),
                        "--set",
                        PROCESSOR,
                        "--set",
                        "engine.num_threads=1",
                    ]
                    self.run("ray", "job", "submit", "--address", address, "--working-dir", ".", "--", *words)
                    check_processed(json.loads(output.read_text())["response"]["body"])
            finally:
                output.unlink(missing_ok=True)

    def check_import_path(self) -> None:
        """Ray Serve's own command deploys the application from a configuration file."""
        port = free_port()
        (self._empty / "serve.yaml").write_text(SERVE_FILE % port)
        with self.serving("Submitted deploy config", "serve", "run", "--address", "local", "serve.yaml"):
            wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), poll_s=0.5)
            assert ANSWER in self.run("manta", "chat", "--port", str(port), QUESTION)


def answers(url: str) -> bool:
    """Returns whether a server answers a GET with 200."""
    with contextlib.suppress(OSError):  # nobody listens yet, or the answer is a 503
        return bool(urllib.request.urlopen(url, timeout=PATIENCE_S).status == 200)
    return False


def check_processed(body: dict[str, Any]) -> None:
    """The user's processor let one token pass, six times."""
    text = body["choices"][0]["text"]
    assert body["usage"]["completion_tokens"] == 6, body
    assert text == text[: len(text) // 6] * 6, body


def main(venv: str) -> None:
    """Checks an environment and says so."""
    with tempfile.TemporaryDirectory() as empty:
        installation = Installation(pathlib.Path(venv), pathlib.Path(empty))
        installation.check_neighbour()
        installation.check_offline()
        print("installed: `manta --version`, `manta check` and `LLM()` work in an empty folder", flush=True)
        installation.check_commands()
        print(
            "installed: `manta batch`, `serve`, `chat`, `status`, `serve run`, `serve deploy` and a Ray job work",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1])

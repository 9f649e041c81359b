"""What an installation of Manta must do in an empty folder, without a checkout: the commands, `LLM`, and the server.

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
from collections.abc import Iterator

from benchmarks.processes import free_port
from tests.patience import PATIENCE_S, wait_until

QUESTION = "What is Manta?"
PAGE_TITLE = "<title>Manta</title>"
ANSWER = "Manta serves language models on a Ray cluster"
OFFLINE = f"""
import pathlib, sys
import cluster, specdecode, structured, workers
from manta import LLM, SamplingParams
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
    import_path: cluster.serve.app:build
    args: {num_ingress_replicas: 1, num_engine_replicas: 1, engine: {model: demo, num_threads: 1}}
http_options: {host: 127.0.0.1, port: %d}
"""


class Installation:
    """The environment in `venv`, used from the folder `empty`. It prints each command and what that command prints."""

    def __init__(self, venv: pathlib.Path, empty: pathlib.Path) -> None:
        self._bin = venv.resolve() / "bin"
        self._empty = empty
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MANTA_UNDER_MAKE")}
        self._environment = {**kept, "PATH": f"{self._bin}:{kept['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}

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

    @contextlib.contextmanager
    def serving(self, ready: str, *command: str) -> Iterator[None]:
        """Runs a server, which has printed `ready`, in this context. Ctrl-C ends it, with exit code 0."""
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
        assert server.returncode == 0

    def check_offline(self) -> None:
        """The version, the check of the demo model, and `LLM()`."""
        assert self.run("manta", "--version").startswith("manta ")
        assert "demo" in self.run("manta", "check")
        assert ANSWER in self.run("python", "-c", OFFLINE)

    def check_commands(self) -> None:
        """`manta batch`, `manta serve` with `manta chat` and `manta status` beside it, and Serve's own command."""
        (self._empty / "in.jsonl").write_text(json.dumps(BATCH_LINE) + "\n")
        self.run("manta", "batch", "in.jsonl", "out.jsonl")
        assert ANSWER in (self._empty / "out.jsonl").read_text()
        port = str(free_port())
        with self.serving("Ctrl-C stops it.", "manta", "serve", "--port", port):
            assert ANSWER in self.run("manta", "chat", "--port", port, QUESTION)
            assert "engine" in self.run("manta", "status", "--port", port)
            for path in ("", "docs", "playground/app.js"):
                asked = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", headers={"accept": "text/html,*/*"})
                with urllib.request.urlopen(asked, timeout=PATIENCE_S) as page:
                    assert page.status == 200
                    assert path or PAGE_TITLE in page.read().decode()
        self.check_import_path()

    def check_import_path(self) -> None:
        """Ray Serve's own command deploys the application from a configuration file."""
        port = free_port()
        (self._empty / "serve.yaml").write_text(SERVE_FILE % port)
        with self.serving("Submitted deploy config", "serve", "run", "--address", "local", "serve.yaml"):
            wait_until(lambda: is_ready(port), poll_s=0.5)
            assert ANSWER in self.run("manta", "chat", "--port", str(port), QUESTION)


def is_ready(port: int) -> bool:
    """Whether an engine answers behind a port of this machine."""
    with contextlib.suppress(OSError):  # nobody listens yet, or the answer is a 503
        return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S).status == 200)
    return False


def main(venv: str) -> None:
    """Checks an environment and says so."""
    with tempfile.TemporaryDirectory() as empty:
        installation = Installation(pathlib.Path(venv), pathlib.Path(empty))
        installation.check_offline()
        print("installed: `manta --version`, `manta check` and `LLM()` work in an empty folder", flush=True)
        installation.check_commands()
        print("installed: `manta batch`, `manta serve`, `manta chat`, `manta status` and `serve run` work", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

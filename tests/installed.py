"""What an installation of Manta must do in an empty folder, without a checkout: the commands, `LLM`, and the server.

`tests/house/test_package.py` looks at the wheel so, with the dependencies that are there, and `make package` at one in
an environment of its own: `python -m tests.installed VENV`.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import urllib.request

from benchmarks.processes import free_port
from tests.patience import PATIENCE_S

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


class Installation:
    """The environment in `venv`, used from the folder `empty`."""

    def __init__(self, venv: pathlib.Path, empty: pathlib.Path) -> None:
        self._bin = venv.resolve() / "bin"
        self._empty = empty
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MANTA_UNDER_MAKE")}
        self._environment = {**kept, "PATH": f"{self._bin}:{kept['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}

    def run(self, program: str, *arguments: str) -> str:
        """Returns what a program of the environment prints. Raises `AssertionError` if it fails."""
        done = subprocess.run(
            [self._bin / program, *arguments],
            cwd=self._empty,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, f"{program} {arguments}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def check_offline(self) -> None:
        """The version, the check of the demo model, and `LLM()`."""
        assert self.run("manta", "--version").startswith("manta ")
        assert "demo" in self.run("manta", "check")
        assert ANSWER in self.run("python", "-c", OFFLINE)

    def check_commands(self) -> None:
        """`manta batch`, then `manta serve` with `manta chat` and `manta status` beside it."""
        (self._empty / "in.jsonl").write_text(json.dumps(BATCH_LINE) + "\n")
        self.run("manta", "batch", "in.jsonl", "out.jsonl")
        assert ANSWER in (self._empty / "out.jsonl").read_text()
        port = str(free_port())
        server = subprocess.Popen(
            [self._bin / "manta", "serve", "--port", port],
            cwd=self._empty,
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            printed = ""
            while "Ctrl-C stops it." not in printed:
                line = server.stdout.readline()
                assert line, f"the server ended: {printed}"
                printed += line
            assert ANSWER in self.run("manta", "chat", "--port", port, QUESTION)
            assert "engine" in self.run("manta", "status", "--port", port)
            for path in ("", "docs", "playground/app.js"):
                asked = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", headers={"accept": "text/html,*/*"})
                with urllib.request.urlopen(asked, timeout=PATIENCE_S) as page:
                    assert page.status == 200
                    assert path or PAGE_TITLE in page.read().decode()
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=PATIENCE_S)
        assert server.returncode == 0


def main(venv: str) -> None:
    """Checks an environment and says so."""
    with tempfile.TemporaryDirectory() as empty:
        installation = Installation(pathlib.Path(venv), pathlib.Path(empty))
        installation.check_offline()
        print("installed: `manta --version`, `manta check` and `LLM()` work in an empty folder", flush=True)
        installation.check_commands()
        print("installed: `manta batch`, `manta serve`, `manta chat` and `manta status` work", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

"""Counts the hands that a request, a constraint and a weight pass through: `python -m benchmarks.paths`.

- A file counts for a request if one of its functions runs for one plain streamed chat request, in any process of the
  server: forward until the scheduler has the sequence, back from the first token on. Back, the files of the step (in
  `STEP_FOLDERS`) are left out, and so is what runs while the server is idle.
- A class carries the request if an instance that one of these functions has among its arguments, locals and results
  holds the prompt, as text or as token ids, in a field of its own.
- A relay of a constraint is a function that gets the `ConstraintSpec` on its way, in one of the files in between.
- A file counts for a weight if one of its functions gets the weight's name, or an array of its size, while the model is
  loaded.

`--checkout PATH` looks at another checkout; the names of its packages may differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import path_profiler
from benchmarks.path_profiler import BACK, FORWARD, IDLE, LOAD, OFF
from benchmarks.processes import ROOT, free_port

IDLE_S = 5.0
"""Seconds of the recording without a request. Whatever repeats does so within two."""
READY = "Ctrl-C stops it."
STEP_FOLDERS = ("cluster/engine/", "workers/", "specdecode/", "structured/")
TEXT = "Pack my box with five dozen liquor jugs"
WEIGHT = "layers.0.mlp.down_proj"
WEIGHT_SIZE = 256 * 704
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
LOADING = "from manta import LLM; LLM('demo')"


class Recording:
    """A folder that the profilers of all processes write to."""

    def __init__(self, folder: pathlib.Path, checkout: pathlib.Path) -> None:
        self._folder = folder
        search = folder / "search"
        search.mkdir()
        shutil.copy(path_profiler.__file__, search / "sitecustomize.py")
        self.tell(OFF)
        self.mark([])
        self.environment = os.environ | {
            "MANTA_PATHS": str(folder),
            "MANTA_PATHS_CHECKOUT": str(checkout),
            "PYTHONPATH": os.pathsep.join([str(search), str(checkout)]),
            "HF_HUB_OFFLINE": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def tell(self, phase: bytes) -> None:
        """Begins a phase in all processes."""
        with (self._folder / "phase").open("r+b" if (self._folder / "phase").exists() else "wb") as file:
            file.write(phase)

    def mark(self, token_ids: list[int]) -> None:
        """Sets what processes that start from now on look for."""
        (self._folder / "marker.json").write_text(json.dumps([TEXT, token_ids, WEIGHT, WEIGHT_SIZE]))

    def noted(self, phase: bytes, kind: str) -> set[tuple[str, str]]:
        """Returns the notes of a kind, from all processes."""
        entries = [json.loads(line) for log in self._folder.glob("*.log") for line in log.read_text().splitlines()]
        return {(first, second) for found, what, first, second in entries if (found, what) == (phase.decode(), kind)}


def demo_token_ids(checkout: pathlib.Path) -> list[int]:
    """Returns the tokens of the middle of `TEXT`, whose neighbours do not change them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkout / "configs" / "demo" / "target" / "tokenizer.json"))
    token_ids: list[int] = tokenizer.encode(f" {TEXT}").ids
    return token_ids[2:-2]


@contextlib.contextmanager
def serving(recording: Recording, checkout: pathlib.Path) -> Iterator[str]:
    """Runs `manta serve` of the checkout with the demo model, and gives its address."""
    name = "manta.cluster.cli" if (checkout / "manta" / "cluster").exists() else "cluster.cli"
    port = free_port()
    command = [sys.executable, "-m", name, "serve", "--model", "demo", "--port", str(port)]
    server = subprocess.Popen(
        command, cwd=checkout, env=recording.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert server.stdout is not None
    printed: list[str] = []
    try:
        while not any(READY in line for line in printed):
            if not (line := server.stdout.readline()):
                raise RuntimeError(f"{shlex.join(command)} did not start: {''.join(printed)[-2000:]}")
            printed.append(line)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.communicate()


def ask(url: str, text: str, **fields: Any) -> None:
    """Sends a streamed chat request and reads the answer to its end."""
    body = {"model": "demo", "stream": True, "max_tokens": 8, "messages": [{"role": "user", "content": text}], **fields}
    asked = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=600) as answer:
        answer.read()


def record_request(recording: Recording, checkout: pathlib.Path, **fields: Any) -> None:
    """Records a request to a server that has answered others of the same form."""
    recording.mark(demo_token_ids(checkout))
    with serving(recording, checkout) as url:
        for number in range(3):
            ask(url, f"Number {number}", **fields)
        recording.tell(IDLE)
        time.sleep(IDLE_S)
        recording.tell(FORWARD)
        ask(url, TEXT, **fields)
        recording.tell(OFF)


def record_load(recording: Recording, checkout: pathlib.Path) -> None:
    recording.tell(LOAD)
    subprocess.run([sys.executable, "-c", LOADING], cwd=checkout, env=recording.environment, check=True)
    recording.tell(OFF)


def files(recording: Recording, phase: bytes) -> dict[str, list[str]]:
    """Returns the files of a phase with their functions, without those that run while the server is idle."""
    idle = recording.noted(IDLE, "file")
    found: dict[str, list[str]] = {}
    for file, function in sorted(recording.noted(phase, "file") - idle):
        if phase != BACK or not file.startswith(STEP_FOLDERS):
            found.setdefault(file, []).append(function)
    return found


def report(title: str, found: dict[str, list[str]], is_long: bool) -> None:
    print(f"{title}: {len(found)}")
    for name, functions in found.items():
        print(f"    {name}" + (f": {', '.join(functions)}" if is_long else ""))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paths", description=__doc__)
    parser.add_argument("--checkout", type=pathlib.Path, default=ROOT, help="the checkout to look at")
    parser.add_argument("--functions", action="store_true", help="names the functions too")
    options = parser.parse_args(arguments)
    checkout = options.checkout.resolve()
    with tempfile.TemporaryDirectory() as folder:
        requests, constraints, weights = (
            Recording(pathlib.Path(tempfile.mkdtemp(dir=folder)), checkout) for _ in range(3)
        )
        record_request(requests, checkout)
        schema = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
        record_request(constraints, checkout, response_format=schema)
        record_load(weights, checkout)
        report("files forward", files(requests, FORWARD), options.functions)
        classes = {f"{module}.{name}": [] for module, name in sorted(requests.noted(FORWARD, "class"))}
        report("classes forward", classes, False)
        report("files back", files(requests, BACK), options.functions)
        relays: dict[str, list[str]] = {}
        for file, function in sorted(constraints.noted(FORWARD, "constraint")):
            relays.setdefault(file, []).append(function)
        report("files with a constraint", relays, True)
        report("files of a weight", files(weights, LOAD), options.functions)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A model by its hub id: downloaded from a hub on this machine, served, and served again when the hub is gone."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from manta.cluster.config import load_config
from manta.cluster.llm import LLM, SamplingParams
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S

HUB_ID = "somebody/tiny-llama"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
PROMPT = [5, 6, 7, 8]
PROGRAM = f"""
import sys
from manta.cluster.llm import LLM, SamplingParams
llm = LLM("{HUB_ID}", dtype="float32", kv_cache_bytes=2**22)
print(llm.generate([{PROMPT}], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0].outputs[0].token_ids)
assert not {{"transformers", "torch._dynamo"}} & set(sys.modules), "they take seconds to import"
"""

RESOLVES = """
import sys
from manta.workers.checkpoints.model_folder import resolve_model_folder
assert (resolve_model_folder(sys.argv[1]) / "config.json").is_file()
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as a download asks for."""

    folder: pathlib.Path
    served: list[str]
    revisions: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        sizes = {path.name: path.stat().st_size for path in self.folder.iterdir()} | {"pytorch_model.bin": 1}
        if self.path.startswith(f"/api/models/{HUB_ID}/revision/"):
            self.revisions.append(self.path.split("/revision/")[1].partition("?")[0])
            self._send_json({"id": HUB_ID, "sha": COMMIT, "siblings": [{"rfilename": name} for name in sizes]})
            return
        if self.path.startswith(f"/api/models/{HUB_ID}/tree/{COMMIT}"):
            entries = [{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes.items()]
            self._send_json(entries)
            return
        prefix = f"/{HUB_ID}/resolve/{COMMIT}/"
        path = self.folder / self.path.removeprefix(prefix)
        if not self.path.startswith(prefix) or not path.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if self.command == "GET":
            self.served.append(path.name)
        data = path.read_bytes()
        self._send(data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def _send_json(self, value: object) -> None:
        self._send(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """A test prints nothing."""


@pytest.fixture
def hub() -> Iterator[http.server.ThreadingHTTPServer]:
    Hub.folder, Hub.served, Hub.revisions = checkpoint("llama"), [], []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.server_close()


def run(command: list[str], hub: http.server.ThreadingHTTPServer, home: pathlib.Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(home)}
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )


def test_a_model_is_downloaded_once_and_served(hub: http.server.ThreadingHTTPServer, tmp_path: pathlib.Path) -> None:
    local = LLM(str(checkpoint("llama")), dtype="float32", kv_cache_bytes=2**22)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    expected = local.generate([PROMPT], greedy, use_tqdm=False)[0].outputs[0].token_ids

    first = run(["-c", PROGRAM], hub, tmp_path)
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout.splitlines()[-1]) == expected
    assert "config.json" in Hub.served
    assert "pytorch_model.bin" not in Hub.served, "weights that are not safetensors are left alone"

    hub.shutdown()
    hub.server_close()
    second = run(["-c", PROGRAM], hub, tmp_path)
    assert second.returncode == 0, second.stderr
    assert json.loads(second.stdout.splitlines()[-1]) == expected


def test_the_hub_is_asked_for_the_revision(hub: http.server.ThreadingHTTPServer, tmp_path: pathlib.Path) -> None:
    answer = run(["-c", RESOLVES, f"{HUB_ID}@v1.2"], hub, tmp_path)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert set(Hub.revisions) == {"v1.2"}
    assert load_config(None, {"engine.model": f"{HUB_ID}@v1.2"}).model_name == "tiny-llama"


def test_a_name_that_the_hub_does_not_know(hub: http.server.ThreadingHTTPServer, tmp_path: pathlib.Path) -> None:
    answer = run(["-m", "manta.cluster.cli", "check", "somebody/else"], hub, tmp_path)
    assert answer.returncode != 0
    assert "the Hugging Face hub refused 'somebody/else'" in answer.stdout + answer.stderr
    assert "Traceback" not in answer.stderr

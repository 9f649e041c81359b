"""One live `manta serve` for all tests that need one: a tiny random model, in float32, on a free port.

The example grammar backend of tests/plugin is installed there.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

import psutil

from benchmarks.processes import free_port
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S, wait_until
from tests.processes import running_below
from tests.sharing import shared

SETTINGS = ("engine.dtype=float32", "engine.kv_cache_bytes=8388608", "engine.num_threads=1")
"""Settings of every server of the tests. Later settings override them."""


class Client:
    """Asks the server of one model at a port of this machine."""

    def __init__(self, folder: pathlib.Path, port: int) -> None:
        self.folder = folder
        self.port = port
        self.model = folder.name
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as response:
            return response.read().decode()

    def metrics(self) -> dict[str, float]:
        """Series without labels but the model's, by name."""
        found = {}
        for line in self.get("/metrics").splitlines():
            name, _, value = line.rpartition(" ")
            if not line.startswith("#") and name.count("=") == 1:
                found[name.partition("{")[0]] = float(value)
        return found

    def until_idle(self) -> None:
        """Returns when nothing runs or waits and every block is free. What an earlier test asked for may still run."""

        def is_idle() -> bool:
            metrics = self.metrics()
            names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            return all(metrics[f"manta:{name}"] == 0 for name in names)

        wait_until(is_idle, poll_s=0.05)

    def post(self, path: str, body: bytes | dict, headers: dict[str, str] | None = None) -> tuple[int, dict, dict]:
        """(status, headers in lower case, decoded body)."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **(headers or {})})
        try:
            response = urllib.request.urlopen(request, timeout=PATIENCE_S)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            lowered = {key.lower(): value for key, value in response.headers.items()}
            return response.status, lowered, json.loads(response.read())


def addresses_heard(pid: int) -> set[str]:
    """Returns the addresses at which a process and all that it started listen, TCP and UDP."""
    pids = {pid, *(each.pid for each in running_below(pid))}
    sockets = (each for each in psutil.net_connections("inet") if each.pid in pids and not each.raddr and each.laddr)
    return {each.laddr.ip.removeprefix("::ffff:") for each in sockets}


class Server(Client):
    """A running server of the checkpoint in `folder`, of a tiny random one if none is given; `stop` ends it and
    everything it started.
    """

    def __init__(self, *settings: str, folder: pathlib.Path | None = None, port: int | None = None) -> None:
        super().__init__(folder or checkpoint("llama"), port or free_port())
        command = [
            sys.executable,
            "-m",
            "manta.cluster.cli",
            "serve",
            "--quiet",
            str(self.folder),
            "--port",
            str(self.port),
        ]
        for setting in (*SETTINGS, *settings):
            command += ["--set", setting]
        paths = [os.environ.get("PYTHONPATH", ""), str(pathlib.Path(__file__).parent / "plugin")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe that nobody reads would fill up and stop the server
        self.process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT, env=environment)
        wait_until(lambda: "Ctrl-C stops it." in self.printed or self.process.poll() is not None)
        if self.process.poll() is not None:
            raise RuntimeError(f"the server did not start: {self.printed}")

    @property
    def printed(self) -> str:
        """The text that the server has printed so far."""
        return os.pread(self._output.fileno(), 1 << 30, 0).decode(errors="replace")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(PATIENCE_S)


def shared_server() -> Server:
    """Started at first use; `tests/sharing.py` says when it is stopped."""
    return shared("server", lambda: Server("engine.max_num_sequences=16", "engine.max_num_waiting=300"), Server.stop)

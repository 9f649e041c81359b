"""A Ray cluster of one node with its dashboard, as `ray start --head` makes it, for the commands that talk to it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import psutil

from benchmarks.processes import free_port

BIN = pathlib.Path(sys.executable).parent


class RayCluster:
    """`environment` is that of the commands that talk to it: Ray's token lies in a home folder of its own."""

    def __init__(self, folder: pathlib.Path) -> None:
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "HOME": str(folder), "RAY_AUTH_MODE": "token"}
        self.address = f"http://127.0.0.1:{free_port()}"
        """Of the dashboard."""

    def run(self, *command: object) -> subprocess.CompletedProcess[str]:
        """A command with its arguments."""
        words = [str(word) for word in command]
        return subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=120)


@contextlib.contextmanager
def ray_cluster(num_cpus: int) -> Iterator[RayCluster]:
    """Its dashboard may not answer yet. `num_cpus` is what Ray is told, however many there are."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ray-"))  # Ray's sockets lie there, and paths have a limit
    cluster = RayCluster(folder)
    cluster.run("ray", "get-auth-token", "--generate")
    ports = {"port": free_port(), "dashboard-agent-listen-port": free_port()}
    ports["dashboard-port"] = int(cluster.address.rpartition(":")[2])
    command = ["ray", "start", "--head", "--block", f"--num-cpus={num_cpus}", f"--temp-dir={folder}"]
    command += [f"--{name}={port}" for name, port in ports.items()]
    with (folder / "head.log").open("wb") as log:
        head = subprocess.Popen(command, env=cluster.environment, stdout=log, stderr=log)
    try:
        yield cluster
    finally:
        parent = psutil.Process(head.pid)
        processes = [*parent.children(recursive=True), parent]
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=10)
        shutil.rmtree(folder, ignore_errors=True)

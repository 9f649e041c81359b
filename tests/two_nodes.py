"""Two machines made of this one: network namespaces on a bridge, a Ray node in each, joined to one cluster."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import psutil

from tests.patience import PATIENCE_S
from tests.processes import kill_all

NETWORK = "10.87.0"
RAY = str(pathlib.Path(sys.executable).parent / "ray")


class NoNamespaces(Exception):
    """This machine does not let us make them; the message says why."""


class Node:
    """A namespace with an address, and the Ray node in it once that has started."""

    def __init__(self, name: str, number: int, bridge: str) -> None:
        self.name = name
        self.address = f"{NETWORK}.{number}"
        _ip("netns", "add", name)
        _ip("link", "add", f"{name}-out", "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", f"{name}-out", "master", bridge, "up")
        for command in (("addr", "add", f"{self.address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            _ip("-n", name, *command)
        _ip("-n", name, "link", "set", "lo", "up")

    def popen(self, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        """A process in it."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )

    def start_ray(self, flags: Sequence[str], environment: dict[str, str]) -> None:
        command = [RAY, "start", "--block", f"--node-ip-address={self.address}", "--num-cpus=1", *flags]
        self.ray = process = self.popen(command, environment)
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line)
            if "Ray runtime started" in line:
                return
        raise RuntimeError(f"ray start ended: {''.join(printed)}")

    @contextlib.contextmanager
    def cut_off(self) -> Iterator[None]:
        """Nothing comes in or goes out meanwhile; those beyond hear of no end."""
        _ip("link", "set", f"{self.name}-out", "down")
        try:
            yield
        finally:
            _ip("link", "set", f"{self.name}-out", "up")

    def processes(self) -> list[psutil.Process]:
        """All that run in it."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        processes = []
        for pid in found.stdout.split():
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.append(psutil.Process(int(pid)))
        return processes

    def kill(self) -> None:
        """All that runs in it, as a machine that loses its power."""
        kill_all(self.processes())


class TwoNodes:
    """`head` and `worker`, of one CPU each. `environment` is for whoever joins them."""

    def __init__(self, head: Node, worker: Node, folder: pathlib.Path) -> None:
        self.head, self.worker = head, worker
        home = folder / "home"
        home.mkdir()
        address = f"{head.address}:6379"
        self.environment = {**os.environ, "HOME": str(home), "RAY_AUTH_MODE": "token"}
        subprocess.run([RAY, "get-auth-token", "--generate"], env=self.environment, check=True, capture_output=True)
        flags = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={folder}"]
        head.start_ray(flags, self.environment)
        self._join = [f"--address={address}"]
        worker.start_ray(self._join, self.environment)
        self.environment["RAY_ADDRESS"] = address

    def keep_worker(self, seconds: float = 20.0) -> None:
        """Starts its Ray anew if it ends within so long, as whoever looks after a node does: Ray gives up a node that
        cannot be reached for half a minute.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.worker.ray.wait(seconds)
            self.worker.start_ray(self._join, self.environment)


@contextlib.contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    """Raises `NoNamespaces` where there is no `ip`, or no right to use it so."""
    if shutil.which("ip") is None:
        raise NoNamespaces("the command ip (iproute2) is not installed")
    suffix = str(os.getpid() % 10_000)
    bridge, names = f"mbr{suffix}", (f"ma{suffix}", f"mb{suffix}")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # Ray's sockets have short paths
    nodes: list[Node] = []
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{NETWORK}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for number, name in enumerate(names, 1):
            nodes.append(Node(name, number, bridge))
        head, worker = nodes
        yield TwoNodes(head, worker, folder)
    finally:
        for node in nodes:
            node.kill()
        for command in (*(("netns", "del", name) for name in names), ("link", "del", bridge)):
            with contextlib.suppress(NoNamespaces):
                _ip(*command)
        shutil.rmtree(folder, ignore_errors=True)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NoNamespaces(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def wait_for_line(process: subprocess.Popen[str], text: str, seconds: float = PATIENCE_S) -> str:
    """What a process printed up to the line with `text`. Raises `RuntimeError` if it ends before."""
    printed, deadline = "", time.monotonic() + seconds
    assert process.stdout is not None
    for line in process.stdout:
        printed += line
        if text in line:
            return printed
        if time.monotonic() > deadline:
            break
    raise RuntimeError(f"{text!r} was not printed: {printed}")

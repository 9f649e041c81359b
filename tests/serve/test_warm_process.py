"""Ray's worker in a fork of a warm process: it takes everything from its stand-in, and either ends with the other."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from manta.cluster.serve.starting import warm_process
from tests.patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.skipif(not warm_process.is_possible(), reason="this system has no warm processes")

KEY = "0123456789abcdef"
WARM = "import sys; from manta.cluster.serve.starting.warm_process import warm_up; warm_up(sys.argv[1], sys.argv[2:])"
WORKER = """
import json, os, sys, time
told = {"arguments": sys.argv[1:], "variable": os.environ.get("TOLD"), "folder": os.getcwd(), "process": os.getpid(),
        "is_warm": "mailbox" in sys.modules, "is_main": __name__ == "__main__"}
print(json.dumps(told), flush=True)
if sys.argv[1] == "wait":
    time.sleep(600)
sys.exit(int(sys.argv[2]))
"""
"""Plays Ray's program for workers."""


class Node:
    """A node with a raylet, and perhaps with a warm process."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.worker = folder / "worker.py"
        self.worker.write_text(WORKER)
        self.folder = folder
        self.raylet = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.environment = {**os.environ, warm_process.RAYLET: str(self.raylet.pid)}
        self.warm: subprocess.Popen[bytes] | None = None
        self._started: list[subprocess.Popen[Any]] = [self.raylet]

    def warm_up(self, *imported: str) -> None:
        """Starts a warm process that imports these modules, and waits until it answers."""
        self.warm = subprocess.Popen([sys.executable, "-c", WARM, KEY, *imported], env=self.environment)
        self._started.append(self.warm)
        name = f"@manta-warm-{os.getuid()}-{self.raylet.pid}-{KEY}"

        def listens() -> bool:
            lines = pathlib.Path("/proc/net/unix").read_text().splitlines()
            return any(line.endswith(name) and line.split()[3] == "00010000" for line in lines)  # __SO_ACCEPTCON

        wait_until(listens)

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Starts what Ray starts in the place of its worker."""
        command = [sys.executable, "-m", warm_process.MODULE, KEY, str(self.worker), *arguments]
        environment = {**self.environment, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
        started = subprocess.Popen(command, env=environment, cwd=self.folder, stdout=subprocess.PIPE, text=True)
        self._started.append(started)
        return started

    def close(self) -> None:
        for each in reversed(self._started):
            each.kill()
            each.wait()
            if each.stdout is not None:
                each.stdout.close()


@pytest.fixture
def node(tmp_path: pathlib.Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


def first_line(started: subprocess.Popen[str]) -> dict[str, Any]:
    assert started.stdout is not None
    told: dict[str, Any] = json.loads(started.stdout.readline())
    return told


def is_running(process: int) -> bool:
    return psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE


def test_a_fork_has_arguments_environment_streams_and_code_of_its_stand_in(node: Node) -> None:
    node.warm_up("mailbox")
    started = node.start("end", "7", TOLD="one")
    told = first_line(started)
    assert told["process"] != started.pid
    expected = {"arguments": ["end", "7"], "variable": "one", "folder": str(node.folder), "is_warm": True}
    assert told == expected | {"process": told["process"], "is_main": True}
    assert started.wait(PATIENCE_S) == 7
    other = node.start("end", "0", TOLD="two")
    assert first_line(other)["variable"] == "two"
    assert other.wait(PATIENCE_S) == 0


def test_a_fork_ends_with_its_stand_in_and_the_other_way_round(node: Node) -> None:
    node.warm_up()
    first, second, third = (node.start("wait", "0") for _ in range(3))
    forks = [first_line(each)["process"] for each in (first, second, third)]
    first.kill()
    wait_until(lambda: not is_running(forks[0]))
    os.kill(forks[1], signal.SIGKILL)
    assert second.wait(PATIENCE_S) == 128 + signal.SIGKILL
    third.terminate()  # which the fork gets
    assert third.wait(PATIENCE_S) == 128 + signal.SIGTERM
    wait_until(lambda: not is_running(forks[2]))


def test_forks_outlive_the_warm_process_which_ends_with_the_raylet(node: Node) -> None:
    node.warm_up()
    assert node.warm is not None
    started = node.start("wait", "0")
    fork = first_line(started)["process"]
    node.raylet.kill()
    assert node.warm.wait(PATIENCE_S) == 0
    assert is_running(fork)
    os.kill(fork, signal.SIGKILL)
    assert started.wait(PATIENCE_S) == 1, "nobody tells the code any more"


def test_a_warm_process_with_threads_forks_nothing(node: Node) -> None:
    node.warm_up("tests.serve.starts_a_thread")
    started = node.start("end", "5")
    told = first_line(started)
    assert told["process"] == started.pid
    assert not told["is_warm"]
    assert started.wait(PATIENCE_S) == 5


def test_a_second_warm_process_leaves_the_first_one_alone(node: Node) -> None:
    node.warm_up("mailbox")
    second = subprocess.run([sys.executable, "-c", WARM, KEY], env=node.environment, timeout=PATIENCE_S)
    assert second.returncode == 0
    assert first_line(node.start("end", "0"))["is_warm"]


def test_without_a_raylet_the_stand_in_is_the_worker(node: Node) -> None:
    node.environment.pop(warm_process.RAYLET)
    started = node.start("end", "3")
    assert first_line(started)["process"] == started.pid
    assert started.wait(PATIENCE_S) == 3


@pytest.mark.prove
def test_a_stand_in_that_finds_no_warm_process_starts_one_for_the_next(node: Node) -> None:
    started = node.start("end", "0")
    assert first_line(started)["process"] == started.pid

    def is_forked() -> bool:
        started = node.start("end", "0")
        return bool(first_line(started)["process"] != started.pid)

    wait_until(is_forked)

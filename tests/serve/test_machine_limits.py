"""A machine that is small: few open files, little address space, memory or disk, for every process of a server."""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import httpx
import pytest

from benchmarks.processes import free_port
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S, wait_until
from tests.processes import kill_tree, running_below
from tests.small_disk import fill, small_disk

pytestmark = pytest.mark.prove

NUM_FILES = 256
NUM_CONNECTIONS = 200
NUM_DISK_BYTES = 64 * 2**20
"""Size of a disk for all logs of a server."""
SMALL_CACHE = "engine.kv_cache_bytes=8388608"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def status(connection: socket.socket) -> bytes:
    """Returns the status of an answer."""
    return connection.makefile("rb").readline().split()[1]


def start(
    limit: Callable[[], object] | None, *settings: str, temporary: pathlib.Path | None = None
) -> tuple[subprocess.Popen[str], int]:
    """Starts a server whose processes have a limit, which `limit` sets in the first of them, and their temporary files
    in a folder. Returns its port too.
    """
    port = free_port()
    command = [sys.executable, "-m", "manta.cluster.cli", "serve", str(checkpoint("llama")), "--port", str(port)]
    for setting in ("engine.num_threads=1", *settings):
        command += ["--set", setting]
    environment = os.environ if temporary is None else {**os.environ, "TMPDIR": str(temporary)}
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=limit, env=environment
    )
    return server, port


def at_most(limited: int, limit: int) -> Callable[[], object]:
    return lambda: resource.setrlimit(limited, (limit, limit))


def until_ready(server: subprocess.Popen[str]) -> str:
    """Returns what a server has printed, once it is ready or has ended."""
    assert server.stdout is not None
    printed: list[str] = []
    while not printed or printed[-1] not in ("Ctrl-C stops it.\n", ""):
        printed.append(server.stdout.readline())
    return "".join(printed)


def tokens_of_answer(port: int) -> int:
    body = {"model": checkpoint("llama").name, "prompt": [5, 6], "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False)
    return answer.json()["usage"]["completion_tokens"]


@pytest.mark.parametrize(("num_bytes", "serves"), [(2**30, False), (4 * 2**30, True)])
def test_with_little_address_space_a_start_ends_in_a_sentence_or_goes_on(num_bytes: int, serves: bool) -> None:
    server, port = start(at_most(resource.RLIMIT_AS, num_bytes), SMALL_CACHE)
    printed = until_ready(server)
    if serves:
        assert tokens_of_answer(port) == 4
        server.send_signal(signal.SIGTERM)
    rest, _ = server.communicate(timeout=PATIENCE_S)
    assert server.returncode == (0 if serves else 1)
    assert "Traceback" not in printed + rest


@contextlib.contextmanager
def memory_group(num_bytes: int) -> Iterator[Callable[[], object]]:
    """Makes a control group with so much memory, as a container has. Yields what puts a process into it."""
    top = pathlib.Path("/sys/fs/cgroup")
    of_version = {top / "memory": "memory.limit_in_bytes", top: "memory.max"}
    folder = next((each for each in of_version if (each / "cgroup.procs").exists()), top) / f"manta-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        limit = folder / of_version[folder.parent]
        if not limit.exists():
            pytest.skip("control groups limit no memory here")
        limit.write_text(str(num_bytes))
        yield lambda: (folder / "cgroup.procs").write_text("0")
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():  # what a process has left that the system has killed
            kill_tree(int(pid))
        wait_until(lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()


@pytest.mark.parametrize(("num_bytes", "serves"), [(2**28, False), (3 * 2**30, True)])
def test_a_containers_memory_bounds_the_cache(num_bytes: int, serves: bool) -> None:
    """The default KV cache takes 40% of the free memory, and a start with too little memory ends in a sentence."""
    with memory_group(num_bytes) as limit:
        server, port = start(limit)
        try:
            printed = until_ready(server)
            if serves:
                assert tokens_of_answer(port) == 4
                metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S, trust_env=False).text
                (cache,) = (line for line in metrics.splitlines() if line.startswith("manta:kv_cache_bytes{"))
                assert 0 < float(cache.split()[-1]) <= 0.4 * num_bytes
                server.send_signal(signal.SIGTERM)
            rest, _ = server.communicate(timeout=PATIENCE_S)
            assert (server.returncode == 0) == serves
            assert "Traceback" not in printed + rest
        finally:
            kill_tree(server.pid)


def test_with_few_open_files_resting_connections_give_way() -> None:
    server, port = start(at_most(resource.RLIMIT_NOFILE, NUM_FILES), SMALL_CACHE)
    try:
        printed = until_ready(server)
        with contextlib.ExitStack() as stack:
            address = ("127.0.0.1", port)
            for _ in range(NUM_CONNECTIONS):
                stack.enter_context(socket.create_connection(address, PATIENCE_S))
            late = stack.enter_context(socket.create_connection(address, PATIENCE_S))
            late.sendall(HEALTH)
            assert status(late) == b"200", "connections that rest give way"
        assert tokens_of_answer(port) == 4
    finally:
        server.send_signal(signal.SIGTERM)
        rest, _ = server.communicate(timeout=PATIENCE_S)
    assert server.returncode == 0
    assert "Traceback" not in printed + rest


def test_with_a_full_disk_for_logs_requests_go_on() -> None:
    """All logs of Ray and of Manta, which lie in the folder for temporary files."""
    with small_disk(NUM_DISK_BYTES) as (folder, is_small):
        if not is_small:
            pytest.skip("no file system can be mounted here")
        server, port = start(None, SMALL_CACHE, temporary=folder)
        try:
            printed = until_ready(server)
            assert list(folder.iterdir()), "the logs are elsewhere"
            filling = fill(folder)
            for _ in range(50):
                assert tokens_of_answer(port) == 4
                assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S, trust_env=False).is_success
            (engine,) = running_below(server.pid, "ray::ServeReplica:manta:engine")
            engine.kill()
            engine.wait(PATIENCE_S)
            filling.unlink()  # a process of Ray starts with a file for its log
            assert tokens_of_answer(port) == 4, "another engine starts"
        finally:
            server.send_signal(signal.SIGTERM)
            rest, _ = server.communicate(timeout=PATIENCE_S)
            kill_tree(server.pid)
        assert server.returncode == 0
        assert "Traceback" not in printed + rest

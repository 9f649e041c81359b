"""A machine that is small: few open files, or little address space, for every process of a server."""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from benchmarks.processes import free_port
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.prove

NUM_FILES = 256
NUM_CONNECTIONS = 200
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def status(connection: socket.socket) -> bytes:
    """Returns the status of an answer."""
    return connection.makefile("rb").readline().split()[1]


def start(limited: int, limit: int) -> tuple[subprocess.Popen[str], int]:
    """Starts a server whose processes have a limit. Returns its port too."""
    port = free_port()
    command = [sys.executable, "-m", "manta.cluster.cli", "serve", str(checkpoint("llama")), "--port", str(port)]
    command += ["--set", "engine.num_threads=1", "--set", "engine.kv_cache_bytes=8388608"]
    server = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: resource.setrlimit(limited, (limit, limit)),
    )
    return server, port


def tokens_of_answer(port: int) -> int:
    body = {"model": checkpoint("llama").name, "prompt": [5, 6], "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False)
    return answer.json()["usage"]["completion_tokens"]


@pytest.mark.parametrize(("num_bytes", "serves"), [(2**30, False), (4 * 2**30, True)])
def test_with_little_address_space_a_start_ends_in_a_sentence_or_goes_on(num_bytes: int, serves: bool) -> None:
    server, port = start(resource.RLIMIT_AS, num_bytes)
    assert server.stdout is not None
    printed: list[str] = []
    while not printed or printed[-1] not in ("Ctrl-C stops it.\n", ""):
        printed.append(server.stdout.readline())
    if serves:
        assert tokens_of_answer(port) == 4
        server.send_signal(signal.SIGTERM)
    rest, _ = server.communicate(timeout=PATIENCE_S)
    assert server.returncode == (0 if serves else 1)
    assert "Traceback" not in "".join(printed) + rest


def test_with_few_open_files_resting_connections_give_way() -> None:
    server, port = start(resource.RLIMIT_NOFILE, NUM_FILES)
    try:
        assert server.stdout is not None
        printed = [line for line in iter(server.stdout.readline, "Ctrl-C stops it.\n") if line]
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
    assert "Traceback" not in "".join(printed) + rest

"""`manta serve` whose replicas cannot start: the cause in words and exit code 1, after the first of Serve's tries."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import re
import resource
import shutil
import socket
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.processes import free_port
from manta.cluster import own_ray
from manta.cluster.config import EngineConfig, ServeConfig
from manta.cluster.http.access.prefix_scope import new_secret
from manta.cluster.private_folder import PrivateFolder
from manta.cluster.serve.ingress import ListeningIngress
from manta.cluster.serve.starting.start_failure import InWords
from tests.checkpoints import checkpoint
from tests.conftest import PROVE
from tests.local_server import Handle
from tests.patience import PATIENCE_S

SOON_S = 10.0
"""Seconds from the failure to the end of the command and of all its processes, on an idle machine."""

FAILING_MODULE = """
import ctypes, os, signal, sys, time

with open(os.environ["ATTEMPTS"], "a") as attempts:
    print(time.time(), file=attempts)

def fail(how):
    if how == "raise":
        raise RuntimeError("two lines:\\nAnother: of them")
    if how == "exit":
        sys.exit("no licence")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "crash":
        ctypes.string_at(0)
    held = []
    while True:  # until Ray's memory monitor ends it
        held.append(b"x" * 2**27)
        time.sleep(0.1 if len(held) < 40 else 1000)

fail(os.environ["HOW"])
"""


def serve(*settings: str, flags: tuple[str, ...] = (), **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "manta.cluster.cli", "serve", *flags]
    for setting in ("engine.kv_cache_bytes=8388608", "engine.num_threads=1", *settings):
        command += ["--set", setting]
    environment = {**os.environ, **environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def refusal(process: subprocess.Popen[str]) -> str:
    """What the command says at its end, on one line; nothing of Ray's is before it."""
    printed, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, printed + error
    for of_ray in ("Traceback", "ray::", "raylet)", "RayTaskError", "WARNING"):
        assert of_ray not in printed + error, printed + error
    return " ".join(error.split())


def log_named_in(said: str) -> pathlib.Path:
    found = re.search(r"The whole story is in (\S+)$", said)
    assert found is not None, said
    path = pathlib.Path(found[1])
    assert path.is_file()
    return path


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", ["RuntimeError: two lines: Another: of them", "module:attribute"]),
        pytest.param("exit", ["no licence"], marks=pytest.mark.prove),
        pytest.param("kill", ["was killed while it started", "kv_cache_bytes"], marks=pytest.mark.prove),
        pytest.param("crash", ["its process crashed (SIGSEGV)"], marks=pytest.mark.prove),
    ],
)
def test_constructor_failures_are_reported_after_one_try(how: str, words: list[str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING_MODULE)
    attempts = tmp_path / "attempts"
    process = serve(
        f"engine.model={checkpoint('llama')}",
        f"port={free_port()}",
        "engine.logits_processors={failing: failing:processor}",
        PYTHONPATH=str(tmp_path),
        ATTEMPTS=str(attempts),
        HOW=how,
    )
    said = refusal(process)
    seconds = time.time() - float(attempts.read_text().split()[0])
    print(f"{how}: the command ended {seconds:.1f} s after the failure")
    assert not PROVE or seconds < SOON_S
    assert len(attempts.read_text().split()) == 1
    assert said.startswith("manta: the engine did not start: ")
    for word in words:
        assert word in said
    PrivateFolder().close()  # the next start
    if how in ("raise", "exit"):
        assert "Traceback" in log_named_in(said).read_text(), "the log has what the terminal is spared"
    else:
        log_named_in(said)


@pytest.mark.prove
def test_running_out_of_memory_at_start_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING_MODULE)
    memory = psutil.virtual_memory()
    process = serve(
        f"engine.model={checkpoint('llama')}",
        f"port={free_port()}",
        "engine.logits_processors={failing: failing:processor}",
        PYTHONPATH=str(tmp_path),
        ATTEMPTS=str(tmp_path / "attempts"),
        HOW="hoard",
        RAY_memory_usage_threshold=str((memory.total - memory.available + 2**31) / memory.total),
    )
    said = refusal(process)
    assert "Ray ended its process because the machine's memory was full; free some memory" in said
    log_named_in(said)


@pytest.mark.prove
def test_a_tensor_that_is_missing_is_named(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "four-layers"
    shutil.copytree(checkpoint("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    said = refusal(serve(f"engine.model={folder}", f"port={free_port()}"))
    assert "the engine did not start: tensor model.layers.3.input_layernorm.weight of shape [64] is missing" in said


def test_a_taken_ingress_port_is_reported_at_once() -> None:
    """Serve takes that for a start that failed, as the next test shows."""

    async def check(port: int) -> None:
        config = ServeConfig(engine=EngineConfig(model=str(checkpoint("llama"))), port=port)
        await ListeningIngress(config, Handle(), new_secret()).check_health()

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InWords, match=f"^port {port} on 127.0.0.1 is in use by another program; .* --port"):
            asyncio.run(check(port))


@pytest.mark.prove
def test_a_port_taken_during_rays_start_is_named() -> None:
    port = free_port()
    process = serve(f"engine.model={checkpoint('llama')}", f"port={port}")
    assert process.stdout is not None
    assert "Starting Ray" in process.stdout.readline()  # it has looked at the port, and will bind it in some seconds
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        said = refusal(process)
    assert f"the ingress did not start: port {port} on 127.0.0.1 is in use by another program" in said
    assert "--port" in said


def test_too_little_address_space_is_refused_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/serve/test_machine_limits.py` starts a server with as little as that, and with more."""
    monkeypatch.setattr(resource, "getrlimit", lambda limited: (2**30, 2**30))
    with pytest.raises(ValueError, match=f"{2**30:,} bytes"):
        own_ray.start()

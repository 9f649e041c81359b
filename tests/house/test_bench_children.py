"""The benchmarks' child processes: none outlives the benchmark, and a peer sees nothing of this checkout."""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import pathlib
import random
import signal
import subprocess
import sys
import venv

import psutil
import pytest

from benchmarks.processes import PEER, ROOT, Child, EngineProcess, ServerProcess, Setup, free_port
from tests.bare_names import ROOMS
from tests.patience import PATIENCE_S, wait_until

BENCHMARK = """
import sys, time
from benchmarks.processes import Child

child = Child([sys.executable, "-c", {server!r}], {{}})
child.engine = "server"
child.wait_until_printed("serves", 600)
print(*[process.pid for process in child.processes()], flush=True)
time.sleep(600)
"""
SERVER = """
import subprocess, sys, time
part = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("serves", flush=True)
time.sleep(600)
"""


@pytest.mark.prove
def test_a_terminated_benchmark_ends_its_servers() -> None:
    """One that does nothing about it itself: its servers are sessions of their own, with processes that are too."""
    command = [sys.executable, "-c", BENCHMARK.format(server=SERVER)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as benchmark:
        assert benchmark.stdout is not None
        started = [psutil.Process(int(pid)) for pid in benchmark.stdout.readline().split()]
        try:
            assert len(started) == 2
            benchmark.send_signal(signal.SIGTERM)
            assert benchmark.wait(PATIENCE_S) != 0
            assert psutil.wait_procs(started, timeout=PATIENCE_S)[1] == []
        finally:
            for process in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


class Spinner(Child):
    """A parent that waits, with a child of its own that spins."""

    engine = "spinner"

    def __init__(self) -> None:
        spin = "import sys\nwhile True: pass"
        script = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {spin!r}])"
        super().__init__([sys.executable, "-S", "-c", script], {})


@pytest.mark.prove
def test_a_resting_child_is_paused_and_fully_stopped() -> None:
    spinner = Spinner()
    try:
        wait_until(lambda: len(spinner.processes()) == 2)
        spinning = spinner.processes()[1]
        wait_until(lambda: spinner.rest(limit_s=0.3) or spinner.spins)  # a busy machine may starve it for once
        wait_until(lambda: spinning.status() == psutil.STATUS_STOPPED)
        spinner.wake()
        wait_until(lambda: spinning.status() != psutil.STATUS_STOPPED)
        spinner.rest(limit_s=0.3)
    finally:
        spinner.stop()
    assert not spinning.is_running() or spinning.status() == psutil.STATUS_ZOMBIE


def test_a_free_port_is_returned_once() -> None:
    """Whoever draws the same number next finds it claimed, before anybody listens there."""
    state = random.getstate()
    first = free_port()
    random.setstate(state)
    assert free_port() != first


PEER_CLI = """
import http.server, pathlib, subprocess, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

import_it = "import manta.cluster; print(manta.cluster.__file__)"
child = subprocess.run([sys.executable, "-c", import_it], cwd="/", capture_output=True, text=True, check=True)
pathlib.Path("imported").write_text(child.stdout.strip())
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.mark.prove
def test_a_peers_server_and_its_processes_run_the_peers_code(tmp_path: pathlib.Path) -> None:
    package = tmp_path / "manta" / "cluster"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "cli.py").write_text(PEER_CLI)
    server = ServerProcess(PEER, "a model", Setup(kv_cache_bytes=1, peer_checkout=str(tmp_path)), free_port())
    server.stop()
    assert (tmp_path / "imported").read_text() == str(package / "__init__.py")


FAKE_PACKAGE = """
import json, os, pathlib, subprocess, sys

print_path = "import json, sys; print(json.dumps(sys.path))"
child = subprocess.run([sys.executable, "-c", print_path], capture_output=True, text=True, check=True)
with open(pathlib.Path(sys.prefix) / "paths", "a") as file:
    file.write(json.dumps(sys.path) + "\\n" + child.stdout)

class Core:
    def get_output(self): ...

class Engine:
    engine_core = Core()

class LLM:
    def __init__(self, **options):
        self.llm_engine = Engine()

class SamplingParams: ...

class Params:
    def __init__(self):
        self.model = self.cpuparams = self.cpuparams_batch = type("Options", (), {})()

CommonParams, Server = Params, lambda params: None
"""
FAKE_SERVER = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def peer_python(tmp_path: pathlib.Path) -> pathlib.Path:
    """The Python of an environment with packages that look like the peers' and write down where they search."""
    venv.create(tmp_path / "peer", with_pip=False)
    (packages,) = (tmp_path / "peer" / "lib").glob("python*/site-packages")
    for name in ("vllm", "xllamacpp"):
        (packages / name).mkdir()
        (packages / name / "__init__.py").write_text(FAKE_PACKAGE)
    server = packages / "vllm" / "entrypoints" / "openai"
    server.mkdir(parents=True)
    (server / "api_server.py").write_text(FAKE_SERVER)
    return tmp_path / "peer" / "bin" / "python"


@pytest.mark.prove
def test_a_peer_and_its_processes_do_not_search_this_checkout(
    peer_python: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    setup = Setup(kv_cache_bytes=1, pythons={"vllm": str(peer_python), "llamacpp": str(peer_python)})
    for child in (
        EngineProcess("vllm", "a model", setup),
        EngineProcess("llamacpp", "a model", setup),
        ServerProcess("vllm", "a model", setup, free_port()),
    ):
        child.stop()
    searched = [json.loads(line) for line in (peer_python.parents[1] / "paths").read_text().splitlines()]
    assert len(searched) == 6
    for paths in searched:
        assert "" not in paths
        assert not [path for path in paths if pathlib.Path(path).is_relative_to(ROOT)]


@pytest.mark.parametrize("folder", ["benchmarks", "tests"])
def test_no_module_has_the_name_of_an_installed_package(folder: str) -> None:
    """A script that is run by its path puts its folder first where modules are searched."""
    names = {path.stem for path in (ROOT / folder).iterdir() if path.suffix in ("", ".py") and path.name[0] not in "._"}
    packages = [path for path in sys.path if "site-packages" in path]
    assert [name for name in names if importlib.machinery.PathFinder.find_spec(name, packages)] == []
    assert folder == "tests" or not names & {"kernels", *ROOMS}

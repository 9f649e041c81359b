"""The engines and servers under test as child processes: start, ask, weigh, stop.

`EngineProcess` is the other end of `benchmarks/engine_child.py`'s pipe; `ServerProcess` is an HTTP server. Each child
leads a process group of its own, so that stopping it leaves nothing behind. A child that still runs when the benchmark
ends, be it by an exception, Ctrl-C or SIGTERM, is stopped then.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import psutil

ROOT = pathlib.Path(__file__).parents[1]
PEER = "peer"
"""The second Manta of a comparison."""
MAX_MODEL_LEN = 4096
MAX_STREAMS = 64
"""Streams for which a server of llama.cpp has room; the others find room as they need it."""
START_TIMEOUT_S = 600.0


class BenchmarkError(RuntimeError):
    """A child that failed; the message holds the end of what it printed."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The options that all engines of one sitting share, and where the peer is."""

    kv_cache_bytes: int
    max_model_len: int = MAX_MODEL_LEN
    environment: dict[str, str] = {}
    """Variables that Manta's processes get in addition."""
    pythons: dict[str, str] = {}
    """The Python of each other engine, by the engine's name."""
    vllm_preload: tuple[str, ...] = ()
    vllm_environment: dict[str, str] = {}
    peer_checkout: str | None = None
    """Checkout of the second Manta; None uses this one."""
    weights: str = "auto"
    """Manta's option of this name."""
    exact: bool = False
    """Manta's option of this name."""
    adapters: dict[str, str] = {}
    """Folders of the LoRA adapters that Manta and vLLM hold, by name."""


class Timing(NamedTuple):
    """One generation: how long, how much, and the moments at which a step's tokens arrived."""

    seconds: float
    num_tokens: int
    steps: list[tuple[float, int]]
    """(seconds since the start, sequences that gained tokens) of each step that gave any."""
    num_cached: int = 0
    """Tokens of prompts that a cache held, as Manta tells it."""
    lengths: tuple[int, ...] = ()
    """Tokens of each choice."""


_running: list[Child] = []
"""The children that were started and not stopped yet."""

_claims: list[socket.socket] = []
"""UDP sockets with the numbers of the ports that `free_port` has returned: one that is bound claims its port."""


@atexit.register
def _stop_running() -> None:
    while _running:
        _running[-1].stop()


def _unwind_on_sigterm() -> None:
    """Makes SIGTERM raise `KeyboardInterrupt`, as Ctrl-C does, unless somebody handles it already: by default it would
    end this process at once and leave its children running.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)


class Child:
    """A process group with its output in a temporary file.

    Between its turns a child must leave the cores to the one that is measured: `rest` waits until it is quiet, and
    stops (SIGSTOP) the processes of one that spins; `wake` lets them go on.
    """

    idle_share = 0.05
    """Cores that a quiet child may use."""

    uses_pipe = False
    """Whether standard output is read here instead of going to the file."""

    engine: str

    def __init__(self, command: list[str], environment: dict[str, str], folder: pathlib.Path = ROOT) -> None:
        """Runs `command` in `folder`."""
        self._log = tempfile.NamedTemporaryFile(mode="w+", prefix="manta-bench-", suffix=".log")  # noqa: SIM115
        self.spins = False
        """Whether the child was busy when it had nothing to do, so that it is paused between its turns."""
        self.idle_cores = 0.0
        """The most that the child, not paused, used while another had its turn."""
        self._paused: list[psutil.Process] = []
        self.started = time.perf_counter()
        _unwind_on_sigterm()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if self.uses_pipe else subprocess.DEVNULL,
            stdout=subprocess.PIPE if self.uses_pipe else self._log,
            stderr=self._log,
            env={**os.environ, **environment},
            cwd=folder,
            start_new_session=True,
            text=True,
        )
        _running.append(self)

    def fail(self, what: str) -> BenchmarkError:
        self._log.flush()
        lines = pathlib.Path(self._log.name).read_text(errors="replace").splitlines()
        self.stop()
        return BenchmarkError(what + "; the end of its output:\n  " + "\n  ".join(lines[-15:]))

    def wait_until_printed(self, text: str, seconds: float) -> None:
        """Raises `BenchmarkError` if the child has not written it within so long after its start, or ends before."""
        while text not in pathlib.Path(self._log.name).read_text(errors="replace"):
            if self.process.poll() is not None or time.perf_counter() - self.started > seconds:
                raise self.fail(f"{self.engine} did not print {text!r}")
            time.sleep(0.1)

    def processes(self) -> list[psutil.Process]:
        """The child and everything that it started."""
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def pss_bytes(self) -> int:
        """Proportional set size of the whole tree: pages shared by k processes count as 1/k in each; where the system
        does not tell, pages that are a process's alone.
        """
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                memory = process.memory_full_info()
                total += getattr(memory, "pss", memory.uss)
        return total

    def cpu_seconds(self) -> float:
        return sum(self.cpu_seconds_by_part().values())

    def cpu_seconds_by_part(self) -> dict[str, float]:
        """Returns the CPU seconds of Manta's processes by deployment, such as `engine`, and of the rest as `others`."""
        totals: dict[str, float] = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                times, command = process.cpu_times(), process.cmdline()
                part = _part_of(command[0] if command else "")
                totals[part] = totals.get(part, 0.0) + times.user + times.system
        return totals

    def rest(self, limit_s: float = 1.5) -> None:
        """Waits until the tree is quiet; one that is still busy after `limit_s` is paused, from then on at once."""
        if self._paused:
            return
        if not self.spins:
            share = self._wait_until_quiet(limit_s)
            self.spins = share > self.idle_share
            if not self.spins:
                self.idle_cores = max(self.idle_cores, share)
        if self.spins:
            self._paused = self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Lets a paused child go on, and waits until it has caught up; must come before asking it anything."""
        if not self._paused:
            return
        for process in self._paused:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        self._paused = []
        self._wait_until_quiet(1.0)

    def _wait_until_quiet(self, limit_s: float) -> float:
        """Returns the cores that the tree uses in the end."""
        share, deadline = 1.0, time.perf_counter() + limit_s
        while share > self.idle_share and time.perf_counter() < deadline:
            before, since = self.cpu_seconds(), time.perf_counter()
            time.sleep(0.2)
            share = (self.cpu_seconds() - before) / (time.perf_counter() - since)
        return share

    def _signal(self, number: signal.Signals) -> list[psutil.Process]:
        reached = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
                reached.append(process)
        return reached

    def stop(self) -> None:
        """Asks politely, then ends what is left of the process group and of the tree."""
        with contextlib.suppress(ValueError):  # it was stopped before
            _running.remove(self)
        self.wake()
        descendants = self.processes()
        if self.uses_pipe and self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()  # an engine ends with its input
        else:
            self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        _, left = psutil.wait_procs(descendants, timeout=5)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what was orphaned, and so is not in the tree
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()


def _part_of(command: str) -> str:
    """Returns the deployment of a replica, whose process Ray names `ray::ServeReplica:APPLICATION:DEPLOYMENT`."""
    if not command.startswith("ray::ServeReplica:"):
        return "others"
    return command.rpartition(":")[2].partition(".")[0]


class EngineProcess(Child):
    """An engine in a fresh process, ready when constructed; `start_seconds` is from spawn to ready."""

    uses_pipe = True

    def __init__(self, engine: str, model: str, setup: Setup, max_num_sequences: int = 256) -> None:
        self.engine = engine
        options = {
            "model": model,
            "max_model_len": setup.max_model_len,
            "kv_cache_bytes": setup.kv_cache_bytes,
            "max_num_sequences": max_num_sequences,
            "weights": setup.weights,
            "exact": setup.exact,
            "adapters": setup.adapters,
        }
        super().__init__(
            child_command(engine, setup, options), environment_of(engine, setup), checkout_of(engine, setup)
        )
        try:
            self._read()
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.perf_counter() - self.started

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int | Sequence[int],
        n: int = 1,
        temperature: float = 0.0,
        schema: Mapping[str, Any] | None = None,
        adapters: Sequence[str] = (),
    ) -> Timing:
        """Generates `n` choices for each prompt past end-of-sequence tokens, or up to the end of what `schema` allows.
        `max_tokens` is the same for all prompts, or each prompt's. `adapters` are the names of each prompt's.
        """
        each = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
        work = {"prompts": prompts, "max_tokens": each, "sampling": {"n": n, "temperature": temperature}}
        answer = self._ask({"do": "generate", **work, "schema": schema, "adapters": list(adapters)})
        steps, lengths = [(seconds, rows) for seconds, rows in answer["steps"]], tuple(answer["lengths"])
        return Timing(answer["seconds"], sum(lengths), steps, answer["num_cached"], lengths)

    def bytes_beyond_kv(self) -> int:
        """Memory of all processes without the KV pool."""
        return self.pss_bytes() - self._ask({"do": "resident_kv_bytes"})["bytes"]

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.fail(f"{self.engine} has died") from None
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self.fail(f"{self.engine} has died")
        return json.loads(line)


class ServerProcess(Child):
    """An OpenAI-compatible server, healthy when constructed; `start_seconds` is from launch to a healthy answer."""

    idle_share = 0.15
    """About the cores that Ray's processes use for their periodic checks."""

    tls: ssl.SSLContext | None = None
    """The client's side of HTTPS; None for a server that speaks HTTP."""

    def __init__(
        self,
        engine: str,
        model: str | Mapping[str, str],
        setup: Setup,
        port: int,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`model` is a folder, or for Manta several ones by the names of their models. `options` are Manta's, by their
        dotted names.
        """
        self.engine, self.port, self.model_name = engine, port, "bench"
        command = _SERVERS.get(engine, _manta_server)(model, setup, port)
        command += _set(options or {})
        super().__init__(command, environment_of(engine, setup), checkout_of(engine, setup))
        try:
            self.wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.perf_counter() - self.started
        # Ray uses a tenth of a core for nothing, which would slow the other in its turn: always paused between turns.
        # Its daemons wake together and a pause of a few seconds misses one health check at most, of five that count.
        self.spins = engine not in _SERVERS

    def wait_until_healthy(self) -> None:
        handlers = [] if self.tls is None else [urllib.request.HTTPSHandler(context=self.tls)]
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), *handlers)
        scheme = "http" if self.tls is None else "https"
        begun = time.perf_counter()
        while time.perf_counter() - begun < START_TIMEOUT_S:
            if self.process.poll() is not None:
                raise self.fail(f"the {self.engine} server ended with exit code {self.process.returncode}")
            try:
                with opener.open(f"{scheme}://127.0.0.1:{self.port}/health", timeout=5) as response:
                    if response.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.1)
        raise self.fail(f"the {self.engine} server is not healthy after {START_TIMEOUT_S:.0f} s")


def checkout_of(engine: str, setup: Setup) -> pathlib.Path:
    """Returns the folder whose code a child runs, and in which it runs."""
    return pathlib.Path(setup.peer_checkout) if engine == PEER and setup.peer_checkout else ROOT


def python_of(engine: str, setup: Setup) -> str:
    return setup.pythons.get(engine, sys.executable)


def child_command(engine: str, setup: Setup, options: Mapping[str, Any]) -> list[str]:
    """Returns the command of an engine's process. A second Manta's is this checkout's too, with the peer's code."""
    name = "manta" if engine == PEER else engine
    return [python_of(engine, setup), str(ROOT / "benchmarks" / "engine_child.py"), name, json.dumps(options)]


def environment_of(engine: str, setup: Setup) -> dict[str, str]:
    """Returns the variables that a child gets in addition.

    `PYTHONPATH` makes the processes that a child starts import the same code, although another checkout is installed;
    a peer sees nothing of ours. `PYTHONSAFEPATH` keeps the folder of a script, and the working directory, from being
    searched for modules: a peer would take a file of ours for a package that it looks for. vLLM's default binding
    leaves a core idle, so it is told to take all of them.
    """
    common = {"HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1", "PYTHONPATH": ""}
    if engine in ("manta", PEER):
        common |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(checkout_of(engine, setup))}
        return common | (setup.environment if engine == "manta" else {})
    if engine == "openvino":
        return common | {"CI": "true"}  # else its telemetry waits for minutes where there is no network
    if engine != "vllm":
        return common
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    # Compiled code that the peer's set-up left beside its environment saves a minute at each start.
    home = pathlib.Path(setup.pythons["vllm"]).parents[2]
    caches = {"VLLM_CACHE_ROOT": home / "vllm-cache", "TORCHINDUCTOR_CACHE_DIR": home / "inductor-cache"}
    common |= {name: str(folder) for name, folder in caches.items() if folder.is_dir()}
    return common | {
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, setup.kv_cache_bytes >> 30)),
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": ":".join(setup.vllm_preload),
        **setup.vllm_environment,
    }


@contextlib.contextmanager
def interrupted_once() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise `KeyboardInterrupt`; later ones are ignored, so that children are stopped in peace."""

    def interrupt(number: int, frame: object) -> None:
        for each in handlers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    handlers = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def free_port() -> int:
    """One that systems do not choose for outgoing connections, and Ray not for its workers: free now, it stays so.
    While this process lives, no other call returns it, here or in another process.
    """
    for port in random.sample(range(20_000, 30_000), 100):
        claim = socket.socket(type=socket.SOCK_DGRAM)
        with socket.socket() as probe, contextlib.suppress(OSError):
            claim.bind(("127.0.0.1", port))
            probe.bind(("127.0.0.1", port))
            _claims.append(claim)
            return port
        claim.close()
    raise BenchmarkError("of 100 ports between 20000 and 30000 none is free")


def _manta_server(model: str | Mapping[str, str], setup: Setup, port: int) -> list[str]:
    options = {
        "engine.dtype": "bfloat16",
        "engine.max_model_len": setup.max_model_len,
        "engine.kv_cache_bytes": setup.kv_cache_bytes,
    }
    if isinstance(model, str):
        named = ["--model", model, "--set", "served_model_name=bench"]
    else:
        named = [f"{name}={folder}" for name, folder in model.items()]
    return [sys.executable, "-m", "manta.cluster.cli", "serve", *named, "--port", str(port), *_set(options)]


def _set(options: Mapping[str, Any]) -> list[str]:
    return [part for key, value in options.items() for part in ("--set", f"{key}={value}")]


def _vllm_server(model: str | Mapping[str, str], setup: Setup, port: int) -> list[str]:
    assert isinstance(model, str), "vLLM serves one model"
    flags = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "bench", "--dtype", "bfloat16"]
    flags += ["--max-model-len", str(MAX_MODEL_LEN), "--disable-log-stats", "--disable-uvicorn-access-log"]
    return [setup.pythons["vllm"], "-m", "vllm.entrypoints.openai.api_server", "--model", model, *flags]


def _llamacpp_server(model: str, setup: Setup, port: int) -> list[str]:
    room = {"max_model_len": setup.max_model_len, "max_num_sequences": MAX_STREAMS}
    return child_command("llamacpp", setup, {"model": model, "port": port, **room})


_SERVERS = {"vllm": _vllm_server, "llamacpp": _llamacpp_server}
"""The commands of the peers' servers, of a model, the options and a port."""

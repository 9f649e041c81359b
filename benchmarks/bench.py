"""`manta bench` (and `make bench`): speed, start-up time and memory, alone or in turns with a peer in the same sitting.

Reads the command line, starts engines and servers, runs the workloads on them and prints a table. What a workload is
stands in `benchmarks/workloads.py`, how processes are started and weighed in `benchmarks/processes.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes.util
import json
import pathlib
import statistics
import sys
from collections.abc import Iterator, Sequence

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.http_load import LoadResult, run_load
from benchmarks.processes import BenchmarkError, Child, EngineProcess, ServerProcess, Setup, free_port
from benchmarks.report import Result, combine, machine, table
from benchmarks.workloads import WORKLOADS, PromptSource, Row, run_workload

ALL = ("a", "b", "d", "g", "start", "memory", "http")
LARGE, TINY = "qwen2.5-0.5b", "tiny-llama"
TOKEN_LIMITS = {LARGE: 150_000, TINY: 30_000}
HTTP_PROMPT, HTTP_OUTPUT = 112, 64
STARTS = 3
"""Starts of Manta's engine of which the median counts; a peer that takes a minute is started once."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmarks; 0 when all were measured, 1 where an engine failed, 2 for a wrong command line."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        bench = Bench(options)
    except ValueError as error:
        parser.error(str(error))
    print(machine(), file=sys.stderr)
    code = 0
    try:
        bench.run()
    except BenchmarkError as error:
        print(f"manta bench: {error}", file=sys.stderr)
        code = 1
    for note in bench.notes:
        print(f"note: {note}", file=sys.stderr)
    if bench.results:
        print(table(bench.results, options.compare))
        if options.json:
            rows = [result.as_json() for result in bench.results]
            pathlib.Path(options.json).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="manta bench", description="Speed, start-up time and memory.")
    parser.add_argument("--workloads", default=",".join(ALL), help=f"some of {', '.join(ALL)} (default: all)")
    parser.add_argument("--model", help="folder of the large model (default: random weights in Qwen2.5-0.5B's shape)")
    parser.add_argument("--tiny-model", help="folder of the tiny model (default: a random Llama of 4 layers)")
    parser.add_argument("--streams", default="1,16,32", help="numbers of HTTP streams (default: 1,16,32)")
    parser.add_argument("--requests-per-stream", type=int, default=2, help="HTTP requests of each stream (default: 2)")
    parser.add_argument("--repetitions", type=int, default=3, help="medians are taken over these (default: 3)")
    parser.add_argument("--kv-gib", type=int, default=2, help="size of the KV pool in GiB (default: 2)")
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE, one JSON object a line")
    parser.add_argument("--compare", choices=["vllm"], help="measure the peer too, in turns with Manta")
    parser.add_argument("--vllm-python", metavar="PATH", help="Python of the environment that vLLM is installed in")
    parser.add_argument(
        "--vllm-preload",
        metavar="LIB:LIB",
        help="what vLLM preloads (default: tcmalloc and libiomp5, if found)",
    )
    parser.add_argument(
        "--vllm-env", action="append", default=[], metavar="KEY=VALUE", help="environment of vLLM; may be repeated"
    )
    parser.add_argument(
        "--pairs",
        type=int,
        metavar="N",
        help="with --compare: N paired repetitions instead, both engines alive, and the 95%% interval of the ratio",
    )
    return parser


class Bench:
    """One sitting. `results` grows as workloads finish, so that a failure late on loses nothing."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.workloads = options.workloads.split(",")
        unknown = sorted(set(self.workloads) - set(ALL))
        if unknown:
            raise ValueError(f"unknown workload {', '.join(unknown)}; there are {', '.join(ALL)}")
        if options.pairs and not options.compare:
            raise ValueError("--pairs compares two engines; add --compare vllm")
        self.options = options
        self.names = ["manta"]
        self.setup = Setup(kv_cache_bytes=options.kv_gib << 30)
        if options.compare:
            self.names.append(options.compare)
            self.setup = _vllm_setup(options)
        self.streams = [int(number) for number in options.streams.split(",")]
        self.repetitions = options.pairs or options.repetitions
        self.results: list[Result] = []
        self.notes: list[str] = []

    def run(self) -> None:
        offline = [letter for letter in ("a", "b", "d") if letter in self.workloads]
        if offline or {"start", "memory"} & set(self.workloads):
            self._offline(self._model(LARGE), LARGE, offline)
        if "g" in self.workloads:
            self._offline(self._model(TINY), TINY, ["g"])
        if "http" in self.workloads:
            self._http(self._model(LARGE))

    def _model(self, name: str) -> str:
        folder = self.options.model if name == LARGE else self.options.tiny_model
        return str(pathlib.Path(folder).expanduser().resolve() if folder else benchmark_checkpoint(name))

    # ---- offline -----------------------------------------------------------------------------------------------

    def _offline(self, model: str, name: str, letters: list[str]) -> None:
        prompts = PromptSource(_token_limit(name, model))
        with self._engines(model) as engines:
            if "start" in self.workloads and name == LARGE:
                self._start_rows(engines, model)
            for engine in engines:
                engine.generate(prompts(4, 64), 8)
            for letter in letters:
                for workload in WORKLOADS[letter]:
                    repetitions = self.repetitions + (0 if self.options.pairs else workload.extra_repetitions)
                    seconds = run_workload(workload, engines, prompts, repetitions, self._note_idle)
                    self._add([[workload.figures(one) for one in engine] for engine in seconds])
            if "memory" in self.workloads and name == LARGE:
                for engine in engines:
                    engine.generate(prompts(32, 128), 16)
                self._add([[[_memory_row(engine)]] for engine in engines])

    @contextlib.contextmanager
    def _engines(self, model: str) -> Iterator[list[EngineProcess]]:
        with contextlib.ExitStack() as stack:
            engines = []
            for name in self.names:
                self._say(f"starting {name} on {pathlib.Path(model).name}")
                engine = EngineProcess(name, model, self.setup)
                stack.callback(engine.stop)
                engines.append(engine)
            yield engines

    def _start_rows(self, engines: list[EngineProcess], model: str) -> None:
        seconds = [engine.start_seconds for engine in engines]
        starts = [seconds[0]]
        for _ in range(STARTS - 1):
            engine = EngineProcess("manta", model, self.setup)
            starts.append(engine.start_seconds)
            engine.stop()
        seconds[0] = statistics.median(starts)
        self._add([[[Row("start", "new process to LLM ready", value, "s")]] for value in seconds])

    # ---- HTTP --------------------------------------------------------------------------------------------------

    def _http(self, model: str) -> None:
        prompts = PromptSource(_token_limit(LARGE, model))
        with contextlib.ExitStack() as stack:
            servers = []
            for name in self.names:
                self._say(f"launching the {name} server on {pathlib.Path(model).name}")
                server = ServerProcess(name, model, self.setup, free_port())
                stack.callback(server.stop)
                servers.append(server)
            self._add([[[Row("http", "server launch to healthy", server.start_seconds, "s")]] for server in servers])
            if "memory" in self.workloads:
                self.notes.append(f"the idle Manta server with Ray holds {servers[0].pss_bytes() / 2**30:.2f} GiB")
            for streams in self.streams:
                self._http_streams(servers, model, streams, prompts)

    def _http_streams(self, servers: list[ServerProcess], model: str, streams: int, prompts: PromptSource) -> None:
        self._say(f"HTTP, {streams} streams")
        count = streams * self.options.requests_per_stream
        workload = f"http {streams}"
        for server in servers:
            run_load(server.port, server.model_name, prompts(streams, HTTP_PROMPT), 8, streams)
        offline = EngineProcess("manta", model, self.setup, max_num_sequences=streams)
        results: dict[Child, list[LoadResult]] = {server: [] for server in servers}
        speeds: list[float] = []
        try:
            offline.generate(prompts(streams, HTTP_PROMPT), 8)
            turns: list[Child] = [*servers, offline]
            for repetition in range(self.repetitions):
                batch = prompts(count, HTTP_PROMPT)
                for child in reversed(turns) if repetition % 2 else turns:
                    self._settle(turns, child)
                    if isinstance(child, ServerProcess):
                        result = run_load(child.port, child.model_name, batch, HTTP_OUTPUT, streams)
                        results[child].append(result)
                    else:
                        seconds, num_tokens = offline.generate(batch, HTTP_OUTPUT)
                        speeds.append(num_tokens / seconds)
        finally:
            offline.stop()
        rows = [[_load_rows(workload, result) for result in results[server]] for server in servers]
        self._add(rows)
        manta = [result.num_tokens / result.seconds for result in results[servers[0]]]
        self._add([[_of_offline(workload, http, speed) for http, speed in zip(manta, speeds, strict=True)]])

    def _settle(self, children: Sequence[Child], next_one: Child) -> None:
        for child in children:
            if child is not next_one:
                self._note_idle(f"{child.engine} ({type(child).__name__})", child.wait_until_idle())

    # ---- what came of it ---------------------------------------------------------------------------------------

    def _add(self, rows: list[list[list[Row]]]) -> None:
        """Rows by engine and repetition."""
        results = combine(rows[0], rows[1] if len(rows) > 1 else None)
        self.results += results
        for result in results:
            self._say(f"{result.workload}: {result.metric} {result.value:.3f} {result.unit}" + _versus(result))

    def _note_idle(self, name: str, cores: float) -> None:
        if cores > 0.05:
            note = f"{name} used {cores:.2f} cores while it had nothing to do, which slowed the other down"
            if note not in self.notes:
                self.notes.append(note)

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _versus(result: Result) -> str:
    return "" if result.peer is None else f" (peer {result.peer:.3f}, ratio {result.ratio:.3f})"


def _memory_row(engine: EngineProcess) -> Row:
    return Row("memory", "all processes beyond the KV pool, offline", engine.bytes_beyond_kv() / 2**30, "GiB")


def _load_rows(workload: str, result: LoadResult) -> list[Row]:
    gaps = sorted(result.gaps)
    return [
        Row(workload, "output", result.num_tokens / result.seconds, "tok/s"),
        Row(workload, "TTFT p50", statistics.median(result.ttft), "s"),
        Row(workload, "inter-token p50", statistics.median(gaps) * 1e3, "ms"),
        Row(workload, "inter-token p99", gaps[int(0.99 * (len(gaps) - 1))] * 1e3, "ms"),
        Row(workload, "load generator", result.generator_cores, "cores"),
    ]


def _of_offline(workload: str, http: float, offline: float) -> list[Row]:
    return [
        Row(workload, "LLM.generate, same work", offline, "tok/s"),
        Row(workload, "HTTP over LLM.generate", http / offline, "x"),
    ]


def _token_limit(name: str, model: str) -> int:
    vocab_size = json.loads((pathlib.Path(model) / "config.json").read_text())["vocab_size"]
    return min(TOKEN_LIMITS[name], vocab_size)


def _vllm_setup(options: argparse.Namespace) -> Setup:
    if not options.vllm_python:
        raise ValueError("--compare vllm needs --vllm-python, the Python that vLLM is installed in")
    python = pathlib.Path(options.vllm_python).expanduser().absolute()
    if not python.exists():
        raise ValueError(f"there is no {python}; --vllm-python names the Python that vLLM is installed in")
    if options.vllm_preload is not None:
        preload = [str(pathlib.Path(path).expanduser()) for path in options.vllm_preload.split(":") if path]
    else:
        openmp = python.parent.parent / "lib" / "libiomp5.so"
        preload = [name for name in map(ctypes.util.find_library, ("tcmalloc_minimal", "tcmalloc")) if name][:1]
        preload += [str(openmp)] if openmp.exists() else []
    return Setup(
        kv_cache_bytes=options.kv_gib << 30,
        vllm_python=str(python),
        vllm_preload=tuple(preload),
        vllm_environment=dict(item.partition("=")[::2] for item in options.vllm_env),
    )


if __name__ == "__main__":
    sys.exit(main())

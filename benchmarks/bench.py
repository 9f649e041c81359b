"""`manta bench` (and `make bench`): speed, start-up time and memory, alone or in turns with a peer.

Reads the command line, starts engines and servers, runs the workloads, and prints each row at once. Beside it:

- `benchmarks/workloads.py`: the workloads, and how engines take turns.
- `benchmarks/processes.py`: how processes are started and measured.
- `benchmarks/report.py`: what is printed.
- `benchmarks/README.md`: how to read it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.http_load import run_load
from benchmarks.peers import add_python_options, pythons_of, vllm_fields
from benchmarks.processes import (
    PEER,
    BenchmarkError,
    Child,
    EngineProcess,
    ServerProcess,
    Setup,
    Timing,
    free_port,
    interrupted_once,
)
from benchmarks.report import Table, machine, say_failure
from benchmarks.workloads import WORKLOADS, PromptSource, Row, alternate, run_workload
from manta.structured.visible_text import say_lines

C = TypeVar("C", bound=Child)

USUAL = ("a", "b", "c", "d", "g", "start", "memory", "http")
ALL = (*USUAL, "http32")
LARGE, TINY = "qwen2.5-0.5b", "tiny-llama"
TOKEN_LIMITS = {LARGE: 150_000, TINY: 30_000}
HTTP_PROMPT, HTTP_OUTPUT = 112, 64
PAIRS = 30
STARTS = 3
"""Starts of Manta's engine of which the median counts; a peer that takes a minute is started once. So often both sides
of an HTTP row start anew, too: what a start leaves to chance, such as where pages lie, lasts as long as its processes.
"""
PARTS = ("engine", "ingress", "others")
"""Parts of a server whose use of the cores an HTTP row shows."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmarks; 0 when all were measured, 1 where an engine failed, 2 for a wrong command line.

    Ctrl-C and SIGTERM stop every child and give 130; the rows that were finished stay printed and written.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        bench = Bench(options)
    except ValueError as error:
        parser.error(str(error))
    print(machine(), file=sys.stderr)
    code = 0
    try:
        with interrupted_once():
            bench.run()
    except BenchmarkError as error:
        say_failure(f"manta bench: {error}")
        code = 1
    except KeyboardInterrupt:
        print("manta bench: interrupted", file=sys.stderr)
        code = 130
    for note in bench.notes:
        say_lines([f"note: {note}"], file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="manta bench", description="Speed, start-up time and memory.")
    parser.add_argument(
        "--workloads", default=",".join(USUAL), help=f"some of {', '.join(ALL)} (default: all but http32)"
    )
    parser.add_argument("--model", help="folder of the large model (default: random weights in Qwen2.5-0.5B's shape)")
    parser.add_argument("--tiny-model", help="folder of the tiny model (default: a random Llama of 4 layers)")
    parser.add_argument("--streams", help="numbers of HTTP streams (default: 1,16,32; with --compare: 16)")
    parser.add_argument("--requests-per-stream", type=int, metavar="N", help="default: 2; in pairs: 1")
    parser.add_argument("--repetitions", type=int, default=3, help="medians are taken over these (default: 3)")
    parser.add_argument("--kv-gib", type=int, default=2, help="size of each engine's KV pool in GiB (default: 2)")
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE as they come, one JSON object a line")
    parser.add_argument(
        "--compare",
        choices=["vllm", "manta"],
        help="measure the peer too, both alive and taking turns of about 2 s; manta is a second Manta: ratios near 1",
    )
    parser.add_argument("--peer-checkout", metavar="PATH", help="code of the second Manta, another commit's checkout")
    parser.add_argument(
        "--pairs", type=int, metavar="N", help=f"turns of each engine with --compare or in http32 (default: {PAIRS})"
    )
    parser.add_argument(
        "--starts",
        type=int,
        metavar="N",
        help=f"of both sides of an HTTP row, which share its pairs (default: {STARTS}; vllm: 1)",
    )
    add_python_options(parser, "vllm")
    return parser


class Bench:
    """One sitting. Rows are printed and written as workloads finish, so that a failure late on loses nothing."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.workloads = options.workloads.split(",")
        unknown = sorted(set(self.workloads) - set(ALL))
        if unknown:
            raise ValueError(f"unknown workload {', '.join(unknown)}; there are {', '.join(ALL)}")
        for folder in filter(None, (options.model, options.tiny_model)):
            if not (pathlib.Path(folder).expanduser() / "config.json").is_file():
                raise ValueError(f"{folder} is no folder of a model: it has no config.json")
        paired = bool(options.compare) or "http32" in self.workloads
        if options.pairs is not None and not paired:
            raise ValueError("--pairs compares two engines; add --compare, or the workload http32")
        if options.pairs is not None and options.pairs < 1:
            raise ValueError(f"--pairs {options.pairs} is less than 1")
        if options.starts is not None and (options.starts < 1 or not paired):
            raise ValueError("--starts is the number of times, at least 1, that the two sides of an HTTP row start")
        self.options = options
        self.names = ["manta"]
        self.setup = Setup(kv_cache_bytes=options.kv_gib << 30)
        self.notes: list[str] = []
        if options.compare:
            self.names.append(PEER if options.compare == "manta" else options.compare)
        if options.peer_checkout:
            if options.compare != "manta":
                raise ValueError("--peer-checkout is the second Manta's; add --compare manta")
            checkout = str(pathlib.Path(options.peer_checkout).expanduser().resolve())
            self.setup = msgspec.structs.replace(self.setup, peer_checkout=checkout)
        if options.compare == "vllm":
            self.setup = _vllm_setup(options, self.notes)
        self.streams = [
            int(number) for number in (options.streams or ("16" if options.compare else "1,16,32")).split(",")
        ]
        self.pairs = options.pairs or PAIRS
        self.starts = min(options.starts or (1 if options.compare == "vllm" else STARTS), self.pairs)
        self.repetitions = self.pairs if options.compare else options.repetitions
        self._table = Table(options.json, paired)

    def run(self) -> None:
        offline = [letter for letter in ("a", "b", "c", "d") if letter in self.workloads]
        if "g" in self.workloads:
            self._offline(self._model(TINY), TINY, ["g"])
        if offline or {"start", "memory"} & set(self.workloads):
            self._offline(self._model(LARGE), LARGE, offline)
        if "http" in self.workloads:
            self._http(self._model(LARGE))
        if "http32" in self.workloads:
            self._http_against_offline(self._model(LARGE))

    def _model(self, name: str) -> str:
        folder = self.options.model if name == LARGE else self.options.tiny_model
        return str(pathlib.Path(folder).expanduser().resolve() if folder else benchmark_checkpoint(name))

    # ---- offline -----------------------------------------------------------------------------------------------

    def _offline(self, model: str, name: str, letters: list[str]) -> None:
        prompts = PromptSource(_token_limit(name, model))
        with self._engines(model) as engines:
            if "start" in self.workloads and name == LARGE:
                self._start_rows(engines, model)
            for letter in letters:
                for workload in WORKLOADS[letter]:
                    self._add(run_workload(workload, engines, prompts, self.repetitions, self._hear(letter)))
            if "memory" in self.workloads and name == LARGE:
                for engine in engines:
                    engine.wake()
                    engine.generate(prompts(32, 128), 16)
                self._add([[[_memory_row(engine)]] for engine in engines])

    @contextlib.contextmanager
    def _engines(self, model: str) -> Iterator[list[EngineProcess]]:
        with contextlib.ExitStack() as stack:
            engines = []
            for name in self.names:
                self._say(f"starting {name} on {pathlib.Path(model).name}")
                engine = EngineProcess(name, model, self.setup)
                stack.callback(self._stop, engine)
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
        """A server and the same work offline, in turns; with a peer its server instead."""
        if self.options.compare:
            self._http_against_peer(model)
            return
        prompts = PromptSource(_token_limit(LARGE, model))
        with contextlib.ExitStack() as stack:
            server = self._server(stack, "manta", model)
            self._add([[[_launch_row(server)]]])
            self._note_memory(server)
            for streams in self.streams:
                workload = f"http {streams}"
                with contextlib.ExitStack() as inner:
                    turns = [server, self._offline_engine(inner, model, streams)]
                    http, offline = self._load(turns, workload, streams, prompts, self.repetitions)
                self._add([http])
                pairs = zip(http, offline, strict=True)
                self._add([[_of_offline(workload, served[0].value, direct[0].value) for served, direct in pairs]])

    def _http_against_peer(self, model: str) -> None:
        prompts = PromptSource(_token_limit(LARGE, model))
        makers = [functools.partial(self._server, name=name, model=model) for name in self.names]
        launches: list[list[list[Row]]] = [[] for _ in makers]
        loads: dict[int, list[list[list[Row]]]] = {streams: [[] for _ in makers] for streams in self.streams}
        for number, servers in self._starts(makers):
            for rows, server in zip(launches, servers, strict=True):
                rows.append([_launch_row(server)])
            if not number:
                self._note_memory(servers[0])
            for streams, found in loads.items():
                more = self._load(servers, f"http {streams}", streams, prompts, self._pairs_of_a_start)
                for rows, new in zip(found, more, strict=True):
                    rows += new
        self._add(launches)
        for found in loads.values():
            self._add(found, num_starts=self.starts)

    def _http_against_offline(self, model: str) -> None:
        """32 streams to Manta's server, in turns with the same requests through `LLM.generate`."""
        prompts = PromptSource(_token_limit(LARGE, model))
        makers: list[Callable[[contextlib.ExitStack], Child]] = [
            functools.partial(self._server, name="manta", model=model),
            functools.partial(self._offline_engine, model=model, max_num_sequences=32),
        ]
        http: list[list[Row]] = []
        offline: list[list[Row]] = []
        for _, turns in self._starts(makers):
            served, direct = self._load(turns, "http32", 32, prompts, self._pairs_of_a_start)
            http += served
            offline += direct
        num_shared = len(offline[0])
        self._add([[row[:num_shared] for row in http], offline], "LLM.generate", self.starts)
        self._add([[row[num_shared:] for row in http]])

    @property
    def _pairs_of_a_start(self) -> int:
        return -(-self.pairs // self.starts)

    def _starts(self, makers: Sequence[Callable[[contextlib.ExitStack], C]]) -> Iterator[tuple[int, list[C]]]:
        """Yields the number of each start and what was started, in an order that is reversed each time."""
        for number in range(self.starts):
            with contextlib.ExitStack() as stack:
                order = range(len(makers))
                started = {index: makers[index](stack) for index in (reversed(order) if number % 2 else order)}
                yield number, [started[index] for index in order]

    def _note_memory(self, server: Child) -> None:
        if "memory" in self.workloads:
            self.notes.append(f"the idle Manta server with Ray holds {server.pss_bytes() / 2**30:.2f} GiB")

    def _server(self, stack: contextlib.ExitStack, name: str, model: str) -> ServerProcess:
        self._say(f"launching the {name} server on {pathlib.Path(model).name}")
        server = ServerProcess(name, model, self.setup, free_port())
        stack.callback(self._stop, server)
        return server

    def _offline_engine(self, stack: contextlib.ExitStack, model: str, max_num_sequences: int) -> EngineProcess:
        self._say(f"starting manta on {pathlib.Path(model).name}")
        engine = EngineProcess("manta", model, self.setup, max_num_sequences=max_num_sequences)
        stack.callback(self._stop, engine)
        return engine

    def _load(
        self, turns: Sequence[Child], workload: str, streams: int, prompts: PromptSource, repetitions: int
    ) -> list[list[list[Row]]]:
        """Rows by child and repetition; those of `_offline_rows` come first."""

        def run(child: Child, batch: list[list[int]]) -> list[Row]:
            if isinstance(child, ServerProcess):
                return load_rows(workload, child, batch, streams)
            assert isinstance(child, EngineProcess)
            return _offline_rows(workload, child.generate(batch, HTTP_OUTPUT))

        paired = self.options.compare or workload == "http32"
        count = streams * (self.options.requests_per_stream or (1 if paired else 2))
        results = alternate(turns, repetitions, lambda: [prompts(count, HTTP_PROMPT)], run, self._hear(workload))
        return [[rows for (rows,) in child] for child in results]

    # ---- what came of it ---------------------------------------------------------------------------------------

    def _add(self, rows: list[list[list[Row]]], against: str | None = None, num_starts: int = 1) -> None:
        """Rows by engine and repetition, of `num_starts` starts one after the other."""
        peer = rows[1] if len(rows) > 1 else None
        self._table.add(rows[0], peer, against or self.options.compare, num_starts)

    def _stop(self, child: Child) -> None:
        name = f"{child.engine} ({type(child).__name__})"
        if child.spins:
            self.notes.append(f"{name} was paused between its turns, for it uses the cores when it has nothing to do")
        elif child.idle_cores > 0.05:
            self.notes.append(f"{name} used up to {child.idle_cores:.2f} cores in the other's turns")
        child.stop()

    def _hear(self, workload: str) -> Callable[[str], None]:
        return lambda text: self._say(f"{time.strftime('%H:%M:%S')} {workload}: {text}")

    def _say(self, text: str) -> None:
        say_lines([text], file=sys.stderr, flush=True)


def _memory_row(engine: EngineProcess) -> Row:
    return Row("memory", "all processes beyond the KV pool, offline", engine.bytes_beyond_kv() / 2**30, "GiB")


def _launch_row(server: Child) -> Row:
    assert isinstance(server, ServerProcess)
    return Row("http", "server launch to healthy", server.start_seconds, "s")


def load_rows(workload: str, server: ServerProcess, prompts: list[list[int]], streams: int) -> list[Row]:
    """Sends a server these prompts in so many streams. Returns the figures, with how many cores each part kept busy."""
    before = server.cpu_seconds_by_part()
    result = run_load(server.port, server.model_name, prompts, HTTP_OUTPUT, streams)
    used = server.cpu_seconds_by_part()
    cores = {part: (used.get(part, 0.0) - before.get(part, 0.0)) / result.seconds for part in PARTS}
    gaps = sorted(result.gaps)
    return [
        Row(workload, "output", result.num_tokens / result.seconds, "tok/s"),
        Row(workload, "first token of all", max(result.ttft), "s"),
        Row(workload, "inter-token p50", statistics.median(gaps) * 1e3, "ms"),
        Row(workload, "TTFT p50", statistics.median(result.ttft), "s"),
        Row(workload, "inter-token p99", gaps[int(0.99 * (len(gaps) - 1))] * 1e3, "ms"),
        Row(workload, "load generator", result.generator_cores, "cores"),
        *(Row(workload, f"server: {part}", used, "cores") for part, used in cores.items()),
    ]


def _offline_rows(workload: str, timing: Timing) -> list[Row]:
    moments = [moment for moment, _ in timing.steps]
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    most = max(count for _, count in timing.steps)
    return [
        Row(workload, "output", timing.num_tokens / timing.seconds, "tok/s"),
        Row(workload, "first token of all", next(moment for moment, count in timing.steps if count == most), "s"),
        Row(workload, "inter-token p50", statistics.median(gaps) * 1e3, "ms"),
    ]


def _of_offline(workload: str, http: float, offline: float) -> list[Row]:
    return [
        Row(workload, "LLM.generate, same work", offline, "tok/s"),
        Row(workload, "HTTP over LLM.generate", http / offline, "x"),
    ]


def _token_limit(name: str, model: str) -> int:
    vocab_size = json.loads((pathlib.Path(model) / "config.json").read_text())["vocab_size"]
    return min(TOKEN_LIMITS[name], vocab_size)


def _vllm_setup(options: argparse.Namespace, notes: list[str]) -> Setup:
    pythons = pythons_of(options)
    if "vllm" not in pythons:
        raise ValueError("--compare vllm needs --vllm-python, the Python that vLLM is installed in")
    fields = vllm_fields(options, pythons["vllm"], notes)
    return Setup(kv_cache_bytes=options.kv_gib << 30, pythons=pythons, **fields)


if __name__ == "__main__":
    sys.exit(main())

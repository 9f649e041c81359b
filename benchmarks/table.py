"""`manta bench table`: Manta beside its peers, cell by cell, into a file that a later run continues.

A cell is a workload on a model in a format, named `workload/model/format`: for each peer that can do it, Manta and the
peer take turns in one sitting. Each is a line of the results file as soon as it is measured, and the table is written
beside the file, as Markdown, after each line. A cell whose line has this commit, the peer's version and this processor
is not measured again, so that an interrupted run goes on, and cells may come from several machines.

    a to e, g    the workloads of `manta bench`, in bfloat16
    a, b         also in int8 and int4, on two shapes
    p            a, b and the prefill of one prompt of 512 tokens on two mixtures, in four formats
    http         closed-loop streams: 1, 16 and 64
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fnmatch
import itertools
import json
import pathlib
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from benchmarks.bench import HTTP_PROMPT, LARGE, TINY, load_rows
from benchmarks.checkpoints import benchmark_checkpoint
from benchmarks.floors import Rates, Shape, bytes_of, measure_rates
from benchmarks.peers import PEERS, add_python_options, pythons_of, version_of, vllm_fields
from benchmarks.processes import BenchmarkError, Child, EngineProcess, ServerProcess, Setup, free_port
from benchmarks.report import Result, combine, commit, figure_text, processor_name
from benchmarks.workloads import (
    A_CONTEXT,
    A_PREFILLS,
    A_PROMPT,
    A_STEPS,
    P_PROMPT,
    WORKLOADS,
    PromptSource,
    Row,
    alternate,
    run_schema,
    run_workload,
    schema_prompts,
)
from manta.structured.visible_text import say_lines, visible_lines
from manta.workers.kept_weights import KEPT_BITS
from manta.workers.kernels import processor

FOUR_B, QWEN_MIXTURE, OPENAI_MIXTURE = "qwen3-4b-12-layers", "qwen3-30b-a3b-4-layers", "gpt-oss-20b-4-layers"
MIXTURES = (QWEN_MIXTURE, OPENAI_MIXTURE)
WEIGHTS = {"bfloat16": "auto", "lossless": "lossless", "int8": "int8", "int4": "int4"}
"""Names of formats, and Manta's option `weights` that makes them of a checkpoint in bfloat16."""
STREAMS = {"http1": 1, "http16": 16, "http64": 64}
ROWS = {"a": 32, "b": 1, "c": 64, "d": 16, "e": 16, "g": 32, "p": 1}
"""The most sequences at once of each offline workload."""
MAX_MODEL_LEN = {"d": 1152}
"""The longest sequences of a workload, with room for its cache's blocks."""
USUAL_MAX_MODEL_LEN = 640
KV_CACHE_BYTES = 2 << 30
PAIRS = 10
LINE = '{"cell": "'
"""How each line of the results begins."""
HEADING = "# Manta beside its peers"
TOKEN_LIMIT = 30_000
"""Prompts are drawn from the tokens that all shapes have."""


class Cell(NamedTuple):
    workload: str
    model: str
    format: str

    def __str__(self) -> str:
        return "/".join(self)


CELLS = [
    *(Cell(letter, LARGE, "bfloat16") for letter in "abcde"),
    Cell("g", TINY, "bfloat16"),
    *(Cell(letter, LARGE, form) for form in ("lossless", "int8", "int4") for letter in "ab"),
    *(Cell(letter, FOUR_B, form) for form in ("int8", "int4") for letter in "ab"),
    *(Cell(letter, LARGE, form) for form in ("bfloat16", "int4") for letter in STREAMS),
    *(Cell(letter, name, form) for name in MIXTURES for form in WEIGHTS for letter in "abp"),
]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every cell is in the file, 1 where an engine failed, 2 for a wrong command line."""
    parser = argparse.ArgumentParser(
        prog="manta bench table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default=",".join(PEERS), help="default: %(default)s")
    parser.add_argument("--results", metavar="FILE", required=True, help="one JSON object a line; continued if there")
    parser.add_argument("--cells", default="*", help="patterns such as 'a/*,http*/*/int4' (default: all)")
    parser.add_argument(
        "--pairs", type=int, default=PAIRS, metavar="N", help="turns of each engine (default: %(default)s)"
    )
    parser.add_argument(
        "--remove-files", action="store_true", help="remove what was made for peers once a model in a format is done"
    )
    add_python_options(parser, *PEERS)
    options = parser.parse_args(arguments)
    try:
        table = Table(options)
    except ValueError as error:
        parser.error(str(error))
    except BenchmarkError as error:
        _say(f"manta bench: {error}")
        return 1
    return table.run()


class Table:
    """One run of the command."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Raises `ValueError` for wrong options, and `BenchmarkError` for a Python without its peer."""
        names = options.peers.split(",")
        if unknown := [name for name in names if name not in PEERS]:
            raise ValueError(f"--peers {unknown[0]}: there are {', '.join(PEERS)}")
        if options.pairs < 1:
            raise ValueError(f"--pairs {options.pairs} is less than 1")
        patterns = options.cells.split(",")
        self._cells = [cell for cell in CELLS if any(fnmatch.fnmatch(str(cell), pattern) for pattern in patterns)]
        if not self._cells:
            raise ValueError(f"--cells {options.cells}: there are {', '.join(map(str, CELLS))}")
        pythons = pythons_of(options)
        notes = [f"{PEERS[name].title} is left out: its Python was not given" for name in names if name not in pythons]
        fields = vllm_fields(options, pythons["vllm"], notes) if "vllm" in pythons else {}
        say_lines(notes, file=sys.stderr)
        self._setup = Setup(kv_cache_bytes=KV_CACHE_BYTES, pythons=pythons, **fields)
        self._pairs = options.pairs
        self._removes_files = options.remove_files
        self._files: set[pathlib.Path] = set()
        """Folders that peers have read since the model or its format changed."""
        self._results = ResultsFile(pathlib.Path(options.results))
        self._here = {"commit": commit(), "processor": f"{processor_name()}, {processor.form().name}"}
        self._versions = {name: version_of(name, pythons[name]) for name in names if name in pythons}

    def run(self) -> int:
        """Measures what is missing, and writes the table; 1 where an engine failed."""
        failed = False
        for model, pairs in itertools.groupby(self._missing(), lambda pair: Sitting.of(*pair)[:2]):
            for sitting, its_pairs in itertools.groupby(pairs, lambda pair: Sitting.of(*pair)):
                failed |= not self._sit(sitting, [cell for _, cell in its_pairs])
            for file in self._files if self._removes_files else ():
                _say(f"removing {file.name}, made for {'/'.join(model)}")
                shutil.rmtree(file)
            self._files.clear()
        self._results.write_table()
        return int(failed)

    def _missing(self) -> list[tuple[str, Cell]]:
        """Returns the cells to measure, each with a peer, in the order of their sittings."""
        wanted = [
            (peer, cell)
            for peer in self._versions
            for cell in self._cells
            if cell.workload in PEERS[peer].workloads
            and (cell.model not in MIXTURES or cell.format in PEERS[peer].mixture_formats)
        ]
        missing = [(peer, cell) for peer, cell in wanted if not self._results.has(self._key(peer, cell))]
        _say(f"{len(wanted) - len(missing)} of {len(wanted)} cells are in {self._results.path}")
        return sorted(missing, key=lambda pair: Sitting.of(*pair))

    def _key(self, peer: str, cell: Cell) -> dict[str, str]:
        return {"cell": str(cell), "peer": peer, "version": self._versions[peer], **self._here}

    def _sit(self, sitting: Sitting, cells: list[Cell]) -> bool:
        """Measures cells with the same two engines, after a failure with new ones; returns whether none failed."""
        left, failed = list(cells), False
        while left:
            started = False
            try:
                with contextlib.ExitStack() as stack:
                    folder = benchmark_checkpoint(sitting.model)
                    children = self._start(stack, sitting, folder, left)
                    started = True
                    while left:
                        self._measure(left[0], sitting.peer, Shape(folder), folder, children)
                        del left[0]
            except BenchmarkError as error:
                failed = True
                message = f"{left[0]}, {PEERS[sitting.peer].title}: {error}"
                say_lines(visible_lines(message).split("\n"), file=sys.stderr)
                *_, last = str(error).splitlines()
                ended = left[:1] if started else left  # engines that do not start fail in every cell
                for cell in ended:
                    self._results.add({**self._key(sitting.peer, cell), "error": last.strip()})
                left = left[len(ended) :]
        return not failed

    def _start(
        self, stack: contextlib.ExitStack, sitting: Sitting, folder: pathlib.Path, cells: list[Cell]
    ) -> list[Child]:
        """Starts Manta and the peer, to be stopped with `stack`."""
        peer, weights = sitting.peer, WEIGHTS[sitting.format]
        file = PEERS[peer].formats[sitting.format].prepare(folder, self._setup.pythons[peer])
        if file != folder:
            self._files.add(file if file.is_dir() else file.parent)
        length = max(MAX_MODEL_LEN.get(cell.workload, USUAL_MAX_MODEL_LEN) for cell in cells)
        setup = msgspec.structs.replace(self._setup, weights=weights, max_model_len=length)
        children: list[Child] = []
        for name, model in (("manta", folder), (peer, file)):
            _say(f"starting {name} on {model.name}")
            if sitting.serves:
                options = {"engine.weights": weights} if name == "manta" else None
                children.append(ServerProcess(name, str(model), setup, free_port(), options))
            else:
                rows = max(ROWS[cell.workload] for cell in cells)
                children.append(EngineProcess(name, str(model), setup, rows))
            stack.callback(children[-1].stop)
        return children

    def _measure(self, cell: Cell, peer: str, shape: Shape, folder: pathlib.Path, children: list[Child]) -> None:
        """Measures a cell and adds it to the file."""
        started = time.perf_counter()
        rates = [self._rates(children)]
        parts = measure(cell, children, self._pairs)
        rates.append(self._rates(children))
        mean = Rates(*(statistics.mean(each) for each in zip(*rates, strict=True)))
        kept = KEPT_BITS[WEIGHTS[cell.format]]
        bits = [(8 * bytes_of(kept.layers), 8 * bytes_of(kept.head)), PEERS[peer].formats[cell.format].bits_of(folder)]
        floors = [floors_of(cell, shape, mean, *each) for each in bits]
        results = [result for ours, others in parts for result in combine(ours, others, PEERS[peer].title)]
        line: dict[str, Any] = {
            **self._key(peer, cell),
            "date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
            "seconds": round(time.perf_counter() - started),
            "bits": bits,
            "rates": mean._asdict(),
            "rows": [_row(result, *(each.get(result.metric) for each in floors)) for result in results],
        }
        self._results.add(line)
        for row in line["rows"]:
            _say(f"{cell}, {PEERS[peer].title}: {row['metric']} {row.get('ratio', 0):.3f}")

    def _rates(self, children: list[Child]) -> Rates:
        for child in children:
            child.rest()
        return measure_rates(processor.form())


class Sitting(NamedTuple):
    """A model in a format, and a peer: Manta and the peer start once for all of its cells."""

    model: str
    format: str
    peer: str
    serves: bool

    @classmethod
    def of(cls, peer: str, cell: Cell) -> Sitting:
        return cls(cell.model, cell.format, peer, cell.workload in STREAMS)


Turns = list[list[Row]]
"""The rows of each turn of one engine."""


def measure(cell: Cell, children: list[Child], pairs: int) -> list[tuple[Turns, Turns]]:
    """Returns what Manta and the peer did in turns, for each part of a cell's workload."""
    prompts = PromptSource(TOKEN_LIMIT)

    def hear(text: str) -> None:
        _say(f"{time.strftime('%H:%M:%S')} {cell}: {text}")

    def load(server: ServerProcess, batch: list[list[int]]) -> list[Row]:
        return load_rows(cell.workload, server, batch, streams)

    if cell.workload in STREAMS:
        streams = STREAMS[cell.workload]
        servers = [child for child in children if isinstance(child, ServerProcess)]
        found = alternate(servers, pairs, lambda: [prompts(streams, HTTP_PROMPT)], load, hear)
    else:
        engines = [child for child in children if isinstance(child, EngineProcess)]
        if cell.workload != "e":
            parts = (run_workload(part, engines, prompts, pairs, hear) for part in WORKLOADS[cell.workload])
            return [(ours, others) for ours, others in parts]
        found = alternate(engines, pairs, lambda: schema_prompts(prompts), run_schema, hear)
    ours, others = ([rows for (rows,) in turns] for turns in found)
    return [(ours, others)]


def floors_of(cell: Cell, shape: Shape, rates: Rates, layer_bits: float, head_bits: float) -> dict[str, float]:
    """Returns the least time, or the highest speed, that the rates allow, by metric, in the units of the metrics. With
    many rows a mixture reads the experts that tokens hit if each expert is as likely as any other.
    """
    rate = rates.bfloat16 if cell.format in ("bfloat16", "lossless") else rates.int8

    def step(rows: int, context: int) -> float:
        return 1e3 * shape.step_seconds(rows, context, rate, rates.bandwidth, layer_bits / 8, head_bits / 8)

    floors = {
        "a": {
            "decode step, 32 rows": step(32, A_CONTEXT + A_STEPS // 2),
            "prefill": A_PREFILLS * A_PROMPT / shape.prefill_seconds(A_PREFILLS, A_PROMPT, rate),
        },
        "b": {"decode step, 1 row": step(1, 32 + 96 // 2)},
        "p": {f"prefill of {P_PROMPT}": P_PROMPT / shape.prefill_seconds(1, P_PROMPT, rate)},
    }
    return floors.get(cell.workload, {})


def _row(result: Result, floor: float | None, peers_floor: float | None) -> dict[str, Any]:
    """Returns a result as it stands in the file; `of_floor` is 1 for an engine that is as fast as the floor."""
    row = result.as_json()
    if floor is not None and peers_floor is not None and result.peer is not None:
        pairs = [(result.value, floor), (result.peer, peers_floor)]
        row["of_floor"] = [least / value if result.unit == "ms" else value / least for value, least in pairs]
    return row


class ResultsFile:
    """Lines of cells, each with what it was measured with, and the table beside them. Raises `ValueError` where either
    file is another program's.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._table_path = path.with_suffix(".md")
        if path.suffix == ".md" or path.is_dir():
            raise ValueError(f"--results {path} must name a file of lines, such as table.jsonl")
        *whole, cut = path.read_text().split("\n") if path.exists() else [""]  # an interrupted run has cut the last one
        self._lines = [_line_of(text, path) for text in whole]
        if cut[: len(LINE)] != LINE[: len(cut)]:
            _line_of(cut, path)
        if self._table_path.exists() and not self._table_path.read_text().startswith(HEADING):
            raise ValueError(f"{self._table_path} is another file; name one beside which there is no such file")
        if cut:
            self._write("".join(json.dumps(line) + "\n" for line in self._lines), self.path)

    def has(self, key: dict[str, str]) -> bool:
        """Whether a cell was measured with just this."""
        return any("error" not in line and key.items() <= line.items() for line in self._lines)

    def add(self, line: dict[str, Any]) -> None:
        self._lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.write_table()

    def write_table(self) -> None:
        """Writes the newest line of each cell, peer and processor as Markdown."""
        self._write(markdown(self._lines), self._table_path)

    def _write(self, text: str, path: pathlib.Path) -> None:
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text)
        partial.replace(path)


def _line_of(text: str, path: pathlib.Path) -> dict[str, Any]:
    with contextlib.suppress(json.JSONDecodeError):
        line = json.loads(text)
        if isinstance(line, dict) and line.keys() >= {"cell", "peer", "version", "commit", "processor"}:
            return line
    raise ValueError(f"--results {path} has lines that this command has not written; name another file")


def markdown(lines: list[dict[str, Any]]) -> str:
    """Returns the table of the newest line of each cell, peer and processor."""
    newest = {(line["processor"], line["cell"], line["peer"]): line for line in lines}
    order = {str(cell): number for number, cell in enumerate(CELLS)}
    text = [
        HEADING,
        "",
        "Manta and one peer take turns on the same checkpoint of random weights. A ratio is the median of the pairs',",
        "with its 95% interval; above 1 Manta is better. Of the floor is 1 for an engine that takes no longer than to",
        "read its weights, keys and values, or to multiply them, at rates that were measured around the cell. Bits a",
        "weight are those of the layers and, in brackets, of the head, scales included.",
    ]
    for place in dict.fromkeys(place for place, _, _ in newest):
        text += ["", f"## {place}", ""]
        text += _markdown_row(
            "cell", "figure", "peer", "Manta", "the peer", "ratio", "pairs", *_BITS_AND_FLOORS, "versions"
        )
        text += _markdown_row(*(["---"] * 10))
        found = [(cell, peer, line) for (where, cell, peer), line in newest.items() if where == place]
        for cell, peer, line in sorted(found, key=lambda each: (order.get(each[0], len(order)), each[1])):
            versions = f"{line['commit']} / {line['version']}"
            if "error" in line:
                text += _markdown_row(cell, "failed: " + line["error"], PEERS[peer].title, *[""] * 6, versions)
            for row in line.get("rows", ()):
                text += _figures(cell, PEERS[peer].title, line["bits"], row, versions)
    text += ["", "## Settings", "", "- Manta: its defaults; int8 and int4 by `weights`, of the checkpoint in bfloat16"]
    seen = {peer for _, _, peer in newest}
    text += [f"- {peer.title}: {peer.settings}" for name, peer in PEERS.items() if name in seen]
    return "\n".join(text) + "\n"


_BITS_AND_FLOORS = ("bits a weight", "of the floor")


def _figures(cell: str, peer: str, bits: list[list[float]], row: dict[str, Any], versions: str) -> list[str]:
    ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
    if "interval" in row:
        ratio += " [{:.2f}, {:.2f}]".format(*row["interval"])
    both = [f"{layers:g} ({head:g})" for layers, head in bits]
    of_floor = " / ".join(f"{each:.2f}" for each in row.get("of_floor", ()))
    values = [figure_text(value, row["unit"]) for value in (row["value"], row["peer"])]
    return _markdown_row(
        cell, row["metric"], peer, *values, ratio, row["repetitions"], " / ".join(both), of_floor, versions
    )


def _markdown_row(*cells: object) -> list[str]:
    return [f"| {' | '.join(str(cell).replace('|', ' ') for cell in cells)} |"]


def _say(text: str) -> None:
    say_lines([text], file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

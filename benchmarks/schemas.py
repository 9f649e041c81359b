"""`manta bench schemas`: engines for JSON schemas on MaskBench, side by side.

    passing             schemas that an engine compiles, whose instances it judges as MaskBench does, in time, and whose
                        random walks end in texts that the schema takes
    texts in order      as passing, where instances have their properties in the schema's order, in any spelling
    tests alone         as passing, without walks: MaskBench's own number
    refused             schemas that it does not compile
    rightly             those of them that it calls unsatisfiable, of which MaskBench has no valid instance; they pass
    invalid accepted    schemas with an invalid instance, or the text of a walk, that it lets a model write to the end
    valid rejected      schemas with a valid instance that it does not let a model write
    for spelling        those of them whose instances it takes as other tokens, or with numbers without exponents
    for order           those of them whose instances it takes in the schema's order of properties
    no end              schemas with a walk of 2,000 tokens, and twice the longest instance's, that finds no end
    timed out           schemas that cost an engine more time than it has; crashes too

MaskBench is `maskbench/data` of github.com/guidance-ai/jsonschemabench. Each engine runs in a process of its own, one
schema after another. The command appends a line to a file of results for each schema and engine, and goes on from
there when it is called again. The order of the files is random and always the same, so a part is a fair sample.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import random
import selectors
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

from tqdm import tqdm

from benchmarks.schema_engines import BUCKETS_PER_DECADE, ENGINES

DEMO = pathlib.Path(__file__).parents[1] / "configs" / "demo" / "target"
DEMO_VOCAB_SIZE, DEMO_EOS = 4160, 2
WALL_FACTOR = 20
"""A process that gives no answer within this multiple of its processor time is taken for hanging."""
START_SECONDS = 300
"""Most time in which a process loads its engine, on a busy machine."""
ENDING_SECONDS = 1
"""Time that a process which has closed its output has to end."""
COLUMNS = (
    *(
        "engine",
        "schemas",
        "passing",
        "texts in order",
        "tests alone",
        "refused",
        "rightly",
        "invalid accepted",
        "valid rejected",
        "for spelling",
        "for order",
    ),
    *("no end", "timed out", "gave up", "compile p50", "p99", "mask mean", "p50", "p99", "max"),
)
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="manta bench schemas", description="Engines for JSON schemas on MaskBench.")
    parser.add_argument("--data", required=True, help="folder of MaskBench's files (maskbench/data)")
    parser.add_argument("--sample", type=int, default=1000, help="files of it, at random; 0: all (default: 1000)")
    parser.add_argument("--engines", default=",".join(ENGINES), help=f"some of {', '.join(ENGINES)}")
    parser.add_argument("--tests", type=int, default=0, help="instances of each schema; 0: all (default: 0)")
    parser.add_argument("--walks", type=int, default=1, help="random texts of each schema (default: 1)")
    parser.add_argument(
        "--seconds", type=float, default=60, help="processor seconds that an engine has for one schema (default: 60)"
    )
    parser.add_argument("--tokenizer", default=str(DEMO), help="folder of a tokenizer.json (default: the demo's)")
    parser.add_argument("--vocab-size", type=int, default=DEMO_VOCAB_SIZE, help="its width of logits")
    parser.add_argument("--eos", type=int, default=DEMO_EOS, help="its end-of-sequence token")
    parser.add_argument("--results", metavar="FILE", help="keep what is measured in FILE, and go on from there")
    options = parser.parse_args(arguments)
    names = options.engines.split(",")
    if unknown := sorted(set(names) - set(ENGINES)):
        parser.error(f"unknown engine {', '.join(unknown)}; there are {', '.join(ENGINES)}")
    files = files_of(pathlib.Path(options.data), options.sample)
    if not files:
        parser.error(f"{options.data} holds no files of MaskBench; clone guidance-ai/jsonschemabench")
    try:
        results = Results(options.results, settings_of(options))
    except OtherSettings as error:
        parser.error(str(error))
    try:
        for name in names:
            measure(name, files, options, results)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
    wanted = {file.name for file in files}
    by_engine = {name: [row for row in results.of(name) if row["file"] in wanted] for name in names}
    print(table(by_engine))
    return 0


def files_of(folder: pathlib.Path, sample: int) -> list[pathlib.Path]:
    """The files in a random order that is always the same, or the first `sample` of them."""
    found = sorted(folder.glob("*.json"))
    random.Random(1).shuffle(found)
    return found[: sample or None]


def settings_of(options: argparse.Namespace) -> Row:
    """Returns the values that must be equal for results to be counted together."""
    tokenizer = pathlib.Path(options.tokenizer).resolve().name
    return {"tokenizer": tokenizer} | {name: getattr(options, name) for name in ("tests", "walks", "seconds")}


# ---- results ---------------------------------------------------------------------------------------------------------


class OtherSettings(Exception):
    """The file of results was made with other options."""


class Results:
    """Lines of JSON, the first of which holds the settings. Without a file they are kept in memory."""

    def __init__(self, path: str | None, settings: Row) -> None:
        self._path = pathlib.Path(path) if path else None
        self._rows: dict[tuple[str, str], Row] = {}
        if self._path is None:
            return
        if not self._path.exists():
            self._append(settings)
        first, *lines = self._path.read_text().splitlines()
        if json.loads(first) != settings:
            raise OtherSettings(f"{path} was made with {first}, and this is {json.dumps(settings)}; name another file")
        for row in map(json.loads, lines):
            self._rows[row["engine"], row["file"]] = row

    def add(self, row: Row) -> None:
        self._rows[row["engine"], row["file"]] = row
        if self._path is not None:
            self._append(row)

    def _append(self, value: Row) -> None:
        assert self._path is not None
        with self._path.open("a") as opened:
            opened.write(json.dumps(value) + "\n")

    def has(self, engine: str, file: str) -> bool:
        return (engine, file) in self._rows

    def of(self, engine: str) -> list[Row]:
        return [row for row in self._rows.values() if row["engine"] == engine]


# ---- an engine -------------------------------------------------------------------------------------------------------


class Child:
    """A process that tries one engine. It is begun anew when it dies or hangs."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self._command = [sys.executable, "-m", "benchmarks.schema_engines", name]
        self._command += [options.tokenizer, str(options.vocab_size), str(options.eos)]
        self._command += [str(options.tests), str(options.walks), str(options.seconds)]
        self.wall_seconds = WALL_FACTOR * options.seconds
        self.process: subprocess.Popen[str] | None = None

    def ask(self, file: str) -> Row:
        """The answer, or `timed_out` or `crashed` if there is none."""
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            if self._answer(START_SECONDS) is None:
                raise RuntimeError(f"{' '.join(self._command)} does not start; run it by hand")
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"file": file}) + "\n")
        self.process.stdin.flush()
        answer = self._answer(self.wall_seconds)
        if answer is None:
            status = self.close()
            return {"timed_out": True} if status in (-signal.SIGPROF, None) else {"crashed": status}
        return answer

    def _answer(self, seconds: float) -> Row | None:
        assert self.process is not None
        output = self.process.stdout
        assert output is not None
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            line = _line(output) if selector.select(seconds) else ""
        return json.loads(line) if line else None

    def close(self) -> int | None:
        """Ends the process. Returns the status with which it had ended by itself; None if it was running."""
        process, self.process = self.process, None
        if process is None:
            return None
        try:
            return process.wait(timeout=ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None


def _line(output: TextIO) -> str:
    return output.readline()


def measure(name: str, files: list[pathlib.Path], options: argparse.Namespace, results: Results) -> None:
    """Tries an engine on the files that the results lack."""
    child = Child(name, options)
    missing = [file for file in files if not results.has(name, file.name)]
    try:
        for file in tqdm(missing, desc=name, file=sys.stderr, mininterval=1):
            results.add({"engine": name, "file": file.name, **child.ask(str(file))})
    finally:
        child.close()


# ---- the table -------------------------------------------------------------------------------------------------------


def table(by_engine: dict[str, list[Row]]) -> str:
    """The table in Markdown. Manta has a line for schemas whose grammar suffices, and one for those with a guard."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- " * len(COLUMNS) + "|"]
    for name, rows in by_engine.items():
        lines.append(line_of(name, rows))
        compiled = [row for row in rows if "compile_ms" in row]
        for is_guarded, part in ((False, "grammar alone"), (True, "with a guard")):
            if chosen := [row for row in compiled if name.startswith("manta") and row["guarded"] is is_guarded]:
                lines.append(line_of(f"{name}, {part}", chosen))
    return "\n".join(lines)


def line_of(name: str, rows: list[Row]) -> str:
    compiled = [row for row in rows if "compile_ms" in row]
    compile_ms = sorted(row["compile_ms"] for row in compiled)
    masks = Masks(row["masks"] for row in compiled)

    def count(holds: Callable[[Row], object]) -> int:
        return sum(bool(holds(row)) for row in rows)

    cells = [
        name,
        f"{len(rows):,}",
        _share(count(passes), len(rows)),
        _share(count(passes_in_order), len(rows)),
        _share(count(passes_tests), len(rows)),
        _share(count(lambda row: "refused" in row), len(rows)),
        count(is_rightly_refused),
        count(accepts_invalid),
        count(lambda row: row.get("valid_rejected")),
        count(is_only_for("valid_rejected_for_spelling")),
        count(is_only_for("valid_rejected_for_order", "valid_rejected_for_spelling")),
        count(lambda row: row.get("walks_without_end")),
        count(is_out_of_time),
        count(lambda row: row.get("failed")),
        *(_number(_quantile(compile_ms, share), "ms") for share in (0.5, 0.99)),
        *(_number(value, "µs") for value in (masks.mean, masks.quantile(0.5), masks.quantile(0.99), masks.max)),
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def passes(row: Row) -> bool:
    """Whether an engine does all right: instances, walks, and in time."""
    return is_rightly_refused(row) or (not row.get("valid_rejected") and passes_in_order(row))


def passes_in_order(row: Row) -> bool:
    """The same as `passes`, with instances in the schema's order of properties, and in any spelling."""
    return is_rightly_refused(row) or (
        "compile_ms" in row
        and not is_out_of_time(row)
        and not accepts_invalid(row)
        and not row.get("walks_without_end")
        and not row.get("failed")
        and row.get("valid_rejected", 0)
        == sum(row.get(f"valid_rejected_for_{name}", 0) for name in ("order", "spelling"))
    )


def is_rightly_refused(row: Row) -> bool:
    """Whether an engine says that nothing satisfies the schema, of which there is no valid instance."""
    return bool(row.get("unsatisfiable"))


def passes_tests(row: Row) -> bool:
    """MaskBench's own measure: the engine compiles the schema and judges every instance as it is labelled, in time."""
    faults = ("valid_rejected", "invalid_accepted", "failed")
    return "compile_ms" in row and not is_out_of_time(row) and not any(row.get(fault) for fault in faults)


def accepts_invalid(row: Row) -> bool:
    return bool(row.get("invalid_accepted") or row.get("walks_wrong"))


def is_only_for(reason: str, *others: str) -> Callable[[Row], bool]:
    """Whether valid instances of a schema are rejected for a reason, or for others beside it, and for nothing else."""

    def holds(row: Row) -> bool:
        explained = sum(row.get(name, 0) for name in (reason, *others))
        return bool(row.get(reason)) and row["valid_rejected"] == explained

    return holds


def is_out_of_time(row: Row) -> bool:
    """Whether the schema or one of its masks took too long, or the engine crashed."""
    return any(name in row for name in ("timed_out", "crashed")) or bool(row.get("slow_texts"))


class Masks:
    """The times of all masks, in µs."""

    def __init__(self, times: Iterable[Row]) -> None:
        self._buckets: Counter[int] = Counter()
        total, self.max = 0, 0.0
        for each in times:
            self._buckets.update({int(bucket): count for bucket, count in each["buckets"].items()})
            total += each["sum"]
            self.max = max(self.max, each["max"])
        self._count = self._buckets.total()
        self.mean = total / self._count if self._count else None

    def quantile(self, share: float) -> float | None:
        ordered = sorted(self._buckets)
        sums = itertools.accumulate(self._buckets[bucket] for bucket in ordered)
        reached = (bucket for bucket, count in zip(ordered, sums, strict=True) if count > share * self._count)
        bucket = next(reached, None)
        return None if bucket is None else 10 ** (bucket / BUCKETS_PER_DECADE)


def _quantile(values: list[float], share: float) -> float | None:
    return values[min(len(values) - 1, int(share * len(values)))] if values else None


def _share(count: int, whole: int) -> str:
    return f"{count:,} ({100 * count / whole:.2f}%)" if whole else "0"


def _number(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


if __name__ == "__main__":
    sys.exit(main())

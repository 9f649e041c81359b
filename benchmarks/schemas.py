"""`manta bench schemas`: engines for JSON schemas on MaskBench, side by side.

    accepted, refused    schemas that an engine compiles, or does not, in the time that it has
    wrong                texts that an engine lets a model write to the end, and that the schema rejects
    forbidden            valid instances that an engine does not let a model write in the schema's order of properties
    other order          valid instances that it lets a model write in that order only
    failed               texts on which an engine gives up with an error
    dead ends            texts after which no token is allowed
    struck               rows from which Manta's guard took a token

MaskBench is `maskbench/data` of github.com/guidance-ai/jsonschemabench. Its files are halved by the SHA-1 of their
names: improve on half 1, and measure on half 2. Each engine runs in a process of its own, one schema after another.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import random
import selectors
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from tqdm import tqdm

from benchmarks.schema_engines import ENGINES

DEMO = pathlib.Path(__file__).parents[1] / "configs" / "demo" / "target"
DEMO_VOCAB_SIZE, DEMO_EOS = 4160, 2
COLUMNS = (
    *("engine", "accepted", "refused", "wrong", "forbidden", "other order", "failed", "dead ends"),
    *("compile p50", "p99", "mask mean", "p99", "max", "struck"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="manta bench schemas", description="Engines for JSON schemas on MaskBench.")
    parser.add_argument("--data", required=True, help="folder of MaskBench's files (maskbench/data)")
    parser.add_argument("--half", type=int, choices=(1, 2), default=1, help="which half of the files (default: 1)")
    parser.add_argument("--sample", type=int, default=1000, help="files of it, at random; 0: all (default: 1000)")
    parser.add_argument("--engines", default=",".join(ENGINES), help=f"some of {', '.join(ENGINES)}")
    parser.add_argument("--tests", type=int, default=6, help="instances of each schema (default: 6)")
    parser.add_argument("--walks", type=int, default=1, help="random texts of each schema (default: 1)")
    parser.add_argument("--seconds", type=float, default=10, help="that an engine has for one schema (default: 10)")
    parser.add_argument("--tokenizer", default=str(DEMO), help="folder of a tokenizer.json (default: the demo's)")
    parser.add_argument("--vocab-size", type=int, default=DEMO_VOCAB_SIZE, help="its width of logits")
    parser.add_argument("--eos", type=int, default=DEMO_EOS, help="its end-of-sequence token")
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE, one JSON object a line")
    options = parser.parse_args(arguments)
    names = options.engines.split(",")
    if unknown := sorted(set(names) - set(ENGINES)):
        parser.error(f"unknown engine {', '.join(unknown)}; there are {', '.join(ENGINES)}")
    files = files_of(pathlib.Path(options.data), options.half, options.sample)
    if not files:
        parser.error(f"{options.data} holds no files of MaskBench; clone guidance-ai/jsonschemabench")
    print(f"{len(files)} schemas of half {options.half}, {options.tests} instances and {options.walks} walks each\n")
    print("| " + " | ".join(COLUMNS) + " |\n" + "| --- " * len(COLUMNS) + "|", flush=True)
    rows = []
    for name in names:
        rows.append(summary(name, measured(name, files, options)))
        print(line_of(rows[-1]), flush=True)
        if options.json:
            pathlib.Path(options.json).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


def files_of(folder: pathlib.Path, half: int, sample: int) -> list[pathlib.Path]:
    """The files of a half, or `sample` of them at random, always the same."""
    found = [file for file in sorted(folder.glob("*.json")) if _parity(file.name) == half % 2]
    if sample and sample < len(found):
        found = random.Random(half).sample(found, sample)
    return found


def _parity(name: str) -> int:
    return int(hashlib.sha1(name.encode()).hexdigest(), 16) % 2


class Child:
    """A process that tries one engine. It is begun anew when it dies or takes too long."""

    def __init__(self, name: str, options: Any) -> None:
        self._command = [sys.executable, "-m", "benchmarks.schema_engines", name]
        self._command += [options.tokenizer, str(options.vocab_size), str(options.eos)]
        self.seconds = options.seconds
        self.process: subprocess.Popen[str] | None = None

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """The answer; one that says `refused` if there is none in time."""
        if self.process is None:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            if self._answer(120) is None:
                raise RuntimeError(f"{' '.join(self._command)} does not start; run it by hand")
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = self._answer(self.seconds)
        if answer is None:
            is_dead = self.process.poll() is not None
            self.close()
            return {"refused": "it crashed" if is_dead else f"it took more than {self.seconds:g} s"}
        return answer

    def _answer(self, seconds: float) -> dict[str, Any] | None:
        assert self.process is not None
        output = self.process.stdout
        assert output is not None
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            line = _line(output) if selector.select(seconds) else ""
        return json.loads(line) if line else None

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def _line(output: TextIO) -> str:
    return output.readline()


def measured(name: str, files: list[pathlib.Path], options: Any) -> list[dict[str, Any]]:
    child, found = Child(name, options), []
    try:
        for file in tqdm(files, desc=name, file=sys.stderr, mininterval=1):
            job = {"file": str(file), "tests": options.tests, "walks": options.walks}
            found.append({"file": file.name, **child.ask(job)})
    finally:
        child.close()
    return found


def summary(name: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts over all schemas, and times: ms of compilation, µs of a mask."""
    accepted = [each for each in found if "refused" not in each]

    def total(key: str) -> int:
        return sum(each[key] for each in accepted)

    masks = sorted(value for each in accepted for value in each["mask_us"])
    compiled = sorted(each["compile_ms"] for each in accepted)
    return {
        "engine": name,
        "accepted": len(accepted),
        "refused": len(found) - len(accepted),
        "wrong": sum(each["wrong"] > 0 for each in accepted),
        "valid": total("valid"),
        "forbidden": total("forbidden"),
        "out_of_order": total("out_of_order"),
        "walks": total("walks"),
        "failed": total("failed"),
        "dead_ends": total("dead_ends"),
        "compile_ms_p50": _quantile(compiled, 0.5),
        "compile_ms_p99": _quantile(compiled, 0.99),
        "mask_us_mean": sum(masks) / len(masks) if masks else None,
        "mask_us_p99": _quantile(masks, 0.99),
        "mask_us_max": masks[-1] if masks else None,
        "rows_struck": total("rows_struck"),
        "rows": total("rows"),
        "wrong_files": [each["file"] for each in accepted if each["wrong"]],
        "refused_files": {each["file"]: each["refused"] for each in found if "refused" in each},
    }


def _quantile(values: list[float], share: float) -> float | None:
    return values[min(len(values) - 1, int(share * len(values)))] if values else None


def line_of(row: dict[str, Any]) -> str:
    """A row of the table in Markdown."""
    count = row["accepted"] + row["refused"]
    cells = [
        row["engine"],
        row["accepted"],
        f"{row['refused']} ({100 * row['refused'] / count:.2f}%)",
        f"{row['wrong']} schemas",
        f"{row['forbidden']} of {row['valid']}",
        row["out_of_order"],
        row["failed"],
        f"{row['dead_ends']} of {row['walks']} walks" if row["walks"] else row["dead_ends"],
        *(_number(row[name], "ms") for name in ("compile_ms_p50", "compile_ms_p99")),
        *(_number(row[name], "µs") for name in ("mask_us_mean", "mask_us_p99", "mask_us_max")),
        f"{row['rows_struck']} of {row['rows']} rows" if row["engine"] == "manta" else "-",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def _number(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


if __name__ == "__main__":
    sys.exit(main())

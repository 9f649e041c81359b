"""One command for a machine with a CUDA GPU: `make gpu-check`, or `python -m benchmarks.gpu_check`.

Runs the Triton kernels and the engine against their references on the GPU, then measures, and writes one table to
`benchmarks/results/`. It needs torch, triton, transformers, pytest, hypothesis, scipy and Manta's other libraries, but
not Ray. Each part is a process of its own, which is ended when its time is over. A part that fails, however it does, is
a row of the table, and the next one runs; the table is written anew with every row.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import TextIO

import msgspec

from benchmarks.gpu_rows import FIGURE, Figure, one_line
from benchmarks.processes import interrupted_once

ROOT = pathlib.Path(__file__).resolve().parents[1]
TESTS = {
    "kernels": "tests/workers/kernels/test_triton_kernels.py",
    "kinds": "tests/workers/kernels/test_triton_attention_kinds.py",
    "sampler": "tests/workers/kernels/test_triton_sampler.py",
    "quantised": "tests/workers/kernels/test_triton_quantized_linear.py",
    "float8": "tests/workers/kernels/test_float8_linear.py",
    "rounding": "tests/workers/kernels/test_rounded_rows.py",
    "recurrences": "tests/workers/kernels/test_triton_recurrences.py",
    "engine": "tests/workers/test_cuda_platform.py",
    "expert kernels": "tests/workers/kernels/test_triton_experts.py",
    "adapter kernels": "tests/workers/kernels/test_triton_adapters.py",
    "adapter engines": "tests/workers/test_cuda_adapters.py",
    "expert engines": "tests/workers/test_experts_cuda.py",
    "recurrent engine": "tests/workers/test_cuda_states.py",
    "families": "tests/workers/test_cuda_layer_kinds.py",
}
MEASURED = (
    "smoke", "device", "attention", "linears", "experts", "recurrent", "profile", "qwen2.5-0.5b", "llama-3.1-8b",
    "speculation", "sanitizer",
)  # fmt: skip
PARTS = (*TESTS, *MEASURED)
STEPS = {
    1: ("smoke", "device", "engine"),
    2: (
        "kernels", "kinds", "families", "sampler", "quantised", "float8", "rounding", "recurrences", "recurrent engine",
        "expert kernels", "expert engines", "adapter kernels", "adapter engines",
    ),
    3: ("attention", "linears", "experts", "recurrent", "profile"),
    4: ("llama-3.1-8b",),
    5: ("sanitizer", "qwen2.5-0.5b", "speculation"),
}  # fmt: skip
"""Parts of each step, the most telling first, for a machine that ends every command after ten minutes."""
STEP_SECONDS = 570.0
PART_SECONDS = 540.0
"""The longest that a part may take."""
PARALLEL = {
    "kernels": 8, "kinds": 4, "families": 4, "sampler": 4, "quantised": 4, "float8": 4, "expert kernels": 8,
}  # fmt: skip
"""Processes of the tests that compile many kernels, if pytest-xdist is there."""
SHOWN_FAILURES = 8


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gpu-check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all parts together (default: 3600)")
    parser.add_argument("--output", type=pathlib.Path, help="the table's file (default: one in benchmarks/results/)")
    steps = "; ".join(f"{number}: {', '.join(parts)}" for number, parts in STEPS.items())
    parser.add_argument(
        "--step",
        type=int,
        choices=STEPS,
        help=f"one of five steps of {STEP_SECONDS:.0f} s at most ({steps}); --output is then a folder, which gets "
        "the tables and keeps Triton's compiled kernels for the next step",
    )
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if options.step is not None:
        if options.output is None:
            parser.error("--step needs --output FOLDER")
        parts, options.seconds = list(STEPS[options.step]), STEP_SECONDS
        os.environ.setdefault("TRITON_CACHE_DIR", str(options.output.resolve() / "triton"))
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"unknown parts {', '.join(unknown)}; choose among {', '.join(PARTS)}")
    import torch

    if not torch.cuda.is_available():
        build = "is built without CUDA" if torch.version.cuda is None else "finds no CUDA GPU"
        print(
            f"gpu-check: torch {torch.__version__} {build}, so nothing was checked: run it on a machine with a CUDA "
            "GPU, or name an interpreter whose torch has CUDA with GPU_PYTHON=python3.",
            file=sys.stderr,
        )
        return 2
    path = options.output or ROOT / "benchmarks" / "results" / _file_name(parts)
    if options.step is not None:
        path.mkdir(parents=True, exist_ok=True)
        path /= f"gpu-step-{options.step}.md"
    table = [*_heading(parts), "| what | figure | bar |", "| --- | --- | --- |"]
    print("\n".join(table), flush=True)
    failed = False
    with interrupted_once():  # a part is a session of its own, and would go on
        for name, value, bar in check(parts, options.seconds):
            failed |= "failed" in value
            table.append(f"| {name} | {value} | {bar} |")
            print(table[-1], flush=True)
            path.write_text("\n".join([*table, ""]))
    print(f"written to {path}")
    return int(failed)


def _file_name(parts: list[str]) -> str:
    """A name of its own if only some parts run, so that they do not replace the figures of the others on this day."""
    chosen = "" if parts == list(PARTS) else "-" + "-".join(parts)
    return f"gpu-{datetime.date.today().isoformat()}{chosen}.md"


def _heading(parts: list[str]) -> list[str]:
    import torch

    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    packages = ("torch", "triton", "transformers", "llguidance")
    versions = [f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in packages)]
    return [
        f"# Checked on a GPU on {datetime.date.today().isoformat()}",
        "",
        f"`make gpu-check ARGS='--parts {','.join(parts)}'` at {_commit()} on "
        f"{torch.cuda.get_device_name()} ({memory:.0f} GiB), {', '.join(versions)}.",
        "",
    ]


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    with contextlib.suppress(OSError):  # no git
        if commit := subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip():
            return commit
    return "an unknown commit"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def check(parts: list[str], seconds: float) -> Iterator[Figure]:
    """The figures of all parts, each as far as it comes, and why no more came."""
    deadline = time.monotonic() + seconds
    for part in parts:
        left = min(PART_SECONDS, deadline - time.monotonic())
        if left < 1:
            yield Figure(part, f"failed: not begun, for the {seconds:.0f} s of all parts are over")
            continue
        run = tested_figures if part in TESTS else measured_figures
        yield from run(part, left)


def measured_figures(part: str, seconds: float) -> Iterator[Figure]:
    process = Process([sys.executable, "-m", "benchmarks.gpu_figures", part], seconds)
    for line in process.lines():
        if line.startswith(FIGURE):
            yield msgspec.json.decode(line.removeprefix(FIGURE), type=Figure)
        else:
            print(line, end="", file=sys.stderr, flush=True)
    if process.why_failed is not None:
        yield Figure(part, f"failed: {process.why_failed}")


def tested_figures(part: str, seconds: float) -> Iterator[Figure]:
    """How the tests of a file ended, and those that failed."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "-v", "-rfE", TESTS[part]]
    if part in PARALLEL and importlib.util.find_spec("xdist") is not None:
        command += ["--numprocesses", str(min(PARALLEL[part], os.cpu_count() or 1)), "--dist", "worksteal"]
    process = Process(command, seconds)
    summary, failures, ended = "", [], collections.Counter[str]()
    for line in process.lines():
        print(line, end="", file=sys.stderr, flush=True)
        if re.match(r"(FAILED|ERROR) ", line):
            failures.append(line)
        elif "%]" in line and (how := re.search(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b", line)):
            ended[how[0].lower()] += 1
        if re.match(r"=*\s*\d+ \w+.* in [\d.]+s", line):
            summary = line.strip("= \n")
    if process.why_failed is None:
        yield Figure(TESTS[part], summary, "all pass")
        return
    so_far = ", ".join(f"{count} {how}" for how, count in ended.items()) or "none ended"
    yield Figure(TESTS[part], f"failed: {summary or f'{process.why_failed}; so far {so_far}'}", "all pass")
    for line in failures[:SHOWN_FAILURES]:
        name, _, why = line.partition(" - ")
        yield Figure(name.split(" ", 1)[1].strip(), f"failed: {one_line(why)}")


class Process:
    """A part's process, which is ended with all that it started when its time is over."""

    def __init__(self, command: list[str], seconds: float) -> None:
        self.why_failed: str | None = None
        """Once `lines` has ended."""
        self._command = command
        self._seconds = seconds

    def lines(self) -> Iterator[str]:
        """The lines that it writes, as they come. They go through a file, because a pipe may stay open in a process
        that it leaves.
        """
        last = ""
        with tempfile.NamedTemporaryFile("w") as written, open(written.name, errors="replace") as read:
            environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONUNBUFFERED": "1"}
            process = subprocess.Popen(
                self._command, cwd=ROOT, env=environment, stdout=written, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            deadline = time.monotonic() + self._seconds
            try:
                while True:
                    has_ended = process.poll() is not None
                    for line in _whole_lines(read):
                        last = line if line.strip() else last
                        yield line
                    if has_ended:
                        break
                    if time.monotonic() > deadline:
                        last = read.read().strip() or last  # the name of the test that hangs has no end of line
                        self.why_failed = f"not done after {self._seconds:.0f} s; last: {one_line(last)}"
                        return
                    time.sleep(0.1)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode != 0:
            self.why_failed = f"exit code {process.returncode}; last: {one_line(last)}"


def _whole_lines(read: TextIO) -> Iterator[str]:
    """New lines up to the last that is whole."""
    while True:
        start = read.tell()
        line = read.readline()
        if not line.endswith("\n"):
            read.seek(start)
            return
        yield line


if __name__ == "__main__":
    sys.exit(main())

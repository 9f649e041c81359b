"""One command for a machine with a CUDA GPU: `make gpu-check`, or `python -m benchmarks.gpu_check`.

Runs the Triton kernels and the engine against their references on the GPU, then measures, and writes one table to
`benchmarks/results/`. It needs torch, triton, transformers, pytest, hypothesis, scipy and Manta's other libraries, but
not Ray. A part that fails is a row of the table, and the others go on.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu_figures import Figure

ROOT = pathlib.Path(__file__).resolve().parents[1]
TESTS = ("tests/test_triton_kernels.py", "tests/test_triton_sampler.py", "tests/test_cuda_platform.py")
PARTS = ("tests", "device", "qwen2.5-0.5b", "llama-3.1-8b", "speculation")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="gpu-check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)} (default: all)")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"unknown parts {', '.join(unknown)}; choose among {', '.join(PARTS)}")
    import torch

    if not torch.cuda.is_available():
        print(f"gpu-check: torch {torch.__version__} finds no CUDA GPU, so nothing was checked.", file=sys.stderr)
        return 2
    rows, failed = [], False
    for name, value, bar in _run(parts):
        failed |= value.startswith("failed")
        rows.append(f"| {name} | {value} | {bar} |")
        print(rows[-1], flush=True)
    path = ROOT / "benchmarks" / "results" / f"gpu-{datetime.date.today().isoformat()}.md"
    path.write_text("\n".join([*_heading(parts), "| what | figure | bar |", "| --- | --- | --- |", *rows, ""]))
    print(f"written to {path.relative_to(ROOT)}")
    return int(failed)


def _heading(parts: list[str]) -> list[str]:
    import torch

    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    packages = ("torch", "triton", "transformers", "llguidance")
    versions = [f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in packages)]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    return [
        f"# Checked on a GPU on {datetime.date.today().isoformat()}",
        "",
        f"`make gpu-check ARGS='--parts {','.join(parts)}'` at {commit.strip() or 'an unknown commit'} on "
        f"{torch.cuda.get_device_name()} ({memory:.0f} GiB), {', '.join(versions)}.",
        "",
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _run(parts: list[str]) -> Iterator[Figure]:
    from benchmarks import gpu_figures as figures

    if "tests" in parts:
        yield from _guarded("tests", _test_figures)
    device = figures.measure_device()
    speed, rate = device.bytes_per_second, device.operations_per_second
    yield figures.Figure("device: a copy, read and written bytes", f"{speed / 1e12:.2f} TB/s")
    yield figures.Figure(f"device: bfloat16 product of {figures.LARGE}", f"{rate / 1e12:.0f} TFLOP/s")
    for name in figures.MODELS:
        if name in parts:
            yield from _guarded(name, lambda name=name: figures.model_figures(name, device))
    if "speculation" in parts:
        yield from _guarded("speculation", figures.speculation_figures)


def _guarded(part: str, run: Callable[[], Iterator[Figure]]) -> Iterator[Figure]:
    """The part's figures as far as they come, and why no more came."""
    from benchmarks.gpu_figures import Figure

    try:
        yield from run()
    except Exception as error:
        yield Figure(part, f"failed: {type(error).__name__}: {' '.join(str(error).split())}"[:400])


def _test_figures() -> Iterator[Figure]:
    from benchmarks.gpu_figures import Figure

    for test in TESTS:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "-q", test]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True
        )
        print(done.stdout[-4000:], file=sys.stderr)
        summary = re.findall(r"^\d+ \w+.* in [\d.]+s.*$", done.stdout, re.MULTILINE)
        text = summary[-1] if summary else (done.stderr or done.stdout).strip()[-200:]
        yield Figure(test, text if done.returncode == 0 else f"failed: {text}", "all pass")


if __name__ == "__main__":
    sys.exit(main())

"""`make gpu-check` where there is no GPU: it says so, needs no Ray, and a part that fails is a row of its table."""

from __future__ import annotations

import math
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_rows import FIGURE, Figure
from benchmarks.gpu_smoke import smoke_figures
from tests.checkpoints import checkpoint
from tests.patience import wait_until

NO_RAY = """
import sys
sys.modules["ray"] = None  # importing it raises ImportError
import pytest
from benchmarks import gpu_check
from manta.cluster.llm import LLM, ConstraintSpec, SamplingParams
if __name__ == "__main__":
    params = SamplingParams(max_tokens=8, constraint=ConstraintSpec(kind="regex", text="[0-9]{3}"))
    (output,) = LLM("demo", device="cpu").generate([5, 6, 7], params, use_tqdm=False)
    assert output.outputs[0].text.isdigit(), output
    from benchmarks import gpu_figures
    assert set(gpu_figures.PARTS) == set(gpu_check.MEASURED)
    sys.exit(pytest.main(["--collect-only", "-q", "-o", "addopts=", *gpu_check.TESTS.values()]))
"""


@pytest.mark.prove
def test_it_needs_no_ray() -> None:
    done = subprocess.run([sys.executable, "-c", NO_RAY], capture_output=True, text=True, cwd=gpu_check.ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU on this machine")
def test_a_missing_gpu_is_reported_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) != 0
    captured = capsys.readouterr()
    assert "nothing was checked: run it on a machine with a CUDA GPU" in captured.err
    assert "GPU_PYTHON" in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def python(code: str, seconds: float = 60.0) -> gpu_check.Process:
    return gpu_check.Process([sys.executable, "-c", code], seconds)


def test_a_parts_output_and_result_are_shown() -> None:
    process = python("print('one'); print('two')")
    assert list(process.lines()) == ["one\n", "two\n"]
    assert process.why_failed is None
    process = python("print('one', flush=True); raise RuntimeError('an illegal | memory access')")
    assert next(process.lines()) == "one\n"
    assert len(list(process.lines())) > 1
    assert process.why_failed == "exit code 1; last: RuntimeError: an illegal / memory access"
    process = python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert list(process.lines()) == []
    assert process.why_failed is not None
    assert "-11" in process.why_failed


@pytest.mark.prove
def test_a_hanging_part_is_ended_with_its_processes() -> None:
    started = time.monotonic()
    assert list(python("import subprocess").lines()) == []
    seconds = math.ceil(1 + 20 * (time.monotonic() - started))  # enough to begin, however busy the machine is
    process = python(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
        "print(child.pid, flush=True); print('test_b', end='', flush=True); time.sleep(3600)",
        seconds=seconds,
    )
    (pid,) = process.lines()
    assert process.why_failed == f"not done after {seconds} s; last: test_b"
    wait_until(lambda: not is_running(int(pid)))


def is_running(pid: int) -> bool:
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_the_next_part_runs_after_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def lines(process: gpu_check.Process) -> Iterator[str]:
        part = process._command[-1]
        if part == "device":
            yield FIGURE + '["copy", "3 TB/s", ""]\n'
            yield "a warning\n"
            process.why_failed = "exit code 1"
        elif part == gpu_check.TESTS["engine"]:
            yield "...F\n"
            yield "FAILED tests/test_x.py::test_a - AssertionError: 1 | 2\n"
            yield "1 failed, 3 passed in 2.1s\n"
            process.why_failed = "exit code 1"
        else:
            yield FIGURE + '["attention", "9 us", "0.8"]\n'

    monkeypatch.setattr(gpu_check.Process, "lines", lines)
    assert list(gpu_check.check(["device", "engine", "attention"], 100)) == [
        Figure("copy", "3 TB/s"),
        Figure("device", "failed: exit code 1"),
        Figure("tests/workers/test_cuda_platform.py", "failed: 1 failed, 3 passed in 2.1s", "all pass"),
        Figure("tests/test_x.py::test_a", "failed: AssertionError: 1 / 2"),
        Figure("attention", "9 us", "0.8"),
    ]

    def cut(process: gpu_check.Process) -> Iterator[str]:
        yield "tests/test_x.py::test_a PASSED          [ 33%]\n"
        yield "[gw1] [ 66%] FAILED tests/test_x.py::test_b[1, 2]\n"
        process.why_failed = "not done after 5 s; last: tests/test_x.py::test_c"

    monkeypatch.setattr(gpu_check.Process, "lines", cut)
    (cut_off,) = gpu_check.check(["engine"], 100)
    assert cut_off.value == ("failed: not done after 5 s; last: tests/test_x.py::test_c; so far 1 passed, 1 failed")
    (late,) = gpu_check.check(["attention"], 0)
    assert late.value.startswith("failed: not begun")


def test_a_step_for_lent_machines_ends_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    asked: list[tuple[list[str], float]] = []

    def check(parts: list[str], seconds: float) -> Iterator[Figure]:
        asked.append((parts, seconds))
        yield Figure("smoke: tokens", "20 are equal")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "_heading", lambda parts: ["# Checked", ""])
    monkeypatch.setattr(gpu_check, "check", check)
    monkeypatch.setitem(os.environ, "TRITON_CACHE_DIR", "")
    monkeypatch.delitem(os.environ, "TRITON_CACHE_DIR")
    assert gpu_check.main(["--step", "1", "--output", str(tmp_path / "out")]) == 0
    assert asked == [(["smoke", "device", "engine"], 570.0)]
    assert "| smoke: tokens | 20 are equal |" in (tmp_path / "out" / "gpu-step-1.md").read_text()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "out" / "triton")
    chosen = [part for parts in gpu_check.STEPS.values() for part in parts]
    assert len(chosen) == len(set(chosen))
    assert set(gpu_check.PARTS) == set(chosen)


def test_a_step_asks_for_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--step", "2"])
    assert "--step needs --output FOLDER" in capsys.readouterr().err


@pytest.mark.prove
def test_the_smoke_part_compares_graphs_kernels_and_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, with one layer."""
    from manta.workers.platforms.cuda import CudaPlatform
    from manta.workers.torch_worker import torch_worker

    choose = torch_worker.choose_platform
    monkeypatch.setattr(
        torch_worker,
        "choose_platform",
        lambda device, *rest: CudaPlatform(torch.device("cpu")) if device == "cuda" else choose(device, *rest),
    )
    monkeypatch.setattr("manta.workers.kernels.triton.graphs.MIXED_TOKENS", (12,))
    figures = list(smoke_figures(str(checkpoint("llama", num_hidden_layers=1)), [5, 6, 7], 3))
    assert [figure.value for figure in figures[1:]] == ["3 are equal"] * 2
    assert int(figures[0].value) > 2

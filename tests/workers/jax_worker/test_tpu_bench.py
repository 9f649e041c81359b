"""The benchmark for a TPU host runs on simulated devices at its smallest size."""

from __future__ import annotations

import tests.workers.jax_worker.devices  # isort: skip  # noqa: F401
import pathlib
import sys

import pytest

from benchmarks import tpu


@pytest.mark.prove
def test_every_part_prints_its_rows(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"ROUNDS": 1, "ROWS": (1, 8), "CONTEXT": 16, "PREFILL": 32}.items():
        monkeypatch.setattr(tpu, name, value)
    arguments = ["tpu", "--output", str(tmp_path / "tables"), "--devices", "2", "--shape", "tiny-llama"]
    monkeypatch.setattr(sys, "argv", arguments)
    tpu.main()
    printed = capsys.readouterr().out
    assert "| the kernel runs on TPUs only |" in printed
    assert "| 6 requests | 6 |" in printed
    assert "| decode, 8 rows of 16 |" in printed
    assert (tmp_path / "tables").read_text() in printed.replace("cpu, 8 devices\n", "")

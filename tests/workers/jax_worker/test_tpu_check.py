"""`manta check` and `manta serve` say before a start whether a TPU is there, and what a mesh of them would hold."""

from __future__ import annotations

import tests.workers.jax_worker.devices  # isort: skip  # noqa: F401
import pytest

from manta.cluster.cli.__main__ import main


def test_check_runs_a_layer_and_plans_devices(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "engine.device=tpu", "--set", "engine.tensor_parallel_size=4"]
    assert main(["check", "demo", *options]) == 0
    printed = capsys.readouterr().out
    assert "4 x cpu (figures are those of each device)" in printed
    assert "ran one layer and the head in" in printed
    assert "(kernels: xla)" in printed


@pytest.mark.parametrize("command", ["check", "serve"])
def test_without_a_tpu_both_say_so(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("JAX_PLATFORMS")
    try:
        code = main([command, "demo", "--set", "engine.device=tpu"])
    except SystemExit as error:
        code = error.code
    assert code not in (0, None)
    printed = capsys.readouterr()
    text = " ".join((printed.out + printed.err).split())
    assert "to simulate a mesh on CPUs set JAX_PLATFORMS=cpu" in text


def test_more_devices_than_heads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "engine.device=tpu", "--set", "engine.tensor_parallel_size=8"]
    assert main(["check", "demo", *options]) == 1
    assert "8 ranks cannot split the 4 attention heads" in capsys.readouterr().err

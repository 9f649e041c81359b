"""The command line as a user meets it: each wrong input is one paragraph and an exit code, never a traceback."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest

from benchmarks.processes import free_port
from manta.cluster.cli.__main__ import main
from manta.cluster.cli.invocation import program
from manta.cluster.cli.serve import ready_message
from manta.cluster.config import EngineConfig, ServeConfig
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S
from tests.workers.test_layer_kinds import folder_of


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command."""
    try:
        code = main(list(arguments))
    except SystemExit as ended:  # argparse ends the process itself
        code = int(ended.code or 0)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--colour", "red"], ["--colour"]),
        (["fly"], ["fly", "serve"]),
        ([], ["COMMAND"]),
        (["serve", "--port", "http"], ["`port`"]),
        (["serve", "--port", "70000"], ["port", "65535"]),
        (["serve", "--set", "engine.speed=9"], ["speed"]),
        (["serve", "--set", "engine.block_size=7"], ["block_size"]),
        (["serve", "--set", "engine.block_size"], ["KEY=VALUE"]),
        (["serve", "--set", "host=[a"], ["host=[a", "YAML"]),
        (["serve", "--set", "port=1", "--set", "port.x=1"], ["port.x"]),
        (["serve", "--config", "/no/such.yaml"], ["/no/such.yaml"]),
        (["serve", "--model", "/no/such/folder"], ["/no/such/folder"]),
        (["check", "--set", "colour=red"], ["colour"]),
        (["chat", "--url", "http://127.0.0.1:9"], ["no server answers", "manta serve"]),
        (["bench", "--workloads", "a,q"], ["q", "http"]),
        (["bench", "--compare", "vllm"], ["--vllm-python"]),
        (["bench", "--pairs", "3"], ["--compare"]),
    ],
)
def test_wrong_input_is_named_with_exit_code_2(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = run(capsys, *arguments)
    assert code == 2
    for word in words:
        assert word in " ".join(error.split())


def test_serve_names_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, error = run(capsys, "serve", "--port", str(port), "--model", str(checkpoint("llama")))
    assert code == 2
    assert str(port) in error
    assert "--port" in error


def test_a_config_file_must_be_a_mapping(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("- engine\n")
    code, _, error = run(capsys, "serve", "--config", str(path))
    assert code == 2
    assert str(path) in error.replace("\n", "")


@pytest.mark.usefixtures("trials_here")
def test_check_reports_what_serving_takes(capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint("llama")
    code, out, _ = run(capsys, "check", str(folder), "--set", "engine.kv_cache_bytes=1048576")
    assert code == 0
    config = json.loads((folder / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    bytes_per_token = 2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim  # float32 K and V
    size = (folder / "model.safetensors").stat().st_size / 2**20
    rows = {line[:13].strip(): line[13:].strip() for line in out.splitlines() if line}
    assert "LlamaForCausalLM" in rows["architecture"]
    assert rows["dtype"].startswith("float32")
    assert rows["device"].startswith("cpu")
    assert float(rows["weights"].split()[0]) == pytest.approx(size, abs=0.1)
    assert f"{bytes_per_token:,} bytes" in rows["KV cache"]
    assert f"{1048576 // (bytes_per_token * 16) * 16:,} tokens" in rows["KV cache"]
    assert rows["longest"].startswith("512 tokens")


@pytest.mark.usefixtures("trials_here")
def test_check_says_how_ranks_divide_experts(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(folder_of("mixtral", num_local_experts=7))
    for num_ranks, words in ((2, "each of 2 ranks has 3 or 4 of the 7 of a layer, whole"), (1, "has no effect")):
        ranks = "--tensor-parallel-size", str(num_ranks)
        code, out, _ = run(capsys, "check", folder, "--enable-expert-parallel", *ranks)
        assert code == 0
        assert words in next(line for line in out.splitlines() if line.startswith("experts"))


@pytest.mark.usefixtures("trials_here")
def test_check_counts_every_shard(capsys: pytest.CaptureFixture[str]) -> None:
    whole, sharded = checkpoint("llama"), checkpoint("llama", max_shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1

    def weights(folder: pathlib.Path) -> str:
        code, out, _ = run(capsys, "check", str(folder))
        assert code == 0
        return next(line for line in out.splitlines() if line.startswith("weights"))

    assert weights(whole) == weights(sharded)


def _copy(folder: pathlib.Path, to: pathlib.Path) -> pathlib.Path:
    shutil.copytree(folder, to)
    return to


def _edit_config(folder: pathlib.Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_check_says_why_a_checkpoint_cannot_be_served(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = checkpoint("llama")

    def refused(folder: pathlib.Path | str, *flags: str) -> str:
        code, out, error = run(capsys, "check", str(folder), *flags)
        assert code == 1
        assert "can be served" not in out
        return error

    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json" in refused(empty)

    no_weights = _copy(good, tmp_path / "no-weights")
    (no_weights / "model.safetensors").unlink()
    assert "safetensors" in refused(no_weights)

    cut = _copy(good, tmp_path / "cut")
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[:-100])
    assert "model.safetensors" in refused(cut)

    missing_tensor = _copy(good, tmp_path / "missing-tensor")
    _edit_config(missing_tensor, num_hidden_layers=4)
    assert "model.layers.3" in refused(missing_tensor)

    misshapen = _copy(good, tmp_path / "misshapen")
    _edit_config(misshapen, intermediate_size=128)
    assert "shape" in refused(misshapen)

    strange_rope = _copy(good, tmp_path / "rope")
    _edit_config(strange_rope, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})
    assert "spiral" in refused(strange_rope)

    no_tokenizer = _copy(good, tmp_path / "no-tokenizer")
    for path in no_tokenizer.glob("tokenizer*"):
        path.unlink()
    assert "tokenizer" in refused(no_tokenizer)
    code, _, error = run(capsys, "serve", "--model", str(no_tokenizer), "--port", str(free_port()))
    assert code == 2
    assert "tokenizer" in error

    unknown = _copy(good, tmp_path / "unknown")
    _edit_config(unknown, architectures=["CloudForCausalLM"], model_type="cloud")
    assert "CloudForCausalLM" in refused(unknown)

    assert "kv_cache_bytes" in refused(good, "--set", "engine.kv_cache_bytes=1000")
    assert "max_model_len 513" in refused(good, "--set", "engine.max_model_len=513")
    assert "memory" in refused(good, "--set", f"engine.kv_cache_bytes={2**60}")
    assert "cuda" in refused(good, "--set", "engine.device=cuda")


@pytest.mark.parametrize("arguments", ["--version", pytest.param("check MODEL", marks=pytest.mark.prove)])
def test_a_closed_output_ends_a_command_silently(arguments: str) -> None:
    """As `| head` does it: nothing on standard error, and the exit code that a shell gives for SIGPIPE."""
    words = arguments.replace("MODEL", str(checkpoint("llama"))).split()
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "manta.cluster.cli", *words]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize("module", ["manta.cluster.cli.__main__", "manta.cluster.config"])
def test_the_command_line_and_configurations_load_nothing_heavy(module: str) -> None:
    """Every process reads its configuration. What reads checkpoints or downloads them takes as long as all of that."""
    heavy = ("torch", "ray", "transformers", "manta.workers.checkpoints.model_folder", "manta.cluster.hub_pull")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_ready_message_has_real_name_and_port() -> None:
    config = ServeConfig(engine=EngineConfig(model="/models/qwen"), host="0.0.0.0", port=8123)
    message = ready_message(config)
    assert "http://127.0.0.1:8123/v1/chat/completions" in message
    assert '"model": "qwen"' in message
    assert 'base_url="http://127.0.0.1:8123/v1"' in message
    assert f"{program()} chat --port 8123" in message


def test_what_calls_manta_works_from_every_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "venv" / "bin" / "manta"
    script.parent.mkdir(parents=True)
    script.touch()
    monkeypatch.setattr(sys, "executable", str(script.parent / "python"))
    monkeypatch.setenv("PATH", "")
    for folder, expected in (("/", str(script)), (tmp_path, "venv/bin/manta"), (script.parent, "./manta")):
        monkeypatch.chdir(folder)
        assert program() == expected

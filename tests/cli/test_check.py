"""`manta check` runs a step: what would fail while serving is a no, in one sentence, and no other layer is read."""

from __future__ import annotations

import json
import pathlib
import re
import shutil

import pytest
import safetensors.torch
import torch
import transformers

from manta.cluster.cli.__main__ import main
from manta.cluster.cli.check import check_model
from manta.cluster.config import EngineConfig
from manta.specdecode.speculative_config import SpeculativeConfig
from manta.workers.models.model_config import ModelError
from tests.adapters import adapters_of
from tests.checkpoints import checkpoint, make_tokenizer


def config(folder: pathlib.Path, **options: object) -> EngineConfig:
    return EngineConfig(model=str(folder), kv_cache_bytes=8 * 2**20, num_threads=1, **options)  # type: ignore[arg-type]


def with_tensor(folder: pathlib.Path, to: pathlib.Path, name: str, value: float) -> pathlib.Path:
    """A copy in which one tensor holds `value` everywhere."""
    shutil.copytree(folder, to)
    path = to / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors[name] = torch.full_like(tensors[name], value)
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    return to


QUICK = ("llama", "bfloat16")
"""One of our own models. `make prove` checks the others too: each takes a process."""
HERE = pytest.mark.usefixtures("trials_here")


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=[] if (family, dtype) == QUICK else pytest.mark.prove)
        for family in ("llama", "qwen3", "gpt_neox", "mistral", "qwen2", "mixtral", "gpt2")
        for dtype in ("float32", "bfloat16")
    ],
)
def test_a_step_of_one_layer_runs(family: str, dtype: str) -> None:
    assert check_model(config(checkpoint(family), dtype=dtype)).step_seconds > 0


@HERE
def test_a_step_through_transformers_runs() -> None:
    assert check_model(config(checkpoint("gpt_neox"), dtype="float32")).step_seconds > 0


@HERE
def test_the_report_has_a_line_of_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(checkpoint("llama")), "--set", "engine.kv_cache_bytes=1048576"]) == 0
    step = re.search(r"^step +ran one layer and the head in (\S+) ms", capsys.readouterr().out, re.MULTILINE)
    assert step is not None
    assert float(step[1]) > 0


@HERE
def test_a_draft_model_runs_its_step_too(tmp_path: pathlib.Path) -> None:
    broken = with_tensor(checkpoint("llama"), tmp_path / "draft", "model.norm.weight", float("nan"))
    speculative = SpeculativeConfig(proposers=("draft",), draft_model=str(broken))
    with pytest.raises(ModelError, match="one step of its first layer"):
        check_model(config(checkpoint("llama"), speculative=speculative))


@HERE
def test_a_first_layer_without_finite_numbers_fails(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "model.layers.0.input_layernorm.weight"
    folder = with_tensor(checkpoint("llama"), tmp_path / "nan", name, float("nan"))
    assert main(["check", str(folder)]) == 1
    captured = capsys.readouterr()
    assert "cannot be served: one step of its first layer gives no token: " in captured.err
    assert "can be served" not in captured.out


@HERE
def test_the_other_layers_are_not_run(tmp_path: pathlib.Path) -> None:
    name = "model.layers.1.input_layernorm.weight"
    assert check_model(config(with_tensor(checkpoint("llama"), tmp_path / "nan", name, float("nan")))).step_seconds > 0


@HERE
def test_a_model_without_causal_attention_fails(tmp_path: pathlib.Path) -> None:
    """Its configuration does not tell; only a run does."""
    options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    bert = transformers.BertConfig(vocab_size=320, **options)
    transformers.BertLMHeadModel(bert).save_pretrained(tmp_path)
    make_tokenizer(tmp_path)
    with pytest.raises(ModelError, match=r"^Bert\w+ is not supported"):
        check_model(config(tmp_path))


@HERE
def test_an_exception_of_transformers_fails(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "activation"
    shutil.copytree(checkpoint("gpt_neox"), folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": "no-such-activation"}))
    with pytest.raises(ModelError, match=r"no-such-activation"):
        check_model(config(folder))


def test_a_step_that_ends_the_process_fails(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ModelError, match=r"one step of its first layer ended the process \(SIGILL\) on .* in float32"):
        check_model(config(checkpoint("llama")))


def test_an_unloadable_logits_processor_fails() -> None:
    with pytest.raises(ModelError, match="'nowhere:nothing' cannot be imported"):
        check_model(config(checkpoint("llama"), logits_processors={"nothing": "nowhere:nothing"}))


@HERE
def test_the_report_names_adapters_and_refuses_damaged_ones(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = adapters_of(checkpoint("llama")).add("checked", 4, target_modules=["q_proj", "v_proj"])
    command = ["check", str(checkpoint("llama")), "--set", "engine.kv_cache_bytes=1048576", "--lora-modules"]
    assert main([*command, f"support={folder}"]) == 0
    assert re.search(r"^adapters +support: rank 4, 6 linears$", capsys.readouterr().out, re.MULTILINE)
    assert main([*command, f"support={tmp_path}"]) == 1

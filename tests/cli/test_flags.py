"""Flags of `manta serve` and `manta check`: those that set an option, and those of other servers that there are not."""

from __future__ import annotations

import re
from typing import Any

import pytest

from manta.cluster.cli.__main__ import main
from manta.cluster.cli.flags import ANSWERS, FLAGS
from manta.cluster.config import ServeConfig, load_config
from manta.cluster.option_docs import option_text
from manta.cluster.option_reader import read_options
from tests.cli.test_first_hour import run


def test_flags_say_what_the_configuration_says(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("serve", "check"):
        code, out, _ = run(capsys, command, "--help")
        said = " ".join(out.split())
        assert code == 0
        for flag, key in FLAGS.items():
            text = option_text(ServeConfig, key)
            assert f"{flag} " in said
            assert text.doc in said
            assert text.values in said
    assert "Longest sequence, prompt and output together, in tokens (default: the model's; at least 1)" in said
    assert "auto, bfloat16, float16, float32" in said


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (["--max-model-len", "512"], {"engine": {"max_model_len": 512}}),
        (
            ["--tensor-parallel-size=2", "--dtype", "float32"],
            {"engine": {"tensor_parallel_size": 2, "dtype": "float32"}},
        ),
        (["--served-model-name", "7"], {"served_model_name": "7"}),
        (["--enable-expert-parallel"], {"engine": {"expert_parallel": True}}),
        (["--no-enable-prefix-caching"], {"engine": {"enable_prefix_caching": False}}),
        (["--max-num-seqs", "8", "--set", "engine.max_num_sequences=9"], {"engine": {"max_num_sequences": 8}}),
        (["--port", "8001"], {"port": 8001}),
        (["--kv-cache-dtype", "int4_per_token_head"], {"engine": {"kv_cache_dtype": "int4"}}),
        (
            ["--lora-modules", "a=folder/a", '{"name": "b", "path": "x=y", "base_model_name": "m"}'],
            {"engine": {"adapters": {"a": "folder/a", "b": "x=y"}}},
        ),
    ],
)
def test_flags_of_other_servers_set_options(
    flags: list[str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ServeConfig] = []
    monkeypatch.setattr("manta.cluster.cli.serve.check_machine", lambda *_: None)
    monkeypatch.setattr("manta.cluster.cli.serve.check_quickly", lambda engine: None)
    monkeypatch.setattr("manta.cluster.cli.serve._check_port", lambda host, port: None)
    monkeypatch.setattr("manta.cluster.cli.serve._serve_until_signal", lambda config, *_: seen.append(config))
    assert main(["serve", *flags]) == 0
    assert seen == [read_options(options, ServeConfig)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--max-model-len", "0"], ["Expected `int` >= 1", "`engine.max_model_len`, which is 0"]),
        (["serve", "--port", "zero"], ["Expected `int`, got `str`", "`port`, which is 'zero'"]),
        (["check", "--dtype", "fp8"], ["`engine.dtype` cannot be 'fp8'", "auto, bfloat16, float16, float32"]),
        (["serve", "--api-key", "secret"], ["there is no --api-key: keys on a command line", "MANTA_API_KEYS"]),
        (["chat", "--api-key=secret"], ["there is no --api-key: put the key into MANTA_API_KEY"]),
        (["serve", "--gpu-memory-utilization", "0.9"], ["engine.kv_cache_fraction"]),
        (["serve", "--kv-cache-dtype", "fp8"], ["`engine.kv_cache_dtype` cannot be 'fp8'", "auto, int8"]),
        (["serve", "--cache-type-k", "q4_0"], ["keys and values have one dtype; write --kv-cache-dtype int8 or int4"]),
        (["serve", "--k-cache-hadamard"], ["--kv-cache-dtype int4 rotates keys and values"]),
        (["serve", "--lora-modules", "folder"], ["--lora-modules folder must be NAME=FOLDER"]),
        (["serve", "--lora-modules", "a=b", "a=c"], ["names a twice"]),
        (["check", "--lora-modules", '{"name": "a"}'], ["missing required field `path`"]),
        (["serve", "--enable-lora"], ["works without a flag", "--lora-modules NAME=FOLDER"]),
        (["check", "--quantization", "awq"], ["how a checkpoint is quantised is read from it"]),
    ],
)
def test_an_unknown_flag_is_answered_with_an_alternative(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = run(capsys, *arguments)
    assert code == 2
    for word in words:
        assert word in error


def test_answers_name_options_that_there_are() -> None:
    for answer in ANSWERS.values():
        for key in re.findall(r"--set '?([\w.]+)=", answer):
            assert option_text(ServeConfig, key).name


def test_a_key_of_a_wrong_type_is_not_shown() -> None:
    with pytest.raises(ValueError, match=r"at `api_keys\[0\]`$"):
        load_config(None, {"api_keys": [12345]})

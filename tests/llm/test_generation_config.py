"""What `generation_config.json` and the tokenizer say of a model's answers: stop tokens and sampling parameters."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import pytest

from manta.cluster.cli.__main__ import main
from manta.cluster.engine.request import FinishStatus
from manta.cluster.llm import LLM, SamplingParams
from tests.checkpoints import EOS_TOKEN_ID, checkpoint

RECOMMENDED = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}


def copy_of(folder: pathlib.Path, to: pathlib.Path, **files: dict[str, Any] | None) -> pathlib.Path:
    """A copy of a checkpoint with changed JSON files; None removes a key."""
    shutil.copytree(folder, to)
    for name, changes in files.items():
        path = to / f"{name}.json"
        values = json.loads(path.read_text()) | (changes or {})
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return to


def without_stop_tokens(to: pathlib.Path, **files: dict[str, Any] | None) -> pathlib.Path:
    none = {"eos_token_id": None}
    return copy_of(checkpoint("llama"), to, **{"config": none, "generation_config": none} | files)


def end_of(llm: LLM, token_id: int) -> FinishStatus | None:
    """How an answer ends whose every token is `token_id`, unless that is a stop token."""
    params = SamplingParams(temperature=0, max_tokens=3, logit_bias={token_id: 100})
    return llm.generate([[5, 6]], params, use_tqdm=False)[0].outputs[0].finish_reason


def make(folder: pathlib.Path, **options: Any) -> LLM:
    return LLM(str(folder), kv_cache_bytes=2**20, num_threads=1, **options)


def test_a_stop_token_that_only_the_tokenizer_names_stops(tmp_path: pathlib.Path) -> None:
    llm = make(without_stop_tokens(tmp_path / "model"))
    assert llm.engine.model.eos_token_ids == (EOS_TOKEN_ID,)
    assert end_of(llm, EOS_TOKEN_ID) is FinishStatus.FINISHED_STOPPED
    assert end_of(llm, EOS_TOKEN_ID + 1) is FinishStatus.FINISHED_LENGTH


@pytest.mark.parametrize("listed", [False, True])
def test_stop_tokens_are_those_of_all_three_files(listed: bool, tmp_path: pathlib.Path) -> None:
    """The id of the tokenizer's is in `tokenizer.json`, or in older files' list of added tokens."""
    tokenizer: dict[str, Any] = {"eos_token": {"content": "<|im_start|>"}}
    if listed:
        tokenizer["added_tokens_decoder"] = {"1": {"content": "<|im_start|>", "special": True}}
    files = {
        "config": {"eos_token_id": 7},
        "generation_config": {"eos_token_id": [9, 7]},
        "tokenizer_config": tokenizer,
    }
    llm = make(without_stop_tokens(tmp_path / "model", **files))
    assert llm.engine.model.eos_token_ids == (7, 9, 1)
    for token_id in (7, 9, 1):
        assert end_of(llm, token_id) is FinishStatus.FINISHED_STOPPED
    assert end_of(llm, EOS_TOKEN_ID) is FinishStatus.FINISHED_LENGTH


def test_another_tokenizers_stop_token_counts(tmp_path: pathlib.Path) -> None:
    folder = without_stop_tokens(tmp_path / "model", tokenizer_config={"eos_token": None})
    assert make(folder).engine.model.eos_token_ids == ()
    assert make(folder, tokenizer=str(checkpoint("llama"))).engine.model.eos_token_ids == (EOS_TOKEN_ID,)


def test_a_stop_token_of_the_tokenizer_that_the_model_cannot_draw_is_left_out(tmp_path: pathlib.Path) -> None:
    added = {"eos_token": "<|new|>", "added_tokens_decoder": {"400": {"content": "<|new|>", "special": True}}}
    folder = without_stop_tokens(tmp_path / "model", tokenizer_config=added)
    assert make(folder).engine.model.eos_token_ids == ()


@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_check_refuses_a_stop_token_beyond_the_vocabulary(
    file: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every request would end in an error."""
    folder = copy_of(checkpoint("llama"), tmp_path / "model", **{file: {"eos_token_id": 320}})
    assert main(["check", str(folder)]) == 1
    refusal = f"{folder / file}.json: eos_token_id must be an integer from 0 to 319, not 320"
    assert refusal in capsys.readouterr().err


@pytest.mark.usefixtures("trials_here")
def test_check_prints_stop_tokens_sampling_and_unknown_keys(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"config": {"eos_token_id": 7, "novel_multiplier": 2.0}, "generation_config": RECOMMENDED}
    folder = copy_of(checkpoint("llama"), tmp_path / "model", **files)
    assert main(["check", str(folder), "--set", "engine.kv_cache_bytes=1048576"]) == 0
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines() if line and line[0] != " ")
    printed = {name: rest.strip() for name, rest in rows.items()}
    assert printed["stop"].startswith("tokens")
    assert "2 <|im_end|>" in printed["stop"]
    assert "7 " in printed["stop"]
    assert "temperature 0.6, top_p 0.9, top_k 20, repetition_penalty 1.05" in printed["sampling"]
    assert "novel_multiplier" in printed["keys"]


def test_prompts_without_parameters_take_the_recommended_ones(tmp_path: pathlib.Path) -> None:
    folder = copy_of(checkpoint("llama"), tmp_path / "model", generation_config=RECOMMENDED | {"top_k": 1})
    llm = make(folder)
    recommended = SamplingParams(**RECOMMENDED | {"top_k": 1})  # type: ignore[arg-type]
    assert llm.get_default_sampling_params() == recommended
    prompt = [[5, 6, 7]]
    greedy = llm.generate(prompt, SamplingParams(temperature=0, repetition_penalty=1.05), use_tqdm=False)
    assert llm.generate(prompt, use_tqdm=False)[0].outputs[0].token_ids == greedy[0].outputs[0].token_ids
    assert make(folder, generation_config="none").get_default_sampling_params() == SamplingParams()

"""Weights that are NaN or infinite end the requests that read them, with an error that says so, and nothing else."""

from __future__ import annotations

import math
import pathlib
import shutil
from typing import Any

import pytest
import safetensors.torch

from manta.cluster.engine.request import FinishStatus
from manta.cluster.llm import LLM, ConstraintSpec, SamplingParams
from tests.checkpoints import checkpoint

WEIGHTS = [
    "model.norm.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "lm_head.weight",
]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
BROKEN_ID, SOUND_IDS = 77, [10, 20, 30, 40]


def original() -> pathlib.Path:
    return checkpoint("llama", num_hidden_layers=2, hidden_size=64)


def broken(at: pathlib.Path, name: str, row: int, value: float) -> pathlib.Path:
    """Writes the checkpoint with a value in the first column of a row of one of its weights."""
    folder = pathlib.Path(shutil.copytree(original(), at / "broken"))
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    weight = tensors[name]
    (weight if weight.dim() == 1 else weight[:, 0])[row] = value
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_llm(folder: pathlib.Path, **options: Any) -> LLM:
    return LLM(str(folder), dtype="float32", num_threads=1, kv_cache_bytes="2MiB", **options)


@pytest.mark.parametrize(("value", "weights"), [(math.nan, "dense"), (math.inf, "int8"), (-math.inf, "int4")])
def test_a_request_ends_with_an_error_that_says_so(value: float, weights: str, tmp_path: pathlib.Path) -> None:
    for name in WEIGHTS:
        llm = make_llm(broken(tmp_path / name, name, 5, value), weights=weights)
        for _ in range(2):  # the engine lives on
            for output in llm.generate([SOUND_IDS, [1, 2]], GREEDY, use_tqdm=False):
                choice = output.outputs[0]
                assert choice.finish_reason is FinishStatus.FINISHED_INTERNAL_ERROR, name
                assert str(choice.error).startswith(
                    ("the model produced NaN logits at position", "the model produced infinite logits at position")
                )


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in 8 bits": {"weights": "int8", "kv_cache_dtype": "int8"},
    "n-grams": {"speculative": {"proposers": ["ngram"]}},
}
REQUESTS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=1, seed=1, max_tokens=6, ignore_eos=True),
    "logprobs": SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    "two choices": SamplingParams(temperature=1, seed=1, n=2, max_tokens=6, ignore_eos=True),
    "constrained": SamplingParams(
        temperature=0, max_tokens=6, constraint=ConstraintSpec(kind="regex", text="[a-z]{2,4}")
    ),
}


@pytest.mark.parametrize("options", list(OPTIONS))
def test_others_go_on_with_their_tokens(options: str, tmp_path: pathlib.Path) -> None:
    """A token whose embedding is broken, in prompts beside those without it, before and after."""
    sound = make_llm(original(), **OPTIONS[options])
    llm = make_llm(broken(tmp_path, "model.embed_tokens.weight", BROKEN_ID, math.nan), **OPTIONS[options])
    for params in REQUESTS.values():
        prompts = [SOUND_IDS, [10, 20, BROKEN_ID, 40], [50, 60, 70]]
        expected = sound.generate([prompts[0], prompts[2]], params, use_tqdm=False)
        for _ in range(2):
            first, failed, last = llm.generate(prompts, params, use_tqdm=False)
            assert [each.outputs[0].token_ids for each in (first, last)] == [
                each.outputs[0].token_ids for each in expected
            ]
            assert {choice.finish_reason for choice in failed.outputs} == {FinishStatus.FINISHED_INTERNAL_ERROR}
            assert all("NaN" in str(choice.error) for choice in failed.outputs)


def test_a_broken_draft_model_changes_no_token(tmp_path: pathlib.Path) -> None:
    draft = broken(tmp_path, "model.norm.weight", 5, math.nan)
    llm = make_llm(original(), speculative={"proposers": ["draft"], "draft_model": str(draft)})
    prompts = [SOUND_IDS, [1, 2]]
    expected = make_llm(original()).generate(prompts, GREEDY, use_tqdm=False)
    for _ in range(2):
        found = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]

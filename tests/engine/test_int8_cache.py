"""`engine.kv_cache_dtype: int8` in whole models: the tokens of transformers with keys and values rounded likewise."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from manta.cluster.cli.check import check_model
from manta.cluster.config import EngineConfig
from manta.cluster.llm import LLM, SamplingParams
from manta.workers.checkpoints.memory import plan_kv_cache
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.kv_cache_dtype import check_kv_cache
from manta.workers.model_options import ModelOptions
from manta.workers.models.model_config import ModelError
from manta.workers.torch_worker.torch_worker import TorchWorker
from tests.checkpoints import checkpoint, on_one_thread, reference_model
from tests.engine.test_exact import SCHEDULES
from tests.workers.cpu_forms import FORMS, TORCH, in_form

pytestmark = pytest.mark.forms_in_turns

NUM_TOKENS = 16
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral, window of 24": ("mistral", {}),
    "qwen3": ("qwen3", {}),
    "through transformers": ("gpt_neox", {}),
}


def rounded(states: torch.Tensor) -> torch.Tensor:
    """Keys or values [..., head_dim] as a cache of int8 holds them."""
    scales = states.abs().amax(-1, keepdim=True) / 127
    return (states / scales).round() * scales


class RoundedCache(transformers.DynamicCache):
    """transformers' cache, with each token's key and value of each head rounded."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        return super().update(rounded(key_states), rounded(value_states), *arguments, **named)


def generated(folder: Any, prompt: list[int]) -> list[int]:
    """transformers' greedy continuation in float32 over rounded keys and values."""
    return list(_generated(folder, tuple(prompt)))


@functools.cache
@torch.inference_mode()
def _generated(folder: Any, prompt: tuple[int, ...]) -> tuple[int, ...]:
    model = reference_model(folder)
    with on_one_thread():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            past_key_values=RoundedCache(config=model.config),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return tuple(output[0, len(prompt) :].tolist())


@functools.cache
def prompts() -> list[list[int]]:
    """Some share their first two blocks."""
    generator = np.random.default_rng(5)
    shared = generator.integers(3, 320, 40).tolist()
    own = [generator.integers(3, 320, length).tolist() for length in (3, 17, 90, 30, 64, 1)]
    return [shared + tokens if i % 2 else tokens for i, tokens in enumerate(own)]


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    with in_form(request.param):
        yield request.param


def make(folder: Any, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "kv_cache_dtype": "int8", "kv_cache_bytes": 4 << 20, "num_threads": 1}
    return LLM(str(folder), **(defaults | options))


def greedy(llm: LLM, **sampling: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, **sampling)
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts(), params, use_tqdm=False)]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_transformers_with_rounded_keys(form: str, name: str) -> None:
    family, options = MODELS[name]
    folder = checkpoint(family, **options)
    assert greedy(make(folder)) == [generated(folder, prompt) for prompt in prompts()]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_schedule_changes_the_tokens(schedule: str) -> None:
    folder = checkpoint("llama")
    expected = [generated(folder, prompt) for prompt in prompts()]
    assert greedy(make(folder, **SCHEDULES[schedule])) == expected


def test_preemption_and_forks_change_no_token() -> None:
    folder = checkpoint("llama")
    expected = [generated(folder, prompt) for prompt in prompts()]
    block_bytes = 16 * load_model_config(folder).kv_bytes_per_token("int8")
    llm = make(folder, kv_cache_bytes=15 * block_bytes)
    assert greedy(llm) == expected
    assert llm.engine.stats().num_preemptions > 0
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=20, ignore_eos=True)
    wide, narrow = (make(folder, enable_prefix_caching=cached) for cached in (True, False))
    answers = [
        [list(choice.token_ids) for choice in each.generate([prompts()[1]], params, use_tqdm=False)[0].outputs]
        for each in (wide, narrow)
    ]
    assert answers[0] == answers[1]


def test_a_draft_model_has_such_a_cache_too() -> None:
    folder, draft = checkpoint("llama"), checkpoint("llama", num_hidden_layers=1)
    llm = make(folder, speculative={"proposers": ["draft"], "draft_model": str(draft), "adaptive": False})
    assert greedy(llm) == [generated(folder, prompt) for prompt in prompts()]
    assert llm.engine.stats().drafts.accepted["draft"]


def test_blocks_take_a_byte_for_each_element() -> None:
    folder = checkpoint("llama")
    config = load_model_config(folder)
    assert config.kv_bytes_per_token("int8") == 2 * 3 * 2 * (16 + 4)
    plans = [
        plan_kv_cache(config, "bfloat16", ModelOptions(**options), free_bytes=1 << 30, weight_bytes=1 << 20)
        for options in ({"kv_cache_bytes": 1 << 20, "kv_cache_dtype": kind} for kind in ("auto", "int8"))
    ]
    assert [sizes.num_blocks for sizes in plans] == [(1 << 20) // (16 * each) for each in (384, 240)]
    info = make(folder, kv_cache_bytes=1 << 20).engine.model
    assert (info.kv_cache_dtype, info.num_blocks) == ("int8", plans[1][1])


@pytest.mark.usefixtures("trials_here")
def test_the_check_says_it() -> None:
    engine = EngineConfig(model=str(checkpoint("llama")), kv_cache_dtype="int8", kv_cache_bytes=1 << 20, device="cpu")
    report = check_model(engine)
    assert (report.kv_cache_dtype, report.kv_bytes_per_token) == ("int8", 240)


def test_what_cannot_have_it_is_refused() -> None:
    options = ModelOptions(kv_cache_dtype="int8")
    for device in ("cuda", "tpu"):
        with pytest.raises(ModelError, match=f"is for CPUs, and the device is {device}; set device to cpu, or leave"):
            check_kv_cache(options, device)
    bloom = ModelOptions(model=str(checkpoint("bloom")), device="cpu", kv_cache_dtype="int8")
    with in_form(TORCH), pytest.raises(ModelError, match=r"kv_cache_dtype int8 is not for Bloom.*ALiBi"):
        TorchWorker(bloom)

"""`engine.kv_cache_dtype` in whole models: the tokens of transformers with keys and values rounded likewise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
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
from manta.workers.kernels.four_bit_heads import round_heads, widen_heads
from manta.workers.kv_cache_dtype import check_kv_cache
from manta.workers.model_options import ModelOptions
from manta.workers.models.model_config import ModelError
from manta.workers.torch_worker.torch_worker import TorchWorker
from tests.checkpoints import checkpoint, on_one_thread, reference_model
from tests.engine.test_exact import SCHEDULES
from tests.pairs import in_turns
from tests.workers.cpu_forms import FORMS, TORCH, in_form

pytestmark = pytest.mark.forms_in_turns

NUM_TOKENS = 16
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral, window of 24": ("mistral", {}),
    "qwen3": ("qwen3", {}),
    "through transformers": ("gpt_neox", {}),
}


def to_int8(states: torch.Tensor) -> torch.Tensor:
    scales = states.abs().amax(-1, keepdim=True) / 127
    return (states / scales).round() * scales


def to_int4(states: torch.Tensor) -> torch.Tensor:
    return widen_heads(*round_heads(states), states.shape[-1])


ROUNDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"int8": to_int8, "int4": to_int4}
"""Keys or values [..., head_dim] as a cache holds them, by its dtype."""


class RoundedCache(transformers.DynamicCache):
    """transformers' cache, with each token's key and value of each head rounded."""

    def __init__(self, cached: str, config: Any) -> None:
        super().__init__(config=config)
        self.rounded = ROUNDED[cached]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        return super().update(self.rounded(key_states), self.rounded(value_states), *arguments, **named)


def generated(folder: Any, prompt: list[int], cached: str) -> list[int]:
    """transformers' greedy continuation in float32 over rounded keys and values."""
    return list(_generated(folder, tuple(prompt), cached))


@functools.cache
@torch.inference_mode()
def _generated(folder: Any, prompt: tuple[int, ...], cached: str) -> tuple[int, ...]:
    model = reference_model(folder)
    with on_one_thread():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            past_key_values=RoundedCache(cached, model.config),
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


def make(folder: Any, cached: str, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "kv_cache_dtype": cached, "kv_cache_bytes": 4 << 20, "num_threads": 1}
    return LLM(str(folder), **(defaults | options))


def greedy(llm: LLM, **sampling: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, **sampling)
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts(), params, use_tqdm=False)]


@pytest.mark.parametrize(("name", "cached"), in_turns(MODELS, list(ROUNDED)))
def test_tokens_equal_transformers_with_rounded_keys(form: str, name: str, cached: str) -> None:
    family, options = MODELS[name]
    folder = checkpoint(family, **options)
    assert greedy(make(folder, cached)) == [generated(folder, prompt, cached) for prompt in prompts()]


@pytest.mark.parametrize(("schedule", "cached"), in_turns(SCHEDULES, list(ROUNDED)))
def test_no_schedule_changes_the_tokens(schedule: str, cached: str) -> None:
    folder = checkpoint("llama")
    expected = [generated(folder, prompt, cached) for prompt in prompts()]
    assert greedy(make(folder, cached, **SCHEDULES[schedule])) == expected


@pytest.mark.parametrize("cached", ROUNDED)
def test_preemption_and_forks_change_no_token(cached: str) -> None:
    folder = checkpoint("llama")
    expected = [generated(folder, prompt, cached) for prompt in prompts()]
    block_bytes = 16 * load_model_config(folder).kv_bytes_per_token(cached)
    llm = make(folder, cached, kv_cache_bytes=15 * block_bytes)
    assert greedy(llm) == expected
    assert llm.engine.stats().num_preemptions > 0
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=20, ignore_eos=True)
    wide, narrow = (make(folder, cached, enable_prefix_caching=reuses) for reuses in (True, False))
    answers = [
        [list(choice.token_ids) for choice in each.generate([prompts()[1]], params, use_tqdm=False)[0].outputs]
        for each in (wide, narrow)
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("cached", ROUNDED)
def test_a_draft_model_has_such_a_cache_too(cached: str) -> None:
    folder, draft = checkpoint("llama"), checkpoint("llama", num_hidden_layers=1)
    llm = make(folder, cached, speculative={"proposers": ["draft"], "draft_model": str(draft), "adaptive": False})
    assert greedy(llm) == [generated(folder, prompt, cached) for prompt in prompts()]
    assert llm.engine.stats().drafts.accepted["draft"]


TOKEN_BYTES = {"int8": 2 * 3 * 2 * (16 + 4), "int4": 2 * 3 * 2 * (8 + 4)}
"""Bytes of a token's keys and values in three layers with two heads of 16 numbers and a scale each."""


@pytest.mark.parametrize("cached", ROUNDED)
def test_blocks_take_the_bytes_of_numbers_and_scales(cached: str) -> None:
    folder = checkpoint("llama")
    config = load_model_config(folder)
    assert config.kv_bytes_per_token(cached) == TOKEN_BYTES[cached]
    options = ModelOptions(kv_cache_bytes=1 << 20, kv_cache_dtype=cached)  # type: ignore[arg-type]
    plan = plan_kv_cache(config, "bfloat16", options, free_bytes=1 << 30, weight_bytes=1 << 20)
    assert plan.num_blocks == (1 << 20) // (16 * TOKEN_BYTES[cached])
    info = make(folder, cached, kv_cache_bytes=1 << 20).engine.model
    assert (info.kv_cache_dtype, info.num_blocks) == (cached, plan.num_blocks)


@pytest.mark.parametrize("cached", ROUNDED)
@pytest.mark.usefixtures("trials_here")
def test_the_check_says_it(cached: str) -> None:
    folder = str(checkpoint("llama"))
    options: dict[str, Any] = {"kv_cache_dtype": cached, "kv_cache_bytes": 1 << 20, "device": "cpu"}
    report = check_model(EngineConfig(model=folder, **options))
    assert (report.kv_cache_dtype, report.kv_bytes_per_token) == (cached, TOKEN_BYTES[cached])


@pytest.mark.parametrize("cached", ROUNDED)
def test_what_cannot_have_it_is_refused(cached: Any) -> None:
    options = ModelOptions(kv_cache_dtype=cached)
    for device in ("cuda", "tpu"):
        with pytest.raises(ModelError, match=f"is for CPUs, and the device is {device}; set device to cpu, or leave"):
            check_kv_cache(options, device)
    bloom = ModelOptions(model=str(checkpoint("bloom")), device="cpu", kv_cache_dtype=cached)
    with in_form(TORCH), pytest.raises(ModelError, match=rf"kv_cache_dtype {cached} is not for Bloom.*ALiBi"):
        TorchWorker(bloom)

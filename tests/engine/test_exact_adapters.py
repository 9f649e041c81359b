"""`engine.exact` with adapters: a request has the same tokens and log-probabilities whatever else is in its steps, in
every form of the kernels. `test_exact.py` and `test_exact_mixers.py` do the same without adapters.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from manta.cluster.llm import LLM, SamplingParams
from manta.workers.kernels import build
from tests.adapters import Adapters, adapters_of
from tests.checkpoints import checkpoint
from tests.engine.histories import NGRAM, prompts
from tests.workers.cpu_forms import COMPILED, in_form
from tests.workers.test_layer_kinds import folder_of

pytestmark = pytest.mark.skipif(build.load_library() is None, reason="no C++ compiler")

NUM_REQUESTS, NUM_TOKENS = 16, 8
HISTORIES: dict[str, dict[str, Any]] = {
    "together": {"num_threads": 2},
    "chunks": {"max_num_batched_tokens": 17},
    "drafts": {"speculative": NGRAM, "num_threads": 2},
    "preempted": {"max_num_batched_tokens": 40},
}
FEW_BLOCKS = {"auto": 20 * 16 * 512, "float32": 20 * 16 * 1024}
"""Bytes of a KV cache of 20 blocks, by dtype."""
KINDS = (("auto", "int8"), ("float32", "int4"), ("auto", "int4"), ("float32", "int8"))
"""Dtypes of activations and adapters, and weights of the base model."""
Told = list[list[tuple[int, float]]]
"""The tokens of each request with their log-probabilities."""


@functools.cache
def of_llama() -> Adapters:
    adapters = adapters_of(checkpoint("llama", dtype="bfloat16"))
    for seed, (name, options) in enumerate(OPTIONS.items()):
        adapters.add(name, seed, **options)
    return adapters


OPTIONS: dict[str, dict[str, Any]] = {
    "wide": {"r": 24},
    "narrow": {"r": 3, "target_modules": ["q_proj"]},
    "inner": {"r": 70, "target_modules": ["up_proj", "down_proj"]},
}


def requests() -> tuple[list[list[int]], list[SamplingParams], list[str]]:
    """Requests of all adapters and of none, of prompts that begin alike and unlike."""
    names = ["wide", "", "narrow", "wide", "inner"]
    params = [
        SamplingParams(temperature=0.7 * (index % 3), seed=index, max_tokens=NUM_TOKENS, logprobs=1, ignore_eos=True)
        for index in range(NUM_REQUESTS)
    ]
    of_requests = [prompts()[index % len(prompts())] for index in range(NUM_REQUESTS)]
    return of_requests, params, [names[index % len(names)] for index in range(NUM_REQUESTS)]


def make(adapters: Adapters, **options: Any) -> LLM:
    defaults = {"exact": True, "num_threads": 1, "kv_cache_bytes": "8MiB", "adapters": dict(adapters.folders)}
    return LLM(str(adapters.base), **(defaults | options))


def answers(llm: LLM, names: list[str] | None = None) -> Told:
    inputs, params, usual = requests()
    outputs = llm.generate(inputs, params, use_tqdm=False, adapter=names or usual)
    choices = [choice for output in outputs for choice in output.outputs]
    assert all(choice.error is None for choice in choices)
    return [[(entry.token_id, entry.logprob) for entry in choice.logprobs or []] for choice in choices]


@functools.cache
def alone(dtype: str, weights: str) -> Told:
    """The answers of an engine that runs one request at a time, from the beginning of its prompt."""
    options = {"max_num_sequences": 1, "enable_prefix_caching": False}
    return answers(make(of_llama(), dtype=dtype, weights=weights, **options))


@pytest.mark.few(3)
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize(("dtype", "weights"), KINDS)
def test_every_history_gives_the_answers_of_each_request_alone(dtype: str, weights: str, history: str) -> None:
    cache = {"kv_cache_bytes": FEW_BLOCKS[dtype]} if history == "preempted" else {}
    llm = make(of_llama(), dtype=dtype, weights=weights, **HISTORIES[history], **cache)
    assert answers(llm) == alone(dtype, weights)
    hits = llm.engine.stats().prefix_cache_hits
    assert answers(llm) == alone(dtype, weights), "from the prefix cache"
    assert llm.engine.stats().prefix_cache_hits > hits
    if history == "preempted":
        assert llm.engine.stats().num_preemptions > 0
    if (history, dtype) == ("together", "auto"):
        assert answers(llm, [""] * NUM_REQUESTS) != alone(dtype, weights), "the adapters change something"


@pytest.mark.few(1)
@pytest.mark.parametrize("form", COMPILED[1:] or COMPILED)
@pytest.mark.parametrize(("dtype", "weights"), KINDS)
def test_every_form_gives_the_same_answers(dtype: str, weights: str, form: str) -> None:
    expected = alone(dtype, weights)
    with in_form(form):
        assert answers(make(of_llama(), dtype=dtype, weights=weights)) == expected


MIXERS: dict[str, Any] = {
    "granite_hybrid": ["in_proj", "out_proj", "q_proj", "v_proj", "o_proj"],
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "o_proj"],
    "deepseek_v2": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "gemma2": "all-linear",
}


@pytest.mark.prove
@pytest.mark.parametrize("kind", MIXERS)
def test_linears_of_other_mixers_are_exact_too(kind: str) -> None:
    adapters = adapters_of(folder_of(kind))
    adapters.add("exact", 1, r=8, target_modules=MIXERS[kind])
    names = ["exact", "", "exact", "exact"] * (NUM_REQUESTS // 4)
    options = {"max_num_sequences": 1, "enable_prefix_caching": False}
    expected = answers(make(adapters, weights="int8", **options), names)
    assert answers(make(adapters, weights="int8"), names) == expected
    with in_form(COMPILED[-1]):
        assert answers(make(adapters, weights="int8", max_num_batched_tokens=17), names) == expected

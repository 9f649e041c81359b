"""`engine.exact`: the same tokens and log-probabilities in every form of the kernels and under every schedule.

Digests are written down here, so that each kind of machine checks itself against the one that computed them.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.llm import LLM, SamplingParams
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.conftest import PROVE
from tests.workers.cpu_forms import COMPILED, QUANTIZED, TORCH, in_form
from workers.model_options import ModelOptions
from workers.models.model_config import ModelError
from workers.step import TokenLogprobs
from workers.torch_worker.torch_worker import TorchWorker

NUM_REQUESTS = 200 if PROVE else 24
DIGESTS = {24: "3ef367ef60ffe0b1", 200: "72467b219c4a6a0a"}
"""Digests of the answers, by number of requests."""
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 30, "min_p": 0.02},
    {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.2},
    {"temperature": 1.0, "prompt_logprobs": 1},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Qwen3 in bfloat16. Its weights are whole numbers of PCG64 times powers of two: no library's rounding."""
    path = make_checkpoint("qwen3", tmp_path_factory.mktemp("exact"), dtype="bfloat16", max_position_embeddings=2048)
    generator = np.random.default_rng(7)
    weights = {}
    for name, tensor in sorted(load_file(path / "model.safetensors").items()):
        numbers = generator.integers(-127, 128, tensor.shape).astype(np.float32)
        scale, first = (2.0**-10, 1.0) if tensor.dim() == 1 else (2.0**-9, 0.0)
        weights[name] = torch.from_numpy(numbers * scale + first).bfloat16()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


def prompts() -> list[list[int]]:
    """Some share their beginning; one in eight is longer than a split of the attention's keys."""
    generator = np.random.default_rng(11)
    shared = generator.integers(3, VOCAB_SIZE, 96).tolist()
    lengths = [int(generator.integers(1, 90)) + (560 if i % 8 == 5 else 0) for i in range(NUM_REQUESTS)]
    own = [generator.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]
    return [shared + tokens if i % 3 == 0 else tokens for i, tokens in enumerate(own)]


def make(folder: str, **options: Any) -> LLM:
    defaults = {"weights": "int8", "exact": True, "kv_cache_bytes": 16 << 20, "num_threads": 2, "max_num_sequences": 16}
    return LLM(folder, **(defaults | options))


def numbers(entries: list[TokenLogprobs | None] | None) -> list[Any] | None:
    """What the model computed of each entry, without what the engine adds."""
    if entries is None:
        return None
    return [
        each and (each.token_id, each.logprob, each.rank, each.top_token_ids, each.top_logprobs) for each in entries
    ]


def answers(llm: LLM) -> str:
    """A digest of all tokens and log-probabilities."""
    sampling = [
        SamplingParams(seed=i, max_tokens=12, logprobs=2, ignore_eos=True, **SAMPLING[i % len(SAMPLING)])
        for i in range(NUM_REQUESTS)
    ]
    outputs = llm.generate(prompts(), sampling, use_tqdm=False)
    told = [
        (each.outputs[0].token_ids, numbers(each.outputs[0].logprobs), numbers(each.prompt_logprobs))
        for each in outputs
    ]
    return hashlib.sha256(msgspec.json.encode(told)).hexdigest()[:16]


@pytest.mark.parametrize("form", QUANTIZED if PROVE else COMPILED)
def test_every_form_gives_the_same_answers(form: str, folder: str) -> None:
    with in_form(form):
        assert answers(make(folder)) == DIGESTS[NUM_REQUESTS]


SCHEDULES: dict[str, dict[str, Any]] = {
    "one at a time, on one thread": {"max_num_sequences": 1, "num_threads": 1},
    "64 at a time, in chunks of 100": {"max_num_sequences": 64, "max_num_batched_tokens": 100},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_sequences": 4},
    "no prefix cache": {"enable_prefix_caching": False},
    "drafts": {"speculative": {"proposers": ["ngram"], "ngram_min": 1, "adaptive": False}},
}


@pytest.mark.parametrize("form", QUANTIZED if PROVE else COMPILED[:1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_same_answers(schedule: str, form: str, folder: str) -> None:
    with in_form(form):
        assert answers(make(folder, **SCHEDULES[schedule])) == DIGESTS[NUM_REQUESTS]


def test_preemption_changes_nothing(folder: str) -> None:
    llm = make(folder, kv_cache_bytes=50 * 16 * 768)
    assert answers(llm) == DIGESTS[NUM_REQUESTS]
    assert llm.engine.stats().num_preemptions > 0


def test_what_cannot_be_exact_is_refused(folder: str) -> None:
    with pytest.raises(
        ModelError, match="exact needs linears of integers, and weights is auto; set weights to int8 or"
    ):
        TorchWorker(ModelOptions(model=folder, device="cpu", exact=True))
    with in_form(TORCH), pytest.raises(ModelError, match="exact needs the compiled kernels: MANTA_NO_KERNELS=1"):
        TorchWorker(ModelOptions(model=folder, device="cpu", exact=True, weights="int8"))

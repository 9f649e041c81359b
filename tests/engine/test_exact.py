"""`engine.exact`: the same tokens and log-probabilities in every form of the kernels, under every schedule and on any
number of ranks.

Digests are written down here, so that each kind of machine checks itself against the one that computed them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import pathlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from manta.cluster.llm import LLM, SamplingParams
from manta.workers.checkpoints.model_folder import load_model_config
from manta.workers.decoders.decoder import Decoder
from manta.workers.kernels.protocol import Forward
from manta.workers.kernels.weights import DecoderWeights, WeightContent
from manta.workers.model_options import ModelOptions
from manta.workers.models.model_config import ModelConfig, ModelError
from manta.workers.parallel.split import shard_config
from manta.workers.platforms.cpu import CpuPlatform
from manta.workers.step import TokenLogprobs
from manta.workers.torch_worker.loader import load_model
from manta.workers.torch_worker.torch_worker import TorchWorker
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.conftest import PROVE
from tests.workers.cpu_forms import COMPILED, EMULATED, QUANTIZED, TORCH, in_form
from tests.workers.rank_processes import RankProcesses, in_forms, over_ranks
from tests.workers.test_quantised_linear import logits_of

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
    return whole_numbers(tmp_path_factory.mktemp("exact"))


def whole_numbers(at: pathlib.Path, **sizes: int) -> str:
    """A tiny Qwen3 in bfloat16. Its weights are whole numbers of PCG64 times powers of two: no library's rounding."""
    path = make_checkpoint("qwen3", at, dtype="bfloat16", max_position_embeddings=2048, **sizes)
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


class _Loop(CpuPlatform):
    """A CPU that calls kernels one by one, without structures or memory that other processes read."""

    def compile_decoder(self, weights: DecoderWeights, config: ModelConfig, run_layers: Forward) -> None:
        """Returns None, so that the loop in Python serves."""

    def shared_linears(self, content: WeightContent) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def logits_by(platform: CpuPlatform, folder: pathlib.Path, weights: str) -> torch.Tensor:
    model = load_model(folder, load_model_config(folder), "bfloat16", platform, weights=weights)
    assert isinstance(model, Decoder)
    return logits_of(folder, model, "bfloat16")


@pytest.mark.parametrize("form", EMULATED)
def test_an_emulated_processor_gives_the_same_logits(form: str, folder: str) -> None:
    path, platform = pathlib.Path(folder), _Loop(1, exact=True)
    kinds = ("int8", "int4")
    expected = {weights: logits_by(CpuPlatform(1, exact=True), path, weights) for weights in kinds}
    with in_form(form):
        for weights in kinds:
            assert torch.equal(logits_by(platform, path, weights), expected[weights])


class Setting(NamedTuple):
    """One way to compute the answers. Ranks take turns with the form named and those after it."""

    form: str
    num_ranks: int
    num_threads: int
    max_num_sequences: int
    max_num_batched_tokens: int
    preempts: bool
    drafts: bool


def settings() -> list[Setting]:
    """Some of all combinations, so that each value meets each value of every other field."""
    fields = (QUANTIZED, (1, 2, 4), (1, 2), (1, 16, 64), (7, 100, 2048), (False, True), (False, True))
    combinations = [Setting(*values) for values in itertools.product(*fields)]  # type: ignore[arg-type]
    random.Random(5).shuffle(combinations)
    seen: set[Any] = set()
    chosen = []
    for setting in combinations:
        pairs = set(itertools.combinations(enumerate(setting), 2))
        if not pairs <= seen:
            chosen.append(setting)
            seen |= pairs
    return chosen


@pytest.fixture(scope="module")
def four() -> Iterator[RankProcesses]:
    ranks = RankProcesses(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose gates four ranks divide in blocks of 16."""
    return whole_numbers(tmp_path_factory.mktemp("wide"), intermediate_size=192)


@pytest.fixture(scope="module")
def wide_answers(wide_folder: str) -> str:
    """The answers of one rank, in this machine's best form and with the options of `make`."""
    return answers(make(wide_folder))


@pytest.mark.prove
@pytest.mark.parametrize("setting", settings(), ids=lambda setting: "-".join(map(str, setting)))
def test_every_pair_of_settings_gives_the_same_answers(
    setting: Setting, wide_folder: str, wide_answers: str, four: RankProcesses
) -> None:
    share = shard_config(load_model_config(wide_folder), setting.num_ranks)
    options = {
        "num_threads": setting.num_threads,
        "max_num_sequences": setting.max_num_sequences,
        "max_num_batched_tokens": max(setting.max_num_batched_tokens, setting.max_num_sequences),
        "kv_cache_bytes": (50 if setting.preempts else 2000) * 16 * share.kv_bytes_per_token("bfloat16"),
        "speculative": {"proposers": ["ngram"], "ngram_min": 1, "adaptive": False} if setting.drafts else None,
    }
    first = QUANTIZED.index(setting.form)
    with contextlib.ExitStack() as stack:
        if setting.num_ranks == 1:
            stack.enter_context(in_form(setting.form))
        else:
            ranks = four.first(setting.num_ranks)
            stack.enter_context(in_forms(ranks, QUANTIZED[first:] + QUANTIZED[:first]))
            stack.enter_context(over_ranks(ranks))
        llm = make(wide_folder, **options)
        assert answers(llm) == wide_answers
    if setting.preempts and setting.max_num_sequences > 1:
        assert llm.engine.stats().num_preemptions > 0


def test_what_cannot_be_exact_is_refused(folder: str) -> None:
    with pytest.raises(
        ModelError, match="exact needs linears of integers, and weights is auto; set weights to int8 or"
    ):
        TorchWorker(ModelOptions(model=folder, device="cpu", exact=True))
    with in_form(TORCH), pytest.raises(ModelError, match="exact needs the compiled kernels: MANTA_NO_KERNELS=1"):
        TorchWorker(ModelOptions(model=folder, device="cpu", exact=True, weights="int8"))

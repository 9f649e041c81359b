"""Kernels have the same bits in every form, on every machine: each is compared with digests from another sitting.

Inputs are whole numbers of numpy's PCG64, scaled by powers of two, so that no library's logarithm is in them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from manta.workers.decoders.rope_table import rope_table
from manta.workers.kernels import cpu, cpu_sampler
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.models.model_config import RopeConfig
from manta.workers.sampling.sampling_state import SamplingState
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import SequenceStart
from tests.workers.cpu_forms import COMPILED, EMULATED, in_form, threads
from tests.workers.kernels.test_kernels import heads_of, make_metadata

pytestmark = [pytest.mark.usefixtures("cheap_groups"), pytest.mark.forms_in_turns]

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
HEADS = heads_of(6, 2, 48)
VOCAB_SIZE = 5003
"""No multiple of a vector's width, and more than one partial sum of the sampler."""

DIGESTS = {
    "norms of 896, float32": "887a7626aaa04d9c",
    "norms of 896, bfloat16": "446888e252afdc35",
    "norms of 100, float32": "234461e5f10da0ad",
    "norms of 100, bfloat16": "7d1421506646756e",
    "silu, float32": "440089d11c0e5ccb",
    "silu, bfloat16": "e561d58a8e1de965",
    "gelu_tanh, float32": "43590bcb10a9f866",
    "gelu_tanh, bfloat16": "32c3affdaaee7be3",
    "rotary, float32": "6485fbd751bd2779",
    "rotary, bfloat16": "8cb181de49d5143b",
    "attention, float32": "5722cf8881db09cd",
    "attention, bfloat16": "7fd70cd5c34f3322",
    "attention in a window, float32": "ad88c641da653c73",
    "attention in a window, bfloat16": "d695b33affa9f23f",
    "sampler, float32": "5f83de1b2767a12a",
    "sampler, bfloat16": "b6ea3c474608a669",
}
"""Digests of results, by kernel and dtype. An Intel processor computed them in every form, and an emulated ARM."""


@pytest.fixture(scope="module", params=[*COMPILED, *EMULATED])
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    with in_form(request.param):
        yield request.param


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 2.0**-16) -> torch.Tensor:
    """About as many small ones as large ones; sums of them are rounded."""
    generator = np.random.default_rng(seed)
    product = generator.integers(-(2**11), 2**11, shape) * generator.integers(0, 2**7, shape)
    return torch.from_numpy((product * scale).astype(np.float32)).to(dtype)


def digest(*tensors: torch.Tensor) -> str:
    sum_ = hashlib.sha256()
    for tensor in tensors:
        sum_.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sum_.hexdigest()[:16]


def check(name: str, dtype: torch.dtype, *results: torch.Tensor) -> None:
    key = f"{name}, {str(dtype).removeprefix('torch.')}"
    assert digest(*results) == DIGESTS[key], key


@DTYPES
@pytest.mark.parametrize("hidden", [896, 100])
def test_norms(form: str, hidden: int, dtype: torch.dtype) -> None:
    x, residual, weight = (numbers(seed, 9, hidden, dtype=dtype) for seed in (1, 2, 3))
    x[1] *= 2.0**-126  # subnormal
    normed = cpu.rms_norm(x, weight[0].contiguous(), 1e-6)
    check(f"norms of {hidden}", dtype, normed, cpu.add_rms_norm(x, residual, weight[0].contiguous(), 1e-6), residual)


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates(form: str, activation: str, dtype: torch.dtype) -> None:
    gate_up = numbers(4, 5, 2 * 200, dtype=dtype, scale=2.0**-11)
    check(activation, dtype, cpu.gate(activation, gate_up))


@DTYPES
def test_rotary_embedding(form: str, dtype: torch.dtype) -> None:
    metadata, num_blocks = make_metadata([(0, 40), (100, 1), (1000, 3)], 16)
    cos_sin = torch.from_numpy(rope_table(RopeConfig(rope_type="default", theta=10000.0), 48, 1100))
    caches = [torch.zeros(num_blocks, 16, 2, 48, dtype=dtype) for _ in range(2)]
    qkv = numbers(5, metadata.num_tokens, 10 * 48, dtype=dtype)
    weights = numbers(6, 48, dtype=dtype), numbers(7, 48, dtype=dtype)
    k_cache, v_cache = caches
    cpu.rope_and_cache(qkv, cos_sin, metadata, k_cache, v_cache, HEADS, weights[0], weights[1])
    check("rotary", dtype, qkv[:, : 6 * 48], *caches)


LENGTH, CHUNK = 640, 301


def attended(
    metadata: AttentionMetadata, caches: list[torch.Tensor], qkv: torch.Tensor, window: int | None
) -> torch.Tensor:
    return cpu.paged_attention(qkv, caches[0], caches[1], metadata, HEADS, window, exact=True)


@pytest.mark.axes_in_turns
@DTYPES
@pytest.mark.parametrize("window", [None, 300], ids=["full", "window"])
def test_attention_of_prompts_equals_their_parts(form: str, dtype: torch.dtype, window: int | None) -> None:
    """A prompt of two splits at once, in chunks, and token by token beside other sequences."""
    tables = np.random.default_rng(8).permutation(2 * LENGTH // 16).astype(np.int32).reshape(2, -1)
    caches = [numbers(seed, tables.size, 16, 2, 48, dtype=dtype) for seed in (9, 10)]
    qkv = numbers(11, LENGTH, 10 * 48, dtype=dtype, scale=2.0**-14)

    def run(*chunks: tuple[int, int, int]) -> list[torch.Tensor]:
        sequences, starts, ends = (np.array(each) for each in zip(*chunks, strict=True))
        tokens = QueryTokens(starts, ends - starts, tables[sequences], 16)
        rows = torch.cat([qkv[start:end] for _, start, end in chunks])
        output = attended(AttentionMetadata.build(tokens), caches, rows, window)
        return list(output.split((ends - starts).tolist()))

    with threads(1):
        (whole,) = run((0, 0, LENGTH))
    check("attention" if window is None else "attention in a window", dtype, whole)
    pieces = [run((0, at, min(LENGTH, at + CHUNK)))[0] for at in range(0, LENGTH, CHUNK)]
    assert torch.equal(whole, torch.cat(pieces))
    for position in (64, 512, 600):
        for count in (1, 9):
            first = position + 1 - count
            for others in ([], [(1, 520, 521), (0, 638, 639), (0, 637, 638), (0, 634, 640)]):
                row = run((0, first, position + 1), *others)[0]
                assert torch.equal(row, whole[first : position + 1]), (position, count, others)


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=40),
    SamplingParams(temperature=1.3, top_p=0.9),
    SamplingParams(temperature=0.9, top_k=2000, top_p=0.6),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, top_p=0.95),
]


@DTYPES
def test_sampler(form: str, dtype: torch.dtype) -> None:
    if form not in COMPILED:
        pytest.skip("an emulated process cannot follow the addresses of parameters")
    num_rows = 40 * len(PARAMS)
    logits = numbers(12, num_rows, VOCAB_SIZE, dtype=dtype, scale=2.0**-15)
    state = SamplingState(VOCAB_SIZE)
    for i in range(num_rows):
        prompt = np.random.default_rng(i).integers(0, VOCAB_SIZE, 20).tolist()
        state.start(SequenceStart(i, PARAMS[i % len(PARAMS)], i, prompt, 12, ()))
    sequences = [state.sequences[i] for i in range(num_rows)]
    token_ids, status = cpu_sampler.draw(logits, sequences, [20] * num_rows, state)
    assert not status.any()
    check("sampler", dtype, token_ids, *cpu_sampler.logprobs(logits, token_ids, 5))

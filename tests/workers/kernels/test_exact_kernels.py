"""Kernels have the same bits in every form, on every machine: each is compared with digests from another sitting.

Inputs are whole numbers of numpy's PCG64, scaled by powers of two, so that no library's logarithm is in them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from manta.workers.decoders.rope_table import rope_table
from manta.workers.kernels import cpu, cpu_exact, cpu_experts, cpu_products, cpu_sampler, expert_choice, reference
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.exponential import exponential
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kernels.recurrence import RecurrentInputs
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.models.model_config import ExpertsConfig, RopeConfig
from manta.workers.sampling.sampling_state import SamplingState
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import SequenceStart, StateUse
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
    "gated delta net, float32": "b611a56e372f97ad",
    "Kimi delta attention, float32": "4ce736627af44e60",
    "Mamba 1, float32": "13254c77e93267fe",
    "convolutions, float32": "f86bfc471461c257",
    "parts of recurrent layers, float32": "1fba3817477a06e9",
    "products of heads, float32": "39550479a5f1d2ca",
    "products of heads, bfloat16": "8e2d005b2276bd2b",
    "scores of experts, softmax, float32": "24dda9b33ad8ac28",
    "scores of experts, sigmoid, float32": "2b2164a7dde90c19",
    "scores of experts, sqrtsoftplus, float32": "7c39b5f14a6f0f6b",
    "norms that subtract the mean, float32": "410e29ca6d538eec",
    "norms that subtract the mean, bfloat16": "e499b25d51f1ff09",
    "soft caps, float32": "e7d278115d759e4e",
    "soft caps, bfloat16": "fd6af0c4068a7f8f",
    "clamped, float32": "bd0c81eea78709db",
    "clamped, bfloat16": "033b4d62d5ecb576",
    "gelu, float32": "beef166825add68b",
    "gelu, bfloat16": "15296cebff2163df",
    "logarithms, float32": "265d4d1a861fb600",
    "exponentials, float32": "d8bf3ff6430b8cd6",
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


SEGMENTS = RecurrentStep.build(
    [0, 7, 3], [40, 1, 2], [StateUse(0, [(39, 2), (40, 3)]), StateUse(4, [(8, 5)]), StateUse(6, [(5, 7)])]
)
"""A prompt, a decode and a short chunk, in slots below `NUM_SLOTS`."""
NUM_SLOTS, NUM_ROWS = 8, 43


@pytest.fixture
def compiled(form: str) -> None:
    if form not in COMPILED:
        pytest.skip("an emulated process cannot follow the addresses of structures")


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("kind", "key_dim", "value_dim"),
    [("gated delta net", 24, 40), ("Kimi delta attention", 20, 12), ("Mamba 1", 12, 1)],
)
def test_recurrences(form: str, kind: str, key_dim: int, value_dim: int) -> None:
    num_groups, num_heads = (1, 70) if kind == "Mamba 1" else (2, 4)
    query, key = (numbers(seed, NUM_ROWS, num_groups, key_dim, scale=2.0**-20) for seed in (13, 14))
    decays = (num_heads, key_dim) if kind == "Kimi delta attention" else (num_heads,)
    inputs = RecurrentInputs(
        query,
        key,
        numbers(15, NUM_ROWS, num_heads, value_dim),
        -numbers(16, NUM_ROWS, *decays).abs(),
        None if kind == "Mamba 1" else numbers(17, NUM_ROWS, num_heads, scale=2.0**-18).abs(),
        numbers(18, num_heads, key_dim).abs() if kind == "Mamba 1" else None,
    )
    states = numbers(19, NUM_SLOTS, num_heads, key_dim, value_dim)
    check(kind, torch.float32, cpu.recurrent.recur(inputs, states, SEGMENTS), states)


@pytest.mark.usefixtures("compiled")
def test_convolutions(form: str) -> None:
    found = []
    for width in (3, 4, 5):  # torch computes the last one, but for its SiLU
        kernel, bias = numbers(20, 300, width), numbers(21, 300)
        states = numbers(22, NUM_SLOTS, 300, width - 1)
        x = numbers(23, NUM_ROWS, 300)
        found += [cpu.recurrent.convolve(x, kernel, bias, states, SEGMENTS, activates=True), states]
    check("convolutions", torch.float32, *found)


@pytest.mark.usefixtures("compiled")
def test_parts_of_recurrent_layers(form: str) -> None:
    x, gate, weight = numbers(24, 7, 3, 52), numbers(25, 7, 156, scale=2.0**-12), numbers(26, 156)
    layer = cpu.recurrent
    norms = [
        layer.gated_norm(x, gate, weight, 1e-6, **options)
        for options in ({}, {"has_sigmoid": True}, {"gates_first": True})
    ]
    gates = [layer.softplus(gate, weight), layer.sigmoid(gate), layer.silu(gate), layer.exp(gate)]
    states = numbers(35, NUM_SLOTS, 9, 1)
    largest = layer.running_max(
        numbers(36, NUM_ROWS, 9), -numbers(37, NUM_ROWS, 9, scale=2.0**-18).abs(), states, SEGMENTS
    )
    squares = layer.sums_of_squares(gate)
    norms += [layer.unit_heads(x, 0.25, 1e-6), layer.row_norm(gate, squares, 200, weight, 1e-6)]
    check("parts of recurrent layers", torch.float32, *norms, *gates, squares, largest, states)


@DTYPES
def test_products_of_heads(form: str, dtype: torch.dtype) -> None:
    """Their bits do not depend on the other rows, and a part of a wider row is read where it lies."""
    wide, weight = numbers(27, 9, 3, 50, dtype=dtype), numbers(28, 3, 40, 70, dtype=dtype)
    whole = cpu_products.head_products(wide[..., :40], weight)
    check("products of heads", dtype, whole)
    assert torch.equal(cpu_products.head_products(wide[5:6, :, :40], weight), whole[5:6])
    expected = torch.einsum("thi,hio->tho", wide[..., :40].double(), weight.double())
    torch.testing.assert_close(whole.double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)


def test_scores_of_experts(form: str) -> None:
    logits = numbers(29, 5, 36, scale=2.0**-13)
    for name in cpu_experts.SCORES:
        config = ExpertsConfig(num_experts=36, num_chosen=30, intermediate_size=1, scores=name, normalises=True)
        shares, chosen = cpu_experts.route(logits, None, config)
        check(f"scores of experts, {name}", torch.float32, shares, chosen)
        torch.testing.assert_close(shares, expert_choice.route(logits, None, config)[0])


@pytest.mark.usefixtures("compiled")
@DTYPES
def test_norms_that_subtract_the_mean(form: str, dtype: torch.dtype) -> None:
    x, weight = numbers(31, 9, 100, dtype=dtype) + 1, numbers(32, 100, dtype=dtype)
    found = cpu_exact.layer_norm(x, weight, 1e-6)
    check("norms that subtract the mean", dtype, found)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, reference.layer_norm(x, weight, 1e-6), rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("compiled")
@DTYPES
def test_soft_caps(form: str, dtype: torch.dtype) -> None:
    x = numbers(33, 5, 100, dtype=dtype, scale=2.0**-12)
    found = cpu_exact.cap(x, 30.0)
    check("soft caps", dtype, found)
    torch.testing.assert_close(found, reference.cap(x.float(), 30.0).to(dtype), rtol=1e-2, atol=1e-4)


@pytest.mark.usefixtures("compiled")
@DTYPES
@pytest.mark.parametrize("activation", ["clamped", "gelu"])
def test_gates_of_other_kernels(form: str, activation: str, dtype: torch.dtype) -> None:
    gate_up = numbers(34, 5, 2 * 50, dtype=dtype, scale=2.0**-14)
    found = cpu.gate(activation, gate_up)
    check(activation, dtype, found)
    torch.testing.assert_close(found, reference.gate(activation, gate_up), rtol=1e-2, atol=1e-5)


def test_logarithms(form: str) -> None:
    x = torch.arange(300.0)
    found = cpu_exact.log1p(x)
    check("logarithms", torch.float32, found)
    assert found.tolist() == [float(np.float32(math.log1p(each))) for each in range(300)]


def test_exponentials() -> None:
    x = numbers(30, 400, scale=2.0**-12)
    check("exponentials", torch.float32, exponential(x))
    assert exponential(x).tolist() == [float(np.float32(math.exp(each))) for each in x.tolist()]
    assert exponential(torch.tensor([torch.nan, -1000.0, 1000.0])).tolist()[1:] == [0.0, math.inf]

"""The KV cache in four bits against a form in numpy of its own, made after the papers: rotations, levels, attention."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
import torch

from manta.workers.kernels import cpu, four_bit_heads
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.cpu_kv_cache import allocate_kv
from manta.workers.kernels.query_tokens import QueryTokens
from tests.workers.cpu_forms import COMPILED, EMULATED, in_form
from tests.workers.kernels.test_kernels import DTYPES, TOLERANCE, heads_of

Numbers = npt.NDArray[np.float64]

pytestmark = [pytest.mark.usefixtures("cheap_groups"), pytest.mark.forms_in_turns]

WIDTHS = [64, 80, 96, 128]
POSITIVE = np.array([6, 18, 31, 44, 58, 75, 96, 127])
LEVELS = np.concatenate((POSITIVE, -POSITIVE)).astype(np.float64)
BLOCK_SIZE = 16


@pytest.fixture(scope="module", params=[*COMPILED, *EMULATED])
def kernels(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    with in_form(request.param):
        yield cpu


def hadamard(width: int) -> Numbers:
    """Sylvester's matrix by its closed form: (-1) to the number of bits that row and column share."""
    index = np.arange(width)
    shared = index[:, None] & index
    for shift in (8, 4, 2, 1):
        shared ^= shared >> shift  # the lowest bit becomes the parity
    return (1.0 - 2.0 * (shared & 1)) / math.sqrt(width)


def rudin_shapiro(width: int) -> Numbers:
    """The sequence by its recurrence: r(2n) = r(n), r(2n + 1) = (-1)^n r(n)."""
    signs = np.ones(width)
    for index in range(1, width):
        signs[index] = signs[index // 2] * (-1) ** (index % 2 * (index // 2))
    return signs


def rotate(heads: Numbers) -> Numbers:
    """Heads [..., head_dim]: the first 2^n dimensions, then the last 2^n if there are more."""
    rotated = heads.copy()
    width = 1 << int(math.log2(heads.shape[-1]))
    for part in {0, heads.shape[-1] - width}:
        rotated[..., part : part + width] = (rotated[..., part : part + width] * rudin_shapiro(width)) @ hadamard(width)
    return rotated


def rotate_back(rotated: Numbers) -> Numbers:
    heads = rotated.copy()
    width = 1 << int(math.log2(heads.shape[-1]))
    for part in sorted({0, heads.shape[-1] - width}, reverse=True):
        heads[..., part : part + width] = (heads[..., part : part + width] @ hadamard(width)) * rudin_shapiro(width)
    return heads


def rounded(heads: Numbers) -> tuple[npt.NDArray[np.int64], Numbers]:
    """Codes [..., head_dim] and scales [...]: the nearest level of all sixteen, for the width that fits best."""
    rotated = rotate(heads)
    squares = (rotated**2).sum(-1)
    units = rotated / np.sqrt(squares / heads.shape[-1])[..., None]
    tried = []
    for width in (36, 42, 48, 54, 60, 66):
        codes = np.abs(units[..., None] * width - LEVELS).argmin(-1)
        products = (rotated * LEVELS[codes]).sum(-1)
        cosine = products / np.sqrt(squares * (LEVELS[codes] ** 2).sum(-1))
        tried.append((cosine, codes, squares / products))
    best = np.stack([cosine for cosine, _, _ in tried]).argmax(0)
    codes = np.take_along_axis(np.stack([codes for _, codes, _ in tried]), best[None, ..., None], 0)[0]
    return codes, np.take_along_axis(np.stack([scales for _, _, scales in tried]), best[None], 0)[0]


def widened(heads: Numbers) -> Numbers:
    """What a cache holds of heads."""
    codes, scales = rounded(heads)
    return rotate_back(LEVELS[codes] * scales[..., None])


def normal_levels(count: int) -> Numbers:
    """The best `count` levels on each side for a normal distribution, by Lloyd's iteration (Max, 1960)."""
    levels = np.linspace(0.1, 2.7, count)
    density = lambda x: math.exp(-x * x / 2) / math.sqrt(2 * math.pi)  # noqa: E731
    share = lambda x: math.erf(x / math.sqrt(2)) / 2  # noqa: E731
    for _ in range(2000):
        bounds = [0.0, *(levels[1:] + levels[:-1]) / 2, 12.0]
        levels = np.array([(density(a) - density(b)) / (share(b) - share(a)) for a, b in itertools.pairwise(bounds)])
    return levels


def hard_heads(num_tokens: int, head_dim: int, seed: int = 0) -> Numbers:
    """Heads [num_tokens, 2, head_dim] of which one dimension is far larger than others, and some are away from zero."""
    generator = np.random.default_rng(seed)
    heads = generator.normal(size=(num_tokens, 2, head_dim))
    heads[:, 0, head_dim // 2 + 1] += 12
    heads[::3, 1] += 2
    return heads.astype(np.float32).astype(np.float64)


def test_the_levels_are_the_best_for_a_normal_distribution() -> None:
    levels = normal_levels(8)
    unit = (POSITIVE @ levels) / (levels @ levels)
    assert np.abs(unit * levels - POSITIVE).max() < 0.6
    assert four_bit_heads.LEVELS.tolist() == LEVELS.tolist()


@pytest.mark.parametrize("head_dim", [*WIDTHS, 16, 576])
def test_heads_are_rotated_and_rounded_as_in_numpy(head_dim: int) -> None:
    heads = hard_heads(40, head_dim).reshape(-1, head_dim)
    packed, scales = four_bit_heads.round_heads(torch.from_numpy(heads))
    np.testing.assert_allclose(heads @ four_bit_heads.rotation(head_dim).double().numpy(), rotate(heads), atol=1e-5)
    codes, expected_scales = rounded(heads)
    found = np.stack((packed.numpy() & 15, packed.numpy() >> 4), -1).reshape(-1, head_dim)
    is_same = (found == codes).all(-1)
    assert is_same.mean() > 0.97, "float32 and float64 may disagree only in the middle of two levels"
    np.testing.assert_allclose(scales.numpy()[is_same], expected_scales[is_same], rtol=1e-5)


@DTYPES
@pytest.mark.parametrize("head_dim", WIDTHS)
@pytest.mark.axes_in_turns
def test_attention_is_that_over_heads_that_numpy_rounds(kernels: ModuleType, head_dim: int, dtype: torch.dtype) -> None:
    """A prompt in chunks of 4 tokens and more, then decode steps."""
    heads, num_tokens = heads_of(6, 2, head_dim), 150
    queries = np.random.default_rng(1).normal(size=(num_tokens, 6 * head_dim))
    keys, values = hard_heads(num_tokens, head_dim, 2), hard_heads(num_tokens, head_dim, 3)
    parts = [torch.from_numpy(each.reshape(num_tokens, -1)) for each in (queries, keys, values)]
    qkv = torch.cat(parts, -1).to(dtype)
    queries, keys, values = (
        part.double().unflatten(-1, (-1, head_dim)).numpy()
        for part in qkv.split([6 * head_dim, 2 * head_dim, 2 * head_dim], -1)
    )
    kv = allocate_kv(1, 10, BLOCK_SIZE, 2, head_dim, torch.uint8).zero_()[0]
    unturned = torch.tensor([1.0, 0.0]).repeat_interleave(head_dim // 2).repeat(num_tokens, 1)
    table = np.random.default_rng(4).permutation(10).astype(np.int32)[None]
    found, start = [], 0
    for length in [4, 4, 60, 80, 1, 1]:
        step = qkv[start : start + length].clone()
        tokens = QueryTokens(np.array([start]), np.array([length]), table, BLOCK_SIZE)
        metadata = AttentionMetadata.build(tokens)
        kernels.rope_and_cache(step, unturned, metadata, kv[0], kv[1], heads)
        found.append(kernels.paged_attention(step, kv[0], kv[1], metadata, heads))
        start += length
    assert start == num_tokens
    expected = causal_attention(queries, widened(keys), widened(values))
    tolerance = 2 * TOLERANCE[dtype] if dtype == torch.bfloat16 else 5e-3
    np.testing.assert_allclose(torch.cat(found).double().numpy(), expected, rtol=tolerance, atol=tolerance)


def causal_attention(queries: Numbers, keys: Numbers, values: Numbers) -> Numbers:
    """Queries [num_queries, num_heads, head_dim] of the last tokens, keys and values [num_tokens, num_kv_heads,
    head_dim].
    """
    group = queries.shape[1] // keys.shape[1]
    keys, values = (np.repeat(each, group, axis=1) for each in (keys, values))
    scores = np.einsum("qhd,khd->hqk", queries, keys) / math.sqrt(queries.shape[-1])
    scores[:, np.triu(np.ones(scores.shape[1:], bool), len(keys) - len(queries) + 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, values).reshape(len(queries), -1)


def test_small_weights_beside_a_large_one_keep_their_sum(kernels: ModuleType) -> None:
    """One key in each block of 64 has 3000 times the weight of each other one, whose values all agree."""
    head_dim, num_keys = 64, 1024
    heads = heads_of(7, 1, head_dim)
    generator = np.random.default_rng(5)
    direction = generator.normal(size=head_dim)
    direction *= math.sqrt(head_dim) / np.linalg.norm(direction)
    keys = np.zeros((num_keys, head_dim))
    keys[17::64] = direction * (math.log(3000) / math.sqrt(head_dim))
    values = np.ones((num_keys, head_dim)) * 4
    values[17::64] = generator.normal(size=(num_keys // 64, head_dim))
    qkv = torch.zeros(num_keys, 9 * head_dim)
    qkv[:, : 7 * head_dim] = torch.from_numpy(np.tile(direction, 7))
    qkv[:, 7 * head_dim : 8 * head_dim], qkv[:, 8 * head_dim :] = torch.from_numpy(keys), torch.from_numpy(values)
    qkv = qkv.bfloat16()
    kv = allocate_kv(1, num_keys // BLOCK_SIZE, BLOCK_SIZE, 1, head_dim, torch.uint8).zero_()[0]
    unturned = torch.tensor([1.0, 0.0]).repeat_interleave(head_dim // 2).repeat(num_keys, 1)
    table = np.arange(num_keys // BLOCK_SIZE, dtype=np.int32)[None]
    metadata = AttentionMetadata.build(QueryTokens(np.array([0]), np.array([num_keys]), table, BLOCK_SIZE))
    kernels.rope_and_cache(qkv.clone(), unturned, metadata, kv[0], kv[1], heads)
    last = AttentionMetadata.build(QueryTokens(np.array([num_keys - 1]), np.array([1]), table, BLOCK_SIZE))
    found = kernels.paged_attention(qkv[-1:], kv[0], kv[1], last, heads).double().numpy()
    wide = qkv.double().unflatten(-1, (9, head_dim)).numpy()
    kept = wide[:, 7:8].copy()
    kept[17::64] = widened(kept[17::64])
    expected = causal_attention(wide[-1:, :7], kept, widened(wide[:, 8:]))
    np.testing.assert_allclose(found, expected, rtol=0.03, atol=0.03)

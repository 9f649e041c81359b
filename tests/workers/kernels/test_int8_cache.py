"""A KV cache of int8: what is written, and attention over it against a float32 reference of the dequantised cache."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from manta.workers.kernels import cpu, kv_cache, reference
from manta.workers.kernels.attention_metadata import AttentionMetadata, copy_blocks
from manta.workers.kernels.cpu_kv_cache import allocate_kv
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.models.model_config import HeadShape
from tests.workers.cpu_forms import COMPILED, EMULATED, in_form, threads
from tests.workers.kernels.test_exact_kernels import digest, numbers
from tests.workers.kernels.test_kernels import DTYPES, MIXES, TOLERANCE, heads_of, make_metadata

pytestmark = [pytest.mark.usefixtures("cheap_groups"), pytest.mark.forms_in_turns]

EXACT_DIGEST = "d59974853ee72fe9"
"""Digest of attention with `exact` over a cache of int8, in every form."""


@pytest.fixture(scope="module", params=[*COMPILED, *EMULATED])
def kernels(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    with in_form(request.param):
        yield cpu


def random_cache(num_blocks: int, block_size: int, heads: HeadShape) -> torch.Tensor:
    """Keys and values [2, num_blocks, block_bytes]. Those of some tokens are a thousand times larger than others'."""
    kv = allocate_kv(1, num_blocks, block_size, heads.num_kv_heads, heads.head_dim, torch.int8)[0]
    slots = torch.arange(num_blocks * block_size)
    for cache in kv:
        sizes = 10.0 ** torch.randint(-3, 1, (len(slots), heads.num_kv_heads, 1))
        kv_cache.write(cache, slots, torch.randn(len(slots), heads.num_kv_heads, heads.head_dim) * sizes, block_size)
    return kv


def poison_unused(metadata: AttentionMetadata, kv: torch.Tensor, heads: HeadShape) -> None:
    """NaN as the scale of every slot outside the contexts: reading one shows in the result."""
    block_size = metadata.block_size
    used = torch.zeros(kv.shape[1], block_size, dtype=torch.bool)
    for table, context_len in zip(metadata.block_tables, metadata.context_lens.tolist(), strict=True):
        position = torch.arange(context_len)
        used[table[position // block_size].long(), position % block_size] = True
    for cache in kv:
        _, scales = kv_cache.split(cache, block_size, heads.num_kv_heads, heads.head_dim)
        scales.masked_fill_(~used[:, None], float("nan"))


def expected(
    qkv: torch.Tensor, kv: torch.Tensor, metadata: AttentionMetadata, heads: HeadShape, window: int | None
) -> torch.Tensor:
    """Attention in float32 over the numbers that the cache stands for."""
    wide = []
    for cache in kv:
        values, scales = kv_cache.split(cache, metadata.block_size, heads.num_kv_heads, heads.head_dim)
        wide.append((values.double() * scales.transpose(1, 2).unsqueeze(-1).double()).float())
    return reference.paged_attention(qkv.float(), wide[0], wide[1], metadata, heads, window)


def check_attention(
    lengths: list[tuple[int, int]], heads: HeadShape, block_size: int, dtype: torch.dtype, window: int | None
) -> None:
    metadata, num_blocks = make_metadata(lengths, block_size)
    kv = random_cache(num_blocks, block_size, heads)
    poison_unused(metadata, kv, heads)
    qkv = torch.randn(metadata.num_tokens, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim).to(dtype)
    actual = cpu.paged_attention(qkv, kv[0], kv[1], metadata, heads, window)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        actual.float(), expected(qkv, kv, metadata, heads, window), atol=tolerance, rtol=tolerance
    )


@DTYPES
@pytest.mark.parametrize("window", [None, 40], ids=["full", "window 40"])
@pytest.mark.parametrize("mix", MIXES)
def test_attention_equals_that_over_the_dequantised_cache(
    kernels: ModuleType, mix: str, window: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    check_attention(MIXES[mix], heads_of(6, 2, 64), 16, dtype, window)


@DTYPES
@pytest.mark.parametrize(
    ("shape", "block_size"),
    [((4, 4, 32), 8), ((3, 1, 80), 32), ((16, 8, 16), 32), ((9, 1, 64), 128), ((120, 1, 48), 16), ((16, 8, 128), 16)],
)
def test_attention_agrees_on_every_head_shape(
    kernels: ModuleType, shape: tuple[int, int, int], block_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    check_attention([(0, 70), (130, 1), (37, 12), (600, 1), (9, 2)], heads_of(*shape), block_size, dtype, None)


@hypothesis.given(
    lengths=st.lists(st.tuples(st.integers(0, 700), st.sampled_from([1, 1, 2, 9, 60])), min_size=1, max_size=6),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 7]),
    head_dim=st.sampled_from([16, 64, 80, 128]),
    block_size=st.sampled_from([8, 16, 32, 64, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.sampled_from([None, 1, 100]),
)
@hypothesis.settings(max_examples=hypothesis.settings().max_examples // 2)
def test_attention_agrees_on_random_batches(
    lengths: list[tuple[int, int]],
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
) -> None:
    torch.manual_seed(2)
    check_attention(lengths, heads_of(num_kv_heads * group, num_kv_heads, head_dim), block_size, dtype, window)


@DTYPES
@pytest.mark.parametrize("head_dim", [32, 80])
@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "qk-norm"])
def test_numbers_become_the_nearest_of_255_steps(
    kernels: ModuleType, with_norm: bool, head_dim: int, dtype: torch.dtype
) -> None:
    """Compared with what a cache in the model's dtype gets of the same tokens."""
    torch.manual_seed(3)
    heads = heads_of(5, 2, head_dim)
    metadata, num_blocks = make_metadata([(0, 17), (30, 1), (5, 9)], 8)
    weights = (torch.rand(head_dim).to(dtype), torch.rand(head_dim).to(dtype)) if with_norm else (None, None)
    qkv, cos_sin = torch.randn(metadata.num_tokens, 9 * head_dim).to(dtype), torch.randn(64, head_dim)
    qkv[3] = 0
    rounded = allocate_kv(1, num_blocks, 8, 2, head_dim, torch.int8).zero_()[0]
    plain = allocate_kv(1, num_blocks, 8, 2, head_dim, dtype).zero_()[0]
    rotated = [qkv.clone(), qkv.clone()]
    kernels.rope_and_cache(rotated[0], cos_sin, metadata, rounded[0], rounded[1], heads, *weights)
    kernels.rope_and_cache(rotated[1], cos_sin, metadata, plain[0], plain[1], heads, *weights)
    assert torch.equal(rotated[0][:, : 5 * head_dim], rotated[1][:, : 5 * head_dim])
    for cache, stored in zip(rounded, plain, strict=True):
        values, scales = kv_cache.split(cache, 8, 2, head_dim)
        wide = stored.double()
        steps = wide.abs().amax(-1) / 127
        torch.testing.assert_close(scales.transpose(1, 2).double(), steps, rtol=1e-6, atol=0)
        error = (values.double() * scales.transpose(1, 2).unsqueeze(-1).double() - wide).abs()
        assert (error <= steps.unsqueeze(-1) * 0.50001).all()
        same = cache.clone().zero_()
        written = stored.view(-1, 2, head_dim)[metadata.slot_mapping]
        kv_cache.write(same, metadata.slot_mapping, written, 8)
        assert torch.equal(same, cache), "torch writes the same bits"


@DTYPES
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_shared_prefix_gives_the_same_bits(kernels: ModuleType, num_threads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    heads = heads_of(14, 2, 64)
    plain, num_blocks = make_metadata([(560 + 9 * i, 1) for i in range(12)] + [(0, 40), (600, 1)], 16)
    tables = plain.block_tables.numpy().copy()
    tables[:12, :34] = tables[0, :34]
    starts = (plain.context_lens - torch.diff(plain.query_start)).numpy()
    tokens = QueryTokens(starts, np.diff(plain.query_start.numpy()), tables, 16)
    grouped, alone = AttentionMetadata.build(tokens), AttentionMetadata.build(tokens._replace(may_share=False))
    assert grouped.shared_prefixes is not None
    kv = random_cache(num_blocks, 16, heads)
    poison_unused(grouped, kv, heads)
    qkv = torch.randn(grouped.num_tokens, 18 * 64).to(dtype)
    with threads(num_threads):
        together = kernels.paged_attention(qkv, kv[0], kv[1], grouped, heads)
        one_by_one = kernels.paged_attention(qkv, kv[0], kv[1], alone, heads)
    assert torch.equal(together, one_by_one)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(together.float(), expected(qkv, kv, alone, heads, None), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_an_infinite_number_fails_only_its_sequence(kernels: ModuleType, part: int, number: float) -> None:
    torch.manual_seed(5)
    heads = heads_of(2, 1, 64)
    metadata, num_blocks = make_metadata([(40, 1), (70, 1)], 16)
    kv = random_cache(num_blocks, 16, heads)
    bad = torch.randn(1, 1, 64)
    bad[0, 0, 5] = number
    kv_cache.write(kv[part], metadata.slot_mapping[:1], bad, 16)
    output = kernels.paged_attention(torch.randn(2, 4 * 64).bfloat16(), kv[0], kv[1], metadata, heads)
    assert output[0].isnan().all()
    assert not output[1].isnan().any()


def test_exact_attention_has_equal_bits_everywhere(kernels: ModuleType) -> None:
    heads = heads_of(6, 2, 48)
    tables = np.random.default_rng(8).permutation(40).astype(np.int32)[None]
    kv = allocate_kv(1, 40, 16, 2, 48, torch.int8).zero_()[0]
    for seed, cache in zip((9, 10), kv, strict=True):
        kv_cache.write(cache, torch.arange(640), numbers(seed, 640, 2, 48), 16)
    qkv = numbers(11, 640, 10 * 48, dtype=torch.bfloat16, scale=2.0**-14)

    def run(start: int, end: int) -> torch.Tensor:
        metadata = AttentionMetadata.build(QueryTokens(np.array([start]), np.array([end - start]), tables, 16))
        return kernels.paged_attention(qkv[start:end], kv[0], kv[1], metadata, heads, exact=True)

    whole = run(0, 640)
    assert digest(whole) == EXACT_DIGEST
    assert torch.equal(whole, torch.cat([run(0, 301), run(301, 639), run(639, 640)]))


def test_copied_blocks_bring_their_scales() -> None:
    torch.manual_seed(6)
    heads = heads_of(2, 2, 32)
    kv = random_cache(5, 16, heads)
    before = kv.clone()
    copy_blocks(kv.unsqueeze(0), [(0, 3), (3, 4)])
    for cache, old in zip(kv, before, strict=True):
        assert torch.equal(cache[3], old[0])
        assert torch.equal(cache[4], old[3])

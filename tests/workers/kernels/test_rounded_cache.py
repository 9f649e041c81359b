"""Rounded KV caches: what is written, and attention over it against a float32 reference of the dequantised cache."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from manta.workers.kernels import cpu, four_bit_heads, kv_cache, reference
from manta.workers.kernels.attention_metadata import AttentionMetadata, copy_blocks
from manta.workers.kernels.cpu_kv_cache import allocate_kv
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.models.model_config import HeadShape
from tests.workers.cpu_forms import COMPILED, EMULATED, in_form, threads
from tests.workers.kernels.test_exact_kernels import digest, numbers
from tests.workers.kernels.test_kernels import DTYPES, MIXES, TOLERANCE, heads_of, make_metadata

pytestmark = [pytest.mark.usefixtures("cheap_groups"), pytest.mark.forms_in_turns]

CACHES = pytest.mark.parametrize("cached", list(kv_cache.ROUNDED))
WIDTHS = [16, 32, 64, 80, 96, 112, 128, 192, 256, 576]
EXACT_DIGESTS = {"int8": "d59974853ee72fe9", "int4": "5cbd0e20a79e7f76"}
"""Digests of attention with `exact` over a rounded cache, in every form."""


@pytest.fixture(scope="module", params=[*COMPILED, *EMULATED])
def kernels(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    with in_form(request.param):
        yield cpu


def random_cache(num_blocks: int, block_size: int, heads: HeadShape, cached: str) -> torch.Tensor:
    """Keys and values [2, num_blocks, block_bytes]. Those of some tokens are a thousand times larger than others'."""
    kv = allocate_kv(1, num_blocks, block_size, heads.num_kv_heads, heads.head_dim, kv_cache.ROUNDED[cached])[0]
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
    blocks, block_size = torch.arange(kv.shape[1]), metadata.block_size
    wide = [kv_cache.read(cache, blocks, block_size, heads).unflatten(0, (-1, block_size)) for cache in kv]
    return reference.paged_attention(qkv.float(), wide[0], wide[1], metadata, heads, window)


def tolerance_of(dtype: torch.dtype, cached: str) -> float:
    """In bfloat16 some forms round queries to int8 over a cache of int4."""
    return TOLERANCE[dtype] * (2 if cached == "int4" and dtype == torch.bfloat16 else 1)


def check_attention(
    lengths: list[tuple[int, int]],
    heads: HeadShape,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    cached: str,
) -> None:
    metadata, num_blocks = make_metadata(lengths, block_size)
    kv = random_cache(num_blocks, block_size, heads, cached)
    poison_unused(metadata, kv, heads)
    qkv = torch.randn(metadata.num_tokens, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim).to(dtype)
    actual = cpu.paged_attention(qkv, kv[0], kv[1], metadata, heads, window)
    tolerance = tolerance_of(dtype, cached)
    torch.testing.assert_close(
        actual.float(), expected(qkv, kv, metadata, heads, window), atol=tolerance, rtol=tolerance
    )


@CACHES
@DTYPES
@pytest.mark.parametrize("window", [None, 40], ids=["full", "window 40"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.axes_in_turns
def test_attention_equals_that_over_the_dequantised_cache(
    kernels: ModuleType, mix: str, window: int | None, dtype: torch.dtype, cached: str
) -> None:
    torch.manual_seed(0)
    check_attention(MIXES[mix], heads_of(6, 2, 64), 16, dtype, window, cached)


SHAPES = [((4, 4, 32), 8), ((3, 1, 80), 32), ((16, 8, 16), 32), ((9, 1, 64), 128), ((120, 1, 48), 16)]
SHAPES += [((16, 8, 128), 16), ((8, 1, 96), 8), ((2, 1, 256), 8)]
"""Heads and block sizes."""


@pytest.mark.axes_in_turns
@pytest.mark.parametrize(("cached", "dtype"), [(each, dtype) for each in kv_cache.ROUNDED for dtype in TOLERANCE])
@pytest.mark.parametrize(("shape", "block_size"), SHAPES)
def test_attention_agrees_on_every_head_shape(
    kernels: ModuleType, shape: tuple[int, int, int], block_size: int, cached: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    lengths = [(0, 70), (130, 1), (37, 12), (600, 1), (9, 2)]
    check_attention(lengths, heads_of(*shape), block_size, dtype, None, cached)


@hypothesis.given(
    lengths=st.lists(st.tuples(st.integers(0, 700), st.sampled_from([1, 1, 2, 9, 60])), min_size=1, max_size=6),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 7]),
    head_dim=st.sampled_from([16, 64, 80, 128]),
    block_size=st.sampled_from([8, 16, 32, 64, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.sampled_from([None, 1, 100]),
    cached=st.sampled_from(sorted(kv_cache.ROUNDED)),
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
    cached: str,
) -> None:
    torch.manual_seed(2)
    heads = heads_of(num_kv_heads * group, num_kv_heads, head_dim)
    check_attention(lengths, heads, block_size, dtype, window, cached)


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


def outliers(head_dim: int) -> dict[str, torch.Tensor]:
    """Heads [500, head_dim] of kinds that are hard to round to few levels."""
    normal = torch.randn(500, head_dim)
    alternating = 1.0 - 2.0 * (torch.arange(head_dim) % 2)
    return {
        "normal": normal,
        "away from zero": normal / 5 + 3,
        "one dimension": normal / 5 + 10.0 * (torch.arange(head_dim) == head_dim - 3),
        "widths by dimension": normal * torch.randn(head_dim).exp(),
        "alternating": normal / 5 + 3 * alternating,
    }


@pytest.mark.parametrize("head_dim", [*WIDTHS, 1, 5, 24])
def test_four_bits_keep_heads_with_outliers(head_dim: int) -> None:
    torch.manual_seed(7)
    rotation = four_bit_heads.rotation(head_dim)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(head_dim), atol=1e-6, rtol=0)
    for name, heads in outliers(head_dim).items():
        found = four_bit_heads.widen_heads(*four_bit_heads.round_heads(heads), head_dim)
        error = (found - heads).square().sum() / heads.square().sum()
        assert error < 0.0105, name
        torch.testing.assert_close((found * heads).sum(-1), heads.square().sum(-1), rtol=1e-4, atol=1e-4)


@DTYPES
@pytest.mark.parametrize("head_dim", WIDTHS)
@pytest.mark.axes_in_turns
def test_the_kernel_rounds_to_four_bits_as_torch_does(kernels: ModuleType, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(8)
    heads = heads_of(1, 2, head_dim)
    metadata, num_blocks = make_metadata([(0, 17), (30, 1), (5, 9)], 8)
    qkv, cos_sin = torch.randn(metadata.num_tokens, 5 * head_dim).to(dtype), torch.randn(64, head_dim)
    qkv[:, -head_dim // 2] = 9
    qkv[3] = 0
    qkv[4] *= 1e-4
    found, plain = allocate_kv(2, num_blocks, 8, 2, head_dim, torch.uint8).zero_()
    kernels.rope_and_cache(qkv.clone(), cos_sin, metadata, found[0], found[1], heads)
    reference.rope_and_cache(qkv, cos_sin, metadata, plain[0], plain[1], heads)
    for ours, theirs in zip(found, plain, strict=True):
        values, scales = kv_cache.split(ours, 8, 2, head_dim)
        expected_values, expected_scales = kv_cache.split(theirs, 8, 2, head_dim)
        torch.testing.assert_close(scales, expected_scales, rtol=0.02, atol=0)
        assert (values != expected_values).float().mean() < 0.01, "few numbers are in the middle of two levels"
    assert (kv_cache.split(found[0], 8, 2, head_dim)[1] > 0).sum() == 2 * (metadata.num_tokens - 1)


@CACHES
@DTYPES
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.axes_in_turns
def test_a_shared_prefix_gives_the_same_bits(
    kernels: ModuleType, num_threads: int, dtype: torch.dtype, cached: str
) -> None:
    torch.manual_seed(4)
    heads = heads_of(14, 2, 64)
    plain, num_blocks = make_metadata([(560 + 9 * i, 1) for i in range(12)] + [(0, 40), (600, 1)], 16)
    tables = plain.block_tables.numpy().copy()
    tables[:12, :34] = tables[0, :34]
    starts = (plain.context_lens - torch.diff(plain.query_start)).numpy()
    tokens = QueryTokens(starts, np.diff(plain.query_start.numpy()), tables, 16)
    grouped, alone = AttentionMetadata.build(tokens), AttentionMetadata.build(tokens._replace(may_share=False))
    assert grouped.shared_prefixes is not None
    kv = random_cache(num_blocks, 16, heads, cached)
    poison_unused(grouped, kv, heads)
    qkv = torch.randn(grouped.num_tokens, 18 * 64).to(dtype)
    with threads(num_threads):
        together = kernels.paged_attention(qkv, kv[0], kv[1], grouped, heads)
        one_by_one = kernels.paged_attention(qkv, kv[0], kv[1], alone, heads)
    assert torch.equal(together, one_by_one)
    tolerance = tolerance_of(dtype, cached)
    torch.testing.assert_close(together.float(), expected(qkv, kv, alone, heads, None), atol=tolerance, rtol=tolerance)


@CACHES
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_an_infinite_number_fails_only_its_sequence(kernels: ModuleType, part: int, number: float, cached: str) -> None:
    torch.manual_seed(5)
    heads = heads_of(2, 1, 64)
    metadata, num_blocks = make_metadata([(40, 1), (70, 1)], 16)
    kv = random_cache(num_blocks, 16, heads, cached)
    bad = torch.randn(1, 1, 64)
    bad[0, 0, 5] = number
    kv_cache.write(kv[part], metadata.slot_mapping[:1], bad, 16)
    output = kernels.paged_attention(torch.randn(2, 4 * 64).bfloat16(), kv[0], kv[1], metadata, heads)
    assert output[0].isnan().all()
    assert not output[1].isnan().any()


@CACHES
def test_exact_attention_has_equal_bits_everywhere(kernels: ModuleType, cached: str) -> None:
    heads = heads_of(6, 2, 48)
    kv = allocate_kv(1, 40, 16, 2, 48, kv_cache.ROUNDED[cached]).zero_()[0]
    written = torch.cat([torch.zeros(640, 6 * 48), *(numbers(seed, 640, 2 * 48) for seed in (9, 10))], dim=-1)
    unturned = torch.tensor([1.0, 0.0]).repeat_interleave(24).repeat(640, 1)
    in_order = AttentionMetadata.build(QueryTokens(np.array([0]), np.array([640]), np.arange(40)[None], 16))
    kernels.rope_and_cache(written, unturned, in_order, kv[0], kv[1], heads)
    tables = np.random.default_rng(8).permutation(40).astype(np.int32)[None]
    qkv = numbers(11, 640, 10 * 48, dtype=torch.bfloat16, scale=2.0**-14)

    def run(start: int, end: int) -> torch.Tensor:
        metadata = AttentionMetadata.build(QueryTokens(np.array([start]), np.array([end - start]), tables, 16))
        return kernels.paged_attention(qkv[start:end], kv[0], kv[1], metadata, heads, exact=True)

    whole = run(0, 640)
    assert digest(whole) == EXACT_DIGESTS[cached]
    assert torch.equal(whole, torch.cat([run(0, 301), run(301, 639), run(639, 640)]))


@CACHES
def test_layers_with_smaller_heads_use_the_beginning_of_a_block(cached: str) -> None:
    torch.manual_seed(9)
    largest, heads = heads_of(4, 2, 64), heads_of(4, 1, 48)
    whole = random_cache(5, 16, largest, cached)[0]
    used, alone = kv_cache.narrowed(whole, heads, largest), random_cache(5, 16, heads, cached)[0]
    assert used.shape == alone.shape
    slots, written = torch.arange(80), torch.randn(80, 1, 48)
    for cache in (used, alone):
        kv_cache.write(cache, slots, written, 16)
    assert torch.equal(used, alone)
    assert torch.equal(kv_cache.narrowed(whole, largest, largest), whole)


@CACHES
def test_copied_blocks_bring_their_scales(cached: str) -> None:
    torch.manual_seed(6)
    heads = heads_of(2, 2, 32)
    kv = random_cache(5, 16, heads, cached)
    before = kv.clone()
    copy_blocks(kv.unsqueeze(0), [(0, 3), (3, 4)])
    for cache, old in zip(kv, before, strict=True):
        assert torch.equal(cache[3], old[0])
        assert torch.equal(cache[4], old[3])

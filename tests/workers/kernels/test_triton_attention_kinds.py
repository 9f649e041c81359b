"""Triton's attention over latent vectors, in chunks, over blocks of which a layer uses the beginning, and over keys of
another layer: against the torch reference, in the interpreter or on a GPU.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from manta.workers.kernels import reference
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.kv_cache import narrowed
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kernels.triton import layers
from manta.workers.kernels.triton.metadata import Layout, build_metadata
from manta.workers.kernels.triton.work import WorkShape
from manta.workers.models.model_config import HeadShape
from tests.workers.kernels.test_kernels import MIXES, heads_of
from tests.workers.kernels.test_triton_kernels import assert_close, shared_batch, tables_of, with_dtypes
from tests.workers.triton_device import DEVICE, THOROUGH

pytestmark = pytest.mark.usefixtures("cheap_groups")

BLOCK_SIZE = 16
Lengths = list[tuple[int, int]]
"""Tokens before the step, and new ones, of each sequence."""


def latent_heads(num_heads: int, latent_dim: int, rotated_dim: int) -> HeadShape:
    width = latent_dim + rotated_dim
    return HeadShape(num_heads, 1, width, width**-0.5, latent_dim=latent_dim)


def is_rotated(heads: HeadShape) -> torch.Tensor:
    """Which dimensions of a head rotate: the first ones of each half."""
    half = heads.head_dim // 2
    return torch.arange(heads.head_dim) % half < half - heads.latent_dim // 2


def poisoned(cache: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
    """Puts NaN into every slot [num_blocks, block_size, ...] that no sequence may read."""
    used = torch.zeros(cache.shape[0] * BLOCK_SIZE, dtype=torch.bool)
    for table, context_len in zip(metadata.block_tables.long(), metadata.context_lens.tolist(), strict=True):
        position = torch.arange(context_len)
        used[table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE] = True
    cache.flatten(0, 1)[~used] = float("nan")
    return cache


def check_latent(
    lengths: Lengths,
    heads: HeadShape,
    dtype: torch.dtype,
    tables: np.ndarray | None = None,
    layout: Layout | None = None,
    shape: WorkShape | None = None,
) -> bool:
    """Compares with the reference, whose result has the values of rotated keys too. Returns whether groups of sequences
    were found that share a prefix.
    """
    torch.manual_seed(0)
    tables = tables_of(lengths, BLOCK_SIZE) if tables is None else tables
    starts, counts = np.array(lengths).T
    tokens = QueryTokens(starts, counts, tables, BLOCK_SIZE)
    plain = AttentionMetadata.build(tokens._replace(may_share=False))
    placed = build_metadata(tokens, DEVICE, layout, shape)
    cache = poisoned(torch.randn(int(tables.max()) + 1, BLOCK_SIZE, 1, heads.head_dim).to(dtype), plain)
    row = torch.randn(plain.num_tokens, (heads.num_heads + 1) * heads.head_dim).to(dtype)
    expected = reference.paged_attention(row, cache, cache, plain, heads).unflatten(-1, (-1, heads.head_dim))
    expected[..., is_rotated(heads)] = 0
    on_device = cache.to(DEVICE)
    assert_close(layers.paged_attention(row.to(DEVICE), on_device, on_device, placed, heads), expected.flatten(1))
    return placed.prefix_rows is not None


@with_dtypes("mix", list(MIXES) if THOROUGH else ["decodes", "mix"])
def test_latent_attention_agrees_on_every_mixed_batch(mix: str, dtype: torch.dtype) -> None:
    check_latent(MIXES[mix], latent_heads(4, 24, 8), dtype)


@pytest.mark.few(2)
@pytest.mark.parametrize("num_heads", [1, 20, 65, 130])
def test_latent_attention_agrees_for_any_number_of_heads(num_heads: int) -> None:
    """More than a tile's rows, too, and numbers that tiles do not divide."""
    check_latent([(70, 1), (3, 1)], latent_heads(num_heads, 32, 16), torch.bfloat16)
    check_latent([(20, 3), (3, 1)], latent_heads(num_heads, 32, 16), torch.float32)


def test_long_latent_contexts_are_split_and_merged() -> None:
    heads = latent_heads(4, 24, 8)
    check_latent([(1500, 1), (3, 1), (40, 1)], heads, torch.float32, shape=WorkShape(16, 8))
    check_latent([(1100, 5), (9, 3)], heads, torch.bfloat16, shape=WorkShape(4, 16))


def test_a_padded_latent_step_keeps_rows() -> None:
    heads, shape = latent_heads(4, 24, 8), WorkShape(16, 8)
    check_latent([(1500, 1), (3, 1)], heads, torch.float32, layout=Layout(1, 4), shape=shape)
    check_latent([(100, 5), (17, 1), (63, 3)], heads, torch.float32, layout=Layout(9, 4), shape=shape)
    check_latent([(0, 41), (700, 1), (33, 10)], heads, torch.float32, layout=Layout(64, 8, 64), shape=shape)


@with_dtypes("case", ["pair", "drafts"])
def test_a_shared_latent_prefix_is_read_once(case: str, dtype: torch.dtype) -> None:
    lengths, tables = shared_batch(case, BLOCK_SIZE)
    assert check_latent(lengths, latent_heads(4, 24, 8), dtype, tables)


REAL_LATENT = {
    "DeepSeek-V3": (128, 512, 64),
    "DeepSeek-V3, a rank of 8": (16, 512, 64),
    "GLM-4.7 Flash": (20, 512, 64),
    "Kimi K2, a rank of 2": (32, 512, 64),
    "MiniCPM3": (40, 256, 32),
}
"""Heads, and the widths of latent vector and rotated key."""


@pytest.mark.skipif(not THOROUGH, reason="real sizes take minutes in the interpreter: make prove, or make gpu-check")
@with_dtypes("model", list(REAL_LATENT))
def test_latent_attention_agrees_at_real_sizes(model: str, dtype: torch.dtype) -> None:
    heads = latent_heads(*REAL_LATENT[model])
    check_latent([(700, 1), (1, 1), (63, 1)], heads, dtype)
    check_latent([(300, 40), (90, 1), (0, 7)], heads, dtype)
    lengths, tables = shared_batch("drafts", BLOCK_SIZE)
    assert check_latent(lengths, heads, dtype, tables)


def test_a_latent_row_is_rotated_and_cached_once() -> None:
    heads = latent_heads(5, 24, 8)
    tables = np.array([[1]], dtype=np.int32)
    tokens = QueryTokens(np.array([3]), np.array([4]), tables, BLOCK_SIZE)
    row, cos_sin = torch.randn(4, 6 * 32), torch.randn(20, 32)
    expected, actual = torch.zeros(2, BLOCK_SIZE, 1, 32), torch.zeros(2, BLOCK_SIZE, 1, 32, device=DEVICE)
    rotated = row.to(DEVICE, copy=True)
    reference.rope_and_cache(row, cos_sin, AttentionMetadata.build(tokens), expected, expected, heads)
    layers.rope_and_cache(rotated, cos_sin.to(DEVICE), build_metadata(tokens, DEVICE), actual, actual, heads)
    assert_close(actual, expected)
    assert_close(rotated[:, : 5 * 32], row[:, : 5 * 32])


CHUNKED: dict[str, Lengths] = {
    "decodes": [(31, 1), (32, 1), (33, 1), (200, 1), (0, 1)],
    "a prompt over several chunks": [(20, 100), (5, 1), (63, 2)],
    "drafts across a border": [(30, 5), (96, 3), (95, 1)],
}


@with_dtypes("case", list(CHUNKED))
def test_tokens_see_their_chunk(case: str, dtype: torch.dtype) -> None:
    """Chunks of 32 tokens. Blocks before the chunk of a sequence's first token hold NaN, as if they were given back."""
    torch.manual_seed(0)
    lengths, heads = CHUNKED[case], heads_of(4, 2, 32)
    tables = tables_of(lengths, BLOCK_SIZE)
    starts, counts = np.array(lengths).T
    tokens = QueryTokens(starts, counts, tables, BLOCK_SIZE)
    plain = AttentionMetadata.build(tokens)
    keys, values = (poisoned(torch.randn(int(tables.max()) + 1, BLOCK_SIZE, 2, 32).to(dtype), plain) for _ in range(2))
    for table, start in zip(tables, starts, strict=True):
        keys[table[: start // 32 * 2]] = float("nan")
    qkv = torch.randn(plain.num_tokens, 8 * 32).to(dtype)
    expected = reference.paged_attention(qkv, keys, values, plain.in_chunks(32), heads)
    on_device = qkv.to(DEVICE), keys.to(DEVICE), values.to(DEVICE)
    for layout in (None, Layout(128, 8, 128)):
        placed = build_metadata(tokens, DEVICE, layout, WorkShape(8, 12)).in_chunks(32)
        assert_close(layers.paged_attention(*on_device, placed, heads), expected)


@pytest.mark.skipif(not THOROUGH, reason="real sizes take minutes in the interpreter: make prove, or make gpu-check")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_chunks_of_llama_4_agree_at_their_size(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lengths, heads = [(9000, 1), (8100, 200), (16383, 2), (100, 1)], heads_of(40, 8, 128)
    tables = tables_of(lengths, BLOCK_SIZE)
    starts, counts = np.array(lengths).T
    tokens = QueryTokens(starts, counts, tables, BLOCK_SIZE)
    keys, values = (torch.randn(int(tables.max()) + 1, BLOCK_SIZE, 8, 128).to(dtype) for _ in range(2))
    qkv = torch.randn(int(counts.sum()), 56 * 128).to(dtype)
    plain = AttentionMetadata.build(tokens).in_chunks(8192)
    expected = reference.paged_attention(qkv, keys, values, plain, heads)
    placed = build_metadata(tokens, DEVICE, shape=WorkShape.of(40, 8, DEVICE)).in_chunks(8192)
    assert_close(layers.paged_attention(qkv.to(DEVICE), keys.to(DEVICE), values.to(DEVICE), placed, heads), expected)


NARROWED = [(4, 1, 16), (4, 2, 32)], [(4, 1, 16), (32, 16, 256), (32, 4, 512), (8, 1, 512)]
"""Heads, KV heads and head sizes, tiny ones and Gemma 4's."""


@with_dtypes("shape", NARROWED[THOROUGH])
def test_layers_with_smaller_heads_use_the_beginning_of_each_block(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Rotation, cache and attention take heads that fill a part of a block, as Gemma 4 has them."""
    torch.manual_seed(0)
    heads, largest = heads_of(*shape), heads_of(shape[0], shape[1] * 2, shape[2] * 2)
    lengths = [(40, 9), (30, 1), (0, 3)]
    tables = tables_of(lengths, BLOCK_SIZE)
    starts, counts = np.array(lengths).T
    tokens = QueryTokens(starts, counts, tables, BLOCK_SIZE)
    plain, placed = AttentionMetadata.build(tokens), build_metadata(tokens, DEVICE)
    whole = torch.randn(2, int(tables.max()) + 1, BLOCK_SIZE, largest.num_kv_heads, largest.head_dim).to(dtype)
    on_device = whole.to(DEVICE)
    (keys, values), (placed_keys, placed_values) = (
        [narrowed(cache, heads, largest) for cache in caches] for caches in (whole, on_device)
    )
    qkv = torch.randn(13, sum(heads.counts) * heads.head_dim).to(dtype)
    cos_sin, norm = torch.randn(64, heads.head_dim), torch.rand(heads.head_dim).to(dtype)
    rotated = qkv.to(DEVICE, copy=True)
    reference.rope_and_cache(qkv, cos_sin, plain, keys, values, heads, norm, norm)
    own_norm, own_table = norm.to(DEVICE), cos_sin.to(DEVICE)
    layers.rope_and_cache(rotated, own_table, placed, placed_keys, placed_values, heads, own_norm, own_norm)
    assert_close(on_device, whole)
    expected = reference.paged_attention(qkv, keys, values, plain, heads)
    assert_close(layers.paged_attention(qkv.to(DEVICE), placed_keys, placed_values, placed, heads), expected)


def test_a_layer_that_reads_another_ones_keys_rotates_queries_alone() -> None:
    heads = heads_of(4, 2, 32)
    tokens = QueryTokens(np.array([3]), np.array([4]), np.array([[0]], dtype=np.int32), BLOCK_SIZE)
    row, cos_sin, norm = torch.randn(4, 4 * 32), torch.randn(20, 32), torch.rand(32)
    rotated, cache = row.to(DEVICE, copy=True), torch.zeros(1, BLOCK_SIZE, 2, 32)
    queries_only, on_device = heads._replace(num_kv_heads=0), cache.to(DEVICE)
    reference.rope_and_cache(row, cos_sin, AttentionMetadata.build(tokens), cache, cache, queries_only, norm)
    placed = build_metadata(tokens, DEVICE)
    layers.rope_and_cache(rotated, cos_sin.to(DEVICE), placed, on_device, on_device, queries_only, norm.to(DEVICE))
    assert_close(rotated, row)
    assert not on_device.any()

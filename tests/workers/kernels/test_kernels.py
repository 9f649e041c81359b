"""The CPU kernels agree with their torch reference, and the reference with SDPA and transformers' own layers."""

from __future__ import annotations

import concurrent.futures
import itertools
import math
import shutil

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from manta.workers.kernels import build, cpu, cpu_decoder, cpu_linear, cpu_sampler, layout, processor, reference
from manta.workers.kernels.attention_metadata import AttentionMetadata, copy_blocks
from manta.workers.kernels.cpu_kv_cache import allocate_kv
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.models.model_config import HeadShape
from tests.workers.cpu_forms import COMPILED, EMULATED, TORCH, forget_libraries, in_form, threads

pytestmark = [pytest.mark.usefixtures("cheap_groups"), pytest.mark.forms_in_turns]

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(scope="module", params=[*COMPILED, *EMULATED])
def kernels(request):
    """The module `cpu` over each form of the C++ that this processor can run or emulate."""
    with in_form(request.param):
        yield cpu


def heads_of(num_heads: int, num_kv_heads: int, head_dim: int) -> HeadShape:
    return HeadShape(num_heads, num_kv_heads, head_dim, head_dim**-0.5)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


def make_metadata(lengths: list[tuple[int, int]], block_size: int, seed: int = 0) -> tuple[AttentionMetadata, int]:
    """Sequences of (context before the step, new tokens) in shuffled blocks; also how many blocks there are."""
    starts = np.array([start for start, _ in lengths])
    query_lens = np.array([count for _, count in lengths])
    max_blocks = -(-int((starts + query_lens).max()) // block_size) + 1
    num_blocks = len(lengths) * max_blocks
    tables = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32).reshape(len(lengths), max_blocks)
    return AttentionMetadata.build(QueryTokens(starts, query_lens, tables, block_size)), num_blocks


def random_cache(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype):
    k_cache, v_cache = allocate_kv(1, num_blocks, block_size, num_kv_heads, head_dim, dtype)[0]
    k_cache.normal_()
    v_cache.normal_()
    return k_cache, v_cache


def poison_unused(metadata: AttentionMetadata, *caches: torch.Tensor) -> None:
    """NaN in every slot outside the contexts: reading one shows in the result."""
    used = torch.zeros(caches[0].shape[:2], dtype=torch.bool).view(-1)
    for table, context_len in zip(metadata.block_tables, metadata.context_lens.tolist(), strict=True):
        position = torch.arange(context_len)
        used[table[position // metadata.block_size] * metadata.block_size + position % metadata.block_size] = True
    for cache in caches:
        cache.view(-1, *cache.shape[2:])[~used] = float("nan")


MIXES = {
    "one token": [(0, 1)],
    "decodes": [(0, 1), (14, 1), (15, 1), (16, 1), (63, 1), (64, 1), (200, 1)],
    "prefills": [(0, 1), (0, 5), (0, 64), (0, 97), (0, 130)],
    "chunks": [(5, 20), (64, 64), (130, 3), (100, 33)],
    "mix": [(300, 1), (0, 40), (77, 9), (12, 1), (150, 2)],
    "long decodes": [(1500, 1), (511, 1), (512, 1), (513, 4), (3, 1)],
}


@DTYPES
@pytest.mark.parametrize("window", [None, 1, 40], ids=["full", "window 1", "window 40"])
@pytest.mark.parametrize("mix", MIXES)
def test_attention_agrees_on_every_mixed_batch(kernels, mix, window, dtype):
    torch.manual_seed(0)
    check_attention(kernels, MIXES[mix], 6, 2, 64, 16, dtype, window)


@DTYPES
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [
        (4, 4, 32, 8),
        (14, 2, 64, 16),
        (3, 1, 80, 32),
        (8, 1, 96, 8),
        (4, 2, 128, 16),
        (16, 8, 16, 32),
        (9, 1, 64, 128),
        (120, 1, 32, 16),
        (2, 1, 256, 8),
    ],
)
def test_attention_agrees_on_every_head_shape(kernels, num_heads, num_kv_heads, head_dim, block_size, dtype):
    torch.manual_seed(1)
    lengths = [(0, 70), (130, 1), (37, 12), (600, 1), (9, 2)]
    check_attention(kernels, lengths, num_heads, num_kv_heads, head_dim, block_size, dtype, None)


def check_attention(kernels, lengths, num_heads, num_kv_heads, head_dim, block_size, dtype, window):
    metadata, num_blocks = make_metadata(lengths, block_size)
    caches = random_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype)
    poison_unused(metadata, *caches)
    qkv = torch.randn(metadata.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    arguments = (qkv, *caches, metadata, heads_of(num_heads, num_kv_heads, head_dim), window)
    assert_close(kernels.paged_attention(*arguments), reference.paged_attention(*arguments))


@DTYPES
def test_a_long_prompt_in_large_tiles_has_the_bits_of_single_tokens(kernels, dtype):
    """A chunk over a long context is computed in larger tiles, whose rows end in different key blocks and splits."""
    check_long_chunk(kernels, dtype, 1, 100, heads_of(64, 8, 16), (0, 1, 27, 28, 29, 47, 48, 99))


@DTYPES
@pytest.mark.parametrize("count", [16, 60])
def test_a_short_chunk_over_a_split_context_has_the_bits_of_single_tokens(kernels, dtype, count):
    """A chunk of few tokens has its context split over the threads. A split begins at its token 28."""
    check_long_chunk(kernels, dtype, 8, count, heads_of(28, 4, 16), (0, 9, 15, 27, 28, 29, 30, 59))


def check_long_chunk(kernels, dtype, num_threads, count, heads, checked):
    """Compares a chunk over 4,580 tokens with the reference, and the bits of some of its tokens with single steps."""
    torch.manual_seed(5)
    context, num_kv_heads = 4580, heads.num_kv_heads
    with threads(num_threads):
        metadata, num_blocks = make_metadata([(context, count)], 16)
        caches = random_cache(num_blocks, 16, num_kv_heads, 16, dtype)
        poison_unused(metadata, *caches)
        qkv = torch.randn(count, (heads.num_heads + 2 * num_kv_heads) * 16).to(dtype)
        arguments = (qkv, *caches, metadata, heads, None)
        together = kernels.paged_attention(*arguments)
        assert_close(together, reference.paged_attention(*arguments))
        table = metadata.block_tables.numpy()
        for token in filter(range(count).__contains__, checked):
            tokens = QueryTokens(np.array([context + token]), np.array([1]), table, 16)
            result = kernels.paged_attention(qkv[token : token + 1], *caches, AttentionMetadata.build(tokens), heads)
            assert torch.equal(result, together[token : token + 1])


def test_a_rows_attention_ignores_its_batchmates(kernels):
    torch.manual_seed(2)
    metadata, num_blocks = make_metadata([(1100, 1), (0, 50), (90, 20), (5, 1)] * 4, 16)
    caches = random_cache(num_blocks, 16, 2, 64, torch.float32)
    qkv = torch.randn(metadata.num_tokens, 10 * 64)
    together = kernels.paged_attention(qkv, *caches, metadata, heads_of(6, 2, 64))
    bounds = metadata.query_start.tolist()
    for index, (first, last) in enumerate(itertools.pairwise(bounds)):
        context_len = int(metadata.context_lens[index])
        table = metadata.block_tables[index : index + 1].numpy()
        tokens = QueryTokens(np.array([context_len - (last - first)]), np.array([last - first]), table, 16)
        alone = AttentionMetadata.build(tokens)
        result = kernels.paged_attention(qkv[first:last], *caches, alone, heads_of(6, 2, 64))
        assert torch.equal(result, together[first:last])


def check_shared_prefixes(kernels, groups, others, shape, block_size, dtype, numbers_of_threads) -> AttentionMetadata:
    """Compares a batch read by groups with the reference, and its bits with those of the batch read one by one, for
    each number of threads.

    `groups` are (shared blocks, [(own keys before the step, new tokens)]), `others` (keys before, new tokens); all are
    shuffled. Returns the grouped metadata.
    """
    num_heads, num_kv_heads, head_dim = shape
    lengths = [(blocks * block_size + own, count) for blocks, members in groups for own, count in members]
    plain, num_blocks = make_metadata(lengths + others, block_size)
    tables = plain.block_tables.numpy().copy()
    row = 0
    for blocks, members in groups:
        tables[row : row + len(members), :blocks] = tables[row, :blocks]
        row += len(members)
    order = np.random.default_rng(1).permutation(len(tables))
    starts, query_lens = np.array(lengths + others).T
    tokens = QueryTokens(starts[order], query_lens[order], tables[order], block_size)
    grouped = AttentionMetadata.build(tokens)
    keys, values = random_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype)
    poison_unused(grouped, keys, values)
    qkv = torch.randn(grouped.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    heads = heads_of(*shape)
    alone = AttentionMetadata.build(tokens._replace(may_share=False))
    expected = reference.paged_attention(qkv, keys, values, alone, heads)
    for num_threads in numbers_of_threads:
        with threads(num_threads):
            together = kernels.paged_attention(qkv, keys, values, grouped, heads)
            one_by_one = kernels.paged_attention(qkv, keys, values, alone, heads)
        assert_close(together, expected)
        assert torch.equal(together, one_by_one)
    return grouped


OWN_KEYS = [0, 1, 15, 16, 17, 63, 64, 100]
SHARED = {
    "pair": (2, 8, (14, 2, 64), 16),
    "uneven tiles": (9, 13, (8, 2, 128), 16),
    "one kv head": (64, 32, (4, 1, 64), 16),
    "no gqa": (33, 40, (3, 3, 80), 16),
    "130 samples": (130, 31, (7, 1, 64), 16),
    "small blocks": (16, 40, (4, 2, 80), 8),
    "large blocks": (5, 9, (2, 2, 32), 128),
}


@pytest.mark.axes_in_turns
@DTYPES
@pytest.mark.parametrize("case", SHARED)
def test_a_shared_prefix_gives_the_same_bits(kernels, case, dtype):
    torch.manual_seed(10)
    num_members, blocks, shape, block_size = SHARED[case]
    members = [(OWN_KEYS[i % len(OWN_KEYS)], 1 + (i % 7 == 3)) for i in range(num_members)]
    metadata = check_shared_prefixes(
        kernels, [(blocks, members)], [(0, 40), (600, 1), (30, 1), (64, 30)], shape, block_size, dtype, (1, 2, 8)
    )
    assert metadata.shared_prefixes is not None
    assert metadata.shared_prefixes.members.shape[0] == num_members


@st.composite
def shared_batches(draw: st.DrawFn):
    member = st.tuples(st.integers(0, 150), st.sampled_from([1, 1, 1, 2, 8, 20]))
    group = st.tuples(st.integers(1, 40), st.lists(member, min_size=2, max_size=draw(st.sampled_from([4, 20, 130]))))
    groups = draw(st.lists(group, min_size=1, max_size=3))
    others = draw(st.lists(st.tuples(st.integers(0, 700), st.sampled_from([1, 1, 5, 60])), max_size=5))
    num_kv_heads = draw(st.integers(1, 2))
    num_heads = num_kv_heads * draw(st.sampled_from([1, 2, 4, 7]))
    shape = (num_heads, num_kv_heads, draw(st.sampled_from([64, 80, 128])))
    block_size = draw(st.sampled_from([8, 16, 32]))
    return (
        groups,
        others,
        shape,
        block_size,
        draw(st.sampled_from(list(TOLERANCE))),
        (draw(st.sampled_from([1, 2, 3, 8])),),
    )


@hypothesis.given(batch=shared_batches())
@hypothesis.settings(max_examples=hypothesis.settings().max_examples // 2)
def test_random_shared_prefixes_give_the_same_bits(batch):
    if cpu._library() is None:
        pytest.skip("no C++ compiler")
    torch.manual_seed(11)
    check_shared_prefixes(cpu, *batch)


def test_a_nan_query_stays_in_its_row(kernels):
    torch.manual_seed(12)
    tables = np.array([[0, 1, 2], [0, 1, 3], [0, 1, 4]], dtype=np.int32)
    metadata = AttentionMetadata.build(QueryTokens(np.array([130, 140, 150]), np.ones(3, dtype=np.int64), tables, 64))
    assert metadata.shared_prefixes is not None
    caches = random_cache(5, 64, 1, 64, torch.bfloat16)
    qkv = torch.randn(3, 4 * 64).bfloat16()
    qkv[1, 5] = float("nan")
    output = kernels.paged_attention(qkv, *caches, metadata, heads_of(2, 1, 64))
    assert output[1, :64].isnan().all()
    assert not output[[0, 2]].isnan().any()


def test_a_sliding_window_ignores_shared_prefixes(kernels):
    torch.manual_seed(13)
    tables = np.array([[0, 1, 2], [0, 1, 3]], dtype=np.int32)
    metadata = AttentionMetadata.build(QueryTokens(np.array([130, 140]), np.ones(2, dtype=np.int64), tables, 64))
    caches = random_cache(4, 64, 1, 64, torch.float32)
    qkv = torch.randn(2, 4 * 64)
    arguments = (qkv, *caches, metadata, heads_of(2, 1, 64), 100)
    assert_close(kernels.paged_attention(*arguments), reference.paged_attention(*arguments))


def test_attention_keeps_huge_and_tiny_scores_finite(kernels):
    torch.manual_seed(3)
    metadata, num_blocks = make_metadata([(400, 1), (0, 80)], 16)
    caches = random_cache(num_blocks, 16, 1, 64, torch.float32)
    qkv = torch.randn(metadata.num_tokens, 4 * 64) * 1e4
    arguments = (qkv, *caches, metadata, heads_of(2, 1, 64))
    assert_close(kernels.paged_attention(*arguments), reference.paged_attention(*arguments))


@DTYPES
@pytest.mark.parametrize("rise", [-3.0, 0.5, 3.0, 7.5, 9.0])
def test_attention_follows_scores_rising_between_key_blocks(kernels, rise, dtype):
    """By powers of two a block of 64 keys: the softmax moves its reference only where scores exceed it by much."""
    torch.manual_seed(5)
    metadata, num_blocks = make_metadata([(700, 1), (130, 40), (64, 1)], 16)
    caches = random_cache(num_blocks, 16, 1, 64, dtype)
    for table, context_len in zip(metadata.block_tables, metadata.context_lens.tolist(), strict=True):
        position = torch.arange(context_len)
        powers = rise * (position // 64 + torch.rand(context_len))
        caches[0][table[position // 16], position % 16, 0, 0] = (powers * math.log(2)).to(dtype)
    qkv = torch.randn(metadata.num_tokens, 4 * 64).to(dtype)
    qkv[:, :128:64] = 8.0  # the first element of both heads' queries: with the scale, a score grows by the power
    arguments = (qkv, *caches, metadata, heads_of(2, 1, 64))
    assert_close(kernels.paged_attention(*arguments), reference.paged_attention(*arguments))


def test_a_nan_in_one_sequence_stays_in_it(kernels):
    torch.manual_seed(4)
    metadata, num_blocks = make_metadata([(40, 1), (70, 1)], 16)
    caches = random_cache(num_blocks, 16, 1, 64, torch.bfloat16)
    caches[0].view(-1, 64)[metadata.slot_mapping[0]] = float("nan")
    qkv = torch.randn(2, 4 * 64).bfloat16()
    output = kernels.paged_attention(qkv, *caches, metadata, heads_of(2, 1, 64))
    assert output[0].isnan().all()
    assert not output[1].isnan().any()


@DTYPES
@pytest.mark.parametrize("rows", [1, 3, 50])
@pytest.mark.parametrize("hidden", [7, 64, 896, 1000])
def test_norms_agree(kernels, hidden, rows, dtype):
    torch.manual_seed(5)
    x, residual = (torch.randn(rows, hidden) * 3).to(dtype), torch.randn(rows, hidden).to(dtype)
    weight = torch.rand(hidden).to(dtype)
    assert_close(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    actual, expected = residual.clone(), residual.clone()
    assert_close(kernels.add_rms_norm(x, actual, weight, 1e-5), reference.add_rms_norm(x, expected, weight, 1e-5))
    assert torch.equal(actual, expected)


@DTYPES
@pytest.mark.parametrize("activation", reference.GATES)
@pytest.mark.parametrize(("rows", "intermediate"), [(1, 5), (2, 64), (40, 1100)])
def test_gates_agree_also_where_they_are_extreme(kernels, rows, intermediate, activation, dtype):
    torch.manual_seed(6)
    gate_up = (torch.randn(rows, 2 * intermediate) * 4).to(dtype)
    gate_up[0, :4] = torch.tensor([1e4, -1e4, float("nan"), 0.0])
    actual, expected = kernels.gate(activation, gate_up), reference.gate(activation, gate_up)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True)


@DTYPES
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128])
@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "qk-norm"])
def test_rope_and_cache_agrees(kernels, with_norm, head_dim, dtype):
    torch.manual_seed(7)
    num_heads, num_kv_heads = 5, 2
    metadata, num_blocks = make_metadata([(0, 17), (30, 1), (5, 9)], 8)
    actual = allocate_kv(1, num_blocks, 8, num_kv_heads, head_dim, dtype).zero_()
    expected = actual.clone()
    qkv = torch.randn(metadata.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    qkv_expected = qkv.clone()
    weights = (torch.rand(head_dim).to(dtype), torch.rand(head_dim).to(dtype)) if with_norm else (None, None)
    cos_sin = torch.randn(64, head_dim)
    shape = (heads_of(num_heads, num_kv_heads, head_dim), *weights)
    kernels.rope_and_cache(qkv, cos_sin, metadata, *actual[0], *shape)
    reference.rope_and_cache(qkv_expected, cos_sin, metadata, *expected[0], *shape)
    assert_close(actual, expected)
    width = num_heads * head_dim
    assert_close(qkv[:, :width], qkv_expected[:, :width])


def test_reference_norm_and_rope_equal_transformers():
    torch.manual_seed(8)
    norm = LlamaRMSNorm(48, eps=1e-5)
    norm.weight.data.uniform_()
    x = torch.randn(6, 48)
    torch.testing.assert_close(reference.rms_norm(x, norm.weight.data, 1e-5), norm(x).detach())

    head_dim, num_heads, num_kv_heads = 32, 4, 2
    config = LlamaConfig(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    metadata, num_blocks = make_metadata([(3, 10)], 8)
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(64).unsqueeze(0))
    cos_sin = torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1).contiguous()
    kv = allocate_kv(1, num_blocks, 8, num_kv_heads, head_dim, torch.float32)
    qkv = torch.randn(10, 8 * head_dim)
    query, key, value = qkv.view(1, 10, 8, head_dim).transpose(1, 2).split((4, 2, 2), dim=1)
    query, key = apply_rotary_pos_emb(query, key, cos[:, 3:13], sin[:, 3:13])
    heads = heads_of(num_heads, num_kv_heads, head_dim)
    reference.rope_and_cache(qkv := qkv.clone(), cos_sin, metadata, kv[0, 0], kv[0, 1], heads)
    torch.testing.assert_close(qkv[:, :128].view(10, 4, 32).transpose(0, 1), query[0])
    torch.testing.assert_close(kv[0, 0].view(-1, 2, 32)[metadata.slot_mapping].transpose(0, 1), key[0])
    torch.testing.assert_close(kv[0, 1].view(-1, 2, 32)[metadata.slot_mapping].transpose(0, 1), value[0])


@pytest.mark.parametrize("window", [None, 3])
def test_the_reference_attention_is_the_closed_form(window):
    torch.manual_seed(9)
    metadata, num_blocks = make_metadata([(6, 4), (0, 3)], 8)
    k_cache, v_cache = random_cache(num_blocks, 8, 1, 16, torch.float32)
    qkv = torch.randn(7, 4 * 16)
    output = reference.paged_attention(qkv, k_cache, v_cache, metadata, heads_of(2, 1, 16), window)
    keys, values = k_cache.view(-1, 16), v_cache.view(-1, 16)
    for row, (sequence, position) in enumerate([(0, 6), (0, 7), (0, 8), (0, 9), (1, 0), (1, 1), (1, 2)]):
        first = 0 if window is None else max(0, position - window + 1)
        slots = [int(metadata.block_tables[sequence, p // 8]) * 8 + p % 8 for p in range(first, position + 1)]
        for head in range(2):
            weights = torch.softmax(keys[slots] @ qkv[row, head * 16 : head * 16 + 16] * 0.25, dim=0)
            torch.testing.assert_close(output[row, head * 16 : head * 16 + 16], weights @ values[slots])


def test_copy_blocks_reads_every_source_before_it_writes():
    kv = torch.arange(2 * 2 * 4 * 8 * 1 * 2, dtype=torch.float32).view(2, 2, 4, 8, 1, 2)
    before = kv.clone()
    copy_blocks(kv, [(0, 1), (1, 2)])
    assert torch.equal(kv[:, :, 1], before[:, :, 0])
    assert torch.equal(kv[:, :, 2], before[:, :, 1])
    assert torch.equal(kv[:, :, 3], before[:, :, 3])


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_the_kernels_of_this_processor_compile() -> None:
    """Where they do not, the reference would serve and every other test pass."""
    assert build.form_in_use() == processor.form().name


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("module", "name", "value", "message"),
    [
        (cpu, "MAX_QUERY_LEN", 9, "MAX_QUERY_LEN is 8 in the attention kernel and 9 in Python"),
        (cpu, "HEAD_DIM_MULTIPLE", 8, "HEAD_DIM_MULTIPLE is 16 in"),
        (cpu_linear, "_PackedLinear", layout.structure("PackedLinear", "packed"), "PackedLinear's size is 40 in"),
        (cpu_decoder, "_Buffers", layout.structure("_Buffers", "residual"), "the size of Buffers is 56 in decoder.cpp"),
        (cpu_sampler, "CONSTRAINT", np.dtype([("mask", np.uint64)]), "a Constraint's size is 32 in sampler.cpp and 8"),
    ],
)
def test_a_library_with_another_size_is_not_loaded(module, name, value, message, monkeypatch):
    monkeypatch.setattr(module, name, value)
    forget_libraries()
    try:
        with pytest.raises(RuntimeError, match=message):
            module._library()
    finally:
        forget_libraries()


def test_without_a_compiler_the_reference_serves():
    with in_form(TORCH):
        x, weight = torch.randn(3, 8), torch.rand(8)
        assert torch.equal(cpu.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


def test_ranks_that_start_together_compile_once(tmp_path, monkeypatch):
    """The compiler here counts what it links, late enough for all others to have found nothing."""
    links = f'case "$*" in *--version) exit;; *-shared*) sleep 0.2; echo >> "{tmp_path}/linked";; esac'
    script = f'{links}; for last; do :; done; echo > "$last"'
    monkeypatch.setenv("MANTA_CACHE", str(tmp_path))
    with concurrent.futures.ThreadPoolExecutor(4) as ranks:
        asked = [ranks.submit(build.library_for, processor.form(), ("sh", "-c", script, "compiler")) for _ in range(4)]
    assert len({each.result() for each in asked}) == 1
    assert (tmp_path / "linked").read_text() == "\n"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_an_old_compiler_builds_a_lower_form(tmp_path, monkeypatch):
    """The compiler here refuses the higher forms, and gives what the real one made of the lower one."""
    low = [form for form in processor.lower_forms(processor.best_form()) if "-mavx512f" not in form.flags]
    made = build.library_for(low[0], build.find_compiler() or ("g++",))
    compiler = tmp_path / "old-g++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *avx512*) echo "unrecognized option" >&2; exit 1;; esac\n'
        f'for last; do :; done\ncase "$*" in *-shared*) exec cp "{made}" "$last";; esac\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MANTA_CACHE", str(tmp_path))
    monkeypatch.delenv(processor.VARIABLE, raising=False)
    forget_libraries()
    try:
        assert build.form_in_use() == low[0].name
        assert build.load_library() is not None
    finally:
        monkeypatch.undo()
        forget_libraries()


def test_an_unsupported_form_is_refused(monkeypatch):
    monkeypatch.setattr(processor, "capabilities", lambda: frozenset({"avx2", "fma3"}))
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    assert [form.name for form in processor.lower_forms(processor.best_form())] == ["avx2", "plain"]
    monkeypatch.setenv(processor.VARIABLE, "amx")
    with pytest.raises(ValueError, match=r"MANTA_CPU_FORM=amx .* one of avx2, plain"):
        processor.form()


@pytest.mark.parametrize(
    ("machine", "capabilities", "expected"),
    [
        ("x86_64", {"sse2"}, "plain"),
        ("x86_64", {"avx2", "fma3", "avx512_f"}, "avx2"),
        ("x86_64", {"avx2", "fma3", "avx_vnni"}, "avx_vnni"),
        ("x86_64", processor.FORMS[3].needs, "avx512"),
        ("x86_64", processor.FORMS[2].needs, "avx512_vnni"),
        ("x86_64", processor.FORMS[1].needs, "avx512_bf16"),
        ("x86_64", processor.FORMS[0].needs, "amx"),
        ("AMD64", {"avx2", "fma3"}, "avx2"),
        ("aarch64", {"neon"}, "neon"),
        ("aarch64", {"neon", "dot"}, "neon_dot"),
        ("arm64", {"neon", "bf16", "dot"}, "neon_bf16"),
        ("riscv64", set(), "plain"),
    ],
)
def test_the_form_follows_what_the_processor_can_do(machine, capabilities, expected, monkeypatch):
    monkeypatch.setattr(processor, "capabilities", lambda: frozenset(capabilities))
    monkeypatch.setattr(processor.platform, "machine", lambda: machine)
    assert processor.best_form().name == expected


@pytest.mark.parametrize(("answers", "expected"), [((True,) * 4, "amx"), ((True, False, False, False), "avx2")])
def test_capabilities_are_known_to_older_torch_too(answers, expected, monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    names = ("_is_avx2_supported", "_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported")
    for name, answer in zip(names, answers, strict=True):
        monkeypatch.setattr(torch.cpu, name, lambda answer=answer: answer, raising=False)
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    assert processor.best_form().name == expected

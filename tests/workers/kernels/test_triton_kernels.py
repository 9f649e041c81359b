"""The Triton kernels of a decoder layer agree with their torch reference, in the interpreter or on a GPU."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from manta.workers.kernels import reference
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kernels.triton import attention, layers
from manta.workers.kernels.triton.metadata import Layout, build_metadata
from manta.workers.kernels.triton.work import Work, WorkShape, plan_work
from tests.pairs import in_turns
from tests.workers.kernels.test_kernels import MIXES, heads_of
from tests.workers.triton_device import DEVICE, THOROUGH

pytestmark = pytest.mark.usefixtures("cheap_groups")

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
DTYPES = list(TOLERANCE)


def with_dtypes(name: str, cases: Sequence[Any]) -> pytest.MarkDecorator:
    """All cases of a parameter, each with every dtype where that is cheap, else with one of them in turns."""
    pairs = itertools.product(cases, DTYPES) if THOROUGH else in_turns(cases, DTYPES)
    return pytest.mark.parametrize((name, "dtype"), pairs, ids=lambda value: str(value).removeprefix("torch."))


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(
        actual.cpu().float(), expected.cpu().float(), atol=tolerance, rtol=tolerance, equal_nan=True
    )


def tables_of(lengths: list[tuple[int, int]], block_size: int) -> np.ndarray:
    """Block tables of sequences (context before the step, new tokens) in shuffled blocks, with an entry to spare."""
    width = -(-max(start + count for start, count in lengths) // block_size) + 1
    order = np.random.default_rng(0).permutation(len(lengths) * width)
    return order.astype(np.int32).reshape(len(lengths), width)


def check_attention(
    lengths: list[tuple[int, int]],
    shape: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
    window: int | None = None,
    tables: np.ndarray | None = None,
    layout: Layout | None = None,
    shape_of_work: WorkShape | None = None,
    cap: float = 0.0,
    has_sinks: bool = False,
) -> bool:
    """Compares with the reference, NaN lying in every slot that no sequence may read. Returns whether groups were
    found.
    """
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_dim = shape
    tables = tables_of(lengths, block_size) if tables is None else tables
    starts, counts = np.array(lengths).T
    tokens = QueryTokens(starts, counts, tables, block_size)
    plain = AttentionMetadata.build(tokens._replace(may_share=False))
    placed = build_metadata(tokens, DEVICE, layout, shape_of_work)
    kv = torch.randn(2, int(tables.max()) + 1, block_size, num_kv_heads, head_dim).to(dtype)
    used = torch.zeros(kv.shape[1] * block_size, dtype=torch.bool)
    for table, context_len in zip(plain.block_tables.long(), plain.context_lens.tolist(), strict=True):
        position = torch.arange(context_len)
        used[table[position // block_size] * block_size + position % block_size] = True
    kv.view(2, -1, num_kv_heads, head_dim)[:, ~used] = float("nan")
    qkv = torch.randn(plain.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    heads = heads_of(*shape)._replace(logit_cap=cap)
    sinks = 2 * torch.randn(num_heads) + 1 if has_sinks else None
    expected = reference.paged_attention(qkv, kv[0], kv[1], plain, heads, window, sinks)
    on_device, sinks = kv.to(DEVICE), None if sinks is None else sinks.to(DEVICE)
    actual = layers.paged_attention(qkv.to(DEVICE), on_device[0], on_device[1], placed, heads, window, sinks)
    assert_close(actual, expected)
    return placed.prefix_rows is not None


@with_dtypes("mix", list(MIXES) if THOROUGH else ["one token", "mix"])
def test_attention_agrees_on_every_mixed_batch(mix: str, dtype: torch.dtype) -> None:
    check_attention(MIXES[mix], (2, 1, 64), 16, dtype)


@pytest.mark.parametrize(("mix", "window"), [("decodes", 40), ("mix", 1), ("mix", 40)])
def test_attention_sees_no_further_than_its_window(mix: str, window: int) -> None:
    check_attention(MIXES[mix], (2, 1, 64), 16, torch.float32, window)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(4, 4, 32, 8), (7, 1, 64, 32), (4, 1, 96, 16), (3, 1, 80, 128), (4, 2, 128, 64), (2, 1, 256, 8), (66, 1, 16, 16)],
)
def test_attention_agrees_on_every_head_shape(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    dtype = torch.float16 if head_dim % 64 else torch.bfloat16
    check_attention([(0, 20), (37, 5)], (num_heads, num_kv_heads, head_dim), block_size, dtype)
    check_attention([(130, 1)], (num_heads, num_kv_heads, head_dim), block_size, dtype)


@pytest.mark.axes_in_turns
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("cap", "has_sinks"), [(0.7, False), (0.0, True), (0.7, True)], ids=["cap", "sinks", "both"])
def test_caps_and_sinks_agree(cap: float, has_sinks: bool, window: int | None) -> None:
    """They do so in decodes, prompts, drafts, items that are split, and steps that are padded."""
    options: dict[str, Any] = {"window": window, "cap": cap, "has_sinks": has_sinks}
    check_attention(MIXES["mix"], (6, 2, 64), 16, torch.bfloat16, **options)
    check_attention([(700, 1), (3, 1)], (6, 2, 64), 16, torch.float32, shape_of_work=WorkShape(16, 8), **options)
    layout, shape = Layout(5, 4), WorkShape(16, 8)
    check_attention([(300, 3), (3, 5)], (2, 1, 80), 16, torch.float32, layout=layout, shape_of_work=shape, **options)


@pytest.mark.parametrize("layout", [None, Layout(5, 8)], ids=["plain", "padded"])
def test_caps_and_sinks_go_with_shared_prefixes(layout: Layout | None) -> None:
    lengths, tables = shared_batch("drafts", 16)
    options: dict[str, Any] = {"tables": tables, "layout": layout, "cap": 0.7, "has_sinks": True}
    assert check_attention(lengths, (4, 2, 64), 16, torch.float32, **options)


def test_capped_scores_may_be_huge() -> None:
    """Their products overflow a power of two, at both ends."""
    torch.manual_seed(3)
    lengths = [(200, 1), (0, 40)]
    starts, counts = np.array(lengths).T
    metadata = build_metadata(QueryTokens(starts, counts, tables_of(lengths, 16), 16), DEVICE)
    kv = torch.randn(2, 32, 16, 1, 64).to(DEVICE)
    qkv = (torch.randn(41, 4 * 64) * 1e4).to(DEVICE)
    arguments = (qkv, kv[0], kv[1], metadata, heads_of(2, 1, 64)._replace(logit_cap=30.0))
    assert_close(layers.paged_attention(*arguments), reference.paged_attention(*arguments))


def test_drafts_are_verified_in_one_tile_with_decodes() -> None:
    check_attention([(100, 5), (17, 1), (63, 3)], (8, 2, 64), 16, torch.float32)


RAGGED = {
    "one long row among short ones": [(1500, 1), (3, 1), (40, 1), (0, 1)],
    "a long row beside a prompt": [(0, 40), (700, 1), (2, 1)],
    "a chunk of a long prompt": [(400, 20), (5, 1)],
    "drafts after a long context": [(1100, 5), (9, 3)],
}


@pytest.mark.parametrize("case", RAGGED if THOROUGH else list(RAGGED)[::2])
def test_long_contexts_are_split_and_merged(case: str) -> None:
    for shape in (WorkShape(16, 8), WorkShape(4, 40)):
        check_attention(RAGGED[case], (4, 2, 64), 16, torch.float32, shape_of_work=shape)
    check_attention(RAGGED[case], (2, 1, 64), 16, torch.bfloat16, 300, shape_of_work=WorkShape(8, 8))


def test_a_token_with_many_splits_is_merged() -> None:
    lengths, shape = [(6000, 1)], WorkShape(1, 100)
    assert work_of(lengths, shape).num_slots > attention.SPLITS_AT_A_TIME
    check_attention(lengths, (2, 1, 64), 16, torch.float32, shape_of_work=shape)


def test_a_padded_step_keeps_one_long_row() -> None:
    shape = WorkShape(16, 8)
    check_attention([(1500, 1), (3, 1)], (2, 1, 64), 16, torch.float32, layout=Layout(1, 4), shape_of_work=shape)
    check_attention([(1500, 3), (3, 5)], (2, 1, 64), 16, torch.float32, layout=Layout(5, 4), shape_of_work=shape)


def test_a_padded_step_with_prompts_keeps_rows() -> None:
    lengths = [(0, 41), (700, 1), (33, 10), (2, 1)]
    for dtype in (torch.float32, torch.bfloat16):
        check_attention(lengths, (4, 2, 64), 16, dtype, layout=Layout(64, 8, 64), shape_of_work=WorkShape(16, 8))
    lengths, tables = shared_batch("drafts", 16)
    lengths[0] = (lengths[0][0], 7)
    layout = Layout(64, 8, 64)
    assert check_attention(lengths, (2, 1, 64), 16, torch.float32, tables=tables, layout=layout)


def work_of(lengths: list[tuple[int, int]], shape: WorkShape, item_tokens: int | None = None) -> Work:
    starts, counts = np.array(lengths).T
    tokens = item_tokens or (1 if counts.max() == 1 else shape.item_tokens)
    return plan_work(starts, counts, np.zeros(len(lengths), dtype=np.int64), tokens, shape.num_programs)


def test_the_long_row_gets_most_programs() -> None:
    """31 rows of 1k and one of 100k: by the number of rows alone each would have one program a KV head."""
    work = work_of([(1000, 1)] * 31 + [(100_000, 1)], WorkShape(16, 33))
    counts = np.bincount(work.items[:, 0])
    assert counts[:31].tolist() == [1] * 31
    assert counts[31] >= 24
    keys = work.items[:, 3] - work.items[:, 2]
    assert keys.max() <= 1.05 * (131_000 / 33)


@settings(deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 300)), min_size=1, max_size=12),
    item_tokens=st.sampled_from([1, 4, 16, 300]),
    num_programs=st.integers(1, 264),
    read_before=st.integers(0, 3),
)
def test_every_query_sees_each_key_once(
    lengths: list[tuple[int, int]], item_tokens: int, num_programs: int, read_before: int
) -> None:
    if item_tokens == 1:
        lengths = [(start, 1) for start, _ in lengths]
    starts, counts = np.array(lengths).T
    first_keys = np.minimum(starts, 64 * read_before * (np.arange(len(starts)) % 2))
    work = plan_work(starts, counts, first_keys, item_tokens, num_programs)
    query_start = np.concatenate([[0], np.cumsum(counts)])
    slots: dict[int, list[int]] = {}
    ends: dict[int, int] = {}
    for sequence, first_token, first_key, end_key, slot, split in work.items.tolist():
        run = query_start[sequence] + first_token
        assert first_key == (first_keys[sequence] if split == 0 else ends[run])
        assert end_key > first_key
        assert split == len(slots.setdefault(run, []))
        slots[run].append(slot)
        ends[run] = end_key
    merges = {token: (row, count) for token, row, count in work.merges.tolist()}
    num_runs = 0
    for sequence, (start, count) in enumerate(lengths):
        for first in range(0, count, item_tokens):
            num_runs += 1
            run, size = query_start[sequence] + first, min(item_tokens, count - first)
            assert ends.pop(run) == start + first + size
            own = slots[run]
            if len(own) == 1:
                assert own == [-1]
                continue
            assert own == list(range(own[0], own[0] + len(own)))
            for row in range(size):
                assert merges.pop(run + row) == (own[0] * item_tokens + row, len(own))
    assert not ends
    assert not merges
    assert work.num_slots == sum(len(own) for own in slots.values() if own != [-1])
    assert len(work.items) <= num_runs + num_programs


SHARED: dict[str, list[tuple[int, list[Any]]]] = {
    "pair": [(8, [3, 40])],
    "two groups and others": [(8, [0, 1, 17]), (4, [5, 64, 70, 2])],
    "drafts": [(8, [(3, 4), (20, 1), (9, 2)])],
}


def shared_batch(case: str, block_size: int) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Sequences that share their first blocks group by group, and two that share nothing."""
    lengths, row = [(30, 1), (100, 1)], 2
    leaders: dict[int, Any] = {}
    for blocks, members in SHARED[case]:
        for member in members:
            own, count = member if isinstance(member, tuple) else (member, 1)
            lengths.append((blocks * block_size + own, count))
        leaders[row] = (blocks, len(members))
        row += len(members)
    tables = tables_of(lengths, block_size)
    for first, (blocks, count) in leaders.items():
        tables[first : first + count, :blocks] = tables[first, :blocks]
    order = np.random.default_rng(1).permutation(len(lengths))
    return [lengths[index] for index in order], tables[order]


@with_dtypes("case", list(SHARED))
def test_a_shared_prefix_is_read_once_and_merged(case: str, dtype: torch.dtype) -> None:
    lengths, tables = shared_batch(case, 16)
    assert check_attention(lengths, (4, 2, 64), 16, dtype, tables=tables)


def test_a_shared_prefix_goes_with_prefill_chunks() -> None:
    lengths, tables = shared_batch("two groups and others", 16)
    lengths[0] = (lengths[0][0], 70)
    tables = np.concatenate([tables, 500 + np.arange(len(tables) * 6, dtype=np.int32).reshape(-1, 6)], axis=1)
    assert check_attention(lengths, (2, 1, 64), 16, torch.float32, tables=tables)


def test_a_window_takes_no_notice_of_shared_prefixes() -> None:
    lengths, tables = shared_batch("pair", 16)
    check_attention(lengths, (2, 1, 64), 16, torch.float32, 50, tables)


@pytest.mark.parametrize("case", ["pair", "two groups and others"] if THOROUGH else ["two groups and others"])
def test_a_padded_decode_step_gives_the_same_rows(case: str) -> None:
    lengths, tables = shared_batch(case, 16)
    assert check_attention(lengths, (2, 1, 64), 16, torch.float32, tables=tables, layout=Layout(1, 16))


def test_a_padded_verification_step_keeps_rows() -> None:
    lengths, tables = shared_batch("drafts", 16)
    assert check_attention(lengths, (2, 1, 64), 16, torch.float32, tables=tables, layout=Layout(5, 8))
    check_attention([(100, 5), (17, 1), (63, 3)], (14, 2, 64), 16, torch.float32, layout=Layout(9, 4))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the host gives memory that nobody touches for nothing")
def test_blocks_beyond_2_31_elements_are_addressed() -> None:
    """An address that is computed in 32 bits would wrap around: to another block, or outside the cache."""
    torch.manual_seed(6)
    block_size, head_dim = 16, 64
    first = 2**31 // (block_size * head_dim)
    blocks = np.arange(first - 1, first + 5, dtype=np.int32)
    keys, values = (torch.empty(first + 8, block_size, 1, head_dim, dtype=torch.bfloat16) for _ in range(2))
    for cache in (keys, values):
        cache[first - 1 :] = torch.randn(9, block_size, 1, head_dim)
    starts, counts = np.array([70, 30]), np.array([1, 1])
    tables = np.stack([blocks, blocks[::-1]])
    heads = heads_of(2, 1, head_dim)
    qkv = torch.randn(2, 4 * head_dim).bfloat16()
    tokens = QueryTokens(starts, counts, tables, block_size)
    plain = AttentionMetadata.build(tokens._replace(may_share=False))
    placed = build_metadata(tokens, DEVICE)
    expected = reference.paged_attention(qkv, keys, values, plain, heads)
    assert_close(layers.paged_attention(qkv, keys, values, placed, heads), expected)
    cos_sin = torch.randn(100, head_dim)
    own = [cache[first - 1 :].clone() for cache in (keys, values)]
    rotated = qkv.clone()
    plain_slots = dataclasses.replace(plain, slot_mapping=plain.slot_mapping - (first - 1) * block_size)
    reference.rope_and_cache(qkv, cos_sin, plain_slots, own[0], own[1], heads)
    layers.rope_and_cache(rotated, cos_sin, placed, keys, values, heads)
    assert_close(keys[first - 1 :], own[0])
    assert_close(values[first - 1 :], own[1])


def test_a_nan_in_one_sequence_stays_in_it() -> None:
    torch.manual_seed(4)
    tables = np.array([[0, 1, 2], [0, 1, 3], [0, 1, 4]], dtype=np.int32)
    metadata = build_metadata(QueryTokens(np.array([130, 140, 150]), np.ones(3, dtype=np.int64), tables, 64), DEVICE)
    assert metadata.prefix_rows is not None
    kv = torch.randn(2, 5, 64, 1, 64)
    kv[0, 2, 2] = float("nan")  # the first sequence's own key
    qkv = torch.randn(3, 4 * 64)
    qkv[1, 5] = float("nan")
    kv, qkv = kv.to(DEVICE), qkv.to(DEVICE)
    output = layers.paged_attention(qkv, kv[0], kv[1], metadata, heads_of(2, 1, 64))
    assert output[0].isnan().all()
    assert output[1, :64].isnan().all()
    assert not output[2].isnan().any()


def test_attention_keeps_huge_scores_finite() -> None:
    torch.manual_seed(3)
    metadata = build_metadata(
        QueryTokens(np.array([200, 0]), np.array([1, 40]), tables_of([(200, 1), (0, 40)], 16), 16), DEVICE
    )
    kv = torch.randn(2, 32, 16, 1, 64).to(DEVICE)
    qkv = (torch.randn(41, 4 * 64) * 1e4).to(DEVICE)
    arguments = (qkv, kv[0], kv[1], metadata, heads_of(2, 1, 64))
    assert_close(layers.paged_attention(*arguments), reference.paged_attention(*arguments))


@with_dtypes("shape", [(1, 7), (3, 896), (5, 64)])
def test_norms_agree(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, hidden = shape
    torch.manual_seed(5)
    x, residual = (torch.randn(rows, hidden) * 3).to(dtype), torch.randn(rows, hidden).to(dtype)
    weight = torch.rand(hidden).to(dtype)
    on_device = x.to(DEVICE), residual.clone().to(DEVICE), weight.to(DEVICE)
    assert_close(layers.rms_norm(on_device[0], on_device[2], 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert_close(layers.add_rms_norm(*on_device, 1e-5), reference.add_rms_norm(x, residual, weight, 1e-5))
    assert_close(on_device[1], residual)


@with_dtypes("shape", [(1, 5), (3, 1100)])
def test_silu_and_mul_agrees_also_on_extreme_gates(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, intermediate = shape
    torch.manual_seed(6)
    gate_up = (torch.randn(rows, 2 * intermediate) * 4).to(dtype)
    gate_up[0, :4] = torch.tensor([1e4, -1e4, float("nan"), 0.0])
    assert_close(layers.silu_and_mul(gate_up.to(DEVICE)), reference.silu_and_mul(gate_up))


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256] if THOROUGH else [96])
@with_dtypes("with_norm", [False, True])
def test_rope_and_cache_agrees(with_norm: bool, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    shape = (5, 2, head_dim)
    lengths = [(0, 9), (30, 1), (5, 3)]
    starts, counts = np.array(lengths).T
    tables = tables_of(lengths, 8)
    expected = torch.zeros(2, int(tables.max()) + 1, 8, 2, head_dim, dtype=dtype)
    actual = expected.to(DEVICE, copy=True)
    qkv = torch.randn(13, 9 * head_dim).to(dtype)
    rotated = qkv.to(DEVICE, copy=True)
    weights = [torch.rand(head_dim).to(dtype) if with_norm else None for _ in range(2)]
    on_device = [None if weight is None else weight.to(DEVICE) for weight in weights]
    cos_sin = torch.randn(64, head_dim)
    tokens = QueryTokens(starts, counts, tables, 8)
    plain, placed = AttentionMetadata.build(tokens), build_metadata(tokens, DEVICE)
    reference.rope_and_cache(qkv, cos_sin, plain, expected[0], expected[1], heads_of(*shape), *weights)
    layers.rope_and_cache(rotated, cos_sin.to(DEVICE), placed, actual[0], actual[1], heads_of(*shape), *on_device)
    assert_close(actual, expected)
    assert_close(rotated[:, : 5 * head_dim], qkv[:, : 5 * head_dim])


def test_a_row_that_pads_writes_no_key() -> None:
    metadata = build_metadata(
        QueryTokens(np.array([3]), np.ones(1, dtype=np.int64), np.zeros((1, 1), np.int32), 8), DEVICE
    )
    metadata.slot_mapping.fill_(-1)
    kv = torch.zeros(2, 2, 8, 1, 32, device=DEVICE)
    qkv = torch.randn(1, 3 * 32).to(DEVICE)
    layers.rope_and_cache(qkv, torch.randn(8, 32).to(DEVICE), metadata, kv[0], kv[1], heads_of(1, 1, 32))
    assert not kv.any()


@pytest.mark.skipif(not THOROUGH, reason="random shapes take minutes in the interpreter: make prove, or make gpu-check")
@pytest.mark.parametrize("seed", range(40))
def test_attention_agrees_on_random_batches(seed: int) -> None:
    """Head sizes, block sizes, dtypes, windows and ragged lengths, some sequences with blocks in common."""
    random = np.random.default_rng(seed)
    num_kv_heads = int(random.choice([1, 2, 4]))
    shape = (num_kv_heads * int(random.choice([1, 3, 4, 7, 8])), num_kv_heads, int(random.choice([64, 96, 128, 256])))
    block_size = int(random.choice([8, 16, 32, 64, 128]))
    dtype = list(TOLERANCE)[seed % 3]
    longest = int(random.choice([1, 1, 8, 90]))
    shared = int(random.integers(1, 6)) * 128 // block_size
    lengths = [
        (shared * block_size + int(random.integers(0, 300)), int(random.integers(1, longest + 1)))
        for _ in range(int(random.integers(1, 12)))
    ]
    tables = tables_of(lengths, block_size)
    members = random.permutation(len(lengths))[: len(lengths) // 2]
    tables[members, :shared] = tables[members[:1], :shared]
    window = int(random.integers(1, 400)) if seed % 4 == 3 else None
    cap, has_sinks = (0.0, 0.7)[seed % 2], bool(seed % 5 == 2)
    check_attention(lengths, shape, block_size, dtype, window, tables, cap=cap, has_sinks=has_sinks)


@pytest.mark.prove
def test_every_kernel_compiles_for_h100_without_spills(tmp_path: pathlib.Path) -> None:
    """Without one: in the interpreter anything goes that NumPy can do."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.kernels.triton_compile"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "forms compiled" in done.stdout

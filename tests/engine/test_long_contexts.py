"""The work of a step and of a request, counted: it does not follow the context beyond the laws that are stated here.

Reads of a sequence's tokens are counted, and so are hashes, look-ups of prefixes and bytes of messages. Nothing is
timed.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from manta.cluster.engine import kv_blocks
from manta.cluster.engine.kv_blocks import KVBlocks
from manta.cluster.engine.kv_cache_manager import KVCacheManager
from manta.cluster.engine.scheduler import Scheduler
from manta.cluster.engine.sequence import Sequence
from manta.cluster.text import tokenizer
from manta.cluster.text.tokenizer import MOST_UNFINISHED, WindowDecoder
from manta.structured.grammar_pool.output_view import MOST_REWRITTEN, OutputView, num_common
from manta.workers.models.attention_growth import even_context
from manta.workers.models.model_config import ModelConfig, RopeConfig
from manta.workers.ranks import rank_sequences
from manta.workers.ranks.rank_sequences import RankSequences
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import ScheduledSequence, SequenceStart, StepInput, StepOutput
from tests.engine.scheduler_harness import Harness

BLOCK, BUDGET = 16, 2048
CONTEXTS = [1024, 16_384]
STEPS = 2 * BLOCK
"""Decode steps, in which two blocks are filled."""


class Watched(list[int]):
    """A list that counts the items that are read at once: of slices, and of iterations from their begin on."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(index, slice):
            self.num_read += len(found)
        return found

    def __iter__(self) -> Iterator[int]:
        self.num_read += len(self)
        return super().__iter__()


class Counted:
    """Counts calls of a function."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.num_calls = 0

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self.num_calls += 1
        return self.function(*arguments, **keywords)


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted = Counted(hashlib.blake2b)
    monkeypatch.setattr(kv_blocks.hashlib, "blake2b", counted)
    return counted


def scheduler_of(num_blocks: int, even_context: int | None = None) -> Scheduler:
    return Scheduler(
        max_num_batched_tokens=BUDGET,
        max_num_sequences=8,
        max_model_len=4 * max(CONTEXTS),
        blocks=KVBlocks(num_blocks, BLOCK),
        even_context=even_context,
    )


def prompt_of(number: int, num_tokens: int, max_tokens: int = 2 * STEPS) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Sequence(number, str(number), [number] * num_tokens, params, 0)


def run_step(scheduler: Scheduler) -> StepInput:
    """One step, in which each sequence that draws gets a token."""
    step = scheduler.schedule()
    drawn = {point.sequence_id: [1] for point in step.sample_points}
    scheduler.update(step, StepOutput(step.step_id, token_ids=drawn))
    return step


@pytest.mark.parametrize("context", CONTEXTS)
def test_decode_steps_cost_the_same_at_any_context(context: int, hashes: Counted) -> None:
    """Law: a decode step reads no token again, and hashes a block when it is full. Its message has new blocks alone."""
    scheduler = scheduler_of(context // BLOCK + 10)
    sequence = prompt_of(0, context)
    scheduler.add(sequence)
    for _ in range(-(-context // BUDGET)):
        run_step(scheduler)
    assert hashes.num_calls == context // BLOCK
    sequence.token_ids = watched = Watched(sequence.token_ids)
    before, sizes = hashes.num_calls, []
    for _ in range(STEPS):
        sizes.append(len(msgspec.msgpack.encode(run_step(scheduler))))
    assert hashes.num_calls - before == STEPS // BLOCK
    assert watched.num_read == STEPS, "each new block's tokens, once"
    assert max(sizes) < 60


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_prompt_is_read_once(context: int, hashes: Counted) -> None:
    """Law: chunks hash each block once, and only the first message of a sequence has its tokens. A second prompt that
    begins alike is looked up once, and computes its last block alone.
    """
    scheduler = scheduler_of(2 * context // BLOCK)
    first, second = prompt_of(0, context, 1), prompt_of(0, context, 1)
    second.sequence_id, second.request_id = 1, "1"
    scheduler.add(first)
    first.token_ids = watched = Watched(first.token_ids)
    steps = [run_step(scheduler) for _ in range(-(-context // BUDGET))]
    assert hashes.num_calls == context // BLOCK
    assert watched.num_read == 2 * context, "for the hashes and for the ranks"
    assert [len(step.started) for step in steps] == [1] + [0] * (len(steps) - 1)
    blocks = sum(len(item.new_block_ids) for step in steps for item in step.scheduled)
    assert blocks == context // BLOCK
    scheduler.add(second)
    (item,) = run_step(scheduler).scheduled
    assert item.num_tokens == BLOCK
    assert hashes.num_calls == 2 * context // BLOCK


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_prompt_that_waits_for_room_is_looked_up_once(
    context: int, hashes: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: while too few blocks are free, a step looks up the prompt's blocks again only if enough have come."""
    looked = Counted(KVCacheManager.find_prefix)
    monkeypatch.setattr(KVCacheManager, "find_prefix", lambda *arguments: looked(*arguments))
    scheduler = scheduler_of(context // BLOCK + 8)
    scheduler.add(prompt_of(5, 4 * BLOCK))
    run_step(scheduler)
    scheduler.add(prompt_of(6, context + 6 * BLOCK, 8))
    before = looked.num_calls
    for _ in range(2 * STEPS - 2):
        assert [item.sequence_id for item in run_step(scheduler).scheduled] == [5]
    num_filled = 2 * STEPS // BLOCK
    assert looked.num_calls - before <= 1 + num_filled
    assert hashes.num_calls <= context // BLOCK + 6 + 4 + num_filled
    run_step(scheduler)  # the first one ends
    assert [item.sequence_id for item in run_step(scheduler).scheduled] == [6], "room has come, and it begins at once"


@pytest.mark.parametrize("num_blocks", [16, 18, 22, 26, 30])
@pytest.mark.parametrize("shared", [0, 20, 40])
def test_waiting_prompts_begin_as_if_looked_up_in_each_step(
    num_blocks: int, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that begin alike arrive while the first is computed in chunks."""

    def begins(looks_always: bool) -> list[list[int]]:
        if looks_always:
            many = itertools.count(0, 10**6)
            monkeypatch.setattr(KVCacheManager, "_num_gained", property(lambda _: next(many)))
        harness = Harness(num_blocks=num_blocks, budget=6, slots=4)
        for number in range(4):
            harness.add([1, 2] * (shared // 2) + [3 + number] * (44 - shared), SamplingParams(max_tokens=6))
        started = []
        while harness.scheduler.has_unfinished:
            harness.step()
            started.append([each.request_id for each in harness.scheduler.running])
        monkeypatch.undo()
        return started

    assert begins(looks_always=False) == begins(looks_always=True)


@pytest.mark.parametrize("priority", [1, -1], ids=["before it", "behind it"])
def test_a_long_prompt_does_not_hold_up_a_row_beside_it(priority: int) -> None:
    """Law: each step has a token of the row, in either order, and chunks get shorter as the context grows, so that
    their attention takes as long as at `even_context`. Users of vLLM saw rows wait (its issue 1026).
    """
    even, length = 5000, 60_000
    scheduler = scheduler_of(6000, even)
    scheduler.add(prompt_of(0, 8, 1000))
    run_step(scheduler)
    long = prompt_of(1, length)
    long.priority = priority
    scheduler.add(long)
    chunks = []
    while long.num_computed_tokens < length:
        step = run_step(scheduler)
        tokens = {item.sequence_id: item for item in step.scheduled}
        assert tokens[0].num_tokens == 1
        chunks.append(tokens[1])
    assert sum(item.num_tokens for item in chunks) == length
    left = BUDGET - (priority > 0)
    for item in chunks[:-1]:
        assert item.num_tokens == (BUDGET - 1 if item.start <= even else left * even // item.start)
    assert chunks[-2].num_tokens < BUDGET // 10


def test_a_long_prompt_alone_has_the_whole_budget() -> None:
    scheduler = scheduler_of(6000, 5000)
    scheduler.add(prompt_of(1, 60_000))
    assert [run_step(scheduler).num_tokens for _ in range(29)] == [BUDGET] * 29


def test_the_even_context_is_where_attention_takes_as_long_as_linears() -> None:
    """Operations of a token of Llama 3.1 8B, counted by hand: 2 for each weight of 32 layers, and 4 for each key and
    dimension of 32 heads in each layer.
    """
    layer = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14_336
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        native=True,
        vocab_size=128_256,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14_336,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        max_position_embeddings=131_072,
        tie_word_embeddings=False,
        sliding_windows=(None,) * 32,
        dtype="bfloat16",
    )
    found = even_context(config)
    assert found == 2 * layer * 32 // (4 * 32 * 4096)
    assert found == 26_624
    assert even_context(msgspec.structs.replace(config, sliding_windows=(4096,) * 32)) is None


def test_an_output_is_read_for_masks_without_its_begin() -> None:
    """Law: a look for new tokens reads at most the last `MOST_REWRITTEN` ones that are known."""
    for context in CONTEXTS:
        tokens = Watched([7] * context + [8] * context)
        view = OutputView(tokens, context)
        known = [8] * (context - 1)
        common = num_common(known, view)
        assert common == context - 1
        assert view[common:] == [8]
        assert tokens.num_read <= MOST_REWRITTEN + 1


@given(tokens=st.lists(st.integers(0, 3), max_size=9), first=st.integers(0, 9), index=st.slices(9))
def test_a_view_is_the_end_of_its_list(tokens: list[int], first: int, index: slice) -> None:
    first = min(first, len(tokens))
    view = OutputView(tokens, first)
    assert list(view) == tokens[first:]
    assert list(view[index]) == tokens[first:][index]
    assert len(view) == len(tokens) - first
    assert num_common(tokens[first:], view) == len(view)


class ByteTokens:
    """A tokenizer's decoder in which each token is a byte, except for 300, which has no text. Counts decoded tokens."""

    def __init__(self) -> None:
        self.most = self.num_decoded = 0

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        self.most = max(self.most, len(token_ids))
        self.num_decoded += len(token_ids)
        return bytes(each for each in token_ids if each < 256).decode(errors="replace")


@pytest.mark.parametrize("token", [0xE2, 300], ids=["no character", "no text"])
def test_tokens_without_a_character_do_not_lengthen_the_window(token: int) -> None:
    """Law: a token costs the same after any number of others. Both happened to SGLang (issues 34740 and 8031)."""
    fast: Any = ByteTokens()
    decoder = WindowDecoder(fast, False, frozenset())
    text = "".join(decoder.decode([each], False) for each in [*b"ab", *[token] * 1000, *"é".encode(), *b"cd"])
    text += decoder.decode([], True)
    assert text.replace("\ufffd", "") == "abécd"
    assert fast.most <= 3 * (MOST_UNFINISHED + 2)


def test_a_character_of_many_tokens_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "MOST_UNFINISHED", 4)
    fast: Any = ByteTokens()
    decoder = WindowDecoder(fast, False, frozenset())
    assert "".join(decoder.decode([each], False) for each in "a€😀é".encode()) == "a€😀é"


@pytest.mark.parametrize("bound", [0, 10**9], ids=["one by one", "at once"])
def test_a_long_sequence_does_not_widen_the_tables_of_others(bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables that a step copies are the same, but those of short sequences beside a long one end early."""
    monkeypatch.setattr(rank_sequences, "RAGGED_ENTRIES", bound)
    sequences = RankSequences(10, BLOCK, 8, 16_384)
    tables = {0: list(range(7, 1007)), 1: [3], 2: [4, 5], 3: [6]}
    starts = [SequenceStart(number, SamplingParams(), 0, [1], 1) for number in tables]
    items = [ScheduledSequence(number, 0, 1, table) for number, table in tables.items()]
    sequences.begin(StepInput(0, started=starts, scheduled=items))
    found = sequences.block_tables([2, 0, 3, 1])
    assert (found.dtype, found.shape) == (np.int32, (4, 1000))
    for row, number in zip(found, [2, 0, 3, 1], strict=True):
        assert row[: len(tables[number])].tolist() == tables[number]

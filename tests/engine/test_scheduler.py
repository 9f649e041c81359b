"""The scheduler against a model that checks every step (`scheduler_harness.py`): hypothesis drives arrivals, forks,
aborts, late rows, failures and drafts.
"""

from __future__ import annotations

import os

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from manta.cluster.engine.kv_blocks import hash_blocks
from manta.cluster.engine.request import FinishStatus
from manta.cluster.engine.sequence import Sequence
from manta.cluster.errors import RequestRefused
from manta.workers.sampling_params import SamplingParams, child_seed
from manta.workers.step import NO_BLOCK
from tests.engine.scheduler_harness import BLOCK_SIZE, MAX_DRAFT_TOKENS, Harness, continuation, name_of

WINDOWS: list[tuple[int | None, ...]] = [(None,), (None, 6), (5,), (1,), (None, None, 3, 9)]
"""Windows of the groups of layers."""
EXAMPLES = 20_000 if os.environ.get("MANTA_PROVE") == "1" else 60


# Few distinct tokens, so that prompts share prefixes.
prompts = st.builds(
    lambda head, tail: [1, 2, 2, 1, 1][:head] * 4 + tail,
    st.integers(0, 5),
    st.lists(st.integers(1, 2), min_size=1, max_size=6),
)
requests = st.builds(
    lambda prompt, max_tokens, ignore_eos, priority, n, masks, client: (
        prompt,
        SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos and not masks),
        priority,
        n,
        masks,
        client,
    ),
    prompts,
    st.integers(1, 20),
    st.booleans(),
    st.integers(-1, 1),
    st.sampled_from([1, 1, 2, 3, 5]),
    st.booleans(),
    st.sampled_from(["", "a", "b"]),
)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests),
        st.tuples(st.just("step"), st.sampled_from(["plain", "plain", "late", "late", "failing", "drafts"])),
        st.tuples(st.just("step"), st.sampled_from(["plain", "plain", "late", "late", "failing", "drafts"])),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("stop"), st.integers(0, 30)),
        st.tuples(st.just("lost"), st.just(0)),
    ),
    min_size=12,
    max_size=40,
)


@pytest.mark.few(1)
@pytest.mark.parametrize("ahead", [False, True])
@settings(max_examples=EXAMPLES * 3 // 2, deadline=None)
@given(
    first=st.lists(requests, min_size=2, max_size=5),
    actions=actions,
    num_blocks=st.integers(5, 24),
    budget=st.integers(1, 40),
    slots=st.integers(1, 6),
    caching=st.booleans(),
    lookahead=st.sampled_from([0, 3]),
    windows=st.sampled_from(WINDOWS),
    num_states=st.sampled_from([0, 0, 10, 13, 24, 40]),
)
def test_every_request_gets_its_tokens_despite_the_others(
    ahead, first, actions, num_blocks, budget, slots, caching, lookahead, windows, num_states
) -> None:
    """Also if each step is planned before it is known what the one before it drew: what ends has a row too many then,
    which nobody may read.
    """
    num_states = num_states or (13 if windows == (1,) else 0)  # layers without keys have states
    harness = Harness(num_blocks * len(windows), budget, slots, caching, ahead, windows, lookahead, num_states)
    for request in first:
        harness.add(*request)
    for action, value in actions:
        if action == "add":
            harness.add(*value)
        elif action == "step":
            ids = {sequence.sequence_id for sequence in harness.scheduler.running}
            some = {sequence_id for sequence_id in ids if sequence_id % 3 == harness.scheduler._plan.step.step_id % 3}
            harness.step(
                late=some if value == "late" else set(),
                failing=some if value == "failing" else set(),
                drafts=value == "drafts" and not (ahead and num_states),
            )
        elif action == "abort":
            harness.collect(harness.scheduler.abort(str(value)))
        elif action == "stop":
            if value < len(harness.sequences):
                choice = harness.sequences[value]
                num_kept = len(harness.gained[name_of(choice)]) // 2
                # Before the fork there is no text yet to stop.
                harness.collect(harness.scheduler.finish(choice.request_id, choice.index, num_kept))
        else:
            harness.lose_ranks()
        harness.scheduler.check_integrity()
        harness.check_events()
        if harness.scheduler.blocks.resumes_at_borders:
            harness.check_borders()
    harness.drain()
    harness.check_events()
    for sequence in harness.sequences:
        end = harness.ends[name_of(sequence)]
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        expected = continuation(prompt, sequence.params, sequence.noise_seed)
        gained = harness.gained[name_of(sequence)]
        assert gained == expected[: len(gained)]
        assert end.finish is not FinishStatus.FINISHED_INTERNAL_ERROR or name_of(sequence) in harness.failed
        if end.finish is FinishStatus.FINISHED_LENGTH:
            assert gained == expected
            assert len(gained) == sequence.params.max_tokens
        if end.finish is FinishStatus.FINISHED_STOPPED and end.stop_token_id is not None:
            assert gained == expected
            assert end.stop_token_id == 0
        assert end.usage is not None
        assert end.usage.num_prompt_tokens == sequence.num_prompt_tokens
        assert 0 <= end.usage.num_cached_tokens < sequence.num_prompt_tokens


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(
    batch=st.lists(st.tuples(prompts, st.integers(1, 20)), min_size=1, max_size=6),
    budget=st.integers(4, 40),
    ahead=st.booleans(),
)
def test_drafts_change_the_steps_never_the_tokens(batch, budget, ahead) -> None:
    """Also if each step assumes that all drafts of the one before it are accepted."""
    harness = Harness(num_blocks=24, budget=budget, slots=4, ahead=ahead)
    for prompt, max_tokens in batch:
        harness.add(prompt, SamplingParams(max_tokens=max_tokens))
    harness.drain(drafts=True)
    for sequence in harness.sequences:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        assert harness.gained[sequence.request_id] == continuation(prompt, sequence.params)


@pytest.mark.parametrize("window", [1, 2])
def test_blocks_that_drafts_fill_and_leave_behind_at_once_stay_cached(window: int) -> None:
    harness = Harness(num_blocks=24, budget=40, slots=4, windows=(window,))
    for prompt in ([1], [2]):  # the drafts of the second one are accepted
        harness.add(prompt, SamplingParams(max_tokens=30, ignore_eos=True))
    while harness.scheduler.has_unfinished:
        harness.step(drafts=True)
    hashes = hash_blocks(harness.sequences[1].token_ids, 7, BLOCK_SIZE)
    assert all(harness.scheduler.blocks.find(each) is not None for each in hashes)


def test_the_state_after_a_rejected_draft_is_no_snapshot() -> None:
    """Prompts of all lengths, so that rejected drafts lie at block borders; then each goes on from its own output."""
    harness = Harness(num_blocks=200, budget=40, slots=2, num_states=100)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    conversations = [[length] * length for length in range(1, 9)]
    for _ in range(2):
        for number, prompt in enumerate(conversations):
            assert harness.add(prompt, params)
            harness.drain(drafts=True)
            conversations[number] = harness.sequences[-1].token_ids
    assert harness.scheduler.prefix_cache_hits > 0


@pytest.mark.parametrize("num_states", [10, 40], ids=["few slots", "a slot for each draft"])
def test_only_accepted_drafts_are_computed_again(num_states: int) -> None:
    """They are those of one step with few slots, and none with a slot for each draft."""
    harness = Harness(num_blocks=60, budget=40, slots=1, num_states=num_states)
    harness.add([1] * 6, SamplingParams(max_tokens=40, ignore_eos=True))
    most = 0
    while harness.scheduler.has_unfinished:
        harness.step(drafts=True)
        for sequence in harness.scheduler.running:
            most = max(most, len(sequence.token_ids) - 1 - sequence.num_computed_tokens)
    assert (0 < most <= MAX_DRAFT_TOKENS) if num_states == 10 else most == 0


def test_with_one_group_the_ranks_are_sent_plain_lists_of_blocks() -> None:
    """The bytes of a step whose sequence is forked, and of the next one, which copies the partly filled block."""
    harness = Harness(num_blocks=24, budget=40, slots=4)
    params = SamplingParams(max_tokens=4, ignore_eos=True, n=2)
    harness.add([1] * 6, params, n=2)
    encoded = []
    for _ in range(2):
        step = harness.scheduler.schedule()
        harness.meet_forks()
        encoded.append(msgspec.msgpack.encode(step))
        harness.collect(harness.scheduler.update(step, harness.model.execute(step)))
    seeds = [child_seed(0, index) for index in range(2)]
    start = [0, params, seeds[0], [1] * 6, 6, [], True, "", "", b""]
    first = [0, [], [start], [], [[0, 1, seeds[1]]], [[0, 0, 6, [0, 1], [], ""]], [[5, 0, 6], [5, 1, 6]], [], False]
    copies, scheduled = [[1, 2]], [[0, 6, 1, [], [], ""], [1, 6, 1, [0, 2], [], ""]]
    second = [1, [], [], copies, [], scheduled, [[0, 0, 7], [1, 1, 7]], [], False]
    assert encoded == [msgspec.msgpack.encode(each) for each in (first, second)]


def test_a_window_reads_only_the_end_of_a_cached_prefix() -> None:
    """The message has equally many blocks for each group, and none where the window never reaches."""
    harness = Harness(num_blocks=24, budget=40, slots=4, windows=(None, 5))
    harness.add([1, 2] * 8, SamplingParams(max_tokens=1))
    harness.drain()
    harness.add([1, 2] * 8 + [3], SamplingParams(max_tokens=1))
    (item,) = harness.scheduler.schedule().scheduled
    assert item.start == 16
    whole, window = item.new_block_ids[:5], item.new_block_ids[5:]
    assert NO_BLOCK not in whole
    assert [block == NO_BLOCK for block in window] == [True, True, True, False, False]


def test_a_prefix_ends_where_a_window_has_lost_a_block() -> None:
    """Of the last three blocks of a chain the middle one is evicted; then the border before it is the longest."""
    harness = Harness(num_blocks=64, budget=40, slots=4, windows=(None, 6))
    prompt = [1, 2] * 12
    harness.add(prompt, SamplingParams(max_tokens=1))
    harness.drain()
    blocks, hashes = harness.scheduler.blocks, hash_blocks(prompt, 6, BLOCK_SIZE)
    lost = blocks.find(hashes[4], 1)
    assert lost is not None
    blocks.discard([lost])
    harness.add([*prompt, 3], SamplingParams(max_tokens=1))
    harness.drain()
    assert harness.num_cached_tokens("1") == 4 * BLOCK_SIZE


def test_the_same_prompt_again_is_found_after_a_long_answer() -> None:
    """The window has long left the prompt, and its blocks wait in the cache."""
    harness = Harness(num_blocks=64, budget=40, slots=4, windows=(None, 5))
    prompt = [1, 2] * 12
    for _ in range(2):
        harness.add(prompt, SamplingParams(max_tokens=30, ignore_eos=True))
        harness.drain()
    assert harness.num_cached_tokens("1") == len(prompt) - BLOCK_SIZE


def test_good_drafts_are_accepted_several_a_step() -> None:
    harness = Harness(num_blocks=24, budget=40, slots=4)
    harness.add([1], SamplingParams(max_tokens=2))  # even ids guess one token right
    harness.add([2, 1, 1], SamplingParams(max_tokens=20, ignore_eos=True))  # odd ids two
    harness.step(drafts=True)
    before = len(harness.gained["1"])
    harness.step(drafts=True)
    assert len(harness.gained["1"]) - before >= 3


def test_a_prefix_within_one_step_is_computed_once() -> None:
    harness = Harness(num_blocks=24, budget=100, slots=8)
    prefix = [1, 2] * 8
    for last in range(3, 7):
        harness.add([*prefix, last], SamplingParams(max_tokens=4))
    step = harness.scheduler.schedule()
    assert [item.num_tokens for item in step.scheduled] == [17, 1, 1, 1]
    harness.collect(harness.scheduler.update(step, harness.model.execute(step)))
    tables = [sequence.block_tables[0] for sequence in harness.scheduler.running]
    assert len({tuple(table[:4]) for table in tables}) == 1
    harness.drain()
    assert [harness.num_cached_tokens(name) for name in "0123"] == [0, 16, 16, 16]


@pytest.mark.parametrize(("num_unwanted", "num_cached"), [(0, 0), (3, 0), (4, 4), (11, 8), (12, 12), (15, 12)])
def test_prompt_logprobs_bypass_the_prefix_cache_from_the_first_wanted_one_on(
    num_unwanted: int, num_cached: int
) -> None:
    harness = Harness(num_blocks=24, budget=100, slots=8)
    harness.add([1, 2] * 8, SamplingParams(max_tokens=1))
    harness.drain()
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    harness.add([1, 2] * 8, params, num_prompt_logprobs=num_unwanted)
    harness.drain()
    assert harness.num_cached_tokens("1") == num_cached


def test_an_urgent_request_preempts_a_patient_one() -> None:
    harness = Harness(num_blocks=8, budget=100, slots=1)
    harness.add([1] * 8, SamplingParams(max_tokens=16, ignore_eos=True), priority=1)
    harness.step()
    harness.add([2] * 8, SamplingParams(max_tokens=4, ignore_eos=True), priority=0)
    harness.step()
    assert [sequence.request_id for sequence in harness.scheduler.running] == ["1"]
    harness.drain()
    assert list(harness.ends) == ["1", "0"]
    assert harness.scheduler.num_preemptions == 1


def test_oversized_requests_name_value_bound_and_remedy() -> None:
    scheduler = Harness(num_blocks=4, budget=8, slots=1).scheduler
    with pytest.raises(RequestRefused, match="max_tokens 12 exceeds the 6 left after a 10-token prompt") as long:
        scheduler.add(Sequence(0, "a", [1] * 10, SamplingParams(max_tokens=12), 0))
    with pytest.raises(RequestRefused) as full:
        scheduler.add(Sequence(1, "b", [1] * 16, SamplingParams(), 0))
    found = [
        (refusal.kind, refusal.field, refusal.value, refusal.bound)
        for refusal in (long.value.refusal, full.value.refusal)
    ]
    assert found == [("exceeds", "max_tokens", 12, 6), ("context_length", "prompt", 16, 16)]
    assert all(each.value.refusal.remedy for each in (long, full))
    assert not scheduler.has_unfinished


def test_nobody_reads_blocks_of_a_failed_row() -> None:
    harness = Harness(num_blocks=24, budget=100, slots=4)
    prefix = [1, 2] * 6
    harness.add([*prefix, 3], SamplingParams(max_tokens=3))
    harness.add([*prefix, 4], SamplingParams(max_tokens=3))  # shares the prefix within the step
    harness.step(failing={0})
    assert harness.ends["0"].error == "NaN"
    assert harness.scheduler.num_preemptions == 1, "the one who shared the failed row's blocks computes them again"
    harness.add([*prefix, 5], SamplingParams(max_tokens=3))
    harness.drain()
    assert harness.num_cached_tokens("2") == len(prefix)
    for name in ("1", "2"):
        sequence = harness.sequences[int(name)]
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        assert harness.gained[name] == continuation(prompt, sequence.params)


def test_answers_from_before_a_preemption_are_ignored() -> None:
    """The second one reads what the failed row wrote, also in the step that was launched before the failure was known.
    It runs again by the time in which that step's answer comes.
    """
    harness = Harness(num_blocks=24, budget=100, slots=4, ahead=True)
    prefix = [1, 2] * 6
    harness.add([*prefix, 3], SamplingParams(max_tokens=3))
    harness.add([*prefix, 4], SamplingParams(max_tokens=3))
    harness.step(failing={0})
    harness.step()
    assert harness.ends["0"].error == "NaN"
    assert harness.under_way[1].errors, "the second one's row fails too"
    harness.drain()
    assert harness.gained["1"] == continuation([*prefix, 4], harness.sequences[1].params)


def test_nobody_reads_results_based_on_failed_blocks() -> None:
    harness = Harness(num_blocks=32, budget=21, slots=4)
    prefix = [1, 2] * 6
    tail = [2, 1, 1, 2] * 4
    harness.add([*prefix, 3], SamplingParams(max_tokens=3))
    harness.add([*prefix, *tail, 4], SamplingParams(max_tokens=3))  # its first chunk fills blocks on top of the prefix
    harness.step(failing={0})
    harness.drain()
    harness.add([*prefix, *tail, 5], SamplingParams(max_tokens=3))
    harness.drain()
    assert [end.finish is FinishStatus.FINISHED_INTERNAL_ERROR for end in harness.ends.values()] == [True, False, False]


def test_a_prefix_that_fails_rows_is_recomputed() -> None:
    """A chunk goes bad unnoticed and its request is aborted: one reader pays, not all to come."""
    harness = Harness(num_blocks=32, budget=8, slots=1)
    prompt = [1, 2] * 8
    harness.add(prompt, SamplingParams(max_tokens=3))
    step = harness.scheduler.schedule()
    harness.collect(harness.scheduler.update(step, harness.model.execute(step, failing={0})))
    harness.collect(harness.scheduler.abort("0"))
    for _ in range(3):
        harness.add(prompt, SamplingParams(max_tokens=3))
        harness.drain()
    assert [harness.ends[name].error for name in ("1", "2", "3")] == ["NaN", None, None]


def test_only_a_passed_deadline_is_called_one() -> None:
    scheduler = Harness(num_blocks=8, budget=8, slots=1).scheduler
    for number in range(3):
        scheduler.add(Sequence(number, str(number), [1], SamplingParams(), 0, deadline=10.0 * (number + 1)))
    scheduler.schedule()
    assert scheduler.expire(9.0) == []
    (expired,) = scheduler.expire(10.0)
    (aborted,) = scheduler.abort("2")
    assert (expired.request_id, expired.error) == ("0", "the deadline passed")
    assert (aborted.finish, aborted.error) == (FinishStatus.FINISHED_ABORTED, None)
    scheduler.check_integrity()


def test_a_refusal_names_the_limit_that_is_short() -> None:
    params = SamplingParams()
    with pytest.raises(RequestRefused, match=r"the limit is 64: .*; shorten the prompt$"):
        Harness(num_blocks=100, budget=8, slots=1).scheduler.add(Sequence(0, "a", [1] * 64, params, 0))
    with pytest.raises(RequestRefused, match=r"the limit is 16: .*; shorten the prompt$"):
        Harness(num_blocks=4, budget=8, slots=1).scheduler.add(Sequence(0, "a", [1] * 16, params, 0))


def test_an_urgent_cached_request_preempts_only_as_needed() -> None:
    harness = Harness(num_blocks=8, budget=100, slots=4)
    prefix = [1, 2] * 8
    harness.add([*prefix, 3], SamplingParams(max_tokens=8, ignore_eos=True), priority=1)
    harness.step()  # holds 5 of 8 blocks
    harness.add([*prefix, 4], SamplingParams(max_tokens=2, ignore_eos=True), priority=0)
    harness.step()
    assert harness.scheduler.num_preemptions == 0
    assert harness.scheduler.num_running == 2
    harness.drain()

"""The scheduler against a model that checks every step: hypothesis drives arrivals, forks, aborts, late rows, failures
and drafts.

The fake model keeps what each KV slot holds, as (position, hash of the tokens up to there), and raises where a token is
computed on anything but its own context: a wrong prefix hit, a premature free or a stale block cannot pass. NaN spreads
in it as in a real model: whatever is computed on a poisoned slot is poisoned too.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Set

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from manta.cluster.engine.kv_blocks import KVBlocks
from manta.cluster.engine.request import FinishStatus, SequenceOutput
from manta.cluster.engine.scheduler import Scheduler
from manta.cluster.engine.sequence import Sequence
from manta.cluster.errors import RequestRefused
from manta.structured.constraint import ConstraintSpec, Resolved
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import RowError, StepInput, StepOutput

BLOCK_SIZE = 4
EXAMPLES = 20_000 if os.environ.get("MANTA_PROVE") == "1" else 200


def next_token(tokens: list[int], seed: int = 0) -> int:
    """The fake model: a fixed function of the whole context and the seed. 0 is its end-of-sequence token."""
    return zlib.crc32(seed.to_bytes(8, "little", signed=True) + bytes(tokens)) % 23


def continuation(prompt: list[int], params: SamplingParams, seed: int = 0) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < (params.max_tokens or 10**9):
        tokens.append(next_token(tokens, seed))
        if tokens[-1] == 0 and not params.ignore_eos:
            break
    return tokens[len(prompt) :]


class FakeModel:
    """Executes steps as a rank would, on tokens alone."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple] = {}
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.seeds: dict[int, int] = {}
        self.poisoned: set[int] = set()
        """Slots that hold NaN."""

    def execute(
        self, step: StepInput, late: Set[int] = frozenset(), failing: Set[int] = frozenset(), drafts: bool = False
    ) -> StepOutput:
        """A row that fails keeps a token all the same: the next step may have been planned already."""
        for sequence_id in step.finished:
            self.tokens.pop(sequence_id, None)
            self.tables.pop(sequence_id, None)
        for start in step.started:
            assert start.sequence_id not in self.tokens, "started while the rank still holds it"
            self.tokens[start.sequence_id] = list(start.token_ids)
            self.tables[start.sequence_id] = []
            self.seeds[start.sequence_id] = start.seed
        for fork in step.forked:
            assert fork.sequence_id not in self.tokens, "forked while the rank still holds it"
            self.tokens[fork.sequence_id] = list(self.tokens[fork.parent_id])
            self.tables[fork.sequence_id] = []
            self.seeds[fork.sequence_id] = fork.seed
        self._copy(step.block_copies)
        inputs = self._write(step, failing)
        self._check_contexts(step, inputs)
        return self._sample(step, inputs, late, drafts)

    def slot(self, sequence_id: int, position: int) -> int:
        return self.tables[sequence_id][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        assert len({destination for _, destination in pairs}) == len(pairs), "two copies into one block"
        copied, poisoned = {}, set()
        for source, destination in pairs:
            for offset in range(BLOCK_SIZE):
                old, new = source * BLOCK_SIZE + offset, destination * BLOCK_SIZE + offset
                copied[new] = self.slots.get(old, ())
                poisoned |= {new} if old in self.poisoned else set()
        self.slots |= copied
        self.poisoned = (self.poisoned - set(copied)) | poisoned

    def _write(self, step: StepInput, failing: Set[int]) -> dict[int, list[int]]:
        inputs, written = {}, {}
        for item in step.scheduled:
            tokens = self.tokens[item.sequence_id]
            self.tables[item.sequence_id] += item.new_block_ids
            known = item.start + item.num_tokens - len(item.draft_token_ids)
            assert known <= len(tokens)
            assert not item.draft_token_ids or known == len(tokens)
            inputs[item.sequence_id] = tokens[:known] + item.draft_token_ids
            for position in range(item.start, item.start + item.num_tokens):
                slot = self.slot(item.sequence_id, position)
                assert slot not in written, "two tokens of a step share a KV slot"
                written[slot] = tuple(inputs[item.sequence_id][: position + 1])
                self.poisoned.discard(slot)
        self.slots |= written
        for item in step.scheduled:  # in one step a sequence that shares a block comes after the block's writer
            fails = item.sequence_id in failing
            for position in range(item.start + item.num_tokens):
                slot = self.slot(item.sequence_id, position)
                fails = fails or slot in self.poisoned
                if fails and position >= item.start:
                    self.poisoned.add(slot)
        return inputs

    def _check_contexts(self, step: StepInput, inputs: dict[int, list[int]]) -> None:
        for item in step.scheduled:
            for position in range(item.start + item.num_tokens):
                expected = tuple(inputs[item.sequence_id][: position + 1])
                assert self.slots.get(self.slot(item.sequence_id, position)) == expected

    def _sample(self, step, inputs, late, drafts) -> StepOutput:
        output = StepOutput(step.step_id)
        row_of = {}
        first = 0
        for item in step.scheduled:
            for offset in range(item.num_tokens):
                row_of[first + offset] = (item.sequence_id, item.start + offset)
            first += item.num_tokens
        rejected: set[int] = set()
        parents = {fork.sequence_id: fork.parent_id for fork in step.forked}
        for point in step.sample_points:
            row_id, position = row_of[point.row]
            sequence_id = point.sequence_id
            assert (row_id, position + 1) == (parents.get(sequence_id, sequence_id), point.position)
            if self.slot(row_id, position) in self.poisoned:
                output.errors[sequence_id] = RowError("NaN", is_corrupt=True)
                self.tokens[sequence_id].append(0)
            elif sequence_id not in late and sequence_id not in rejected:
                given_tokens = inputs[row_id]
                token = next_token(given_tokens[: position + 1], self.seeds[sequence_id])
                output.token_ids.setdefault(sequence_id, []).append(token)
                self.tokens[sequence_id].append(token)
                if position + 1 < len(given_tokens) and given_tokens[position + 1] != token:
                    rejected.add(sequence_id)
        if drafts:
            for sequence_id, tokens in self.tokens.items():
                seed = self.seeds[sequence_id]
                guess = [next_token(tokens, seed)]
                guess.append(next_token(tokens + guess, seed) if sequence_id % 2 else 22)
                output.draft_token_ids[sequence_id] = [*guess, 5]
        return output


def name_of(choice: Sequence | SequenceOutput) -> str:
    """The request's id, with the index of a choice that is not the first."""
    return f"{choice.request_id}/{choice.index}" if choice.index else choice.request_id


class Harness:
    """A scheduler, its model and what every request gained so far."""

    def __init__(self, num_blocks: int, budget: int, slots: int, caching: bool = True, ahead: bool = False) -> None:
        self.budget = budget
        self.ahead = ahead
        """Each step is planned, and executed, before the scheduler hears of the one before it."""
        self.under_way = (StepInput(-1), StepOutput(-1))
        self.scheduler = Scheduler(
            max_num_batched_tokens=budget,
            max_num_sequences=slots,
            max_model_len=64,
            blocks=KVBlocks(num_blocks, BLOCK_SIZE, caching),
        )
        self.model = FakeModel()
        self.sequences: list[Sequence] = []
        """One a choice, by id: the scheduler's own, or before the fork a stand-in of the same prompt."""
        self.gained: dict[str, list[int]] = {}
        self.ends: dict[str, SequenceOutput] = {}
        self.failed: set[str] = set()
        """Sequences whose row was made to fail."""

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        priority: int = 0,
        n: int = 1,
        masks: bool = False,
        client: str = "",
        weight: float = 1.0,
    ) -> bool:
        """Adds a request of `n` choices; with `masks` they may be late."""
        number = len(self.sequences)
        sequence = Sequence(
            number,
            str(number),
            list(prompt),
            msgspec.structs.replace(params, n=n),
            seed=0,
            unforked=range(1, n),
            priority=priority,
            client=client,
            weight=weight,
            eos_token_ids=(0,),
            constraint=Resolved(spec=ConstraintSpec(kind="regex", text="a"), compiled=b"") if masks else None,
        )
        try:
            self.scheduler.add(sequence)
        except RequestRefused:
            return False
        sequences = [sequence, *map(sequence.fork, sequence.unforked)]
        self.sequences += sequences
        self.gained |= {name_of(sequence): [] for sequence in sequences}
        return True

    def meet_forks(self) -> None:
        """Puts the sequences that the scheduler made in the place of their stand-ins."""
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            self.sequences[sequence.sequence_id] = sequence

    def num_cached_tokens(self, request_id: str) -> int:
        usage = self.ends[request_id].usage
        assert usage is not None
        return usage.num_cached_tokens

    def collect(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            name = name_of(output)
            assert name not in self.ends, "output behind the end"
            self.gained[name] += output.token_ids
            if output.finish is not None:
                self.ends[name] = output

    def step(self, late: Set[int] = frozenset(), failing: Set[int] = frozenset(), drafts: bool = False) -> None:
        for sequence in self.scheduler.running:
            self.scheduler.wait_for_mask(sequence, sequence.waits_for_mask and sequence.num_pending_tokens > 0)
        step = self.scheduler.schedule()
        self.meet_forks()
        assert step.num_tokens <= self.budget
        assert len({item.sequence_id for item in step.scheduled}) == len(step.scheduled)
        has_work = self.scheduler.has_unfinished and not self.under_way[0].scheduled
        assert step.scheduled or not has_work, "work is there and nothing was scheduled"
        for item in step.scheduled:
            assert item.start + item.num_tokens < self.sequences[item.sequence_id].max_length, "computed past its end"
        # What fails is sampled in the same step, so the failure is known at once and no other sequence may suffer.
        failing = failing & {point.sequence_id for point in step.sample_points}
        failing |= {fork.sequence_id for fork in step.forked if fork.parent_id in failing}
        self.failed |= {name_of(self.sequences[sequence_id]) for sequence_id in failing}
        masked = {sequence.sequence_id for sequence in self.sequences if sequence.constraint is not None}
        late = late & masked
        output = self.model.execute(step, late, failing, drafts)
        if self.ahead:
            (step, output), self.under_way = self.under_way, (step, output)
        self.collect(self.scheduler.update(step, output))
        for point in self.under_way[0].sample_points:
            sequence = self.scheduler.get(point.sequence_id)
            if sequence is not None and point.sequence_id in late and self.under_way[0].step_id >= sequence.first_step:
                self.scheduler.wait_for_mask(sequence)
        self.scheduler.check_integrity()
        for sequence in self.sequences:
            size = len(sequence.block_hashes)
            fresh = Sequence(0, "", list(sequence.token_ids), sequence.params, 0).hash_blocks(size, BLOCK_SIZE)
            assert sequence.finish or sequence.block_hashes == fresh, "a block was hashed before its tokens were known"

    def lose_ranks(self) -> None:
        self.scheduler.recompute_all()
        self.model, self.under_way = FakeModel(), (StepInput(-1), StepOutput(-1))

    def drain(self, drafts: bool = False) -> None:
        bound = 200 + 100 * sum(sequence.max_length for sequence in self.sequences)
        while self.scheduler.has_unfinished:
            self.step(drafts=drafts)
            bound -= 1
            assert bound > 0, "no progress"
        self.scheduler.schedule()
        self.scheduler.check_integrity()
        assert self.scheduler.blocks.num_free == self.scheduler.blocks.num_blocks


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


@pytest.mark.parametrize("ahead", [False, True])
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    first=st.lists(requests, min_size=2, max_size=5),
    actions=actions,
    num_blocks=st.integers(5, 24),
    budget=st.integers(1, 40),
    slots=st.integers(1, 6),
    caching=st.booleans(),
)
def test_every_request_gets_its_tokens_despite_the_others(
    ahead, first, actions, num_blocks, budget, slots, caching
) -> None:
    """Also if each step is planned before it is known what the one before it drew: what ends has a row too many then,
    which nobody may read.
    """
    harness = Harness(num_blocks, budget, slots, caching, ahead)
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
                drafts=value == "drafts" and not ahead,
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
    harness.drain()
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


@settings(max_examples=EXAMPLES // 3, deadline=None)
@given(batch=st.lists(st.tuples(prompts, st.integers(1, 20)), min_size=1, max_size=6), budget=st.integers(4, 40))
def test_drafts_change_the_steps_never_the_tokens(batch, budget) -> None:
    harness = Harness(num_blocks=24, budget=budget, slots=4)
    for prompt, max_tokens in batch:
        harness.add(prompt, SamplingParams(max_tokens=max_tokens))
    harness.drain(drafts=True)
    for sequence in harness.sequences:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        assert harness.gained[sequence.request_id] == continuation(prompt, sequence.params)


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
    tables = [sequence.block_table for sequence in harness.scheduler.running]
    assert len({tuple(table[:4]) for table in tables}) == 1
    harness.drain()
    assert [harness.num_cached_tokens(name) for name in "0123"] == [0, 16, 16, 16]


def test_prompt_logprobs_bypass_the_prefix_cache() -> None:
    harness = Harness(num_blocks=24, budget=100, slots=8)
    harness.add([1, 2] * 8, SamplingParams(max_tokens=1))
    harness.drain()
    harness.add([1, 2] * 8, SamplingParams(max_tokens=1, prompt_logprobs=0))
    harness.drain()
    assert harness.num_cached_tokens("1") == 0


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

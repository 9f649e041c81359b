"""A scheduler against a model that checks every step.

The fake model keeps what each KV slot holds, as its group of layers and the tokens up to its position. It raises where
a token is computed on anything but its own context: a wrong prefix hit, a block given back too early or a stale block
cannot pass. NaN spreads in it as in a real model: whatever is computed on a poisoned slot is poisoned too.
"""

from __future__ import annotations

import zlib
from collections.abc import Set

import msgspec

from manta.cluster.engine.kv_blocks import KVBlocks, hash_blocks
from manta.cluster.engine.kv_events import CacheLog
from manta.cluster.engine.request import SequenceOutput
from manta.cluster.engine.scheduler import Scheduler
from manta.cluster.engine.sequence import Sequence
from manta.cluster.errors import RequestRefused
from manta.structured.constraint import ConstraintSpec, Resolved
from manta.workers.kv_groups import BlockNeeds, KVGroup, most_states
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import (
    NO_BLOCK,
    NUM_FIXED_STATES,
    ZERO_STATE,
    RowError,
    ScheduledSequence,
    StateUse,
    StepInput,
    StepOutput,
)
from tests.engine.gateway import Gateway

BLOCK_SIZE = 4
NOTHING = -1
"""The token that a step computes where it expected one that has not been drawn."""
MAX_DRAFT_TOKENS = 3
"""The drafts that the fake model proposes, at most."""


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
    """Executes steps as a rank would, on tokens alone. It has a layer for each of `windows`."""

    def __init__(self, windows: tuple[int | None, ...] = (None,)) -> None:
        self.windows = windows
        self.slots: dict[int, tuple] = {}
        """What each KV slot holds: the number of its group, then the tokens up to its position."""
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[list[int]]] = {}
        self.seeds: dict[int, int] = {}
        self.poisoned: set[int] = set()
        """Slots that hold NaN."""
        self.states: dict[int, tuple[int, ...]] = {ZERO_STATE: ()}
        """The tokens after which the state in each slot of recurrent states stands."""
        self.poisoned_states: set[int] = set()

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
            self.tables[start.sequence_id] = [[] for _ in self.windows]
            self.seeds[start.sequence_id] = start.seed
        for fork in step.forked:
            assert fork.sequence_id not in self.tokens, "forked while the rank still holds it"
            self.tokens[fork.sequence_id] = list(self.tokens[fork.parent_id])
            self.tables[fork.sequence_id] = [[] for _ in self.windows]
            self.seeds[fork.sequence_id] = fork.seed
        self._copy(step.block_copies)
        inputs = self._write(step, failing)
        self._check_contexts(step, inputs)
        return self._sample(step, inputs, late, drafts)

    def slot(self, sequence_id: int, position: int, group: int = 0) -> int:
        block = self.tables[sequence_id][group][position // BLOCK_SIZE]
        assert block != NO_BLOCK, "a position that a layer reads or writes has no block"
        return block * BLOCK_SIZE + position % BLOCK_SIZE

    def visible(self, group: int, position: int) -> range:
        window = self.windows[group]
        return range(0 if window is None else max(0, position - window + 1), position + 1)

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
            size, rest = divmod(len(item.new_block_ids), len(self.windows))
            assert not rest, "every group gets equally many blocks"
            for group, table in enumerate(self.tables[item.sequence_id]):
                table += item.new_block_ids[group * size : (group + 1) * size]
            known = item.start + item.num_tokens - len(item.draft_token_ids)
            assert not item.draft_token_ids or known >= len(tokens)
            if known > len(tokens):
                assert step.assumes_drafts
                tokens = [*tokens, *[NOTHING] * (known - len(tokens))]
            inputs[item.sequence_id] = tokens[:known] + item.draft_token_ids
            for position in range(item.start, item.start + item.num_tokens):
                for group in range(len(self.windows)):
                    slot = self.slot(item.sequence_id, position, group)
                    assert slot not in written, "two tokens of a step share a KV slot"
                    written[slot] = (group, *inputs[item.sequence_id][: position + 1])
                    self.poisoned.discard(slot)
        self.slots |= written
        uses = {item.sequence_id: use for item, use in zip(step.scheduled, step.states, strict=bool(step.states))}
        for item in step.scheduled:  # in one step a sequence that shares a block comes after the block's writer
            use = uses.get(item.sequence_id)
            is_poisoned = item.sequence_id in failing or (use is not None and use.read in self.poisoned_states)
            for position in range(item.start, item.start + item.num_tokens):
                if is_poisoned or self.poisoned & self._read(item.sequence_id, position).keys():
                    is_poisoned |= use is not None
                    self.poisoned |= {
                        self.slot(item.sequence_id, position, group) for group in range(len(self.windows))
                    }
            if use is not None:
                self._write_states(item, use, inputs[item.sequence_id], is_poisoned)
        self._check_states(step)
        return inputs

    def _write_states(self, item: ScheduledSequence, use: StateUse, inputs: list[int], is_poisoned: bool) -> None:
        assert self.states[use.read] == tuple(inputs[: item.start]), "a step starts from another state"
        positions = [position for position, _ in use.writes]
        assert positions == sorted(set(positions))
        assert (item.start < positions[0], positions[-1]) == (True, item.start + item.num_tokens)
        for position, slot in use.writes:
            self.states[slot] = tuple(inputs[:position])
            self.poisoned_states.discard(slot)
            if is_poisoned:
                self.poisoned_states.add(slot)

    def _check_states(self, step: StepInput) -> None:
        read = {use.read for use in step.states}
        written = [slot for use in step.states for _, slot in use.writes]
        assert len(set(written)) == len(written), "two states in one slot"
        assert not read & set(written), "a step writes over a state that it starts from"
        assert min(written, default=NUM_FIXED_STATES) >= NUM_FIXED_STATES

    def _read(self, sequence_id: int, position: int) -> dict[int, tuple[int, int]]:
        """Returns the slots that a token reads, each with its group and position."""
        return {
            self.slot(sequence_id, read, group): (group, read)
            for group in range(len(self.windows))
            for read in self.visible(group, position)
        }

    def _check_contexts(self, step: StepInput, inputs: dict[int, list[int]]) -> None:
        for item in step.scheduled:
            if NOTHING in inputs[item.sequence_id]:
                continue  # it draws nothing
            for position in range(item.start, item.start + item.num_tokens):
                for slot, (group, read) in self._read(item.sequence_id, position).items():
                    assert self.slots.get(slot) == (group, *inputs[item.sequence_id][: read + 1])

    def _sample(self, step, inputs, late, drafts) -> StepOutput:
        output = StepOutput(step.step_id)
        row_of = {}
        first = 0
        for item in step.scheduled:
            for offset in range(item.num_tokens):
                row_of[first + offset] = (item.sequence_id, item.start + offset)
            first += item.num_tokens
        overtaken = {sequence_id for sequence_id, tokens in inputs.items() if NOTHING in tokens}
        rejected: set[int] = set()
        parents = {fork.sequence_id: fork.parent_id for fork in step.forked}
        for point in step.sample_points:
            row_id, position = row_of[point.row]
            sequence_id = point.sequence_id
            assert (row_id, position + 1) == (parents.get(sequence_id, sequence_id), point.position)
            if sequence_id in overtaken:
                continue
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
            output.draft_token_ids = self.guesses()
        return output

    def guesses(self) -> dict[int, list[int]]:
        """Returns drafts for the next step of every sequence, of which some are right."""
        drafts = {}
        for sequence_id, tokens in self.tokens.items():
            seed = self.seeds[sequence_id]
            guess = [next_token(tokens, seed)]
            guess.append(next_token(tokens + guess, seed) if sequence_id % 2 else 22)
            drafts[sequence_id] = guess if len(tokens) % 3 else [*guess, 5]
        return drafts


def name_of(choice: Sequence | SequenceOutput) -> str:
    """The request's id, with the index of a choice that is not the first."""
    return f"{choice.request_id}/{choice.index}" if choice.index else choice.request_id


class Harness:
    """A scheduler, its model and what every request gained so far."""

    def __init__(
        self,
        num_blocks: int,
        budget: int,
        slots: int,
        caching: bool = True,
        ahead: bool = False,
        windows: tuple[int | None, ...] = (None,),
        lookahead: int = 0,
        num_states: int = 0,
    ) -> None:
        """`num_states` are the slots of a model with recurrent states; 0 for one without."""
        self.windows = windows
        self.budget = budget
        self.lookahead = lookahead
        self.ahead = ahead
        """Each step is planned, and executed, before the scheduler hears of the one before it."""
        self.under_way = (StepInput(-1), StepOutput(-1))
        self.scheduler = Scheduler(
            max_num_batched_tokens=budget,
            max_num_sequences=slots,
            max_model_len=64,
            blocks=KVBlocks(
                num_blocks,
                BLOCK_SIZE,
                caching,
                tuple(map(KVGroup, windows)),
                KVBlocks(num_states, BLOCK_SIZE, caching) if num_states else None,
            ),
            num_lookahead_tokens=lookahead,
            num_steps_ahead=int(ahead),
            max_draft_tokens=0 if ahead else MAX_DRAFT_TOKENS,
        )
        self.borders: set[bytes] = set()
        """Hashes of the blocks after which a prompt may go on, as the router is told."""
        self.scheduler.blocks.report_to(self._note_border)
        self.events = CacheLog(self.scheduler.blocks.groups, BLOCK_SIZE, {})
        self.scheduler.blocks.tell(self.events)
        self.gateway = Gateway()
        self.model = FakeModel(windows)
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
        num_prompt_logprobs: int = 0,
    ) -> bool:
        """Adds a request of `n` choices; with `masks` they may be late. `num_prompt_logprobs` log-probabilities of the
        prompt are not wanted.
        """
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
            num_prompt_logprobs=num_prompt_logprobs,
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

    def check_events(self) -> None:
        """Checks that a subscriber of KV events knows what is cached."""
        self.gateway.hear(msgspec.to_builtins(self.events.take()))
        self.gateway.check(self.scheduler.blocks)

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
        step.assumes_drafts = self.ahead and any(item.draft_token_ids for item in self.under_way[0].scheduled)
        output = self.model.execute(step, late, failing, drafts and not self.ahead)
        self._check_holding(step)
        if self.ahead:
            (step, output), self.under_way = self.under_way, (step, output)
            if drafts:  # they are for the step behind the one under way
                output.draft_token_ids = self.model.guesses()
        self.collect(self.scheduler.update(step, output))
        for point in self.under_way[0].sample_points:
            sequence = self.scheduler.get(point.sequence_id)
            if sequence is not None and point.sequence_id in late and self.under_way[0].step_id >= sequence.first_step:
                self.scheduler.wait_for_mask(sequence)
        self.scheduler.check_integrity()
        for sequence in self.sequences:
            size = len(sequence.block_hashes)
            fresh = hash_blocks(sequence.token_ids, size, BLOCK_SIZE)
            assert sequence.finish or sequence.block_hashes == fresh, "a block was hashed before its tokens were known"

    def _check_holding(self, step: StepInput) -> None:
        """The sequences of a planned step hold what the step reads, and of a window not much more."""
        for item, use in zip(step.scheduled, step.states, strict=False):
            own = self.sequences[item.sequence_id]
            held = {slot for each in self.scheduler.running if each is not own for slot in each.states.values()}
            written = {slot for position, slot in use.writes if own.states.get(position) == slot}
            assert written <= set(own.states.values())
            forks = {fork.sequence_id for fork in step.forked if fork.parent_id == own.sequence_id}
            assert forks or not held & written, "a step writes a state that another sequence holds"
        for item in step.scheduled:
            sequence = self.sequences[item.sequence_id]
            for group, table in enumerate(self.model.tables[item.sequence_id]):
                held = sequence.block_tables[group]
                first = self.model.visible(group, item.start)[0] // BLOCK_SIZE
                assert held[first:] == table[first:], "a step reads a block that was given back"
        needs = BlockNeeds(tuple(map(KVGroup, self.windows)), BLOCK_SIZE, self.budget + 1)
        most = most_states(int(self.ahead), not self.ahead) + (0 if self.ahead else MAX_DRAFT_TOKENS)
        sizes = [len(sequence.states) for sequence in self.scheduler.running]
        assert max(sizes, default=0) <= most, "a sequence holds more slots than admission counts"
        for sequence in self.scheduler.running:
            lookahead = len(self.windows) * -(-self.lookahead // BLOCK_SIZE)
            assert len(sequence.held_blocks()) <= needs.of_sequence(sequence.num_blocks * BLOCK_SIZE) + lookahead

    def _note_border(self, block_hash: bytes, is_there: bool) -> None:
        assert (block_hash in self.borders) != is_there, "told twice"
        (self.borders.add if is_there else self.borders.discard)(block_hash)

    def check_borders(self) -> None:
        """The router knows the borders at which every group can go on, and no others."""
        blocks, expected = self.scheduler.blocks, set()
        for hashes in [sequence.block_hashes for sequence in self.sequences]:
            for end in range(1, len(hashes) + 1):
                read = [
                    (group, number)
                    for group in range(len(self.windows))
                    for number in range(self.model.visible(group, end * BLOCK_SIZE)[0] // BLOCK_SIZE, end)
                ]
                has_state = blocks.states is None or blocks.states.find(hashes[end - 1], 0) is not None
                if has_state and all(blocks.find(hashes[number], group) is not None for group, number in read):
                    expected.add(hashes[end - 1])
        assert self.borders == expected

    def lose_ranks(self) -> None:
        self.scheduler.recompute_all()
        self.model, self.under_way = FakeModel(self.windows), (StepInput(-1), StepOutput(-1))

    def drain(self, drafts: bool = False) -> None:
        bound = 200 + 100 * sum(sequence.max_length for sequence in self.sequences)
        while self.scheduler.has_unfinished:
            self.step(drafts=drafts)
            bound -= 1
            assert bound > 0, "no progress"
        self.scheduler.schedule()
        self.scheduler.check_integrity()
        assert self.scheduler.blocks.num_free == self.scheduler.blocks.num_blocks

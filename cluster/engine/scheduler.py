"""Decides what each step computes: continuous batching over one token budget, in plain Python.

The scheduler has no prefill or decode phase: a sequence has known tokens and computed tokens, and each step computes
some of the difference. The engine calls the scheduler for one step at a time. The scheduler's queues are ordered lists,
so that every run makes the same decisions. Imports neither torch nor ray. `step_plan.py` records the decisions,
`kv_cache_manager.py` hands out blocks, and `outcome.py` applies the results.
"""

from __future__ import annotations

import msgspec

from manta.cluster.engine.admission import check_room
from manta.cluster.engine.kept_prefixes import KeptPrefixes
from manta.cluster.engine.kv_blocks import IntegrityError, KVBlocks
from manta.cluster.engine.kv_cache_manager import KVCacheManager, Prefix
from manta.cluster.engine.outcome import advance, computed_by
from manta.cluster.engine.request import FinishStatus, SequenceOutput
from manta.cluster.engine.sequence import Sequence
from manta.cluster.engine.state_manager import StateManager
from manta.cluster.engine.stats import DraftCounts
from manta.cluster.engine.step_plan import LEAST_CHUNK, StepPlan
from manta.cluster.engine.turns import SequenceQueue, Turns
from manta.workers.adapter_key import AdapterKey
from manta.workers.kv_groups import BlockNeeds
from manta.workers.step import RowError, StateUse, StepInput, StepOutput


class Scheduler:
    """Schedules running sequences first, then waiting ones, each ordered by priority, turn and arrival.

    Every sequence makes progress: the first running sequence may preempt all that follow it, and no admitted sequence
    can outgrow the KV cache. The groups of layers take blocks from one pool. A sequence is admitted if the pool holds
    the most blocks that the sequence has at a time, in all groups together, at every length up to its longest.
    """

    def __init__(
        self,
        *,
        max_num_batched_tokens: int,
        max_num_sequences: int,
        max_model_len: int,
        blocks: KVBlocks,
        num_lookahead_tokens: int = 0,
        length_remedy: str = "",
        num_steps_ahead: int = 0,
        max_draft_tokens: int = 0,
        kept: KeptPrefixes | None = None,
        even_context: int | None = None,
    ) -> None:
        """`num_steps_ahead` steps are planned before the results of an earlier one are known; a step verifies at most
        `max_draft_tokens` drafts of a sequence. `even_context` is `ModelInfo.even_context`.
        """
        states, self._places_option = None, "max_num_sequences"
        if blocks.states is not None:
            states = StateManager(blocks, blocks.states, max_num_sequences, num_steps_ahead, max_draft_tokens)
            if states.max_num_sequences < max_num_sequences:
                self._places_option, max_num_sequences = "kv_cache_bytes", states.max_num_sequences
        self.max_num_batched_tokens, self.max_num_sequences = max_num_batched_tokens, max_num_sequences
        self._length_remedy = length_remedy
        self.blocks = blocks
        self.running = SequenceQueue()
        self.waiting = SequenceQueue()
        self.preempted: list[Sequence] = []  # since the current or last call of `schedule` began
        self.prefix_cache_queries = self.prefix_cache_hits = self.num_preemptions = 0
        self.has_advanced = False
        """Whether the last `update` brought a token, an end, or a position that stays computed."""
        self.drafts = DraftCounts()
        needs = BlockNeeds(blocks.groups, blocks.block_size, max_num_batched_tokens + 1)
        self._cache = KVCacheManager(blocks, needs, num_lookahead_tokens, states, kept)
        self.longest = self._cache.longest(max_model_len)
        """The longest sequence in tokens: the model's limit, or what the whole cache holds if that is less."""
        self._even_context = even_context
        self._plan = StepPlan(0, max_num_batched_tokens, even_context)
        """The next step, which collects ended sequences, copies and branches until `schedule` fills it."""
        self._by_id: dict[int, Sequence] = {}
        self._by_request: dict[str, list[Sequence]] = {}
        self._turns = Turns()
        self._num_deadlines = 0

    # ---- what is there -----------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def has_unsent_ends(self) -> bool:
        """Whether the ranks still remember a sequence that has ended."""
        return bool(self._plan.step.finished)

    @property
    def kv_usage(self) -> float:
        """Share of blocks that sequences hold, in [0, 1]."""
        return self._cache.usage

    def get(self, sequence_id: int) -> Sequence | None:
        """Returns the sequence, or None if it has ended or is unknown."""
        return self._by_id.get(sequence_id)

    def of_request(self, request_id: str) -> list[Sequence]:
        """Returns the sequences of a request that have not ended."""
        return list(self._by_request.get(request_id, ()))

    def adapters_in_use(self) -> set[str]:
        """Returns the digests of the adapters of all sequences that have not ended."""
        return {AdapterKey.of(sequence.adapter).digest for sequence in self._by_id.values() if sequence.adapter}

    # ---- arrival -----------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, which also stands for its `unforked` choices. Raises `RequestRefused` if they can never
        all fit.
        """
        limits = self.longest, self.max_num_sequences, self._length_remedy, self._places_option
        sequence.max_length = check_room(sequence, *limits)
        self._turns.give(sequence)
        self._register(sequence)
        self.waiting.add(sequence)

    def _register(self, sequence: Sequence) -> None:
        if sequence.deadline is not None:
            self._num_deadlines += 1
        self._by_id[sequence.sequence_id] = sequence
        self._by_request.setdefault(sequence.request_id, []).append(sequence)

    # ---- one step ----------------------------------------------------------------------------------------------

    def schedule(self) -> StepInput:
        """Plans the next step."""
        plan = self._plan
        self.preempted.clear()
        plan.budget = min(plan.budget, self.max_num_batched_tokens)  # it may have shrunk
        self._make_way()
        self._schedule_running(plan)
        plan.start_branches()
        self._admit_waiting(plan)
        plan.close()
        self._plan = StepPlan(plan.step.step_id + 1, self.max_num_batched_tokens, self._even_context)
        for parent, row in plan.completed_prompts:
            self._fork(plan, parent, row)
        return plan.step

    def _schedule_running(self, plan: StepPlan) -> None:
        running, cache, states = self.running, self._cache, self._cache.states
        index = 0
        while index < len(running) and plan.budget > 0:
            sequence = running[index]
            wanted = sequence.num_wanted_tokens()
            if not wanted or sequence.waits_for_mask or sequence.is_paused:
                index += 1
                continue
            count = min(wanted, plan.budget)
            if wanted >= LEAST_CHUNK:
                count = plan.chunk(sequence, wanted, len(running) - index - 1, is_alone=len(running) == 1)
            if sequence.draft_token_ids and not cache.can_grow(sequence, count):
                sequence.propose([], "")  # no sequence is preempted for drafts
                count = min(sequence.num_wanted_tokens(), plan.budget)
            if states is not None:
                count = states.aligned(sequence, count)
            while not cache.grow(sequence, count, num_others=len(running)):
                victim = running[-1]  # not in this step yet: scheduled sequences come earlier in the list
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                if states is not None:
                    plan.step.states.append(states.grow(sequence, count))
                plan.schedule(sequence, count)
                cache.register_full_blocks(sequence)
                index += 1

    def _admit_waiting(self, plan: StepPlan) -> None:
        num_taken, states = self._num_places_taken() if self.waiting else 0, self._cache.states
        while plan.budget > 0 and (sequence := self._first_waiting()) is not None:
            has_places = num_taken + sequence.num_places <= self.max_num_sequences
            prefix = self._cache.find_room(sequence) if has_places else None
            if prefix is None:
                paused = [other for other in self.running if other.is_paused and not other.num_pending_tokens]
                if plan.step.scheduled or not paused:
                    break
                self._preempt(paused[-1])  # it has reported its log-probabilities, and nothing else can be preempted
                num_taken -= paused[-1].num_places
                continue
            self.waiting.remove(sequence)
            self._admit(sequence, prefix, plan.step.step_id)
            num_taken += sequence.num_places
            plan.start(sequence)
            count = plan.chunk(sequence, sequence.num_wanted_tokens(), is_alone=len(self.running) == 1)
            if states is not None:
                count = states.aligned(sequence, count)
                plan.step.states.append(states.grow(sequence, count))
            self._cache.grow(sequence, count, num_others=len(self.running))
            plan.schedule(sequence, count)
            self._cache.register_full_blocks(sequence)

    def _first_waiting(self) -> Sequence | None:
        return next((sequence for sequence in self.waiting if not sequence.is_paused), None)

    def _num_places_taken(self) -> int:
        """Returns the places that running sequences and their future forks take, of `max_num_sequences`."""
        return sum(other.num_places for other in self.running)

    def _admit(self, sequence: Sequence, prefix: Prefix, step_id: int) -> None:
        self._cache.start_on(sequence, prefix, step_id)
        self._turns.reach(sequence)
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            may_read_all = sequence.params.prompt_logprobs is None
            self.prefix_cache_queries += sequence.num_prompt_tokens if may_read_all else sequence.num_prompt_logprobs
            self.prefix_cache_hits += sequence.num_cached_tokens
        self.running.add(sequence)

    def _fork(self, plan: StepPlan, parent: Sequence, row: int) -> None:
        """Makes sequences of the parent's other choices; they draw their first tokens from the parent's logits.

        Forks share full blocks. The last block of each group is copied before the next step in two cases: it is not
        full, or a late mask may make the fork recompute the prompt's last token. If too few blocks are free for the
        copies, the fork is queued.
        """
        forks = [parent.fork(index) for index in parent.unforked]
        parent.unforked = range(0)
        last_block_is_full = parent.num_prompt_tokens % self.blocks.block_size == 0
        may_recompute_last_token = parent.is_masked
        num_shared = parent.num_prompt_tokens
        if last_block_is_full and may_recompute_last_token:
            num_shared -= 1  # then the last block is not full, and is copied
        for fork in forks:
            self._register(fork)
            if self._share(parent, fork, num_shared):
                plan.fork(parent, fork, row)

    def _share(self, parent: Sequence, fork: Sequence, num_tokens: int) -> bool:
        """Starts `fork` on the blocks of the parent's first `num_tokens` tokens, or queues it if that is impossible."""
        if not self._cache.can_share(parent, num_tokens):
            self.waiting.add(fork)
            return False
        self._plan.copy(fork, self._cache.share(parent, fork, num_tokens))
        self.running.add(fork)
        return True

    def branch(self, request_id: str, pairs: list[tuple[Sequence, Sequence]]) -> None:
        """Replaces a request's sequences by continuations. `pairs` are (parent, child); a child's last token is new."""
        parents = self._by_request.get(request_id, [])
        for parent, child in pairs:
            if self._share(parent, child, parent.num_computed_tokens):
                self._plan.branch(child)
        for parent in list(parents):
            self._end(parent, FinishStatus.FINISHED_STOPPED)
        for _, child in pairs:
            self._register(child)
        while self._num_places_taken() > self.max_num_sequences:  # other sequences took the places of queued parents
            self._preempt(self.running[-1])

    # ---- drafts and masks --------------------------------------------------------------------------------------

    def propose(self, sequence: Sequence, draft_token_ids: list[int], proposer: str) -> None:
        """Replaces a sequence's drafts for the next step. `proposer` names their proposer."""
        sequence.propose(draft_token_ids, proposer)

    def wait_for_mask(self, sequence: Sequence, is_late: bool = True) -> None:
        """Excludes the sequence from steps while its mask is late; `is_late=False` lets it go on."""
        sequence.waits_for_mask = is_late

    # ---- preemption --------------------------------------------------------------------------------------------

    def _make_way(self) -> None:
        """Preempts running sequences for the first waiting one if its turn allows it. Called before anything is
        scheduled.
        """
        first = self._turns.promote_next(self.running, self.waiting)
        while first is not None and (victim := self._turns.who_gives_way(self.running, first)) is not None:
            has_places = self._num_places_taken() + first.num_places <= self.max_num_sequences
            if has_places and self._cache.fits(first, self._cache.find_prefix(first)):
                break
            self._preempt(victim)
            self._turns.put_behind(self.waiting, victim, first)

    def _preempt(self, sequence: Sequence) -> None:
        """Moves a running sequence to the queue. Its tokens stay; its keys and values are recomputed later."""
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.add(sequence)
        self.preempted.append(sequence)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self._cache.release(sequence)
        self._plan.finish(sequence)

    def recompute_all(self) -> None:
        """Preempts every running sequence and clears the prefix cache, because the ranks lost their memory."""
        for sequence in reversed(self.running[:]):
            self._preempt(sequence)
        self.blocks.clear_cache()

    # ---- results -----------------------------------------------------------------------------------------------

    def update(self, step: StepInput, output: StepOutput) -> list[SequenceOutput]:
        """Applies the output of a step; returns what each sequence gained."""
        changes: list[SequenceOutput] = []
        self.has_advanced = False
        uses: dict[int, StateUse] = {}
        if step.states:
            uses = {item.sequence_id: use for item, use in zip(step.scheduled, step.states, strict=True)}
        for computed in computed_by(step):
            sequence = self._by_id.get(computed.sequence_id)
            if sequence is None:
                continue  # ended since the step was planned
            error = output.errors.get(computed.sequence_id)
            was_preempted = step.step_id < sequence.first_step
            is_failed_fork = error is not None and not computed.num_tokens  # it would fail again on its parent's row
            if was_preempted and not is_failed_fork:
                continue
            if error is not None:
                changes.append(self._fail(sequence, error))
                continue
            change = advance(sequence, computed, output, self.drafts)
            if sequence.is_overtaken:
                self._plan.overtake(sequence)
            if uses and computed.num_tokens:
                self._cache.settle(sequence, uses[computed.sequence_id])
            self.has_advanced |= sequence.num_computed_tokens > computed.start
            if change is not None:
                changes.append(change)
                if change.finish is not None:
                    self._end(sequence, change.finish)
        self.has_advanced |= bool(changes)
        return changes

    def _fail(self, sequence: Sequence, error: RowError) -> SequenceOutput:
        """Ends a sequence whose row failed. If its keys and values may be corrupt, removes them from the prefix cache
        and preempts the running sequences that read them. If the request's parameters leave no token, the output so far
        counts; the request is refused if there is none.
        """
        if error.leaves_none and sequence.num_output_tokens:
            status = FinishStatus.FINISHED_STOPPED if error.may_end else FinishStatus.FINISHED_LENGTH
            return self._final(sequence, status)
        readers = []
        if error.is_corrupt:
            readers = self._cache.discard(sequence, [other for other in self.running if other is not sequence])
        final = self._final(sequence, FinishStatus.FINISHED_INTERNAL_ERROR, error.reason)
        final.is_refusal = error.is_refusal
        for reader in readers:
            self._preempt(reader)
        return final

    # ---- endings -----------------------------------------------------------------------------------------------

    def abort(self, request_id: str) -> list[SequenceOutput]:
        """Ends all sequences of a request at once. Returns nothing for an unknown request."""
        return self._abort(self.of_request(request_id))

    def finish(self, request_id: str, index: int, num_kept_tokens: int) -> list[SequenceOutput]:
        """Ends one choice whose text reached a stop string. The first `num_kept_tokens` of its output stay."""
        for sequence in self.of_request(request_id):
            if sequence.index == index:
                sequence.keep_output(num_kept_tokens)
                return [self._final(sequence, FinishStatus.FINISHED_STOPPED)]
        return []

    def end(self, sequence_id: int, status: FinishStatus, error: str | None = None) -> list[SequenceOutput]:
        """Ends one sequence with the tokens that it has; its blocks stay valid in the prefix cache."""
        sequence = self._by_id.get(sequence_id)
        return [] if sequence is None else [self._final(sequence, status, error)]

    def expire(self, now: float) -> list[SequenceOutput]:
        """Aborts the sequences that are past their deadline; `now` is on `time.monotonic`'s clock."""
        if not self._num_deadlines:
            return []
        late = [s for s in self._by_id.values() if s.deadline is not None and s.deadline <= now]
        return self._abort(late, "the deadline passed")

    def _abort(self, sequences: list[Sequence], error: str | None = None) -> list[SequenceOutput]:
        outputs = []
        for sequence in sequences:
            unforked, sequence.unforked = sequence.unforked, range(0)
            final = self._final(sequence, FinishStatus.FINISHED_ABORTED, error)
            outputs += [final, *(msgspec.structs.replace(final, index=index) for index in unforked)]
        return outputs

    def _final(self, sequence: Sequence, status: FinishStatus, error: str | None = None) -> SequenceOutput:
        self._end(sequence, status)
        return SequenceOutput(sequence.request_id, sequence.index, [], finish=status, error=error, usage=sequence.usage)

    def _end(self, sequence: Sequence, status: FinishStatus) -> None:
        sequence.finish = status
        if sequence.block_tables:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)
        if sequence.unforked:  # the next choice computes the prompt instead
            heir = sequence.fork(sequence.unforked[0])
            heir.unforked = sequence.unforked[1:]
            self._register(heir)
            self.waiting.add(heir)
        if sequence.deadline is not None:
            self._num_deadlines -= 1
        del self._by_id[sequence.sequence_id]
        siblings = self._by_request[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._by_request[sequence.request_id]

    # ---- integrity ---------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises `IntegrityError` if a block leaked, a reference count is wrong, or a sequence is not in exactly one
        queue.
        """
        self._cache.check_integrity(self.running)
        listed = sorted(sequence.sequence_id for sequence in (*self.running, *self.waiting))
        if listed != sorted(self._by_id):
            raise IntegrityError(f"{len(listed)} sequences are queued and {len(self._by_id)} are known")
        if any(sequence.block_tables for sequence in self.waiting):
            raise IntegrityError("a waiting sequence holds blocks")

"""Decides what each step computes: continuous batching over one token budget, in plain Python.

There is no prefill and no decode: a sequence has known tokens and computed tokens, and a step closes part of the gap.
Called by the engine, one step at a time; imports neither torch nor ray. Lists keep their order, so that every run
decides alike.
"""

from __future__ import annotations

import bisect
import operator

import msgspec

from cluster.engine.kv_blocks import IntegrityError, KVBlocks
from cluster.engine.request import FinishStatus, RequestRefused, SequenceOutput
from cluster.engine.sequence import Sequence
from cluster.engine.stats import DraftCounts
from workers.step import (
    RowError,
    SamplePoint,
    ScheduledSequence,
    SequenceFork,
    StepInput,
    StepOutput,
    TokenLogprobs,
)

_ORDER = operator.attrgetter("order")


class Scheduler:
    """Running sequences go first, then waiting ones, each group by priority and arrival.

    Progress is certain: the first running sequence may take every block from those behind it, and no admitted sequence
    can outgrow the pool.
    """

    def __init__(
        self,
        *,
        max_num_batched_tokens: int,
        max_num_sequences: int,
        max_model_len: int,
        blocks: KVBlocks,
        num_lookahead_tokens: int = 0,
    ) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_sequences = max_num_sequences
        self.max_model_len = max_model_len
        self.blocks = blocks
        self.num_lookahead_tokens = num_lookahead_tokens
        """Tokens behind a sequence's own for which its blocks should have room: a draft model writes there."""
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_preemptions = 0
        self.has_advanced = False
        """Whether the last step brought a token, an end or a position that stays computed."""
        self.drafts = DraftCounts()
        self._by_id: dict[int, Sequence] = {}
        self._by_request: dict[str, list[Sequence]] = {}
        self._forgotten: list[int] = []
        """Sequences that the ranks still remember and need not."""
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_rows = 0
        """Flat token rows of the step being planned."""
        self._num_deadlines = 0
        self._to_fork: list[tuple[Sequence, int]] = []
        """Prompts that the step being planned completes, and the row of their last token."""
        self._copies: list[tuple[Sequence, int, int]] = []
        """Forks of the last step, and the block copies (source, destination) that they need before the next."""
        self._branches: list[Sequence] = []
        """Sequences that the ranks have not heard of, though what they hold is computed."""

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
    def has_unforgotten(self) -> bool:
        """Whether the ranks do not know yet that a sequence has ended."""
        return bool(self._forgotten)

    @property
    def kv_usage(self) -> float:
        """Share of blocks that sequences hold, in [0, 1]."""
        return 1.0 - self.blocks.num_free / self.blocks.num_blocks

    def get(self, sequence_id: int) -> Sequence | None:
        """A sequence that has not ended."""
        return self._by_id.get(sequence_id)

    def of_request(self, request_id: str) -> list[Sequence]:
        """Its sequences that have not ended."""
        return list(self._by_request.get(request_id, ()))

    # ---- arrival -----------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, which stands for its `unforked` choices too. Raises `RequestRefused` where they can never
        be served whole.
        """
        if sequence.num_places > self.max_num_sequences:
            raise RequestRefused(
                f"n {sequence.num_places} exceeds the {self.max_num_sequences} sequences that run at a time; "
                "lower it or raise max_num_sequences",
                "n",
            )
        pool = self.blocks.num_blocks * self.blocks.block_size
        limit = min(self.max_model_len, pool)
        remedy = "raise max_model_len" if self.max_model_len <= pool else "enlarge the KV cache (kv_cache_bytes)"
        room = limit - sequence.num_prompt_tokens
        if room < 1:
            raise RequestRefused(
                f"the prompt has {sequence.num_prompt_tokens} tokens and leaves no room for output: both share {limit} "
                f"tokens; shorten the prompt or {remedy}",
                "prompt",
            )
        max_tokens = sequence.params.max_tokens
        if max_tokens is not None and max_tokens > room:
            raise RequestRefused(
                f"max_tokens {max_tokens} exceeds the {room} left after a {sequence.num_prompt_tokens}-token prompt; "
                f"lower it, shorten the prompt or {remedy}",
                "max_tokens",
            )
        sequence.max_length = sequence.num_prompt_tokens + (max_tokens or room)
        sequence.arrival = self._num_arrivals
        self._know(sequence)
        self._num_arrivals += 1
        bisect.insort(self.waiting, sequence, key=_ORDER)

    def _know(self, sequence: Sequence) -> None:
        self._num_deadlines += sequence.deadline is not None
        self._by_id[sequence.sequence_id] = sequence
        self._by_request.setdefault(sequence.request_id, []).append(sequence)

    # ---- one step ----------------------------------------------------------------------------------------------

    def schedule(self) -> StepInput:
        """Plans the next step."""
        step = StepInput(self._num_steps)
        self._num_steps += 1
        self._num_rows = 0
        self._make_way_for_priority()
        budget = self._schedule_running(step)
        step.started = [branch.start() for branch in self._branches if branch.block_table]
        self._branches = []
        self._admit_waiting(step, budget)
        step.block_copies = [(src, dst) for fork, src, dst in self._copies if dst in fork.block_table]
        self._copies = []
        for parent, row in self._to_fork:
            self._fork(step, parent, row)
        self._to_fork = []
        step.finished, self._forgotten = self._forgotten, []
        return step

    def _schedule_running(self, step: StepInput) -> int:
        budget = self.max_num_batched_tokens
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            if sequence.waits_for_mask or sequence.is_paused:
                index += 1
                continue
            count = min(self._num_wanted(sequence), budget)
            if sequence.draft_token_ids and self._num_missing_blocks(sequence, count) > self.blocks.num_free:
                sequence.draft_token_ids = []  # nobody is thrown out for a guess
                count = min(self._num_wanted(sequence), budget)
            while self._num_missing_blocks(sequence, count) > self.blocks.num_free:
                victim = self.running[-1]  # never one already in this step: those stand further up
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                self._schedule(step, sequence, count)
                budget -= count
                index += 1
        return budget

    def _admit_waiting(self, step: StepInput, budget: int) -> None:
        while budget > 0 and (sequence := self._first_waiting()) is not None:
            prefix = self._cached_prefix(sequence) if self._has_places(sequence) else None
            if prefix is None or not self._fits(sequence, prefix):
                paused = [other for other in self.running if other.is_paused]
                if step.scheduled or not paused:
                    break
                self._preempt(paused[-1])  # it has said what may follow, and nobody else gives way
                continue
            self.waiting.remove(sequence)
            self._admit(sequence, prefix)
            step.started.append(sequence.start())
            count = min(self._num_wanted(sequence), budget)
            self._schedule(step, sequence, count)
            budget -= count

    def _first_waiting(self) -> Sequence | None:
        return next((sequence for sequence in self.waiting if not sequence.is_paused), None)

    def _has_places(self, sequence: Sequence) -> bool:
        """Whether the sequence and its forks may run beside those that do."""
        return self._num_places_taken() + sequence.num_places <= self.max_num_sequences

    def _num_places_taken(self) -> int:
        return sum(other.num_places for other in self.running)

    def _fits(self, sequence: Sequence, prefix: list[int]) -> bool:
        """Room for the whole prompt, not for its first chunk: who is let in should not be thrown out at once."""
        missing = self._blocks_for(len(sequence.token_ids)) - len(prefix)
        return missing <= self.blocks.num_free - self.blocks.num_evictable(prefix)

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks that the sequence may read; its last token is always computed, for somebody must make the
        logits.
        """
        if sequence.params.prompt_logprobs is not None:
            return []
        count = (len(sequence.token_ids) - 1) // self.blocks.block_size
        return self.blocks.find_prefix(sequence.hash_blocks(count, self.blocks.block_size))

    def _admit(self, sequence: Sequence, prefix: list[int]) -> None:
        self.blocks.share(prefix)
        sequence.block_table = list(prefix)
        sequence.num_shared_blocks = sequence.num_registered_blocks = len(prefix)
        sequence.num_computed_tokens = len(prefix) * self.blocks.block_size
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            if sequence.params.prompt_logprobs is None:
                self.prefix_cache_queries += sequence.num_prompt_tokens
                self.prefix_cache_hits += sequence.num_cached_tokens
        bisect.insort(self.running, sequence, key=_ORDER)

    def _num_wanted(self, sequence: Sequence) -> int:
        """Tokens that would bring the sequence up to date: known ones and drafts, of which none may pass its end."""
        known = len(sequence.token_ids)
        if sequence.draft_token_ids:
            del sequence.draft_token_ids[max(0, sequence.max_length - known - 1) :]
        return known + len(sequence.draft_token_ids) - sequence.num_computed_tokens

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.blocks.block_size)

    def _num_missing_blocks(self, sequence: Sequence, count: int) -> int:
        return self._blocks_for(sequence.num_computed_tokens + count) - len(sequence.block_table)

    def _schedule(self, step: StepInput, sequence: Sequence, count: int) -> None:
        """Puts the next `count` tokens of a sequence into the step; its blocks are known to be free."""
        start, known = sequence.num_computed_tokens, len(sequence.token_ids)
        end = start + count
        missing = self._num_missing_blocks(sequence, count)
        if missing > 0:
            sequence.block_table += self.blocks.allocate(missing)
        if self.num_lookahead_tokens and end >= known:
            ahead = self._blocks_for(min(end + self.num_lookahead_tokens, sequence.max_length))
            ahead -= len(sequence.block_table)
            if 0 < ahead <= self.blocks.num_free - len(self.running):  # others may need one each
                sequence.block_table += self.blocks.allocate(ahead)
        unsent = sequence.block_table[sequence.num_sent_blocks :]
        sequence.num_sent_blocks += len(unsent)
        drafts = sequence.draft_token_ids[: max(0, end - known)] if sequence.draft_token_ids else []
        step.scheduled.append(
            ScheduledSequence(sequence.sequence_id, start, count, unsent, drafts, sequence.draft_proposer)
        )
        if end >= known:
            first_row = self._num_rows - start
            for position in range(known, end + 1):
                step.sample_points.append(SamplePoint(first_row + position - 1, sequence.sequence_id, position))
            if sequence.unforked:
                self._to_fork.append((sequence, first_row + known - 1))
        self._num_rows += count
        self._register_full_blocks(sequence, min(end, known))

    def _fork(self, step: StepInput, parent: Sequence, row: int) -> None:
        """Makes the parent's other choices sequences of their own, which draw their first tokens from its logits.

        Full blocks are shared. The last one is copied before the next step, where it is not full, or where a late mask
        may make the fork compute the last token of the prompt again. Forks without a block to spare queue up.
        """
        forks = [parent.fork(index) for index in parent.unforked]
        parent.unforked = range(0)
        num_tokens = parent.num_prompt_tokens
        is_full = num_tokens % self.blocks.block_size == 0
        shared = num_tokens - (is_full and parent.constraint is not None)
        for fork in forks:
            self._know(fork)
            if self._share(parent, fork, shared):
                fork.num_computed_tokens = num_tokens
                step.forked.append(SequenceFork(parent.sequence_id, fork.sequence_id, fork.noise_seed))
                step.sample_points.append(SamplePoint(row, fork.sequence_id, num_tokens))

    def _share(self, parent: Sequence, fork: Sequence, num_tokens: int) -> bool:
        """Makes a sequence run on the blocks of another one's first tokens, or queues it where that cannot be."""
        size = self.blocks.block_size
        if not parent.block_table or (num_tokens % size and not self.blocks.num_free):
            bisect.insort(self.waiting, fork, key=_ORDER)
            return False
        fork.block_table, copies = self.blocks.fork(parent.block_table, num_tokens)
        self._copies += [(fork, source, destination) for source, destination in copies]
        fork.num_computed_tokens = num_tokens
        fork.num_shared_blocks = fork.num_registered_blocks = num_tokens // size
        bisect.insort(self.running, fork, key=_ORDER)
        return True

    def branch(self, request_id: str, pairs: list[tuple[Sequence, Sequence]]) -> None:
        """Replaces a request's sequences by continuations of theirs, (parent, child), whose last token is new."""
        parents = self._by_request.get(request_id, [])
        for parent, child in pairs:
            if self._share(parent, child, parent.num_computed_tokens):
                self._branches.append(child)
        for parent in list(parents):
            self._end(parent, FinishStatus.FINISHED_STOPPED)
        for _, child in pairs:
            self._know(child)
        while self._num_places_taken() > self.max_num_sequences:  # others had taken those of parents that were queued
            self._preempt(self.running[-1])

    def _register_full_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        full = num_tokens // self.blocks.block_size
        if full > sequence.num_registered_blocks:
            hashes = sequence.hash_blocks(full, self.blocks.block_size)
            for block in range(sequence.num_registered_blocks, full):
                self.blocks.register(sequence.block_table[block], hashes[block])
            sequence.num_registered_blocks = full

    # ---- preemption --------------------------------------------------------------------------------------------

    def _make_way_for_priority(self) -> None:
        """The first in the queue takes the place of less urgent ones. It happens before anything is scheduled."""
        urgent = self._first_waiting()
        while urgent is not None and self.running and urgent.priority < self.running[-1].priority:
            if self._has_places(urgent) and self._fits(urgent, self._cached_prefix(urgent)):
                break
            self._preempt(self.running[-1])

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue; its tokens stay, its keys and values are computed again."""
        self.running.remove(sequence)
        self._release(sequence)
        bisect.insort(self.waiting, sequence, key=_ORDER)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.blocks.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = sequence.num_shared_blocks = 0
        sequence.num_registered_blocks = sequence.num_sent_blocks = 0
        sequence.draft_token_ids = []
        sequence.waits_for_mask = False
        self._forgotten.append(sequence.sequence_id)

    def recompute_all(self) -> None:
        """Sends every running sequence back to the queue and trusts no cached block: the ranks lost their memory."""
        for sequence in reversed(self.running[:]):
            self._preempt(sequence)
        self.blocks.clear_cache()

    # ---- results -----------------------------------------------------------------------------------------------

    def update(self, step: StepInput, output: StepOutput) -> list[SequenceOutput]:
        """Applies what the ranks answered; returns what each sequence gained."""
        changes: list[SequenceOutput] = []
        self.has_advanced = False
        computed = [
            (item.sequence_id, item.start, item.start + item.num_tokens - len(item.draft_token_ids))
            for item in step.scheduled
        ]
        for fork in step.forked:
            sequence = self._by_id.get(fork.sequence_id)
            if sequence is not None:
                computed.append((fork.sequence_id, sequence.num_prompt_tokens, sequence.num_prompt_tokens))
        drafts = {item.sequence_id: item.draft_token_ids for item in step.scheduled if item.draft_token_ids}
        for sequence_id, start, known_end in computed:
            sequence = self._by_id.get(sequence_id)
            if sequence is None:
                continue  # ended since the step was planned
            is_fork = start == known_end
            if not sequence.block_table and not is_fork:
                continue  # preempted since; a fork's row is its parent's and would fail again
            error = output.errors.get(sequence_id)
            if error is not None:
                changes.append(self._fail(sequence, error))
            elif sequence.block_table:
                change = self._advance(sequence, start, known_end, drafts.get(sequence_id, []), output)
                self.has_advanced |= sequence.num_computed_tokens > start
                if change is not None:
                    changes.append(change)
        self.has_advanced |= bool(changes)
        return changes

    def _advance(
        self, sequence: Sequence, start: int, known_end: int, drafts: list[int], output: StepOutput
    ) -> SequenceOutput | None:
        token_ids = output.token_ids.get(sequence.sequence_id)
        proposer = sequence.draft_proposer
        sequence.draft_token_ids = output.draft_token_ids.get(sequence.sequence_id, [])
        sequence.draft_proposer = output.draft_proposers.get(sequence.sequence_id, "")
        prompt_logprobs = self._new_prompt_logprobs(sequence, start, output)
        if not token_ids:
            # A row whose token is not drawn yet (a late mask) does its last position again.
            late = known_end == len(sequence.token_ids)
            sequence.num_computed_tokens = known_end - late
            if prompt_logprobs:
                return SequenceOutput(sequence.request_id, sequence.index, [], prompt_logprobs=prompt_logprobs)
            return None
        if sequence.num_branches:
            sequence.num_computed_tokens, sequence.is_paused = known_end, True
            return SequenceOutput(sequence.request_id, sequence.index, [], output.logprobs.get(sequence.sequence_id))
        gained, finish = self._accept(sequence, token_ids)
        if drafts:
            self._count_drafts(sequence, proposer, drafts, gained)
        sequence.num_computed_tokens = known_end + len(gained) - 1
        logprobs = output.logprobs.get(sequence.sequence_id)
        change = SequenceOutput(
            sequence.request_id,
            sequence.index,
            gained,
            None if logprobs is None else logprobs[: len(gained)],
            prompt_logprobs,
        )
        if finish is not None or drafts or sequence.num_output_tokens == len(gained):
            change.usage = sequence.usage
        if finish is not None:
            change.finish = finish
            if finish is FinishStatus.FINISHED_STOPPED:
                change.stop_token_id = gained[-1]
            self._end(sequence, finish)
        return change

    def _accept(self, sequence: Sequence, token_ids: list[int]) -> tuple[list[int], FinishStatus | None]:
        """Appends tokens up to the one that ends the sequence, if one does."""
        for count, token_id in enumerate(token_ids, start=1):
            sequence.token_ids.append(token_id)
            if token_id in sequence.stop_ids:
                return token_ids[:count], FinishStatus.FINISHED_STOPPED
            if len(sequence.token_ids) >= sequence.max_length:
                return token_ids[:count], FinishStatus.FINISHED_LENGTH
        return token_ids, None

    def _count_drafts(self, sequence: Sequence, proposer: str, drafts: list[int], gained: list[int]) -> None:
        num_accepted = 0
        while drafts[num_accepted : num_accepted + 1] == gained[num_accepted : num_accepted + 1] != []:
            num_accepted += 1
        self.drafts.add(proposer, len(drafts), num_accepted)
        sequence.num_accepted_drafts += num_accepted
        sequence.num_rejected_drafts += len(drafts) - num_accepted

    def _new_prompt_logprobs(self, sequence: Sequence, start: int, output: StepOutput) -> list[TokenLogprobs] | None:
        """Entries for prompt positions that were not reported before a preemption."""
        entries = output.prompt_logprobs.get(sequence.sequence_id)
        if not entries:
            return None
        new = entries[max(0, sequence.num_prompt_logprobs - start) :]
        sequence.num_prompt_logprobs = max(sequence.num_prompt_logprobs, start + len(entries))
        return new or None

    def _fail(self, sequence: Sequence, error: RowError) -> SequenceOutput:
        """Ends a sequence whose row failed. Where its keys and values may be at fault, all it read or wrote leaves the
        cache; running sequences that read what it wrote compute again, and what they wrote behind it leaves too.

        Nobody reads a reader's blocks alone, for a prefix is found from its head. Blocks that the failed row only read
        leave without disturbing their other readers: had the failure come from there, these fail by themselves, and no
        newcomer should.
        """
        if not error.is_corrupt:
            return self._final(sequence, FinishStatus.FINISHED_INTERNAL_ERROR, error.reason)
        written = set(sequence.block_table[sequence.num_shared_blocks :])
        self.blocks.discard(sequence.block_table)
        final = self._final(sequence, FinishStatus.FINISHED_INTERNAL_ERROR, error.reason)
        for reader in [other for other in self.running if not written.isdisjoint(other.block_table)]:
            first = next(index for index, block in enumerate(reader.block_table) if block in written)
            self.blocks.discard(reader.block_table[first:])
            self._preempt(reader)
        return final

    # ---- endings -----------------------------------------------------------------------------------------------

    def abort(self, request_id: str) -> list[SequenceOutput]:
        """Ends what is left of a request, at once; an unknown one yields nothing."""
        return self._abort(self.of_request(request_id))

    def finish(self, request_id: str, index: int, num_kept_tokens: int) -> list[SequenceOutput]:
        """Ends one choice whose text reached a stop string; only `num_kept_tokens` of its output count."""
        for sequence in self.of_request(request_id):
            if sequence.index == index:
                del sequence.token_ids[sequence.num_prompt_tokens + num_kept_tokens :]
                return [self._final(sequence, FinishStatus.FINISHED_STOPPED)]
        return []

    def end(self, sequence_id: int, status: FinishStatus, error: str | None = None) -> list[SequenceOutput]:
        """Ends one sequence as it stands; what it computed stays valid."""
        sequence = self._by_id.get(sequence_id)
        return [] if sequence is None else [self._final(sequence, status, error)]

    def expire(self, now: float) -> list[SequenceOutput]:
        """Aborts what is past its deadline; `now` is on `time.monotonic`'s clock."""
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
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)
        if sequence.unforked:  # the prompt is left to the next choice
            heir = sequence.fork(sequence.unforked[0])
            heir.unforked = sequence.unforked[1:]
            self._know(heir)
            bisect.insort(self.waiting, heir, key=_ORDER)
        self._num_deadlines -= sequence.deadline is not None
        del self._by_id[sequence.sequence_id]
        siblings = self._by_request[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._by_request[sequence.request_id]

    # ---- integrity ---------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises `IntegrityError` where blocks leaked or are miscounted, or a sequence is in two places or in none."""
        self.blocks.check_integrity(sequence.block_table for sequence in self.running)
        listed = sorted(sequence.sequence_id for sequence in (*self.running, *self.waiting))
        if listed != sorted(self._by_id):
            raise IntegrityError(f"{len(listed)} sequences are queued and {len(self._by_id)} are known")
        if any(sequence.block_table for sequence in self.waiting):
            raise IntegrityError("a waiting sequence holds blocks")

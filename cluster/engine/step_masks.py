"""The masks of a step. The engine requests them when it plans the step and collects them after the forward pass.

Only this module decides which rows are late:

- A row without a constraint never waits.
- A row whose mask is late is left out of the following steps until the mask is ready.
- A row whose time budget is spent fails alone.

A sequence with drafts has one mask after each draft, and draws up to the first missing mask. Tokens that a grammar
forces come with the masks and become drafts of the next step. The engine's thread is the only caller, and sequences
change only through the scheduler's methods.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping

from manta.cluster.engine.constraint_service import ConstraintService
from manta.cluster.engine.kv_blocks import IntegrityError
from manta.cluster.engine.request import FinishStatus, SequenceOutput
from manta.cluster.engine.scheduler import Scheduler
from manta.cluster.engine.sequence import Sequence
from manta.specdecode.forced import ForcedProposer
from manta.specdecode.lengths import Load
from manta.structured.grammar_pool.output_view import OutputView
from manta.structured.grammar_pool.pool import GrammarPool
from manta.structured.grammar_pool.tracked_session import SessionStart
from manta.structured.masks import DEAD_END, FINISHED, LATE, NO_MASK, MaskBatch
from manta.workers.step import StepInput, StepOutput

LONGEST_WAIT_S = 0.03
"""Longest wait for masks behind the forward pass, if every row is constrained. After it the engine handles new
requests, aborts and deadlines.
"""
MOST_STEP_S = 1.0
"""Seconds after which the beginning of the next step no longer tells how long a step takes: the engine was idle."""


class Waiting:
    """Decides how long the ready rows of a step wait for missing ones. Times are seconds of one clock.

    A row that is left out has to be computed again, so it loses the time of a step. The ready rows wait until they have
    lost as much together. Whenever the others come, that loses at most twice as much as the best decision in hindsight
    (Karp, 1992, on renting skis).
    """

    def __init__(self, num_rows: int, step_seconds: float, now: float) -> None:
        self._num_rows = num_rows
        self._step_seconds = step_seconds
        self._num_ready = 0
        self._looked_at = now
        self._lost = 0.0
        """Seconds that ready rows have waited, summed over the rows."""

    def is_over(self, num_missing: int, now: float) -> bool:
        """Returns whether to go on without the missing rows, which are `num_missing` now."""
        self._lost += self._num_ready * (now - self._looked_at)
        self._num_ready, self._looked_at = self._num_rows - num_missing, now
        return self._num_ready > 0 and num_missing * self._step_seconds <= self._lost


class StepMasks:
    """The masks of one step. Call `begin`, `collect` and `settle` once each, in this order; if the engine plans ahead,
    call `end_sequences` instead of `settle`.

    A failed step loses nothing, because a session is a function of its tokens. `step_seconds` is the time of a step
    without such waits, which a row loses if its mask is late.
    """

    def __init__(
        self,
        pool: GrammarPool | None,
        scheduler: Scheduler,
        forced: ForcedProposer | None,
        step_seconds: float,
    ) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._forced = forced
        self._step_seconds = step_seconds
        self._step_id = 0
        self.began_at = 0.0
        """Time of `begin` (`time.perf_counter`); 0 without a pool."""
        self._slots: list[int] = []
        """The mask slot of each sample point, as in `MaskBatch`."""
        self._points: dict[int, list[int]] = {}
        """Ids of constrained sequences, each with the indices of its sample points by position."""
        self._sequences: list[Sequence] = []
        """The sequences of `_points`."""
        self._drafts: dict[int, list[int]] = {}
        self._tried: list[tuple[Sequence, int, list[int]]] = []
        """Sequences with forced drafts, each with its length before the step and the drafts."""
        self._finished: list[tuple[Sequence, list[int], FinishStatus]] = []
        """(sequence, output, finish): the sequence ends with `finish` if the step leaves it with this output."""
        self._failed: dict[int, str] = {}
        self._allows_one: dict[int, list[bool]] = {}
        """Ids of sequences that report origins, with whether each sample point's mask leaves a single token."""
        self.num_late = 0
        """Sequences that draw nothing in this step because their masks are late."""
        self.num_dead_ends = 0
        """Sequences that ended because their constraint left no token to draw."""
        self.waited = 0.0
        """Seconds that the draw waited for masks behind the forward pass."""
        self.asked_early: list[int] = []
        """Sessions whose masks for the next step were requested early."""
        self.forced_tokens: dict[int, list[int]] = {}
        """Sequence ids with the tokens that the grammar forces next."""

    def begin(self, step: StepInput) -> None:
        """Requests the masks of the step's constrained sample points; returns at once."""
        pool = self._pool
        if pool is None:
            return
        self.began_at = time.perf_counter()
        self._step_id = step.step_id
        self._drafts = {item.sequence_id: item.draft_token_ids for item in step.scheduled if item.draft_token_ids}
        self._find_points(step)
        self._slots = [NO_MASK] * len(step.sample_points)
        for sequence in self._sequences:
            if sequence.sequence_id not in pool:
                pool.start(sequence.sequence_id, _session_start(sequence))
            drafts = self._drafts.get(sequence.sequence_id)
            if drafts and self._forced is not None and sequence.draft_proposer == self._forced.name:
                self._tried.append((sequence, len(sequence.token_ids), drafts))
        if self._sequences:
            _ask(pool, self._sequences, self._drafts)

    def _find_points(self, step: StepInput) -> None:
        points = step.sample_points
        order: Iterable[int] = range(len(points))
        if self._drafts:
            order = sorted(order, key=lambda index: points[index].position)
        for index in order:
            sequence_id = points[index].sequence_id
            if sequence_id in self._points:
                self._points[sequence_id].append(index)
                continue
            sequence = self._scheduler.get(sequence_id)
            if sequence is None or not sequence.is_masked or step.step_id < sequence.first_step:
                continue  # the last case: preempted after the step was planned, so its draw is ignored
            self._points[sequence_id] = [index]
            self._sequences.append(sequence)

    def collect(self, is_computing: Callable[[], bool] = lambda: False) -> MaskBatch | None:
        """Returns the masks that are ready when the forward pass is over; None for a step without constraints.

        `is_computing` returns whether the forward pass still runs.
        """
        pool = self._pool
        if pool is None or not self._points:
            return None
        missing = self._wait(pool, is_computing)
        adjustments = {}
        for sequence, plain_row in zip(self._sequences, pool.plain_rows(self._points), strict=True):
            sequence_id = sequence.sequence_id
            points = self._points[sequence_id]
            is_missing = sequence_id in missing
            if plain_row is not None and sequence.constraint is None and pool.buffer.is_free[plain_row]:
                sequence.is_masked = False
            if plain_row is not None and len(points) == 1 and not (is_missing or sequence.params.token_origins):
                self._slots[points[0]] = plain_row
                continue
            for index in points:
                self._slots[index] = LATE
            if is_missing:
                self._scheduler.wait_for_mask(sequence)
                self.num_late += 1
                continue
            rows = self._rows(pool, sequence)
            if sequence.params.token_origins:
                self._allows_one[sequence_id] = [pool.buffer.allows_one(slot) for slot in rows]
            for index, slot in zip(points, rows, strict=False):  # points without a row stay late
                self._slots[index] = slot
                if pool.buffer.num_adjustments[slot]:
                    adjustments[index] = pool.buffer.adjustments(slot)
        return MaskBatch(self._step_id, self._slots, pool.buffer.rows, adjustments)

    def _wait(self, pool: GrammarPool, is_computing: Callable[[], bool]) -> set[int]:
        """Waits for masks, and returns the sessions whose masks are late.

        Waiting costs nothing while the model runs. If every row is constrained, the step waits longer, because no
        unconstrained row is delayed (`Waiting`).
        """
        ids = list(self._points)
        if is_computing():
            pool.wait(ids, math.inf, lambda count: not is_computing())
        num_constrained = sum(len(points) for points in self._points.values())
        if num_constrained == len(self._slots):
            started = time.perf_counter()
            waiting = Waiting(len(ids), self._step_seconds, started)
            pool.wait(ids, LONGEST_WAIT_S, lambda count: waiting.is_over(count, time.perf_counter()), for_drafts=True)
            self.waited = time.perf_counter() - started
        # Look again: the masks of a grammar worker that was replaced in the meantime are lost.
        return {session_id for session_id in ids if not pool.is_ready(session_id)}

    def _rows(self, pool: GrammarPool, sequence: Sequence) -> list[int]:
        """Returns the mask slots of a sequence's sample points, up to the first missing mask. Records a sequence that
        failed or that its mask ends.
        """
        sequence_id = sequence.sequence_id
        error = pool.session(sequence_id).error()
        if error is not None:
            self._failed[sequence_id] = f"the constraint failed: {error}"
            return []
        finish = finish_of(pool, sequence_id)
        if finish is not None:
            self._finished.append((sequence, list(_output(sequence)), finish))
            return []
        rows = [pool.session(sequence_id).slot]
        if len(self._points[sequence_id]) > 1:
            draft_rows, ends = pool.session(sequence_id).draft_rows()
            rows += draft_rows
            if ends:
                output = list(_output(sequence)) + self._drafts[sequence_id][: len(rows)]
                self._finished.append((sequence, output, FinishStatus.FINISHED_STOPPED))
        return rows

    def mark_forced(self, output: StepOutput) -> None:
        """Notes in the log-probabilities which tokens were the only ones that their masks left."""
        for sequence_id, allows_one in self._allows_one.items():
            for entry, is_forced in zip(output.logprobs.get(sequence_id, ()), allows_one, strict=False):
                entry.origin = "forced" if is_forced else ""

    def mark_ends(self, output: StepOutput) -> None:
        """Notes in the errors of rows without a token whether the constraint lets the text end there."""
        if self._pool is None or not output.errors:
            return
        for sequence in self._sequences:
            error = output.errors.get(sequence.sequence_id)
            if error is not None and error.leaves_none and sequence.num_output_tokens:
                slot = self._slots[self._points[sequence.sequence_id][0]]
                error.may_end = self._pool.buffer.allows_any(slot, sequence.eos_token_ids)
                self.num_dead_ends += not error.may_end

    def end_sequences(self) -> list[SequenceOutput]:
        """Ends the sequences that the step's masks end, and those whose constraint failed."""
        outputs: list[SequenceOutput] = []
        for sequence, output, finish in self._finished:
            if list(_output(sequence)) == output:
                if finish is FinishStatus.FINISHED_LENGTH:
                    self.num_dead_ends += 1
                outputs += self._scheduler.end(sequence.sequence_id, finish)
        for sequence_id, error in self._failed.items():
            outputs += self._scheduler.end(sequence_id, FinishStatus.FINISHED_INTERNAL_ERROR, error)
        return outputs

    def settle(self) -> list[SequenceOutput]:
        """Ends the sequences that the step's masks end, and requests the next masks early.

        Most finished grammars are then known before the next step is planned, which saves that step a row.
        """
        pool = self._pool
        if pool is None or not self._points:
            return []
        if self._forced is not None:
            for sequence, num_before, drafts in self._tried:
                self._forced.learn(sequence.sequence_id, drafts, sequence.token_ids[num_before:])
        outputs = self.end_sequences()
        going_on = [
            s for s in self._sequences if s.finish is None and s.block_tables and s.is_masked and not s.waits_for_mask
        ]
        if going_on:
            if self._forced is not None:
                self.forced_tokens = {s.sequence_id: pool.session(s.sequence_id).forced(_output(s)) for s in going_on}
            _ask(pool, going_on)
            self.asked_early = [sequence.sequence_id for sequence in going_on]
        return outputs


class EngineMasks:
    """The masks across steps: which were requested early, which are late, which tokens are forced, which sessions are
    open.
    """

    def __init__(self, constraints: ConstraintService, scheduler: Scheduler, forced: ForcedProposer | None) -> None:
        self.forced = forced
        self._constraints = constraints
        self._scheduler = scheduler
        self._last = StepMasks(None, scheduler, None, step_seconds=0.0)
        self._num_late_before = 0
        self._num_dead_ends_before = 0
        self._step_seconds = 0.0

    @property
    def pool(self) -> GrammarPool | None:
        """The grammar pool; None until the first constraint."""
        return self._constraints.pool

    @property
    def has_sessions(self) -> bool:
        """Whether any sequence of the last step is held to a constraint."""
        return self.pool is not None and bool(self.pool.session_ids)

    @property
    def num_late(self) -> int:
        """Sequences that drew nothing in a step because their masks were late, summed over the engine's life."""
        return self._num_late_before + self._last.num_late

    @property
    def num_dead_ends(self) -> int:
        """Sequences that ended because no token could follow, over the engine's life."""
        return self._num_dead_ends_before + self._last.num_dead_ends

    def begin(self, step: StepInput) -> StepMasks:
        """Requests the masks of a step; returns at once."""
        self._end_sessions()
        self._num_late_before += self._last.num_late
        self._num_dead_ends_before += self._last.num_dead_ends
        before, self._last = self._last, StepMasks(self.pool, self._scheduler, self.forced, self._step_seconds)
        self._last.begin(step)
        if before.began_at and (seconds := self._last.began_at - before.began_at - before.waited) < MOST_STEP_S:
            slowly_risen = self._step_seconds + 0.1 * (seconds - self._step_seconds)
            self._step_seconds = min(seconds, slowly_risen)  # a step with a long prompt says nothing of the others
        return self._last

    def before_step(self) -> list[SequenceOutput]:
        """Applies the masks that arrived since the last step, and supervises the grammar workers.

        Ends sequences whose grammar is finished, lets late sequences go on if their masks are ready, and proposes
        forced tokens as drafts.
        """
        pool, last = self.pool, self._last
        if pool is None:
            return []
        pool.supervise()
        outputs: list[SequenceOutput] = []
        for sequence_id in last.asked_early:
            if sequence_id in pool and (finish := finish_of(pool, sequence_id)) is not None:
                if finish is FinishStatus.FINISHED_LENGTH:
                    self._num_dead_ends_before += 1
                outputs += self._scheduler.end(sequence_id, finish)
        for sequence in self._late:
            self._scheduler.wait_for_mask(sequence, not pool.is_ready(sequence.sequence_id))
        if self.forced is not None:
            self._propose_forced(pool, self.forced)
        return outputs

    @property
    def _late(self) -> list[Sequence]:
        """The running sequences with late masks. A sequence with a step under way is left out: its position is not
        known yet.
        """
        running = self._scheduler.running
        return [sequence for sequence in running if sequence.waits_for_mask and not sequence.num_pending_tokens]

    def is_late_mask_there(self) -> bool:
        """Returns whether the mask of a late sequence is ready. Supervises the grammar workers too."""
        if self.pool is None:
            return False
        self.pool.supervise()
        return any(self.pool.is_ready(sequence.sequence_id) for sequence in self._late)

    def _propose_forced(self, pool: GrammarPool, forced: ForcedProposer) -> None:
        """Proposes as drafts the forced tokens that are known now or were known after the last step."""
        found: dict[int, list[int]] = {}
        sequences: dict[int, Sequence] = {}
        for sequence in self._scheduler.running:
            sequence_id = sequence.sequence_id
            if sequence.waits_for_mask or sequence_id not in pool:
                continue
            if sequence.draft_token_ids and not forced.may_replace(sequence.draft_proposer):
                continue
            tokens = pool.session(sequence_id).forced(_output(sequence)) or self._last.forced_tokens.get(sequence_id)
            if tokens:
                found[sequence_id], sequences[sequence_id] = tokens, sequence
        if found:
            for sequence_id, drafts in forced.propose(found, self._load()).items():
                self._scheduler.propose(sequences[sequence_id], drafts, forced.name)

    def _load(self) -> Load:
        """Returns the load of the next step with the drafts that sequences already have."""
        rows = [sequence for sequence in self._scheduler.running if not sequence.waits_for_mask]
        return Load(len(rows) + sum(len(sequence.draft_token_ids) for sequence in rows), len(rows))

    # ---- sessions ----------------------------------------------------------------------------------------------

    def _end_sessions(self) -> None:
        """Ends the sessions of sequences that do not run, or need no masks any more. A preempted sequence frees its
        mask slots and gets a new session, built from its tokens, when it runs again.
        """
        if self.pool is None:
            return
        for session_id in self.pool.session_ids:
            sequence = self._scheduler.get(session_id)
            if sequence is None or not (sequence.block_tables and sequence.is_masked):
                self.pool.end(session_id)
                if self.forced is not None:
                    self.forced.forget((session_id,))

    def check_integrity(self) -> None:
        """Ends unneeded sessions. Raises `IntegrityError` if the pool has lost a mask slot."""
        self._end_sessions()
        if self.pool is not None and self.pool.num_lost_slots:
            raise IntegrityError(f"{self.pool.num_lost_slots} slots of the grammar pool are lost")


def finish_of(pool: GrammarPool, session_id: int) -> FinishStatus | None:
    """Returns how the mask ends the sequence: as stopped if complete, by length at a dead end, None if it goes on."""
    if not pool.is_ready(session_id) or pool.session(session_id).error() is not None:
        return None
    flags = pool.buffer.flags[pool.session(session_id).slot]
    if flags & DEAD_END:
        return FinishStatus.FINISHED_LENGTH
    return FinishStatus.FINISHED_STOPPED if flags & FINISHED else None


def _ask(pool: GrammarPool, sequences: Iterable[Sequence], drafts: Mapping[int, list[int]] | None = None) -> None:
    pool.prepare(((sequence.sequence_id, _output(sequence)) for sequence in sequences), drafts)


def _output(sequence: Sequence) -> OutputView:
    return OutputView(sequence.token_ids, sequence.num_prompt_tokens)


def _session_start(sequence: Sequence) -> SessionStart:
    end_token_ids = (*sequence.eos_token_ids, *sequence.params.stop_token_ids)
    thinking, constraint = sequence.params.thinking, sequence.constraint
    if constraint is None:
        return SessionStart(None, b"", end_token_ids, thinking)
    return SessionStart(constraint.spec, constraint.compiled, end_token_ids, thinking)

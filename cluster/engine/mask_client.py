"""The engine's client of the grammar pool: `prepare` starts a step's masks, `collect` takes those that are there.

Who is late is decided here alone: a row without a constraint never waits, a row whose mask is late sits the step out
and comes back when the mask is there, and a row whose budget is spent fails alone. A sequence with drafts has a row
behind each: it draws as far as they are there, and what a grammar forces comes back with them, for the next step's
drafts. Compiler and pool start with the first constraint or with `start`. `start` and `resolve` may be called from any
thread, the rest is the engine's.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import Future

import numpy as np

from cluster.config import EngineConfig
from cluster.engine.kv_blocks import IntegrityError
from cluster.engine.request import FinishStatus, RequestRefused, SequenceOutput
from cluster.engine.scheduler import Scheduler
from cluster.engine.sequence import Sequence
from cluster.engine.stats import ConstraintStats, GrammarPoolStats
from specdecode.acceptance import Acceptance, num_accepted
from specdecode.lengths import Load, StepCost, choose_lengths
from structured.compiler import Compiler
from structured.constraint import ConstraintError, ConstraintSpec, Resolved
from structured.grammar_worker import GRAMMAR_CACHE_BYTES, SessionStart
from structured.masks import FINISHED, LATE, MAX_FORCED, NO_MASK, MaskBatch
from structured.pool import GrammarPool
from structured.vocabulary import Vocabulary
from workers.model_info import ModelInfo
from workers.step import StepInput

PATIENCE = 0.25
"""Where every row is constrained, those that are ready wait this share of a step for the others."""

PROBE_INTERVAL = 16
"""Steps between two tries of a forced token where none pays for itself."""

LONGEST_WAIT_S = 0.03
"""Where every row is constrained and no mask is there, a step waits this long for the first; then all sit it out, and
the engine sees to new requests, aborts and deadlines.
"""


class MaskClient:
    """One engine's constraints, from proof to mask."""

    def __init__(self, config: EngineConfig, model: ModelInfo, scheduler: Scheduler) -> None:
        self._config = config
        self._model = model
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self._compiler: Compiler | None = None
        self.pool: GrammarPool | None = None
        self._points: dict[int, list[int]] = {}
        """Constrained sequence to its sample points of this step, in the order of their positions."""
        self._sequences: list[Sequence] = []
        """Those of `_points`."""
        self._drafts: dict[int, list[int]] = {}
        self._asked_early: list[int] = []
        self._finished: list[tuple[Sequence, list[int]]] = []
        """Sequences that are over where this is their output behind the step."""
        self._forced: dict[int, list[int]] = {}
        """What the masks of the last step said of the next tokens."""
        self._tried: list[tuple[Sequence, int, list[int]]] = []
        """Sequences with forced drafts in this step: their length before it, and the drafts."""
        self._acceptance: dict[int, Acceptance] = {}
        """Of forced drafts, by sequence; a grammar may leave their spelling open."""
        self.step_cost = StepCost(model.step_costs) if model.step_costs else None
        """What lengths of forced drafts are weighed against; None where they are not."""
        self._num_withheld: dict[int, int] = {}
        self._failed: dict[int, str] = {}
        self._step_started = 0.0
        self._step_seconds = 0.0
        self.num_late = 0
        """Rows that sat a step out, over the engine's life."""

    # ---- before admission ----------------------------------------------------------------------------------------

    def resolve(self, spec: ConstraintSpec) -> Future[Resolved]:
        """The future raises `RequestRefused` where the constraint cannot be served."""
        future: Future[Resolved] = Future()
        try:
            compiler = self.start()
        except RequestRefused as error:
            future.set_exception(error)
            return future

        def settle(done: Future[Resolved]) -> None:
            if not future.set_running_or_notify_cancel():
                return
            error = done.exception()
            if isinstance(error, ConstraintError):
                future.set_exception(RequestRefused(str(error), "constraint"))
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(done.result())

        compiler.resolve(spec).add_done_callback(settle)
        return future

    def start(self) -> Compiler:
        """Starts compiler and pool where they have not been; they get ready in the background.

        Raises `RequestRefused` where the model has no tokenizer to read a vocabulary from.
        """
        with self._lock:
            if self._compiler is None:
                config = self._config
                folder = config.tokenizer or self._model.folder
                try:
                    vocabulary = Vocabulary.load(folder, self._model.vocab_size, self._model.eos_token_ids)
                except ConstraintError as error:
                    raise RequestRefused(str(error), "constraint") from error
                compiler = Compiler(vocabulary, config.constraints)
                weakref.finalize(self, compiler.close)
                actors = config.grammar_pool.form == "actors"
                speculative = config.speculative
                num_drafts = 0 if speculative is None else speculative.max_draft_tokens
                pool = GrammarPool(
                    config.grammar_pool,
                    vocabulary,
                    config.max_num_sequences,
                    actors,
                    num_drafts,
                    # One for the token that is drawn behind the drafts, the rest for the next step.
                    min(num_drafts + 1, MAX_FORCED) if self._proposes_forced else 0,
                )
                weakref.finalize(self, pool.close)
                self._compiler, self.pool = compiler, pool
            return self._compiler

    @property
    def _proposes_forced(self) -> bool:
        speculative = self._config.speculative
        return speculative is not None and "forced" in speculative.proposers

    @property
    def num_compiled(self) -> int:
        """Constraints compiled, over the engine's life."""
        return 0 if self._compiler is None else self._compiler.num_compiled

    @property
    def num_replaced(self) -> int:
        """Grammar workers that were replaced, over the engine's life."""
        return 0 if self.pool is None else self.pool.num_replaced

    def stats(self) -> ConstraintStats:
        """Callable from any thread."""
        compiler, pool = self._compiler, self.pool
        if compiler is None or pool is None:
            return ConstraintStats()
        workers = list(pool.workers)
        num_grammars, grammar_bytes = pool.buffer.cached[[worker.index for worker in workers]].sum(axis=0).tolist()
        return ConstraintStats(
            num_compilers=compiler.num_processes,
            num_compilers_alive=compiler.num_alive,
            num_cached=len(compiler.cache),
            cached_bytes=compiler.cache.num_bytes,
            max_cached_bytes=compiler.cache.max_bytes,
            num_grammars=num_grammars,
            grammar_bytes=grammar_bytes,
            max_grammar_bytes=GRAMMAR_CACHE_BYTES * len(workers),
        )

    # ---- a step --------------------------------------------------------------------------------------------------

    def before_step(self) -> list[SequenceOutput]:
        """Ends sequences whose grammar is finished, lets late ones go on whose masks are there now, proposes forced
        tokens, and looks after the pool's workers.
        """
        if self.pool is None:
            return []
        self.pool.supervise()
        outputs: list[SequenceOutput] = []
        for sequence_id in self._asked_early:
            if sequence_id in self.pool and self._is_finished(self.pool, sequence_id):
                outputs += self._scheduler.end(sequence_id, FinishStatus.FINISHED_STOPPED)
        self._asked_early = []
        for sequence in self._late:
            sequence.waits_for_mask = not self.pool.is_ready(sequence.sequence_id)
        if self._proposes_forced:
            self._propose_forced(self.pool)
        return outputs

    @property
    def _late(self) -> list[Sequence]:
        return [sequence for sequence in self._scheduler.running if sequence.waits_for_mask]

    def is_late_mask_there(self) -> bool:
        """Whether a sequence that sits steps out may go on. Looks after the pool's workers, too."""
        if self.pool is None:
            return False
        self.pool.supervise()
        return any(self.pool.is_ready(sequence.sequence_id) for sequence in self._late)

    def _propose_forced(self, pool: GrammarPool) -> None:
        """Makes forced tokens drafts where they are known, by now or since the last step, and nobody who comes first
        has proposed some.
        """
        speculative = self._config.speculative
        assert speculative is not None
        before = speculative.proposers[: speculative.proposers.index("forced")]
        forced, self._forced = self._forced, {}
        proposals: list[tuple[Sequence, list[int]]] = []
        for sequence in self._scheduler.running:
            sequence_id = sequence.sequence_id
            if sequence.waits_for_mask or sequence_id not in pool:
                continue
            if sequence.draft_token_ids and sequence.draft_proposer in before:
                continue
            tokens = pool.forced(sequence_id, _output(sequence)) or forced.get(sequence_id)
            if tokens:
                proposals.append((sequence, tokens[: speculative.max_draft_tokens]))
        for (sequence, tokens), length in zip(proposals, self._lengths(proposals), strict=True):
            if length:
                sequence.draft_token_ids = tokens[:length]
                sequence.draft_proposer = "forced"

    def _lengths(self, proposals: list[tuple[Sequence, list[int]]]) -> list[int]:
        """As many of the tokens as pay for themselves, by what became of each sequence's and what a step costs."""
        limits = [len(tokens) for _, tokens in proposals]
        if self.step_cost is None or not proposals:
            return limits
        records = [self._acceptance.get(sequence.sequence_id) for sequence, _ in proposals]
        acceptance = np.array([1.0 if record is None else record.mean for record in records])
        drafted = [s.draft_token_ids for s in self._scheduler.running if not s.waits_for_mask and s.draft_token_ids]
        num_rows = sum(not sequence.waits_for_mask for sequence in self._scheduler.running)
        load = Load(num_rows + sum(map(len, drafted)), num_rows)
        lengths = choose_lengths(acceptance, np.array(limits), load, self.step_cost).tolist()
        for index, (sequence, _) in enumerate(proposals):
            if not lengths[index]:
                withheld = self._num_withheld.get(sequence.sequence_id, 0) + 1
                self._num_withheld[sequence.sequence_id] = withheld
                lengths[index] = int(withheld % PROBE_INTERVAL == 0)
        return lengths

    def _learn(self) -> None:
        """From what became of the step's forced drafts; those behind the last new token were not judged."""
        for sequence, num_before, drafts in self._tried:
            gained = sequence.token_ids[num_before:]
            num_judged = min(len(drafts), len(gained))
            if num_judged:
                record = self._acceptance.setdefault(sequence.sequence_id, Acceptance(prior=1.0))
                record.learn(num_accepted(drafts, gained), num_judged)
        self._tried = []

    @staticmethod
    def _is_finished(pool: GrammarPool, sequence_id: int) -> bool:
        if not pool.is_ready(sequence_id) or pool.error(sequence_id) is not None:
            return False
        return bool(pool.buffer.flags[pool.slot(sequence_id)] & FINISHED)

    def prepare(self, step: StepInput) -> None:
        """Starts the masks of the step's constrained sample points; returns at once."""
        self._end_sessions()
        self._step_started = time.perf_counter()
        self._points, self._sequences = {}, []
        self._drafts = {item.sequence_id: item.draft_token_ids for item in step.scheduled if item.draft_token_ids}
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
            if sequence is not None and sequence.constraint is not None:
                self._points[sequence_id] = [index]
                self._sequences.append(sequence)
        if not self._points:
            return
        step.mask_follows = True
        pool = self.pool
        assert pool is not None, "a constraint was resolved, so the pool has started"
        for sequence in self._sequences:
            if sequence.sequence_id not in pool:
                pool.start(sequence.sequence_id, _session_start(sequence))
        self._tried = [
            (sequence, len(sequence.token_ids), self._drafts[sequence.sequence_id])
            for sequence in self._sequences
            if sequence.sequence_id in self._drafts and sequence.draft_proposer == "forced"
        ]
        _ask(pool, self._sequences, self._drafts)

    def collect(self, step: StepInput) -> MaskBatch | None:
        """The masks that are there when the forward pass is over; None for a step without constraints."""
        if not self._points:
            return None
        pool = self.pool
        assert pool is not None
        num_constrained = sum(len(points) for points in self._points.values())
        missing = self._wait(pool, all_constrained=num_constrained == len(step.sample_points))
        slots = [NO_MASK] * len(step.sample_points)
        adjustments = {}
        for sequence in self._sequences:
            sequence_id = sequence.sequence_id
            points = self._points[sequence_id]
            for index in points:
                slots[index] = LATE
            if sequence_id in missing:
                sequence.waits_for_mask = True
                self.num_late += 1
                continue
            error = pool.error(sequence_id)
            if error is not None:
                self._failed[sequence_id] = f"the constraint failed: {error}"
                continue
            if self._is_finished(pool, sequence_id):
                self._finished.append((sequence, _output(sequence)))
                continue
            rows = [pool.slot(sequence_id)]
            if len(points) > 1:
                draft_rows, ends = pool.draft_rows(sequence_id)
                rows += draft_rows
                if ends:
                    self._finished.append((sequence, _output(sequence) + self._drafts[sequence_id][: len(rows)]))
            for index, slot in zip(points, rows, strict=False):  # points without a row stay late
                slots[index] = slot
                if pool.buffer.num_adjustments[slot]:
                    adjustments[index] = pool.buffer.adjustments(slot)
        self._step_seconds = 0.9 * self._step_seconds + 0.1 * (time.perf_counter() - self._step_started)
        return MaskBatch(step.step_id, slots, pool.buffer.rows, adjustments)

    def _wait(self, pool: GrammarPool, all_constrained: bool) -> set[int]:
        """Sessions whose masks are late. Where all rows are constrained a step waits a little: nobody in it is kept
        waiting, and one that draws nothing is computed again.
        """
        ids = list(self._points)
        pool.wait(ids, LONGEST_WAIT_S if all_constrained else 0.0, lambda count: count < len(ids))
        if all_constrained:
            pool.wait(ids, PATIENCE * self._step_seconds, lambda count: count == 0, pool.is_complete)
        # Asked again, for a row that was there has gone where its worker was replaced meanwhile.
        return {session_id for session_id in ids if not pool.is_ready(session_id)}

    def settle(self) -> list[SequenceOutput]:
        """Ends what the step's masks ended, and asks early for the next masks: most finished grammars are then known
        before the next step is planned, and spare it a row.
        """
        self._learn()
        outputs: list[SequenceOutput] = []
        for sequence, output in self._finished:
            if _output(sequence) == output:
                outputs += self._scheduler.end(sequence.sequence_id, FinishStatus.FINISHED_STOPPED)
        for sequence_id, error in self._failed.items():
            outputs += self._scheduler.end(sequence_id, FinishStatus.FINISHED_INTERNAL_ERROR, error)
        going_on = [s for s in self._sequences if s.finish is None and s.block_table and not s.waits_for_mask]
        if going_on:
            pool = self.pool
            assert pool is not None
            if self._proposes_forced:
                self._forced = {s.sequence_id: pool.forced(s.sequence_id, _output(s)) for s in going_on}
            _ask(pool, going_on)
            self._asked_early = [sequence.sequence_id for sequence in going_on]
        self.forget_step()
        return outputs

    def forget_step(self) -> None:
        """The step came to nothing; sessions stay, for they depend on tokens alone."""
        self._points, self._sequences, self._drafts, self._finished, self._failed = {}, [], {}, [], {}
        self._tried = []

    def _end_sessions(self) -> None:
        """Only running sequences have one: those that were preempted leave their places to those that took theirs, and
        get a session again, made from their tokens, when they run again.
        """
        if self.pool is None:
            return
        for session_id in self.pool.session_ids:
            sequence = self._scheduler.get(session_id)
            if sequence is None or not sequence.block_table:
                self.pool.end(session_id)
                self._acceptance.pop(session_id, None)
                self._num_withheld.pop(session_id, None)

    # ---- state ---------------------------------------------------------------------------------------------------

    def pool_stats(self) -> GrammarPoolStats:
        """May be called from any thread."""
        pool = self.pool
        if pool is None:
            return GrammarPoolStats()
        return GrammarPoolStats(
            num_sessions=pool.num_sessions,
            num_slots=pool.num_session_slots,
            num_slots_in_use=pool.num_session_slots_in_use,
            num_workers=len(pool.workers),
            num_hanging_workers=pool.num_given_up,
        )

    def check_integrity(self) -> None:
        """Ends the sessions that nobody needs; raises `IntegrityError` where the pool has lost a slot."""
        self._end_sessions()
        if self.pool is not None and self.pool.num_lost_slots:
            raise IntegrityError(f"{self.pool.num_lost_slots} slots of the grammar pool are lost")


def _ask(pool: GrammarPool, sequences: Iterable[Sequence], drafts: Mapping[int, list[int]] | None = None) -> None:
    pool.prepare(((sequence.sequence_id, _output(sequence)) for sequence in sequences), drafts)


def _output(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :]


def _session_start(sequence: Sequence) -> SessionStart:
    assert sequence.constraint is not None
    end_token_ids = (*sequence.eos_token_ids, *sequence.params.stop_token_ids)
    return SessionStart(sequence.constraint.spec, sequence.constraint.compiled, end_token_ids)

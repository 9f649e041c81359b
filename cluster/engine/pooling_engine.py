"""The engine of a model that pools: steps over the texts of many requests, without a cache and without tokens to draw.

A step is a batch of texts by tokens. Between two layers of a step, requests that have just come and are short run at
once, as long as they have fewer tokens than the step: a text beside a batch of a thousand so waits for one layer, not
for the batch. `cluster/serve/engine/pooling_replica.py` runs the steps in a thread of their own, and
`cluster/text/offline_pooling.py` in its caller's. `add`, `abort` and questions about the state may come from any
thread; one thread at a time runs steps.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from manta.cluster.config import EngineConfig
from manta.cluster.engine.executors.deadline import StepWatch
from manta.cluster.engine.pooling_queue import OnEnd, PoolingJob, PoolingQueue, Turn
from manta.cluster.engine.pooling_request import PoolingRequest, PoolingResult, check_text
from manta.cluster.engine.stats import ConstraintStats, DraftCounts, EngineStats, GrammarPoolStats
from manta.structured.refusals import Refusal
from manta.structured.visible_logs import logger_of
from manta.workers.model_info import ModelInfo
from manta.workers.models.model_config import ModelError
from manta.workers.pooling.pooling_model import PooledText
from manta.workers.pooling.pooling_worker import PoolingWorker

logger = logger_of(__name__)

CPU_STEP_TOKENS = 512
"""Most tokens of a step on a CPU, so that other requests soon get their turn. No measurement chose the number."""


PROBE_TOKENS = 16
"""Tokens of the text that shows whether the model works at all."""


class ModelBroken(RuntimeError):
    """The model fails at any text, so its process must be replaced."""


class Pooler(Protocol):
    """What computes the steps. `PoolingWorker` does."""

    @property
    def info(self) -> ModelInfo: ...

    def run(self, texts: Sequence[PooledText], between: Callable[[], None] | None = None) -> np.ndarray:
        """Returns float32 [num_texts, dimension]. Calls `between` between two layers, from where it may be called
        again.
        """
        ...


class PoolingEngine:
    """Raises `ModelError` if the model cannot be loaded, or if an option is set that only models that generate have."""

    def __init__(self, config: EngineConfig, worker: Pooler | None = None) -> None:
        """Without a `worker`, the engine loads the model of the configuration."""
        if config.speculative is not None:
            raise ModelError("speculative drafts tokens, and a model that pools generates none; leave it out")
        self.config = config
        self._worker = worker or PoolingWorker(config)
        self.model: ModelInfo = self._worker.info
        self._has_work = threading.Condition()
        self._queue = PoolingQueue(max(1, config.max_num_waiting) * self.model.max_model_len)
        self._engine_id = secrets.token_hex(8)
        is_cpu = self.model.platform == "cpu"
        self._step_tokens = min(config.max_num_batched_tokens, CPU_STEP_TOKENS if is_cpu else 2**31)
        self._spare = 0
        """Tokens of short requests that may still run inside the step under way."""
        self._has_newcomers = False
        self._num_running = 0
        """Texts in steps."""
        self.is_broken = False
        """Whether the model fails at any text."""
        self._num_steps = 0
        self._progress_at = time.monotonic()
        self.watch = StepWatch()
        """Watches the steps, with those that run between their layers."""

    # ---- in any thread -------------------------------------------------------------------------------------------

    def add(self, request: PoolingRequest, on_end: OnEnd) -> PoolingJob:
        """Adds a request. `on_end` gets its result in the thread that runs the steps. Raises `RequestRefused` for a
        text that does not fit the model, and `QueueFull`.
        """
        for index, text in enumerate(request.texts):
            check_text(text.token_ids, self.model, f"texts[{index}]")
        job = PoolingJob(request, on_end)
        with self._has_work:
            if not self._queue.num_tokens and not self._num_running:
                self._progress_at = time.monotonic()
            self._queue.add(job)
            self._has_newcomers = True
            self._has_work.notify_all()
        return job

    def abort(self, job: PoolingJob) -> None:
        """Ends a job whose result nobody wants any more. What runs of it runs to the end of its step."""
        with self._has_work:
            job.has_ended = True
            self._queue.remove(job)

    def wait(self, timeout_s: float) -> None:
        """Waits until texts wait, at most `timeout_s`."""
        with self._has_work:
            self._has_work.wait_for(lambda: self._queue.num_tokens > 0, timeout_s)

    @property
    def is_away(self) -> bool:
        """Whether a step is so late that it may hang, so that texts had better go to another engine."""
        return self.watch.is_late()

    @property
    def is_hung(self) -> bool:
        """Whether a step hangs that only the end of this process ends."""
        return self.watch.is_hung()

    def stats(self) -> EngineStats:
        with self._has_work:
            num_waiting, num_running = self._queue.num_jobs, self._num_running
        is_idle = not num_waiting and not num_running
        return EngineStats(
            engine_id=self._engine_id,
            num_running=num_running,
            num_waiting=num_waiting,
            kv_usage=0.0,
            num_free_blocks=0,
            num_blocks=0,
            num_cached_blocks=0,
            kv_cache_bytes=0,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            num_preemptions=0,
            num_steps=self._num_steps,
            num_steps_without_progress=0,
            seconds_since_progress=0.0 if is_idle else time.monotonic() - self._progress_at,
            alive=not self.is_broken,
            is_away=self.is_away,
            num_constraints_compiled=0,
            num_late_rows=0,
            num_dead_ends=0,
            num_grammar_workers_replaced=0,
            num_rank_rebuilds=0,
            num_rank_disagreements=0,
            drafts=DraftCounts(),
            grammar_pool=GrammarPoolStats(),
            constraints=ConstraintStats(),
        )

    # ---- in the thread that runs steps ---------------------------------------------------------------------------

    def step(self) -> bool:
        """Runs one step. Returns False if nothing waits. Raises `ModelBroken` if the model fails at any text; whoever
        waits then asks another engine.
        """
        with self._has_work:
            overdue = self._queue.overdue()
            for job in overdue:
                self._queue.remove(job)
            turns = self._queue.take(self._step_tokens, self.config.max_num_sequences)
            self._has_newcomers = self._queue.num_tokens > 0  # short requests may still wait for a step of their own
        for job in overdue:
            refusal = Refusal("deadline", place="request_timeout_s", cause="the texts had to wait too long")
            self._end(job, PoolingResult(refusal=refusal))
        if not turns:
            return False
        self._spare = num_tokens = sum(len(turn.text.token_ids) for turn in turns)
        self.watch.begin(num_tokens)
        try:
            self._run(turns, is_outer=True)
        except ModelBroken:
            self.watch.forget()
            raise
        self.watch.end()
        self._spare = 0
        return True

    def _run_newcomers(self) -> None:
        """Runs short requests that came during a step, between two of its layers."""
        if not self._has_newcomers or self._spare <= 0:
            return
        with self._has_work:
            self._has_newcomers = False
            turns = self._queue.take(self._spare, self.config.max_num_sequences, only_whole=True)
        if turns:
            self._spare -= sum(len(turn.text.token_ids) for turn in turns)
            self._run(turns, is_outer=False)

    def _run(self, turns: list[Turn], is_outer: bool) -> None:
        texts = [PooledText(text.token_ids, text.num_first, text.num_skipped) for text in (turn.text for turn in turns)]
        self._num_running += len(turns)
        try:
            rows = self._worker.run(texts, self._run_newcomers if is_outer else None)
        except Exception as error:  # torch and model code raise what they like
            self._num_running -= len(turns)
            if len(turns) > 1:  # one text may be at fault
                for turn in turns:
                    self._run([turn], is_outer=False)
            else:
                logger.exception("a text of request %s failed", turns[0].job.request.request_id)
                self._probe()
                self._fail(turns[0], f"the model failed ({type(error).__name__})")
            return
        self._num_running -= len(turns)
        self._num_steps += 1
        self._progress_at = time.monotonic()
        for turn, row in zip(turns, rows, strict=True):
            if np.isfinite(row).all():
                self._store(turn, row)
            else:
                self._fail(turn, "the model gives numbers that are not finite (NaN)")

    def _probe(self) -> None:
        """Runs a text that every model takes. Raises `ModelBroken` if that fails, too: after some errors a device fails
        at everything.
        """
        num_tokens = min(PROBE_TOKENS, self.model.max_model_len)
        try:
            self._worker.run([PooledText([0] * num_tokens, num_tokens, 0)])
        except Exception as error:
            self.is_broken = True
            raise ModelBroken(f"the model fails at any text ({type(error).__name__})") from error

    def _store(self, turn: Turn, row: np.ndarray) -> None:
        job = turn.job
        job.num_running -= 1
        job.rows[turn.place] = row
        if job.is_done:
            numbers = np.stack([row for row in job.rows if row is not None]).astype("<f4")
            self._end(job, PoolingResult(numbers=numbers.tobytes(), dimension=numbers.shape[1]))

    def _fail(self, turn: Turn, cause: str) -> None:
        """Ends the request of a text that has no answer. Others go on."""
        with self._has_work:
            self._queue.remove(turn.job)
        turn.job.num_running -= 1
        self._end(turn.job, PoolingResult(refusal=Refusal("failed", cause=cause), text=turn.place))

    def _end(self, job: PoolingJob, result: PoolingResult) -> None:
        if not job.has_ended:
            job.has_ended = True
            job.on_end(job, result)

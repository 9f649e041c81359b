"""One batch until its end: its lease, its lines, its result files. `cluster/batch/batch_runner.py` starts it.

    acquire the lease ─▶ answer the lines ─▶ decide the ending ─▶ write the files ─▶ settle ─▶ publish, close
                         (lease is checked before each save)

Every step may be interrupted and repeated, by this runner or another one. The three decisions (`Records.decide`,
`settle` and `end`) are claims: a runner that comes second continues with what the first one decided.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO, Literal, NamedTuple, TypeVar

from manta.cluster.batch.batch_job import Answer, BatchJob, Pace
from manta.cluster.batch.batch_job import run as answer_all
from manta.cluster.batch.journal import BatchRefused, DoneLines, Line, check_encoding, count_lines, read_lines
from manta.cluster.batch.lease import RENEW_S, Holder, Lease, LeaseLost, acquire
from manta.cluster.batch.line_places import Places
from manta.cluster.batch.lines import BatchResult, custom_id_of, encode
from manta.cluster.batch.stored import StoredResults
from manta.cluster.protocol.batches_api import Batch, BatchError, BatchErrors, FileObject, RequestCounts
from manta.cluster.storage.file_records import Upload, age_s
from manta.cluster.storage.records import (
    ENDED,
    BatchOutcome,
    BatchProgress,
    Ending,
    Finalizing,
    InputMissing,
    Records,
    new_attempt,
)
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

FLUSH_CHECK_S = 0.25
"""Seconds between two checks whether results are due to be flushed."""
MAX_FLUSH_FAILURES = 5
"""Flushes that may fail in a row before the batch is left for a later run; until then its results stay in memory."""
UNREADABLE_GRACE_S = 60.0
"""Age in seconds from which a batch that cannot be decoded fails. A store may show a younger one before it is
complete.
"""

GivenUp = Literal["expired", "cancelled", "failed"]
"""Endings that leave lines without an answer. A batch ends as `failed` if its results have no room."""
_REASONS: dict[Ending, BatchError] = {
    "expired": BatchError("batch_expired", "the completion window ended before this request was answered"),
    "cancelled": BatchError("batch_cancelled", "the batch was cancelled before this request was answered"),
    "failed": BatchError(
        "quota_exceeded", "your files and results have as many bytes as may be kept (batches.max_stored_bytes)"
    ),
}
_Kind = Literal["output", "errors"]
_Saved = TypeVar("_Saved")


class LeaseHeld(Exception):
    """Another runner has the batch; its lease ends in `left_s` seconds."""

    def __init__(self, left_s: float) -> None:
        super().__init__(f"its lease ends in {left_s:.1f} s")
        self.left_s = left_s


class LinesMissing(Exception):
    """Answered lines are not stored, or not listed yet. The next run asks them again."""


class Answering(NamedTuple):
    """The function and the limits with which a runner answers the lines of all its batches."""

    answer: Answer
    places: Places
    max_line_bytes: int
    pace: Pace | None = None


class BatchRun:
    """One batch that runs here. `holder` is the runner."""

    def __init__(self, records: Records, answering: Answering, holder: Holder, owner: str, batch_id: str) -> None:
        self.owner = owner
        self.id = batch_id
        self._records = records
        self._answering = answering
        self._holder = holder
        self._lease: Lease | None = None
        self._giving_up: GivenUp | None = None
        self._lines: asyncio.Task[None] | None = None
        """Task that answers the lines."""

    def give_up(self, ending: GivenUp) -> None:
        """Ends the batch with the answers that it has. Only the first call counts."""
        if self._giving_up is None:
            self._giving_up = ending
            if self._lines is not None:
                self._lines.cancel()

    async def run(self) -> None:
        """Returns when the batch has ended. Raises `LeaseHeld`, `LeaseLost`, or the error after which it must be tried
        again.
        """
        acquired = await asyncio.to_thread(
            acquire, self._records.storage, self._records.leases(self.owner, self.id), self._holder
        )
        if isinstance(acquired, float):
            raise LeaseHeld(acquired)
        self._lease = acquired
        held = _HeldBatch(self._records, acquired, self.owner, self.id, self._answering.max_line_bytes)
        try:
            async with asyncio.TaskGroup() as tasks:
                renewing = tasks.create_task(self._keep_lease(acquired))
                await self._bring_to_its_end(held)
                renewing.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    def release(self) -> None:
        """Lets another runner continue at once. Waits for the storage."""
        if self._lease is not None:
            self._lease.release()

    async def _keep_lease(self, lease: Lease) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await asyncio.to_thread(lease.renew)
            except LeaseLost:
                raise
            except Exception as error:
                logger.warning("the lease on batch %s was not renewed: %r", self.id, error)

    async def _bring_to_its_end(self, held: _HeldBatch) -> None:
        progress = await asyncio.to_thread(held.progress)
        if progress is None or progress.batch.status in ENDED:
            await asyncio.to_thread(held.close)
            return
        outcome = progress.outcome or await self._outcome(held, progress)
        await asyncio.to_thread(held.end, outcome)

    async def _outcome(self, held: _HeldBatch, progress: BatchProgress) -> BatchOutcome:
        """Answers the lines that have no result, and settles the outcome of the batch."""
        batch = progress.batch
        if not batch.input_file_id:  # it replaces one that cannot be decoded
            if age_s(batch.id) < UNREADABLE_GRACE_S:
                raise LinesMissing(f"batch {batch.id} cannot be decoded yet")
            return await asyncio.to_thread(held.failed, batch, batch.errors)
        results = await asyncio.to_thread(held.results, batch)
        try:
            await self._answer_until_given_up(held, progress, results)
            wanted: Ending = progress.ending or self._giving_up or "completed"
            return await asyncio.to_thread(held.finish, batch, results, wanted)
        except (BatchRefused, InputMissing) as error:
            errors = BatchErrors([BatchError("invalid_input_file", str(error))])
            return await asyncio.to_thread(held.failed, batch, errors)

    async def _answer_until_given_up(self, held: _HeldBatch, progress: BatchProgress, results: StoredResults) -> None:
        """Answers the lines unless the batch is given up. Raises `BatchRefused` and `InputMissing`."""
        if progress.ending is None and self._giving_up is not None:
            return
        if progress.ending not in (None, "completed"):
            return
        self._lines = asyncio.create_task(self._answer(held, progress.batch, results))
        try:
            await self._lines
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if self._giving_up is None or (this is not None and this.cancelling()):  # not only its lines were cancelled
                raise
        except InputMissing:
            if progress.ending is None:
                raise  # otherwise all lines were answered, and the owner may have removed the input

    async def _answer(self, held: _HeldBatch, batch: Batch, results: StoredResults) -> None:
        """Answers the lines. Raises `BatchRefused` if the input has none, and `InputMissing`."""
        if not batch.request_counts.total:
            await asyncio.to_thread(held.count, batch, results)
        job = BatchJob(
            self._answering.answer,
            results,
            self._answering.places,
            self._answering.max_line_bytes,
            lambda _: None,
            endpoint=batch.endpoint,
            owner=self.owner,
            pace=self._answering.pace,
        )
        try:
            with await asyncio.to_thread(held.input, batch) as source:
                async with asyncio.TaskGroup() as tasks:
                    flushing = tasks.create_task(self._keep_flushing(held, batch, results))
                    await answer_all(job, source)
                    flushing.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _keep_flushing(self, held: _HeldBatch, batch: Batch, results: StoredResults) -> None:
        num_failures = 0
        while True:
            await asyncio.sleep(FLUSH_CHECK_S)
            if not results.is_due:
                continue
            try:
                await asyncio.to_thread(held.flush, batch, results)
                num_failures = 0
                if await asyncio.to_thread(held.is_full):
                    self.give_up("failed")
            except LeaseLost:
                raise
            except Exception as error:
                num_failures += 1
                if num_failures == MAX_FLUSH_FAILURES:
                    raise
                logger.warning("results of batch %s were not stored, and are kept: %r", self.id, error)


class _HeldBatch:
    """A batch in the storage, for the runner that has its lease. Every method waits for the storage and is called in a
    thread. Methods that save raise `LeaseLost` if another runner has the batch.
    """

    def __init__(self, records: Records, lease: Lease, owner: str, batch_id: str, max_line_bytes: int) -> None:
        self._records = records
        self._lease = lease
        self._owner = owner
        self._id = batch_id
        self._max_line_bytes = max_line_bytes

    def progress(self) -> BatchProgress | None:
        return self._records.progress(self._owner, self._id)

    def close(self) -> None:
        """Removes what only an open batch needs."""
        self._records.close_batch(self._owner, self._id)

    def results(self, batch: Batch) -> StoredResults:
        """Returns the results that are stored, after it has made sure that the batch is listed."""
        self._records.keep_asked(self._owner, batch)
        return StoredResults(self._records.storage, self._parts)

    def input(self, batch: Batch) -> BinaryIO:
        """Opens the input. Raises `InputMissing`."""
        return self._records.input(self._owner, batch.input_file_id)

    def is_full(self) -> bool:
        """Returns whether the owner has stored more than it may."""
        return self._records.quota.is_full(self._owner)

    @property
    def _parts(self) -> str:
        return self._records.parts(self._owner, self._id)

    def _fenced(self, save: Callable[..., _Saved], *arguments: object) -> _Saved:
        """Saves if this runner still has the batch. Raises `LeaseLost` otherwise."""
        self._lease.check()
        return save(*arguments)

    def flush(self, batch: Batch, results: StoredResults) -> None:
        self._fenced(results.flush)
        batch.request_counts.completed, batch.request_counts.failed = results.num_good, results.num_failed
        self._fenced(self._records.save, self._owner, batch)

    def count(self, batch: Batch, results: StoredResults) -> None:
        """Counts the lines and starts the batch. Raises `BatchRefused` if the input has none that can be read."""
        with self.input(batch) as source:
            check_encoding(source, f"file {batch.input_file_id}")
            batch.request_counts.total, _ = count_lines(source, self._max_line_bytes, results)
        if not batch.request_counts.total:
            raise BatchRefused(f"file {batch.input_file_id} holds no line; write one request a line")
        if batch.status == "validating":
            batch.status, batch.in_progress_at = "in_progress", int(time.time())
        self._fenced(self._records.save, self._owner, batch)

    def failed(self, batch: Batch, errors: BatchErrors | None) -> BatchOutcome:
        """Settles a batch of which nothing can be answered as failed."""
        batch.status, batch.failed_at, batch.errors = "failed", int(time.time()), errors
        return self._fenced(self._records.settle, self._owner, BatchOutcome(batch, []))

    def finish(self, batch: Batch, results: StoredResults, ending: Ending) -> BatchOutcome:
        """Writes the results to files and settles the outcome. Raises `LinesMissing`."""
        self._fenced(results.flush)
        if ending in _REASONS and self._has_all(batch, results):
            ending = "completed"
        decided = self._fenced(self._records.decide, self._owner, batch.id, ending)
        outputs = _Outputs(self._records, self._owner, batch.id)
        try:
            self._write_lines(outputs, batch, results, _REASONS.get(decided.ending))
            files = outputs.finish()
        except BaseException:
            outputs.discard()
            raise
        # From here on another runner may find these files in the outcome, even if `settle` seems to fail.
        return self._fenced(self._records.settle, self._owner, BatchOutcome(_ended(batch, decided, outputs), files))

    def _has_all(self, batch: Batch, results: StoredResults) -> bool:
        """Returns whether every line has a result; False if the input is gone."""
        with contextlib.suppress(InputMissing), self.input(batch) as source:
            num_lines, num_done = count_lines(source, self._max_line_bytes, results)
            return num_lines == num_done
        return False

    def _write_lines(self, outputs: _Outputs, batch: Batch, results: StoredResults, reason: BatchError | None) -> None:
        """Writes every stored result, then `reason` for each line of the input without one. Raises `LinesMissing` if
        there is such a line and no reason.
        """
        seen = DoneLines(self._parts)
        for line in results.stored():
            seen.note(line.key)
            outputs.write(line.is_good, line.text)
        for key, text in self._lines_without_result(batch, seen):
            if reason is None:
                raise LinesMissing(f"line {key.number + 1} of batch {batch.id} has no stored result")
            custom_id = None if text is None else custom_id_of(text)
            outputs.write(False, encode(BatchResult(key.id, custom_id, error=reason)))

    def _lines_without_result(self, batch: Batch, seen: DoneLines) -> Iterator[Line]:
        """Yields the lines of the input that have no result. Yields nothing if the input is gone, because its owner may
        delete it at any time.
        """
        with contextlib.suppress(InputMissing), self.input(batch) as source:
            yield from (line for line in read_lines(source, self._max_line_bytes) if not seen.has(line.key))

    def end(self, outcome: BatchOutcome) -> None:
        self._fenced(self._records.end, self._owner, outcome)


class _Outputs:
    """Result files of a batch that one attempt writes. A file without lines is not created."""

    def __init__(self, records: Records, owner: str, batch_id: str) -> None:
        self._records = records
        self._owner = owner
        self._batch_id = batch_id
        self._attempt = new_attempt()
        self._uploads: dict[_Kind, Upload] = {}
        self.counts = RequestCounts()

    def write(self, is_good: bool, line: bytes) -> None:
        kind: _Kind = "output" if is_good else "errors"
        if kind not in self._uploads:
            self._uploads[kind] = self._records.files.begin_output(self._owner, self._batch_id, self._attempt, kind)
        self._uploads[kind].write(line)
        self.counts.total += 1
        self.counts.completed += is_good
        self.counts.failed += not is_good

    def id_of(self, kind: _Kind) -> str | None:
        upload = self._uploads.get(kind)
        return None if upload is None else upload.id

    def finish(self) -> list[FileObject]:
        """Completes the contents without publishing them."""
        return [upload.finish(f"{self._batch_id}_{kind}.jsonl") for kind, upload in self._uploads.items()]

    def discard(self) -> None:
        """Removes what was written, as far as the storage allows. The rest is removed later as left over."""
        for upload in self._uploads.values():
            with contextlib.suppress(Exception):
                upload.discard()


def _ended(batch: Batch, decided: Finalizing, outputs: _Outputs) -> Batch:
    """Returns the batch as it ends now."""
    now = int(time.time())
    batch.status, batch.finalizing_at, batch.request_counts = decided.ending, decided.at, outputs.counts
    batch.output_file_id, batch.error_file_id = outputs.id_of("output"), outputs.id_of("errors")
    if decided.ending == "expired":
        batch.expired_at = now
    elif decided.ending == "cancelled":
        batch.cancelled_at = now
    elif decided.ending == "failed":
        batch.failed_at, batch.errors = now, BatchErrors([_REASONS["failed"]])
    else:
        batch.completed_at = now
    return batch

"""Runs the batches of `/v1/batches`: looks into the storage for those that have not ended, and brings each to its end.

The storage is all that it goes by, so that a new runner goes on where a killed one was. Clients take turns: one batch
of each runs at a time, and their lines share the places. Serve keeps one runner (`cluster/batch/deployment.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any, Literal

from cluster.batch.job import Answer, Job
from cluster.batch.job import run as answer_all
from cluster.batch.journal import BatchRefused, count_lines, read_lines
from cluster.batch.lines import BatchError, BatchResult, custom_id_of
from cluster.batch.records import ENDED, Batch, BatchErrors, OpenBatch, Records
from cluster.batch.stored import StoredResults

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks into the storage."""
FLUSH_CHECK_S = 0.25
"""How often it is asked whether a batch's results are due to be stored."""
RETRY_S = 10.0
"""After a failure that is not the batch's own, such as a storage that is away."""
CLEAN_S = 3600.0
"""Between two removals of what has expired."""
MAX_RUNNING = 16
"""Batches, each of another client. Each holds some megabytes of lines that were read ahead."""

Ending = Literal["expired", "cancelled"]
_REASONS: dict[Ending, BatchError] = {
    "expired": BatchError("batch_expired", "the completion window ended before this request was answered"),
    "cancelled": BatchError("batch_cancelled", "the batch was cancelled before this request was answered"),
}


def sharer_of(owner: str) -> str:
    """Who takes turns with others in the engines: the batches of one API key, or of everybody, are one client."""
    return f"batches of {owner}"


class _Run:
    """One batch that runs here."""

    def __init__(self, owner: str, batch_id: str) -> None:
        self.owner = owner
        self.id = batch_id
        self.ending: Ending | None = None
        self.task: asyncio.Task[None] | None = None
        self.answering: asyncio.Task[None] | None = None

    def end(self, ending: Ending) -> None:
        """Leaves what is not answered."""
        if self.ending is None:
            self.ending = ending
            if self.answering is not None:
                self.answering.cancel()


class Runner:
    """`answer` answers the lines, `max_in_flight` of them at a time."""

    def __init__(self, records: Records, answer: Answer, max_in_flight: int, max_line_bytes: int) -> None:
        self._records = records
        self._answer_line = answer
        self._places = asyncio.Semaphore(max_in_flight)
        self._max_line_bytes = max_line_bytes
        self._runs: dict[str, _Run] = {}
        self._expires: dict[str, int] = {}
        """By batch that has not ended."""
        self._not_before: dict[str, float] = {}
        self._next_cleaning = 0.0

    async def serve(self) -> None:
        """Until it is cancelled. What runs then is left as it is."""
        try:
            while True:
                try:
                    await self._look()
                except Exception:
                    logger.exception("the batch storage was not read; it is tried again")
                await asyncio.sleep(LOOK_S)
        finally:
            tasks = [run.task for run in self._runs.values() if run.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        found = await asyncio.to_thread(self._records.open_batches)
        busy = {run.owner for run in self._runs.values()}
        for each in found:
            ending = await self._ending(each)
            running = self._runs.get(each.id)
            if running is not None:
                if ending is not None:
                    running.end(ending)
            elif time.monotonic() >= self._not_before.get(each.id, 0.0) and (
                ending is not None or (each.owner not in busy and len(self._runs) < MAX_RUNNING)
            ):
                busy.add(each.owner)
                self._start(each, ending)
        self._forget({each.id for each in found})
        if time.monotonic() >= self._next_cleaning:
            self._next_cleaning = time.monotonic() + CLEAN_S
            await asyncio.to_thread(self._records.remove_expired)

    async def _ending(self, each: OpenBatch) -> Ending | None:
        if each.is_cancelled:
            return "cancelled"
        if each.id not in self._expires:
            batch = await asyncio.to_thread(self._records.state, each.owner, each.id)
            self._expires[each.id] = 0 if batch is None else batch.expires_at
        return "expired" if self._expires[each.id] <= time.time() else None

    def _forget(self, still_open: set[str]) -> None:
        """What another runner has ended, which took this one for dead, is left to it."""
        memories: tuple[dict[str, Any], ...] = (self._expires, self._not_before)
        for memory in memories:
            for batch_id in memory.keys() - still_open:
                del memory[batch_id]
        for batch_id in self._runs.keys() - still_open:
            task = self._runs[batch_id].task
            assert task is not None
            task.cancel()

    def _start(self, each: OpenBatch, ending: Ending | None) -> None:
        run = self._runs[each.id] = _Run(each.owner, each.id)
        run.ending = ending
        run.task = asyncio.create_task(self._bring_to_its_end(run))

    async def _bring_to_its_end(self, run: _Run) -> None:
        try:
            await self._run(run)
        except Exception:
            logger.exception("batch %s failed; it is tried again in %g s", run.id, RETRY_S)
            self._not_before[run.id] = time.monotonic() + RETRY_S
        finally:
            del self._runs[run.id]

    async def _run(self, run: _Run) -> None:
        batch = await asyncio.to_thread(self._records.state, run.owner, run.id)
        if batch is None or batch.status in ENDED:
            await asyncio.to_thread(self._records.close_batch, run.owner, run.id)
            return
        folder = self._records.parts(run.owner, run.id)
        results = await asyncio.to_thread(StoredResults, self._records.storage, folder)
        try:
            if run.ending is None and batch.status != "finalizing":
                run.answering = asyncio.create_task(self._answer(run, batch, results))
                await run.answering
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if run.ending is None or (this is not None and this.cancelling()):  # not its answering alone
                raise
        except (BatchRefused, FileNotFoundError) as error:
            message = str(error) if isinstance(error, BatchRefused) else f"file {batch.input_file_id} is not there"
            await asyncio.to_thread(self._fail, run, batch, message)
            return
        await asyncio.to_thread(self._finish, run, batch, results, run.ending)

    async def _answer(self, run: _Run, batch: Batch, results: StoredResults) -> None:
        if batch.status == "validating":
            await asyncio.to_thread(self._count, run, batch, results)
        job = Job(
            self._answer_line,
            results,
            self._places,
            self._max_line_bytes,
            lambda _: None,
            endpoint=batch.endpoint,
            client=sharer_of(run.owner),
        )
        try:
            with await asyncio.to_thread(self._records.content, run.owner, batch.input_file_id) as source:
                async with asyncio.TaskGroup() as tasks:
                    flushing = tasks.create_task(self._keep_flushing(run, batch, results))
                    await answer_all(job, source)
                    flushing.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _keep_flushing(self, run: _Run, batch: Batch, results: StoredResults) -> None:
        while True:
            await asyncio.sleep(FLUSH_CHECK_S)
            if results.is_due:
                await asyncio.to_thread(self._flush, run, batch, results)

    # ---- in threads ----------------------------------------------------------------------------------------------

    def _flush(self, run: _Run, batch: Batch, results: StoredResults) -> None:
        results.flush()
        batch.request_counts.completed, batch.request_counts.failed = results.num_good, results.num_failed
        self._records.save(run.owner, batch)

    def _count(self, run: _Run, batch: Batch, results: StoredResults) -> None:
        """Raises `BatchRefused` if there is nothing to do."""
        with self._records.content(run.owner, batch.input_file_id) as source:
            batch.request_counts.total, _ = count_lines(source, self._max_line_bytes, results)
        if not batch.request_counts.total:
            raise BatchRefused(f"file {batch.input_file_id} holds no line; write one request a line")
        batch.status, batch.in_progress_at = "in_progress", int(time.time())
        self._records.save(run.owner, batch)

    def _fail(self, run: _Run, batch: Batch, message: str) -> None:
        """Nothing of it can be answered."""
        batch.status, batch.failed_at = "failed", int(time.time())
        batch.errors = BatchErrors([BatchError("invalid_input_file", message)])
        self._records.save(run.owner, batch)
        self._records.close_batch(run.owner, run.id)

    def _finish(self, run: _Run, batch: Batch, results: StoredResults, ending: Ending | None) -> None:
        """Makes files of the results. Whatever interrupts it, it may be done again."""
        batch.status, batch.finalizing_at = "finalizing", int(time.time())
        if ending is not None and self._give_up(run, batch, results, _REASONS[ending]) == 0:
            ending = None
        self._flush(run, batch, results)
        batch.request_counts.total = results.num_done
        batch.output_file_id, batch.error_file_id = self._write_files(run.owner, batch, results)
        ended_at = int(time.time())
        if ending == "expired":
            batch.status, batch.expired_at = "expired", ended_at
        elif ending == "cancelled":
            batch.status, batch.cancelled_at = "cancelled", ended_at
        else:
            batch.status, batch.completed_at = "completed", ended_at
        self._records.save(run.owner, batch)
        self._records.close_batch(run.owner, run.id)

    def _give_up(self, run: _Run, batch: Batch, results: StoredResults, reason: BatchError) -> int:
        """Every line without a result gets `reason`; returns how many these are."""
        num_done = results.num_done
        with contextlib.suppress(FileNotFoundError), self._records.content(run.owner, batch.input_file_id) as source:
            for line in read_lines(source, self._max_line_bytes):
                if not results.has(line.key):
                    custom_id = None if line.text is None else custom_id_of(line.text)
                    results.write(line.key, BatchResult(line.key.id, custom_id, error=reason))
                    if results.is_due:
                        results.flush()
        return results.num_done - num_done

    def _write_files(self, owner: str, batch: Batch, results: StoredResults) -> tuple[str | None, str | None]:
        """The ids of good answers and of errors; None for what there is none of."""
        uploads = {
            is_good: self._records.begin_output(owner, f"file-{batch.id.removeprefix('batch_')}-{name}")
            for is_good, name in ((True, "output"), (False, "errors"))
        }
        for is_good, line in results.stored():
            uploads[is_good].write(line)
        ids: dict[bool, str | None] = {True: None, False: None}
        for is_good, upload in uploads.items():
            if upload.num_bytes:
                name = "output" if is_good else "errors"
                ids[is_good] = upload.commit(f"{batch.id}_{name}.jsonl").id
            else:
                upload.discard()
        return ids[True], ids[False]

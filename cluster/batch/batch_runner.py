"""Runs the batches of `/v1/batches`: finds the ones in the storage that have not ended, and brings each to its end.

Its only state is the storage, so a new runner continues where a killed one stopped. Runners may share a storage: each
batch has a lease, and runs where its lease is held. In one runner clients take turns: one batch of each runs at a time,
and their lines share the places. Serve keeps one runner for each server (`cluster/batch/batch_deployment.py`).
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from manta.cluster.batch.batch_job import Answer, Pace
from manta.cluster.batch.batch_run import Answering, BatchRun, GivenUp, LeaseHeld
from manta.cluster.batch.lease import LeaseLost, new_holder
from manta.cluster.batch.line_places import Places
from manta.cluster.storage.kept_responses import KeptResponses
from manta.cluster.storage.records import OpenBatch, Records
from manta.cluster.storage.retention import remove_expired
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

LOOK_S = 1.0
"""Seconds between two listings of the storage."""
RETRY_S, MAX_RETRY_S = 10.0, 600.0
"""Backoff in seconds after a batch's first failure, and its maximum; each further failure doubles it."""
CLEAN_S = 3600.0
"""Seconds between two removals of what has expired."""
MAX_RUNNING = 16
"""Batches that run at a time, each of another client; batches that are being given up run in addition. Each holds some
megabytes of lines that were read ahead.
"""


class _Backoff(NamedTuple):
    """The pause before a batch may be tried again."""

    num_failures: int
    not_before: float
    """Time of the next try in seconds, on the monotonic clock."""


class Runner:
    """Runs batches of a storage. `answer` answers lines, as many at a time as there are `places`, each after `pace` of
    its owner. Also removes what has expired from the storage, stored `responses` included.
    """

    def __init__(
        self,
        records: Records,
        answer: Answer,
        places: Places,
        max_line_bytes: int,
        responses: KeptResponses | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._records = records
        self._responses = responses
        self._answering = Answering(answer, places, max_line_bytes, pace)
        self._holder = new_holder()
        self._runs: dict[BatchRun, asyncio.Task[None]] = {}
        self._expires: dict[str, int] = {}
        """Unix time at which the window of an open batch ends, by batch id."""
        self._backoffs: dict[str, _Backoff] = {}
        self._next_cleaning = 0.0
        self._cleaning: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Runs until it is cancelled, then stops the running batches and releases their leases."""
        try:
            while True:
                try:
                    await self._look()
                except Exception:
                    logger.exception("the batch storage was not listed; it is tried again")
                await asyncio.sleep(LOOK_S)
        finally:
            await self._stop()

    async def _stop(self) -> None:
        runs = dict(self._runs)
        tasks = [*runs.values(), *([] if self._cleaning is None else [self._cleaning])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(asyncio.to_thread(run.release) for run in runs), return_exceptions=True)

    async def _look(self) -> None:
        found = await asyncio.to_thread(self._records.open_batches)
        self._forget({each.id for each in found})
        for each in found:
            try:
                await self._look_at(each)
            except Exception:
                logger.exception("batch %s was not read; the others go on", each.id)
        if time.monotonic() >= self._next_cleaning and (self._cleaning is None or self._cleaning.done()):
            self._next_cleaning = time.monotonic() + CLEAN_S
            self._cleaning = asyncio.create_task(self._clean())

    async def _look_at(self, each: OpenBatch) -> None:
        giving_up = await self._giving_up(each)
        running = next((run for run in self._runs if run.id == each.id), None)
        if running is not None:
            if giving_up is not None:
                running.give_up(giving_up)
            return
        backoff = self._backoffs.get(each.id)
        if backoff is not None and time.monotonic() < backoff.not_before:
            return
        is_turn = len(self._runs) < MAX_RUNNING and all(run.owner != each.owner for run in self._runs)
        if is_turn or giving_up is not None:
            self._start(each, giving_up)

    async def _giving_up(self, each: OpenBatch) -> GivenUp | None:
        if each.is_cancelled:
            return "cancelled"
        if each.id not in self._expires:
            progress = await asyncio.to_thread(self._records.progress, each.owner, each.id)
            if progress is None:
                return None
            self._expires[each.id] = progress.batch.expires_at
        return "expired" if self._expires[each.id] <= time.time() else None

    def _forget(self, still_open: set[str]) -> None:
        """Forgets batches that have ended. Running batches are kept, because a listing may be out of date."""
        for batch_id in self._expires.keys() - still_open:
            del self._expires[batch_id]
        for batch_id in self._backoffs.keys() - still_open:
            del self._backoffs[batch_id]

    def _start(self, each: OpenBatch, giving_up: GivenUp | None) -> None:
        run = BatchRun(self._records, self._answering, self._holder, each.owner, each.id)
        if giving_up is not None:
            run.give_up(giving_up)
        self._runs[run] = asyncio.create_task(self._run(run))

    async def _run(self, run: BatchRun) -> None:
        try:
            await run.run()
            self._backoffs.pop(run.id, None)
        except (LeaseHeld, LeaseLost) as error:
            logger.info("batch %s runs elsewhere: %s", run.id, error)
            wait_s = error.left_s if isinstance(error, LeaseHeld) else RETRY_S
            self._backoffs[run.id] = _Backoff(0, time.monotonic() + wait_s)
        except Exception:
            last = self._backoffs.get(run.id)
            num_failures = 1 if last is None else last.num_failures + 1
            pause_s = min(RETRY_S * 2 ** (num_failures - 1), MAX_RETRY_S)
            logger.exception("batch %s failed; it is tried again in %g s", run.id, pause_s)
            self._backoffs[run.id] = _Backoff(num_failures, time.monotonic() + pause_s)
        finally:
            del self._runs[run]

    async def _clean(self) -> None:
        try:
            await asyncio.to_thread(remove_expired, self._records)
            if self._responses is not None:
                await asyncio.to_thread(self._responses.remove_expired)
        except Exception:
            logger.exception("what has expired was not removed; it is tried again in %g s", CLEAN_S)

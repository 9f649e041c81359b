"""How often a batch tries a line, and that a line which waits for its next try holds up no other batch."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from typing import BinaryIO

import msgspec
import pytest

from manta.cluster.batch import batch_job
from manta.cluster.batch.journal import Journal
from manta.cluster.batch.lines import BatchRequest, BatchResponse
from manta.cluster.http.exchange.condition import Condition
from manta.cluster.protocol.error_bodies import answer_of, openai_body
from tests.batch.test_batch import MAX_BYTES, Echo, line, results, write_lines
from tests.patience import PATIENCE_S


def test_a_line_that_waits_for_its_next_try_holds_no_place(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's lines that an engine refuses for half an hour hold up no other client's batch."""
    monkeypatch.setattr(batch_job, "RETRY_S", 0.05)
    sources = [write_lines(tmp_path / f"{name}.jsonl", [line(name)]) for name in (1, 2)]
    echo = Echo({"1": [503] * 10_000})

    async def answer_both() -> None:
        places = asyncio.Semaphore(1)
        with contextlib.ExitStack() as stack:
            runs = []
            for source in sources:
                lines = stack.enter_context(source.open("rb"))
                journal = stack.enter_context(Journal(source.with_suffix(".out"), lines, MAX_BYTES))
                job = batch_job.BatchJob(echo, journal, places, MAX_BYTES, lambda _: None)
                runs.append(asyncio.create_task(batch_job.run(job, lines)))
            await runs[1]
            while len(echo.asked) < 4:
                await asyncio.sleep(0.01)
            runs[0].cancel()
            await asyncio.gather(*runs, return_exceptions=True)
            async with asyncio.timeout(PATIENCE_S):
                await places.acquire()
            assert places.locked(), "there are more places than before"

    asyncio.run(answer_both())
    assert results(sources[1].with_suffix(".out"))[0]["response"]["status_code"] == 200


def test_a_model_that_does_not_start_fails_a_line_in_a_few_tries(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_job, "RETRY_S", 0.0)
    refusal = Condition("failed", "no such file").refusal("m")
    num_asked = 0

    async def answer(request: BatchRequest, request_id: str, client: str) -> BatchResponse:
        nonlocal num_asked
        num_asked += 1
        return BatchResponse(answer_of(refusal).status, request_id, msgspec.Raw(openai_body(refusal)))

    async def run_one(journal: Journal, lines: BinaryIO) -> None:
        job = batch_job.BatchJob(answer, journal, asyncio.Semaphore(1), MAX_BYTES, lambda _: None)
        await batch_job.run(job, lines)

    source = write_lines(tmp_path / "in.jsonl", [line(1)])
    with source.open("rb") as lines, Journal(tmp_path / "out.jsonl", lines, MAX_BYTES) as journal:
        asyncio.run(run_one(journal, lines))
    (result,) = results(tmp_path / "out.jsonl")
    assert (result["response"]["status_code"], num_asked) == (503, batch_job.MAX_TRIES)
    assert result["response"]["body"]["error"]["code"] == "model_failed"

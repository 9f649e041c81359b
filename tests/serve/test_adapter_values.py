"""The digest of an adapter's values goes with a request wherever it goes: recordings, engines, batches, the registry.
No request that has begun with some values goes on with others, and those that are in use stay.
"""

from __future__ import annotations

import asyncio
import pathlib
from typing import BinaryIO

import msgspec
import pytest

from manta.cluster.batch import batch_job
from manta.cluster.batch.journal import Journal
from manta.cluster.batch.lines import BatchRequest, BatchResponse
from manta.cluster.engine.adapter_table import AdapterTable, LoadedAdapter
from manta.cluster.errors import ServingError
from manta.cluster.http.exchange.engines import Generation
from manta.cluster.protocol.error_bodies import answer_of, openai_body
from manta.structured.refusals import Refusal
from tests.async_tests import async_test
from tests.batch.test_batch import line, results, write_lines
from tests.patience import until
from tests.serve.stream_world import OWNER, World, opening, read, tokens_of
from tests.serve.test_stream_owners import short_times

__all__ = ["short_times"]

NUM_TOKENS = 20
KEY = f"{'ab' * 16}*0.5"
MAX_BYTES = 1 << 20


async def read_into(tokens: list[int], answer: Generation) -> None:
    async for event in answer:
        tokens += event.token_ids


@pytest.mark.parametrize("has_values", [True, False])
@async_test
async def test_a_recording_goes_on_with_its_values_or_ends(has_values: bool) -> None:
    """Its ingress dies, and another one continues it, while clients have other values under the adapter's name."""
    world = World(2, 1)
    first, second = world.ingresses
    recording = first.streams.begin(opening(NUM_TOKENS, adapter=KEY))
    stream_id = recording.opening.stream_id
    world.run_engines(5)
    await until(lambda: recording.num_safe == 5)
    if not has_values:
        world.gone.add(KEY)
    world.kill_ingress(first)
    await until(lambda: len(world.adapters) == 2)
    world.run_engines()
    found = await second.streams.find(stream_id, OWNER)
    assert found is not None
    if has_values:
        assert await read(second, found) == tokens_of(3, NUM_TOKENS)
    else:
        tokens: list[int] = []
        with pytest.raises(ServingError) as refused:
            await read_into(tokens, second.streams.read(found))
        assert (refused.value.refusal.kind, refused.value.refusal.value) == ("adapter_lost", KEY)
        assert tokens == tokens_of(3, 5)
    assert world.adapters == [KEY, KEY]
    world.close()


@async_test
async def test_a_request_without_output_may_ask_again() -> None:
    """Its ingress may have had an old table: no value has answered yet."""
    world = World(1, 1)
    world.gone.add(KEY)
    recording = world.ingresses[0].streams.begin(opening(NUM_TOKENS, adapter=KEY))
    with pytest.raises(ServingError) as refused:
        await read(world.ingresses[0], recording)
    assert refused.value.refusal.kind == "adapter_gone"
    world.close()


def test_a_line_of_a_batch_that_had_begun_is_not_tried_again(tmp_path: pathlib.Path) -> None:
    """Another try would have the values of now."""
    asked: list[str] = []

    async def answer(request: BatchRequest, request_id: str, client: str) -> BatchResponse:
        asked.append(request_id)
        refusal = Refusal("adapter_lost", "model", "ab" * 16)
        return BatchResponse(answer_of(refusal).status, request_id, msgspec.Raw(openai_body(refusal)))

    async def run_one(journal: Journal, lines: BinaryIO) -> None:
        job = batch_job.BatchJob(answer, journal, asyncio.Semaphore(1), MAX_BYTES, lambda _: None)
        await batch_job.run(job, lines)

    source = write_lines(tmp_path / "in.jsonl", [line(1)])
    with source.open("rb") as lines, Journal(tmp_path / "out.jsonl", lines, MAX_BYTES) as journal:
        asyncio.run(run_one(journal, lines))
    (result,) = results(tmp_path / "out.jsonl")
    assert (len(asked), result["response"]["body"]["error"]["code"]) == (1, "adapter_lost")


def test_replaced_values_stay_while_requests_use_them() -> None:
    one, two = LoadedAdapter("/a", "1"), LoadedAdapter("/a", "2")
    table = AdapterTable().changed({"a": one}, 0, 100).changed({"a": two}, 10, 100)
    assert table.replaced == {"1": 110}
    assert table.keeping(("2", "3"), 1000, 600) is table, "nothing of theirs was replaced"
    kept = table.keeping(("1", "2"), 100, 600)
    assert (kept.version, kept.loaded, kept.replaced) == (table.version + 1, table.loaded, {"1": 700})
    assert kept.keeping(("1",), 399, 600) is kept
    assert kept.keeping(("1",), 401, 600).replaced == {"1": 1001}
    assert kept.needed(701) == {"2"}, "once nobody uses them"

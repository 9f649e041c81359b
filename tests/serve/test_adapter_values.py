"""The digest of an adapter's values goes with a request wherever it goes: recordings, engines, batches, the registry.
No request that has begun with some values goes on with others, and those that are in use stay.
"""

from __future__ import annotations

import asyncio
import pathlib
import shutil
import threading
import types
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec
import pytest
from ray.exceptions import ActorDiedError

from manta.cluster.batch import batch_job
from manta.cluster.batch.journal import Journal
from manta.cluster.batch.lines import BatchRequest, BatchResponse
from manta.cluster.config import EngineConfig
from manta.cluster.engine.adapter_table import AdapterTable, LoadedAdapter
from manta.cluster.engine.request import EngineRequest
from manta.cluster.errors import ServingError
from manta.cluster.http.exchange.engines import Generation
from manta.cluster.protocol.error_bodies import answer_of, openai_body
from manta.cluster.serve.engine.replica_adapters import ReplicaAdapters
from manta.cluster.serve.requests.engine_client import EngineQuestions
from manta.cluster.serve.requests.takeover import USUAL_TIMES
from manta.structured.refusals import Refusal
from manta.workers.adapters.adapter_copies import AdapterCopies
from manta.workers.adapters.combined_adapter import CombinedPart, OtherValues, combined_path
from manta.workers.cache_folder import cache_entry
from manta.workers.sampling_params import SamplingParams
from tests.async_tests import async_test
from tests.batch.test_batch import line, results, write_lines
from tests.loaded_adapters import MemoryRegistry
from tests.patience import PATIENCE_S, until
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


class Broadcasting:
    """In place of Serve's handle: its replicas answer each question so."""

    app_name = "values"

    def __init__(self, *answers: object) -> None:
        self._answers = answers

    def broadcast(self, method: str, *arguments: object) -> Broadcasting:
        return self

    def results(self, timeout_s: float, return_exceptions: bool) -> list[object]:
        if any(isinstance(each, TimeoutError) for each in self._answers):
            raise TimeoutError  # as Serve, whichever others have answered
        return [*self._answers]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [((False, True), True), ((False, ActorDiedError()), False), ((), False), ((False, TimeoutError()), True)],
)
@async_test
async def test_an_engine_that_does_not_answer_may_use_an_adapter(answers: tuple[object, ...], expected: bool) -> None:
    """Else an unload that waits would end while it streams."""

    async def is_removed() -> bool:
        return False

    engines = EngineQuestions(Broadcasting(*answers), None, 1, is_removed, USUAL_TIMES)
    assert await engines.uses_adapter("ab" * 16) == expected


class OneLate(MemoryRegistry):
    """A registry of which one read gives what was there when it began, and takes until `may_end` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_late = False
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def read(self) -> AdapterTable:
        table, is_late, self.is_late = self.table, self.is_late, False
        if is_late:
            self.has_begun.set()
            assert self.may_end.wait(PATIENCE_S)
        return table


THREAD: Any = types.SimpleNamespace(call=lambda function, *arguments: function(*arguments))
"""In place of an engine's thread: it makes each call at once."""


def engine_of(held: object, read: Callable[[str], object]) -> Any:
    """In place of an engine: it holds what `held` says, and reads an adapter by `read`."""
    executor, model = types.SimpleNamespace(read_adapter=read), types.SimpleNamespace(adapters={})
    return types.SimpleNamespace(adapters=held, executor=executor, model=model)


@async_test
async def test_a_late_read_of_the_table_takes_no_adapter_away(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request has had its adapter read meanwhile, which the older table does not have."""
    monkeypatch.setattr(AdapterCopies, "keep", lambda *_: None)
    adapter = types.SimpleNamespace(digest="ab" * 16, num_bytes=1)
    dropped: list[str] = []
    held = types.SimpleNamespace(loaded=(), drop=dropped.append)
    engine = engine_of(held, lambda folder: adapter)
    registry = OneLate()
    try:
        adapters = ReplicaAdapters(EngineConfig(adapter_roots=(str(tmp_path),)), engine, THREAD, registry)
        registry.is_late = True
        catching_up = asyncio.ensure_future(adapters.catch_up())
        assert await asyncio.to_thread(registry.has_begun.wait, PATIENCE_S)
        loaded = {"new": LoadedAdapter(str(tmp_path), adapter.digest)}
        registry.table = AdapterTable(1, loaded)
        assert await adapters.find(adapter.digest) is adapter
        held.loaded = (adapter.digest,)
        registry.may_end.set()
        await catching_up
        assert not dropped
        adapters.close()
    finally:
        shutil.rmtree(cache_entry("adapters") / registry.server, ignore_errors=True)


@async_test
async def test_a_combination_stays_while_all_of_its_adapters_do(tmp_path: pathlib.Path) -> None:
    """Their paths and digests are read together, so that it never has values of others."""
    registry, dropped, paths = MemoryRegistry(), list[str](), list[str]()
    held = types.SimpleNamespace(loaded=("ef" * 16,), drop=dropped.append, num_fixed_bytes=0)

    def read_adapter(path: str) -> object:
        paths.append(path)
        if "gone" in path:
            raise OtherValues(path)
        return types.SimpleNamespace(digest="ef" * 16, num_bytes=1)

    digests = {"a": "ab" * 16, "b": "cd" * 16, "gone": "0f" * 16}
    loaded = {name: LoadedAdapter(f"/{name}", digest) for name, digest in digests.items()}
    registry.table = AdapterTable(1, loaded)
    engine = engine_of(held, read_adapter)
    adapters = ReplicaAdapters(EngineConfig(adapter_roots=(str(tmp_path),)), engine, THREAD, registry)
    try:
        both = f"{'ab' * 16}*0.5&{'cd' * 16}"
        request = EngineRequest(request_id="a", prompt_token_ids=[5], params=SamplingParams(), adapter=both)
        assert adapters.with_values(request) is request
        known, adapter = await adapters.find_for(request)
        assert (known.adapter, adapter.digest) == ("ef" * 16, "ef" * 16)
        assert adapters.with_values(request) == known
        parts = [CombinedPart("/a", "ab" * 16, 0.5), CombinedPart("/b", "cd" * 16, 1.0)]
        assert paths == [combined_path(parts)]
        for missing in ("0f", "00"):
            lost = msgspec.structs.replace(request, adapter=f"{both}&{missing * 16}")
            with pytest.raises(ServingError) as refused:
                await adapters.find_for(lost)
            assert refused.value.refusal.kind == "adapter_gone"
        await adapters.catch_up()
        assert not dropped
        registry.table = AdapterTable(2, {"a": loaded["a"]})
        await adapters.catch_up()
        assert dropped == ["ef" * 16]
    finally:
        adapters.close()
        shutil.rmtree(cache_entry("adapters") / registry.server, ignore_errors=True)

"""Lines of batches under the rate limits of their owner's API key: charged like requests, and patient."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import pytest

from manta.cluster.batch import batch_job
from manta.cluster.batch.batch_job import BatchJob
from manta.cluster.batch.journal import LineKey
from manta.cluster.batch.line_endpoints import Endpoints
from manta.cluster.batch.lines import BatchRequest, BatchResponse, BatchResult, parse
from manta.cluster.config import ServeConfig
from manta.cluster.engine.request import FinishStatus
from manta.cluster.errors import QueueFull
from manta.cluster.http.access.rate_limits import RateLimits
from manta.cluster.http.exchange.engines import Event
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.serve_limits import KeyLimits
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.refusals import Refusal
from tests.http.test_routes import Repeating, RepeatingEngines
from tests.patience import PATIENCE_S

OWNER, KEY = "0" * 32, "key-one"
OUTPUT, NUM_PLACES = 5, 4


class Metered(Repeating):
    """Output of `OUTPUT` tokens, which the meter counts."""

    def __init__(self, prompts: list[list[int]], meter: Any) -> None:
        super().__init__(prompts, "abc")
        self._meter = meter

    async def __aiter__(self) -> Any:
        self._meter.spend(OUTPUT)
        yield Event(index=0, text="abc", token_ids=[1] * OUTPUT, finish=FinishStatus.FINISHED_STOPPED)

    def close(self) -> None:
        self._meter.end()


class MeteredEngines(RepeatingEngines):
    def __init__(self) -> None:
        self.refuses = 0

    async def submit(self, request: Any, meter: Any = None) -> Metered:
        if self.refuses:
            self.refuses -= 1
            raise QueueFull(Refusal("queue_full", value=1, bound=1, unit="requests"))
        return Metered(request.prompts, meter)


class Clocked:
    """The endpoints of batches under a clock that the test moves."""

    def __init__(self, **limits: Any) -> None:
        self.now = 0.0
        self.engines = MeteredEngines()
        config = ServeConfig(key_limits={KEY: KeyLimits(**limits)})
        self.limits = RateLimits(config.key_limits, lambda: self.now)
        engines: Any = self.engines
        self.endpoints = Endpoints(
            config, Tokenizer("demo"), engines, Metrics("demo"), key_names={OWNER: KEY}, limits=self.limits
        )
        self.results: list[BatchResult] = []

    def write(self, key: LineKey, result: BatchResult) -> None:
        self.results.append(result)

    def has(self, key: LineKey) -> bool:
        return False

    async def run(self, num_lines: int, owner: str = OWNER) -> None:
        self.places = places = asyncio.Semaphore(NUM_PLACES)
        job = BatchJob(self.endpoints.answer, self, places, 4096, lambda _: None, owner=owner, pace=self.endpoints.pace)
        await batch_job.run(job, io.BytesIO(b"".join(line(number) for number in range(num_lines))))

    @property
    def statuses(self) -> list[int]:
        return [each.response.status_code for each in self.results if each.response is not None]


def line(number: int, **fields: Any) -> bytes:
    body = {"model": "", "prompt": [1, 2, 3], "max_tokens": OUTPUT, **fields}
    return json.dumps({"custom_id": f"{number}", "url": "/v1/completions", "body": body}).encode() + b"\n"


async def all_places_are_free(places: asyncio.Semaphore) -> None:
    for _ in range(NUM_PLACES):
        assert not places.locked()
        await places.acquire()
    for _ in range(NUM_PLACES):
        places.release()


async def until_waiting(clocked: Clocked, num_results: int) -> None:
    """Waits for results, and sees that none follows in many turns of the loop."""
    async with asyncio.timeout(PATIENCE_S):
        while len(clocked.results) < num_results:
            await asyncio.sleep(0.01)
    for _ in range(20):
        await asyncio.sleep(0.01)
    assert len(clocked.results) == num_results


def test_lines_wait_for_requests_and_hold_no_place() -> None:
    async def check() -> None:
        clocked = Clocked(requests_per_minute=2)
        running = asyncio.create_task(clocked.run(5))
        for number in (1, 2, 3, 4, 5):
            await until_waiting(clocked, number)
            await all_places_are_free(clocked.places)
            clocked.now += 30.0
        await running
        assert clocked.statuses == [200] * 5

    asyncio.run(check())


def test_lines_are_charged_for_prompt_and_output() -> None:
    async def check() -> None:
        clocked = Clocked(tokens_per_minute=1000)
        await clocked.run(3)
        assert clocked.limits.taken()[KEY].tokens == 3 * (3 + OUTPUT)
        assert clocked.limits.taken()[KEY].requests == 3

    asyncio.run(check())


def test_what_other_processes_took_counts() -> None:
    async def check() -> None:
        clocked = Clocked(tokens_per_minute=600)
        clocked.limits.note_peer("ingress", {KEY: (0, 0)})
        clocked.endpoints.limits.of(KEY)
        clocked.limits.note_peer("ingress", {KEY: (1, 600)})
        running = asyncio.create_task(clocked.run(1))
        await until_waiting(clocked, 0)
        clocked.now += 30.0
        await running
        assert clocked.statuses == [200]

    asyncio.run(check())


def test_a_line_that_the_engines_refuse_for_now_is_charged_once() -> None:
    async def check() -> None:
        clocked = Clocked(requests_per_minute=100, tokens_per_minute=1000)
        clocked.engines.refuses = 1
        await clocked.run(1)
        assert clocked.statuses == [200]
        taken = clocked.limits.taken()[KEY]
        assert (taken.requests, taken.tokens) == (1, 3 + OUTPUT)

    asyncio.run(check())


def test_a_prompt_beyond_the_limit_itself_is_refused() -> None:
    async def ask(clocked: Clocked) -> BatchResponse:
        asked: Any = parse(line(1, prompt=[1] * 20))
        assert isinstance(asked, BatchRequest)
        return await clocked.endpoints.answer(asked, "a", OWNER)

    answer = asyncio.run(ask(Clocked(tokens_per_minute=10)))
    assert answer.status_code == 400
    assert b"key_limits" in bytes(answer.body)


@pytest.mark.parametrize("owner", ["", "1" * 32])
def test_owners_without_limits_wait_for_nothing(owner: str) -> None:
    clocked = Clocked(requests_per_minute=1)
    asyncio.run(clocked.run(5, owner))
    assert clocked.statuses == [200] * 5

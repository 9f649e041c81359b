"""Clients of all kinds against live servers, and the HTTP fuzzer's own promise: what is wrong is found.

`make fuzz ARGS=--http SEED=...` runs the same clients again.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from cluster.http.endpoints import tokens
from tests.fuzz.http import campaign as campaigns
from tests.fuzz.http.bodies import changed
from tests.fuzz.http.campaign import NUM_EXAMPLES, HttpCampaign, serving_processes
from tests.fuzz.http.clients import ACTIONS, World
from tests.fuzz.http.connection import Answer
from tests.fuzz.http.good import essence
from tests.local_server import LocalServer, local_server
from tests.server import Server, shared_server

SECONDS = 10.0
PART_SECONDS = 300.0
CROWDED = (
    "engine.kv_cache_bytes=524288",
    "engine.max_num_sequences=8",
    "engine.speculative={proposers: [forced, ngram]}",
)
"""A server whose requests are preempted and speculate."""


def fuzz(server: Server, seed: int, seconds: float, num_examples: int) -> HttpCampaign:
    campaign = HttpCampaign(server.port, server.model, seed, serving_processes(server.process.pid), num_examples)
    campaign.run(seconds)
    assert not campaign.failures, "\n\n".join(map(str, campaign.failures))
    return campaign


@pytest.mark.timeout(240)
def test_clients_of_all_kinds_get_what_is_documented_and_what_they_get_alone() -> None:
    campaign = fuzz(shared_server(), seed=1, seconds=SECONDS, num_examples=5)
    assert campaign.world.counts["equal answers"] > 0


@pytest.mark.prove
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("settings", [(), CROWDED], ids=["roomy", "crowded"])
def test_ten_minutes_of_clients_of_all_kinds(settings: tuple[str, ...], record_property) -> None:
    server = Server(*settings)
    try:
        counts = fuzz(server, seed=len(settings), seconds=PART_SECONDS, num_examples=NUM_EXAMPLES).world.counts
    finally:
        server.stop()
    for name in ("equal answers", "disconnects", *(name for name in sorted(counts) if name.startswith("answers "))):
        record_property(name, counts[name])
    assert not [name for name in ACTIONS if not counts[name]]
    assert counts["disconnects"] >= 1000


# ---- what is wrong is found ----------------------------------------------------------------------------------------


async def found(server: LocalServer, spoil: Callable[[World], None] = lambda _: None) -> str:
    """Of a short campaign with a few clients; `spoil` gets its world before they begin."""
    campaign = HttpCampaign(server.port, server.model, seed=3, num_examples=1)
    prepare = campaign.world.prepare

    async def prepared() -> None:
        await prepare()
        spoil(campaign.world)

    campaign.world.prepare = prepared  # type: ignore[method-assign]
    await campaign.run_async(seconds=20.0, num_clients=4)
    return "\n\n".join(map(str, campaign.failures))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first failure ends the campaign, and what stays is not waited for long."""
    monkeypatch.setattr(campaigns, "MAX_FAILURES", 1)
    monkeypatch.setattr(campaigns, "SETTLE_S", 1.0)


@pytest.mark.usefixtures("hasty")
def test_a_failure_inside_is_found_and_told_with_its_transcript(monkeypatch: pytest.MonkeyPatch) -> None:
    is_armed: list[bool] = []
    response = tokens.TokenizeResponse

    def failing(*fields: Any) -> tokens.TokenizeResponse:
        if is_armed:
            raise RuntimeError("by hand")
        return response(*fields)

    monkeypatch.setattr(tokens, "TokenizeResponse", failing)

    async def run() -> None:
        async with local_server() as server:
            told = await found(server, lambda _: is_armed.append(True))
        assert "seed 3, client" in told
        assert "/tokenize answers 500" in told
        assert "> b'POST /tokenize HTTP/1.1" in told

    asyncio.run(run())


@pytest.mark.usefixtures("hasty")
def test_an_answer_that_is_not_as_it_was_alone_is_found() -> None:
    def spoil(world: World) -> None:
        for alone in world.alone.values():
            alone["changed"] = True

    async def run() -> None:
        async with local_server() as server:
            assert "alone the answer was" in await found(server, spoil)

    asyncio.run(run())


@pytest.mark.usefixtures("hasty")
def test_a_request_that_stays_behind_is_found() -> None:
    async def run() -> None:
        async with local_server() as server:
            stats = server.replica.engine.stats

            def leaking() -> Any:
                found = stats()
                found.num_running += 1
                return found

            server.replica.engine.stats = leaking  # type: ignore[method-assign]
            campaign = HttpCampaign(server.port, server.model, seed=4, num_examples=1)
            await campaign.run_async(seconds=0.0)
            assert ["num_requests_running is 1" in failure.problem for failure in campaign.failures] == [True]

    asyncio.run(run())


def test_parts_of_a_stream_add_up_to_the_whole_answer() -> None:
    def answer(*bodies: dict[str, Any], kind: str = "application/json") -> Answer:
        text = [json.dumps(body).encode() for body in bodies]
        stream = b"".join(b"data: " + part + b"\n\n" for part in [*text, b"[DONE]"])
        return Answer(200, {"content-type": kind}, stream if "event" in kind else text[0])

    usage = {"prompt_tokens": 2, "completion_tokens": 2}
    call = {"function": {"name": "f", "arguments": "{}"}}
    whole = {"choices": [{"index": 0, "message": {"content": None, "tool_calls": [call]}, "finish_reason": "stop"}]}
    parts: list[dict[str, Any]] = [
        {"delta": {"role": "assistant", "tool_calls": [{"index": 0, "function": {"name": "f"}}]}},
        {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}},
        {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}, "finish_reason": "stop"},
    ]
    chunks = [{"choices": [{"index": 0, **part}], "usage": None} for part in parts]
    streamed = answer(*chunks, {"choices": [], "usage": usage}, kind="text/event-stream")
    assert essence(streamed) == essence(answer({**whole, "usage": usage}))
    cut = Answer(200, {"content-type": "text/event-stream"}, streamed.body[:-20])
    with pytest.raises(AssertionError, match="the stream ends with"):
        essence(cut)


def test_changed_bodies_follow_from_their_generator_alone() -> None:
    """However many were made before."""
    fields = {"prompt": "a", "stop": ["a"], "structured_outputs": {"json": {"type": "object"}}}
    first, second = ([changed(fields, random.Random(seed)) for seed in range(1000)] for _ in range(2))
    assert first == second
    assert len(set(first)) > 100

"""Clients of all kinds against live servers, and the HTTP fuzzer's own promise: what is wrong is found.

`make fuzz ARGS=--http SEED=...` runs the same clients again.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from manta.cluster.http.endpoints import tokens
from tests.async_tests import async_test
from tests.conftest import PROVE
from tests.documented import Document
from tests.fuzz.http import campaign as campaigns
from tests.fuzz.http import extremes
from tests.fuzz.http.bodies import changed
from tests.fuzz.http.campaign import NUM_EXAMPLES, HttpCampaign, serving_processes
from tests.fuzz.http.clients import ACTIONS, World
from tests.fuzz.http.connection import Answer, Closed, connect, request
from tests.fuzz.http.good import CATALOGUE, essence
from tests.local_server import LocalServer, local_server
from tests.patience import PATIENCE_S
from tests.server import Server, shared_server

SECONDS = 5.0
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


def test_all_kinds_of_clients_get_documented_answers() -> None:
    campaign = fuzz(shared_server(), seed=1, seconds=SECONDS, num_examples=2)
    assert campaign.world.counts["equal answers"] > 0


@pytest.mark.prove
@pytest.mark.parametrize("settings", [(), CROWDED], ids=["roomy", "crowded"])
def test_ten_minutes_of_clients_of_all_kinds(
    settings: tuple[str, ...], tmp_path: pathlib.Path, record_property
) -> None:
    server = Server(*settings, f"batch_storage={tmp_path}")
    try:
        counts = fuzz(server, seed=len(settings), seconds=PART_SECONDS, num_examples=NUM_EXAMPLES).world.counts
    finally:
        server.stop()
    for name in (
        "equal answers",
        "equal files",
        "disconnects",
        *(name for name in sorted(counts) if name.startswith("answers ")),
    ):
        record_property(name, counts[name])
    assert not [name for name in ACTIONS if not counts[name]]
    assert counts["disconnects"] >= 1000


# ---- extreme numbers -----------------------------------------------------------------------------------------------

RANKS = ("engine.tensor_parallel_size=2",)
EXTREME_SECONDS = 1500.0


async def extremes_beside_a_stream(server: LocalServer, asked: list[tuple[str, bytes]]) -> None:
    """Each is answered 2xx or 4xx, in OpenAI's shape, and the stream that runs meanwhile keeps its tokens."""
    world = World(server.port, server.model, seed=1, num_examples=0)
    document = json.loads((await server.get("/openapi.json"))[1])
    world.document = Document(document)
    good = CATALOGUE[1]
    stream = request(good.path, good.body(server.model, stream=True))

    async def streamed() -> Any:
        connection = await connect(server.port, [])
        await connection.send(stream)
        try:
            return essence(await connection.answer())
        finally:
            connection.close()

    alone = await streamed()
    engine, num_rebuilds = server.replica.engine, server.replica.engine.stats().num_rank_rebuilds
    beside = asyncio.ensure_future(streamed())
    for path, body in asked:
        transcript: list[str] = []
        connection = await connect(server.port, transcript)
        await connection.send(request(path, body))
        try:
            world.check(path, await connection.answer())
        except Exception as error:
            raise AssertionError(f"{path} {body[:1000]!r}: {error}") from error
        finally:
            connection.close()
        if beside.done():
            assert beside.result() == alone
            beside = asyncio.ensure_future(streamed())
    assert await beside == alone
    await server.until_idle()
    stats = engine.stats()
    assert stats.alive
    assert stats.num_rank_rebuilds == num_rebuilds


@pytest.mark.prove
@pytest.mark.usefixtures("plugin")
@async_test
async def test_extreme_field_values_cost_nobody_else_anything() -> None:
    """Each alone; every 25th unless all are to be proved."""
    processors = {"automaton": "manta_example_processor:Automaton"}
    async with local_server(engine_options={"logits_processors": processors}) as server:
        document = json.loads((await server.get("/openapi.json"))[1])
        every = [(place, name) for place in extremes.places(document) for name in extremes.EXTREMES]
        chosen = every if PROVE else every[::25]
        assert len(every) > 1000
        asked = [(place.path, extremes.body(server.model, place.path, (place, name))) for place, name in chosen]
        await extremes_beside_a_stream(server, asked)


async def answered(port: int, asked: bytes) -> Answer | None:
    """The answer to a request. None if there is none because the body is not as long as was said."""
    head, _, sent = asked.partition(b"\r\n\r\n")
    is_whole = b"\r\ncontent-length: %d" % len(sent) in head
    connection = await connect(port, [])
    try:
        await connection.send(asked)
        if not is_whole:
            connection.half_close()
        return await connection.answer()
    except Closed:
        assert not is_whole, asked[:300]
        return None
    finally:
        connection.close()


@async_test
async def test_extreme_numbers_in_queries_and_headers_are_answered(tmp_path: pathlib.Path) -> None:
    """With success or a refusal; every seventh unless all are to be proved."""
    async with local_server(batch_storage=str(tmp_path)) as server:
        content = json.loads((await server.get("/openapi.json"))[1])
        document = Document(content)
        body = {"model": server.model, "input": "Hello", "background": True, "max_output_tokens": 3}
        made = await answered(server.port, request("/v1/responses", json.dumps(body).encode()))
        assert made is not None
        response_id = json.loads(made.body)["id"]
        ids = {"response_id": response_id, "stream_id": response_id.replace("resp", "strm")}
        every = [*extremes.queries(content, ids), *extremes.headers(server.model, ids)]
        assert len(every) > 300
        num_successes = 0
        for asked in every if PROVE else every[::7]:
            found = await answered(server.port, asked)
            if found is None:
                continue
            path = asked.split(b" ")[1].partition(b"?")[0].decode()
            assert found.status in (200, 400, 404, 413, 414, 431), (asked[:300], found.status, found.body[:300])
            if (name := document.path_of(path)) is not None and found.status not in (414, 431):
                document.check(name, found.status, found.content_type, found.body)
            num_successes += found.status == 200
        assert num_successes > 10
        await server.until_idle()


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("settings", [(), RANKS], ids=["one process", "two ranks"])
def test_extreme_numbers_among_clients_of_all_kinds(
    settings: tuple[str, ...], tmp_path: pathlib.Path, record_property
) -> None:
    """An hour in all with the two campaigns above: alone and in pairs, on one engine and on two ranks."""
    processors = "engine.logits_processors={automaton: manta_example_processor:Automaton}"
    server = Server(processors, *settings, f"batch_storage={tmp_path}")
    try:
        counts = fuzz(server, seed=10 + len(settings), seconds=EXTREME_SECONDS, num_examples=5).world.counts
    finally:
        server.stop()
    for name in (
        "equal answers",
        "equal files",
        "send_extremes",
        "send_form",
        *(name for name in sorted(counts) if name.startswith("answers ")),
    ):
        record_property(name, counts[name])
    assert counts["send_extremes"] > 1000
    assert counts["equal files"] > 100


# ---- what is wrong is found ----------------------------------------------------------------------------------------


async def found(server: LocalServer, spoil: Callable[[World], None] = lambda _: None) -> str:
    """Returns the first failure of a campaign of a few clients; `spoil` gets its world before they begin."""
    campaign = HttpCampaign(server.port, server.model, seed=3, num_examples=1)
    prepare = campaign.world.prepare

    async def prepared() -> None:
        await prepare()
        spoil(campaign.world)

    campaign.world.prepare = prepared  # type: ignore[method-assign]
    await campaign.run_async(seconds=PATIENCE_S, num_clients=4)
    return "\n\n".join(map(str, campaign.failures))


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first failure ends the campaign, and what stays is not waited for long."""
    monkeypatch.setattr(campaigns, "MAX_FAILURES", 1)
    monkeypatch.setattr(campaigns, "SETTLE_S", 1.0)


@pytest.mark.prove
@pytest.mark.usefixtures("hasty")
@async_test
async def test_an_internal_failure_is_reported_with_its_transcript(monkeypatch: pytest.MonkeyPatch) -> None:
    is_armed: list[bool] = []
    response = tokens.TokenizeResponse

    def failing(*fields: Any) -> tokens.TokenizeResponse:
        if is_armed:
            raise RuntimeError("by hand")
        return response(*fields)

    monkeypatch.setattr(tokens, "TokenizeResponse", failing)

    async with local_server() as server:
        told = await found(server, lambda _: is_armed.append(True))
    assert "seed 3, client" in told
    assert "/tokenize answers 500" in told
    assert "\n  > b'POST " in told  # of several requests in one piece the first is shown


@pytest.mark.prove
@pytest.mark.usefixtures("hasty")
@async_test
async def test_an_answer_unlike_its_solitary_one_is_found() -> None:
    def spoil(world: World) -> None:
        for alone in world.alone.values():
            alone["changed"] = True

    async with local_server() as server:
        assert "alone the answer was" in await found(server, spoil)


@pytest.mark.prove
@pytest.mark.usefixtures("hasty")
@async_test
async def test_a_request_that_stays_behind_is_found() -> None:
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


def test_stream_parts_add_up_to_the_answer() -> None:
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

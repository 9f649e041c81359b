"""Calls of an engine over the token channel, which answer as calls through Serve do."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

from manta.cluster.engine.request import EngineRequest, FinishStatus, SequenceOutput
from manta.cluster.errors import RequestRefused
from manta.cluster.http.exchange.engines import GenerationRequest
from manta.cluster.http.exchange.metrics import Metrics
from manta.cluster.serve.channel.token_channel import Address, Connection, Control, EngineFailed, RequestResult, Run
from manta.cluster.serve.engine.channel_requests import POLL_S, ChannelRequests
from manta.cluster.serve.requests.channel_calls import ChannelCalls
from manta.cluster.serve.requests.engine_client import EngineClient
from manta.cluster.serve.requests.submission import Submission
from manta.cluster.serve.routing.replicas import ChosenReplica, Replicas, known_replicas
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.constraint import ConstraintSpec
from manta.workers.sampling_params import SamplingParams
from tests.async_tests import async_test
from tests.checkpoints import checkpoint, reference_greedy
from tests.local_server import Handle
from tests.patience import PATIENCE_S, until
from tests.replicas import Replicas as ReplicaMaker

PROMPT = [5, 9, 17, 30]
NUM_TOKENS = 12


class CountingHandle(Handle):
    """Serve's handle, with the names of the methods that were called."""

    app_name = "channel-calls"

    def __init__(self, replica: Any) -> None:
        super().__init__(replica)
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.called.append(name)
        return super().__getattr__(name)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, ignore_eos=True, **fields)


async def submit(client: EngineClient, name: str, asked: SamplingParams, **fields: Any) -> Submission:
    request = EngineRequest(request_id=name, prompt_token_ids=[], params=asked, deadline_s=PATIENCE_S, **fields)
    return await client.submit(GenerationRequest(prompts=[PROMPT], engine=request))


async def read(submission: Submission) -> list[int]:
    try:
        return [token_id async for event in submission for token_id in event.token_ids]
    finally:
        submission.close()


@async_test
async def test_requests_need_no_call_of_serve() -> None:
    """Streams, refusals, constraints and clients that leave; Serve gets what msgpack cannot carry, and the hold."""
    make = ReplicaMaker()
    replica = make()
    handle = CountingHandle(replica)
    client = EngineClient(handle, Tokenizer(checkpoint("llama")), "127.0.0.1", Metrics("m"))
    known = known_replicas(handle.app_name)
    known.block_sizes["engine"] = 0
    known.set_running("engine", [""])  # the name of a replica outside of Serve
    try:
        await client.until_greeted()
        expected = reference_greedy(checkpoint("llama"), PROMPT, NUM_TOKENS)
        streams = [await submit(client, str(number), params(max_tokens=NUM_TOKENS)) for number in range(3)]
        assert await asyncio.gather(*map(read, streams)) == [expected] * 3
        choice = params(max_tokens=NUM_TOKENS, constraint=ConstraintSpec(kind="regex", text="a{12}"))
        assert len(await read(await submit(client, "constrained", choice))) <= NUM_TOKENS
        with pytest.raises(RequestRefused):
            await read(await submit(client, "refused", params(max_tokens=10**6)))
        leaving = await submit(client, "leaving", params(max_tokens=400))
        await anext(aiter(leaving))
        leaving.close()
        await until(lambda: not replica.engine.has_unfinished and not client.runs)
        assert "generate" not in handle.called
        await until(lambda: not client.over_channel.num_held)
        assert 1 <= handle.called.count("hold") <= 4, "one each time that requests run"
        odd = await submit(client, "odd", params(max_tokens=NUM_TOKENS), session="\ud800")
        assert await read(odd) == expected
        assert handle.called.count("generate") == 1
        assert client.over_channel.num_open == 0
    finally:
        await client.close()
        make.close()


@async_test
async def test_an_output_after_a_stop_string_cancels_no_result() -> None:
    """A frame is under way when the ingress ends the request, whose result comes nevertheless."""
    make = ReplicaMaker()
    client = EngineClient(CountingHandle(make()), Tokenizer(checkpoint("llama")), "127.0.0.1", Metrics("m"))
    known = known_replicas(CountingHandle.app_name)
    known.block_sizes["engine"] = 0
    known.set_running("engine", [""])
    results: list[tuple[str, RequestResult]] = []
    returned = client.over_channel.returned

    def note(found: list[tuple[str, RequestResult]]) -> None:
        results.extend(found)
        returned(found)

    try:
        await client.until_greeted()
        client._receiver._on_results = note
        text = client.tokenizer.decode(reference_greedy(checkpoint("llama"), PROMPT, NUM_TOKENS))
        submission = await submit(client, "stopped", params(max_tokens=400, stop=(text[-3:],)))
        (connection,) = client.over_channel.connections.values()
        await read(submission)
        assert not client.runs
        client._on_outputs([SequenceOutput("stopped-0", 0, [5])], connection)
        await until(lambda: not client.over_channel.num_open)
        assert [request_id for request_id, _ in results] == ["stopped-0"]
        wire = cast(Connection, Wire())
        client._on_outputs([SequenceOutput("given up before an engine had it", 0, [5])], wire)
        assert wire.sent == [Control("given up before an engine had it")]  # type: ignore[attr-defined]
    finally:
        await client.close()
        make.close()


class Wire:
    """A connection that keeps what is sent over it."""

    def __init__(self, replica: str = "a", takes_requests: bool = True) -> None:
        self.replica, self.takes_requests = replica, takes_requests
        self.is_away = False
        self.sent: list[Any] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


def calls_of(*wires: Wire, running: str = "a") -> tuple[ChannelCalls, list[str]]:
    """Returns the calls of an ingress with these connections, and the replicas that it has held."""
    known, held = Replicas(), list[str]()
    known.block_sizes["engine"] = 0
    known.set_running("engine", running)

    async def hold(chosen: ChosenReplica) -> None:
        held.append(chosen.name)
        await asyncio.sleep(0)

    calls = ChannelCalls(known, hold)
    for wire in wires:
        calls.connected(cast(Connection, wire))
    return calls, held


REQUEST = EngineRequest(request_id="r", prompt_token_ids=PROMPT, params=params(max_tokens=4))


@async_test
async def test_a_call_ends_as_one_of_serve_does() -> None:
    wire = Wire()
    calls, held = calls_of(wire)

    async def sent() -> asyncio.Task[RequestResult | None]:
        wire.sent.clear()
        call = asyncio.ensure_future(calls.generate(REQUEST, "engine"))
        await until(lambda: bool(wire.sent))
        assert [message.request.request_id for message in wire.sent if isinstance(message, Run)] == ["r"]
        return call

    call = await sent()
    calls.returned([("unknown", RequestResult()), ("r", RequestResult(finish=FinishStatus.FINISHED_LENGTH))])
    assert (await call) == RequestResult(finish=FinishStatus.FINISHED_LENGTH)
    call = await sent()
    calls.returned([("r", RequestResult(failure="out of luck"))])
    with pytest.raises(EngineFailed, match="out of luck"):
        await call
    call = await sent()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert wire.sent[1:] == [Control("r")]
    call = await sent()
    calls.lost(cast(Connection, wire))
    with pytest.raises(ConnectionError):
        await call
    assert await calls.generate(REQUEST, "engine") is None, "nobody is connected"
    await until(lambda: not calls.num_held)
    assert set(held) == {"a"}


@pytest.mark.parametrize("wires", [[Wire()], [Wire(), Wire("b", takes_requests=False)], []])
@async_test
async def test_serve_is_called_unless_all_replicas_take_requests(wires: list[Wire]) -> None:
    calls, _ = calls_of(*wires, running="ab")
    assert await calls.generate(REQUEST, "engine") is None
    assert not any(wire.sent for wire in wires)
    assert await calls.generate(REQUEST, "standby") is None


def test_a_request_survives_the_channel() -> None:
    sent = Run(msgspec.structs.replace(REQUEST, num_new_tokens=3, cache_root=b"root" * 4))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Run) == sent


@pytest.mark.parametrize(
    ("error", "has_died"),
    [(EngineFailed("rank 1 is lost"), True), (OSError("no route"), True), (RuntimeError("no compiler"), False)],
)
@async_test
async def test_an_error_of_one_request_is_no_death_of_its_engine(error: Exception, has_died: bool) -> None:
    """Another engine runs the request again in the first case only, as after a call through Serve."""
    sent: list[tuple[str, RequestResult]] = []

    async def run(requests: list[EngineRequest], address: Address) -> list[RequestResult]:
        raise error

    requests = ChannelRequests(run, lambda address, outputs, results: sent.extend(results))
    requests.begin(REQUEST, Address("127.0.0.1", 1, "ingress"))
    await until(lambda: bool(sent))
    ((request_id, result),) = sent
    assert request_id == "r"
    if has_died:
        assert str(error) in result.failure
    else:
        assert result.refusal is not None
        assert result.refusal.kind == "engine_failed"
        assert str(error) in str(result.refusal.cause)


@async_test
async def test_an_engine_is_held_until_its_requests_have_ended() -> None:
    """A request that begins between two looks is seen by the second one."""
    ended, address = asyncio.Event(), Address("127.0.0.1", 1, "ingress")

    async def run(requests: list[EngineRequest], address: Address) -> list[RequestResult]:
        await ended.wait()
        return [RequestResult()]

    requests = ChannelRequests(run, lambda address, outputs, results: None)
    held = asyncio.ensure_future(requests.until_none(address))
    await asyncio.sleep(0)
    requests.begin(REQUEST, address)
    await asyncio.sleep(2.5 * POLL_S)
    assert not held.done()
    ended.set()
    await asyncio.wait_for(held, PATIENCE_S)

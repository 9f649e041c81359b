"""Ingresses and keepers of recorded streams in one event loop, whose links a test delays and breaks as it likes.

`RecordedStreams`, `Keeper` and what they use are the real ones. A link carries their messages in order, encoded as the
token channel encodes them. In place of an engine, each ingress makes the tokens of its requests itself: a function of
seed and position, as an engine's are.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable
from typing import Any

import msgspec

from manta.cluster.engine.request import EngineRequest, FinishStatus, SequenceOutput, Usage
from manta.cluster.http.exchange.engines import GenerationRequest
from manta.cluster.http.exchange.exchange import new_stream_id
from manta.cluster.http.exchange.metrics import Metrics, RequestMetrics, Unmeasured
from manta.cluster.http.exchange.recordings import Opening, Recording
from manta.cluster.serve.channel.keeping import FromKeeper, ToKeeper, stream_format
from manta.cluster.serve.channel.token_channel import Address, RequestResult
from manta.cluster.serve.recorded.keeper import Keeper
from manta.cluster.serve.recorded.streams import RecordedStreams
from manta.cluster.serve.requests.prompt_run import PromptRun
from manta.cluster.serve.requests.takeover import USUAL_TIMES
from manta.cluster.serve_limits import StreamLimits
from manta.cluster.text.tokenizer import Tokenizer
from manta.structured.refusals import Refusal
from manta.workers.sampling_params import SamplingParams
from tests.checkpoints import checkpoint

OWNER = "ann"


def token_at(seed: int, position: int) -> int:
    return 5 + (seed * 31 + position * 7) % 80


def tokens_of(seed: int, num_tokens: int) -> list[int]:
    """All tokens of an answer."""
    return [token_at(seed, position) for position in range(num_tokens)]


class _Pipe:
    """Carries messages one way, in order. While it is held they wait."""

    def __init__(self, deliver: Any, kind: Any) -> None:
        self.is_held = False
        self._deliver = deliver
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)
        self._waiting: list[bytes] = []
        self._is_broken = False

    def put(self, message: Any) -> None:
        self._waiting.append(msgspec.msgpack.encode(message))
        asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        while self._waiting and not self.is_held and not self._is_broken:
            self._deliver(self._decoder.decode(self._waiting.pop(0)))

    def cut(self) -> None:
        self._is_broken = True


class Link:
    """The connection of an ingress and a keeper, as the ingress holds it."""

    is_away = False

    def __init__(self, ingress: Ingress, keeping: KeeperProcess) -> None:
        self.replica, self.node = keeping.name, keeping.node
        self.stream_format = keeping.stream_format
        self.ingress, self.keeping = ingress, keeping
        self.num_sent: collections.Counter[type] = collections.Counter()
        """Messages to the keeper by type."""
        self._there = _Pipe(lambda message: keeping.keeper.receive(ingress.address, message), ToKeeper)
        self._back = _Pipe(lambda message: ingress.streams.copies.receive(message, self), FromKeeper)

    def send(self, message: Any) -> None:
        """Sends to the keeper. An engine's messages have no receiver here."""
        self.num_sent[type(message)] += 1
        if isinstance(message, ToKeeper):
            self._there.put(message)

    def answer(self, message: FromKeeper) -> None:
        self._back.put(message)

    def hold(self, is_held: bool = True) -> None:
        for pipe in (self._there, self._back):
            pipe.is_held = is_held
            pipe.flush()

    def cut(self) -> None:
        """Breaks the connection without a word to either end."""
        self._there.cut()
        self._back.cut()


class KeeperProcess:
    """A keeper, and the ingresses that are connected to it."""

    def __init__(self, name: str, node: str = "a keeper's node") -> None:
        self.name, self.node = name, node
        self.stream_format = stream_format()
        self.links: dict[Address, Link] = {}
        self.ended: set[Address] = set()
        """Ingresses whose processes are known to have ended."""
        self.keeper = Keeper(self._send, has_died=self._has_died)

    async def _has_died(self, address: Address) -> bool:
        return address in self.ended

    def _send(self, address: Address, message: FromKeeper) -> None:
        if (link := self.links.get(address)) is not None:
            link.answer(message)


class Ingress:
    """The streams of one ingress, and what makes their tokens: it implements `Dispatcher`."""

    def __init__(self, world: World, number: int, limits: StreamLimits, node: str) -> None:
        self.address = Address("127.0.0.1", 1000 + number, "secret")
        self.tokenizer = world.tokenizer
        self.metrics = Metrics("model", f"ingress {number}")
        self.runs: dict[str, PromptRun] = {}
        self.suspects = asyncio.Lock()
        self.times = USUAL_TIMES
        self.num_generated = 0
        self.keepers: Any = None
        self.replicas_running: frozenset[str] = frozenset()
        self._world = world
        self.streams = RecordedStreams(self, limits, node)

    def owns(self, stream_id: str) -> bool:
        return stream_id in self.streams._own

    async def until_greeted(self) -> None: ...

    def measure(self, num_choices: int) -> RequestMetrics:
        return Unmeasured()

    def call(self, run: PromptRun, request: EngineRequest, pause_s: float) -> asyncio.Task[None]:
        return asyncio.ensure_future(self._generate(run, request))

    async def _generate(self, run: PromptRun, request: EngineRequest) -> None:
        """Makes a token, or as many as the world says, in each turn in which its engines run."""
        seed, most = request.params.seed, request.params.max_tokens
        assert seed is not None
        assert most is not None
        assert request.request_id not in self._world.requests, "an engine would run two requests of one id"
        self._world.requests.add(request.request_id)
        self._world.deadlines.append(request.deadline_s)
        self._world.adapters.append(request.adapter)
        try:
            if request.adapter in self._world.gone:
                refusal = Refusal("adapter_gone", "model", request.adapter)
                run.has_returned(RequestResult(refusal=refusal))
                return
            begun = request.continued[0].token_ids if request.continued else []
            end = len(begun)
            while end < most:
                await self._world.step()
                start, end = end, min(most, end + self._world.tokens_at_once())
                self.num_generated += end - start
                tokens = [token_at(seed, position) for position in range(start, end)]
                finish = FinishStatus.FINISHED_LENGTH if end == most else None
                usage = Usage(len(request.prompt_token_ids), end, 0)
                output = SequenceOutput(request.request_id, 0, tokens, finish=finish, usage=usage)
                run.receive(output, self)  # type: ignore[arg-type]
        finally:
            self._world.requests.discard(request.request_id)

    replica = "engine"

    def send(self, control: object) -> None: ...

    async def generate(self, request: EngineRequest) -> RequestResult:
        raise AssertionError("`call` makes the tokens")

    def replica_sent_to(self, request_id: str) -> str | None:
        return None

    def forget_sent(self, request_id: str) -> None: ...

    def cannot_reach(self, request_id: str) -> bool:
        return False

    def note_output(self, request_id: str) -> None: ...

    def note_end(self, request_id: str) -> None: ...

    def cancel_later(self, call: Any) -> None: ...


class World:
    """Some ingresses, each connected to each of some keepers."""

    def __init__(self, num_ingresses: int, num_keepers: int, limits: StreamLimits | None = None) -> None:
        self.tokenizer = Tokenizer(checkpoint("llama"))
        self.requests: set[str] = set()
        """Ids of the requests that engines run."""
        self.deadlines: list[float | None] = []
        """Deadline in seconds of each request that an engine began."""
        self.adapters: list[str] = []
        """The adapter of each request that an engine began."""
        self.gone: set[str] = set()
        """Adapters whose values engines do not have."""
        self.keepers = [KeeperProcess(f"keeper {number}") for number in range(num_keepers)]
        self.ingresses: list[Ingress] = []
        self.tells_deaths = False
        """Whether keepers can find out that the process of an ingress has ended."""
        self.tokens_at_once: Callable[[], int] = lambda: 1
        """How many tokens the next output has."""
        self._limits = limits or StreamLimits()
        self._num_added = 0
        self._tokens = asyncio.Semaphore(0)
        for _ in range(num_ingresses):
            self.add()

    def add(self, *keepers: KeeperProcess, node: str = "an ingress's node") -> Ingress:
        """Adds an ingress that is connected to these keepers, or to all."""
        ingress = Ingress(self, self._num_added, self._limits, node)
        self._num_added += 1
        self.ingresses.append(ingress)
        for keeping in keepers or self.keepers:
            self.connect(ingress, keeping)
        return ingress

    def connect(self, ingress: Ingress, keeping: KeeperProcess) -> None:
        link = keeping.links[ingress.address] = Link(ingress, keeping)
        ingress.replicas_running |= {keeping.name}
        ingress.streams.copies.connected(link)  # type: ignore[arg-type]

    def link(self, ingress: Ingress, keeping: KeeperProcess) -> Link:
        return keeping.links[ingress.address]

    def cut(self, ingress: Ingress, keeping: KeeperProcess) -> None:
        """Breaks a connection. Both ends notice."""
        link = keeping.links.pop(ingress.address)
        link.cut()
        ingress.streams.copies.lost(link)  # type: ignore[arg-type]
        keeping.keeper.lose(ingress.address)

    async def step(self) -> None:
        """Waits until a token may be made."""
        await self._tokens.acquire()
        await asyncio.sleep(0.001)

    def run_engines(self, num_tokens: int = 1000) -> None:
        """Lets requests make so many tokens."""
        for _ in range(num_tokens):
            self._tokens.release()

    def kill_ingress(self, ingress: Ingress) -> None:
        """Ends its process. Every keeper notices."""
        self.ingresses.remove(ingress)
        streams = ingress.streams
        for own in list(streams._own.values()):
            own.stop()
            if own.expiry is not None:
                own.expiry.cancel()
        streams._own.clear()
        for task in streams._tasks:
            task.cancel()
        for keeping in self.keepers:
            if (link := keeping.links.pop(ingress.address, None)) is not None:
                link.cut()
                if self.tells_deaths:
                    keeping.ended.add(ingress.address)
                keeping.keeper.lose(ingress.address)

    def kill_keeper(self, keeping: KeeperProcess) -> None:
        """Ends its process. Every ingress notices."""
        self.keepers.remove(keeping)
        for link in keeping.links.values():
            link.cut()
            link.ingress.replicas_running -= {keeping.name}
            link.ingress.streams.copies.lost(link)  # type: ignore[arg-type]
        keeping.links.clear()
        keeping.keeper._streams.clear()

    def copies(self, stream_id: str) -> list[Any]:
        """The copies that keepers have."""
        return [found for each in self.keepers if (found := each.keeper._streams.get(stream_id)) is not None]

    def close(self) -> None:
        while self.ingresses:
            self.kill_ingress(self.ingresses[0])
        for keeping in self.keepers:
            if keeping.keeper._offering is not None:
                keeping.keeper._offering.cancel()


def opening(num_tokens: int, seed: int = 3, owner: str = OWNER, adapter: str = "") -> Opening:
    stream_id = new_stream_id()
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return Opening(
        stream_id=stream_id,
        owner=owner,
        path="/v1/completions",
        body=b"{}",
        created=int(time.time()),
        unread_s=60.0,
        generation=GenerationRequest(
            prompts=[[5, 6, 7]],
            engine=EngineRequest(
                request_id=f"{stream_id}-00000000",
                prompt_token_ids=[],
                params=params,
                deadline_s=600.0,
                adapter=adapter,
            ),
        ),
        seeds=[seed],
    )


async def read(ingress: Ingress, recording: Recording) -> list[int]:
    """All tokens, each entry's once."""
    found: list[int] = []
    reader = ingress.streams.read(recording)
    try:
        async for event in reader:
            found += event.token_ids
    finally:
        reader.close()
    return found


async def read_elsewhere(ingress: Ingress, stream_id: str) -> list[int]:
    """As `read`, for a stream that the ingress has to find."""
    found = await ingress.streams.find(stream_id, OWNER)
    assert found is not None
    return await read(ingress, found)

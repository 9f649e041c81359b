"""A thousand replicas in one process: the router's own code decides for chats that share system prompts.

Real are the decision (`cluster/serve/routing/`), the reports between engines and ingresses with their delay, the hashes
and the blocks of each KV cache with their eviction; simulated are time, the model and the network. `simulate` runs one
router over a workload; `benchmarks/routing.py` prints what came of it.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from cluster.engine.kv_blocks import KVBlocks, hash_blocks
from cluster.engine.request import EngineRequest, SequenceOutput
from cluster.serve.channel import BEAT_S
from cluster.serve.routing.placement import Placement, Prompt
from cluster.serve.routing.prefix_index import PrefixIndex, block_keys
from cluster.serve.routing.reports import CacheReporter
from workers.sampling_params import SamplingParams

BLOCK_SIZE = 16
GROUP = "engine"
PREFILL_TOKENS_PER_S = 20_000
STEP_S, STEP_S_PER_SEQUENCE = 0.02, 0.0002
"""Of one decode step: a model of some 8 billion parameters on a GPU of today."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Chats of several turns, each begun by one of a few system prompts, most of them by the same ones."""

    num_replicas: int = 1000
    num_ingresses: int = 4
    num_blocks: int = 2000
    """Of each replica's KV cache."""
    seconds: float = 24.0
    """Of simulated time in which chats begin."""
    chats_per_s: float = 1.5
    """For each replica."""
    num_system_prompts: int = 100
    seed: int = 1


class Outcome(NamedTuple):
    num_requests: int
    hit_rate: float
    """Prompt tokens that were found in the chosen replica's cache, of all."""
    best_hit_rate: float
    """The same if each request had gone to the replica that had most of it at that moment."""
    ttft: list[float]
    """Seconds."""
    loads: list[float]
    """Of each replica: choices running or waiting, the mean over the second half of the time."""
    decision_s: list[float]
    hash_s: float
    """A block."""
    num_index_blocks: int


class _Chat:
    """A conversation: its tokens so far, and what is left of it."""

    def __init__(self, name: str, system_prompt: list[int], rng: random.Random) -> None:
        self.name = name
        self.token_ids = list(system_prompt)
        self.num_turns = 1 + int(rng.expovariate(1 / 5))
        self.hashes: list[bytes] = []
        self._rng = rng

    def ask(self) -> None:
        self._grow(self._rng.randrange(20, 200))
        self.num_turns -= 1

    def answer(self, count: int) -> None:
        self._grow(count)

    def _grow(self, count: int) -> None:
        self.token_ids += [self._rng.randrange(1 << 17) for _ in range(count)]

    def hash(self, num_tokens: int) -> list[bytes]:
        self.hashes = hash_blocks(self.token_ids, num_tokens // BLOCK_SIZE, BLOCK_SIZE, self.hashes)
        return self.hashes[: num_tokens // BLOCK_SIZE]


class _Request(NamedTuple):
    request: EngineRequest
    chat: _Chat
    hashes: list[bytes]
    ingress: int
    num_output_tokens: int
    arrived: float


class Router:
    """Chooses replicas by number for one ingress; `truth` is the simulation, which only those look at who may."""

    def __init__(self, workload: Workload, truth: Simulation, number: int) -> None:
        self.workload, self.truth, self.number = workload, truth, number
        self.rng = random.Random(workload.seed + number)

    def place(self, prompt: Prompt) -> tuple[int, int | None]:
        """The replica, and the tokens that it is expected to compute."""
        raise NotImplementedError

    def has_output(self, request_id: str) -> None: ...

    def end(self, request_id: str) -> None: ...

    def report(self, replica: int, report: Any) -> None: ...


class Prefixes(Router):
    """Manta's."""

    def __init__(self, workload: Workload, truth: Simulation, number: int) -> None:
        super().__init__(workload, truth, number)
        self.placement = Placement(random_seed=number)
        self.placement.set_running(GROUP, map(str, range(workload.num_replicas)))

    def place(self, prompt: Prompt) -> tuple[int, int | None]:
        name, new_tokens = self.placement.place(prompt, GROUP)
        return int(name), new_tokens

    def has_output(self, request_id: str) -> None:
        self.placement.has_output(request_id)

    def end(self, request_id: str) -> None:
        self.placement.end(request_id)

    def report(self, replica: int, report: Any) -> None:
        self.placement.report(str(replica), report)


class RoundRobin(Router):
    def place(self, prompt: Prompt) -> tuple[int, int | None]:
        self.number += 1
        return self.number % self.workload.num_replicas, None


class TwoChoices(Router):
    """The less busy of two at random, as it is at this moment."""

    def place(self, prompt: Prompt) -> tuple[int, int | None]:
        some = self.rng.sample(range(self.workload.num_replicas), 2)
        return min(some, key=lambda number: self.truth.replicas[number].num_sequences), None


class Oracle(Router):
    """Knows what every replica has at this moment, and goes where most of the prompt is, however busy it is there; of
    several such replicas to the least busy one.
    """

    def place(self, prompt: Prompt) -> tuple[int, int | None]:
        everybody = (1 << self.workload.num_replicas) - 1
        found = self.truth.index.find(prompt.keys, everybody)
        bits = found[0][1] if found else everybody
        some = (number for number in range(self.workload.num_replicas) if bits >> number & 1)
        return min(some, key=lambda number: self.truth.replicas[number].num_sequences), None


class _Replica:
    """An engine: prompts are computed one after the other, each sequence then decodes beside the others."""

    def __init__(self, number: int, simulation: Simulation) -> None:
        self.number = number
        self.simulation = simulation
        self.blocks = KVBlocks(simulation.workload.num_blocks, BLOCK_SIZE)
        self.blocks.on_change = self._on_change
        self.reporter = CacheReporter(lambda: self.blocks.num_free * BLOCK_SIZE, lambda: simulation.now)
        self.waiting: deque[_Request] = deque()
        self.is_computing = False
        self.num_running = 0
        self.load_seconds = 0.0
        self._since = 0.0
        self.is_reporting = False

    @property
    def num_sequences(self) -> int:
        return len(self.waiting) + self.num_running

    def _on_change(self, block_hash: bytes, is_cached: bool) -> None:
        self.reporter.note(block_hash, is_cached)
        keys = block_keys([block_hash])
        (self.simulation.index.add if is_cached else self.simulation.index.discard)(self.number, keys)
        self._will_report()

    def _will_report(self) -> None:
        """At the next beat."""
        if not self.is_reporting:
            self.is_reporting = True
            self.simulation.at(BEAT_S, self._report)

    def _report(self) -> None:
        self.is_reporting = False
        for ingress, router in enumerate(self.simulation.routers):
            report = self.reporter.take(ingress)
            if report is not None:
                router.report(self.number, report)

    def note_load(self) -> None:
        """Called before it changes."""
        now, middle = self.simulation.now, self.simulation.workload.seconds / 2
        end = min(now, self.simulation.workload.seconds)
        self.load_seconds += self.num_sequences * max(0.0, end - max(self._since, middle))
        self._since = now

    def add(self, request: _Request) -> None:
        self.note_load()
        self.reporter.begin(request.ingress, request.request)
        self._will_report()
        self.waiting.append(request)
        self._compute_next()

    def _compute_next(self) -> None:
        if self.is_computing or not self.waiting:
            return
        request = self.waiting[0]
        prefix = self.blocks.find_prefix(request.hashes)
        num_tokens = len(request.request.prompt_token_ids) + request.num_output_tokens
        num_blocks = -(-num_tokens // BLOCK_SIZE) - len(prefix)
        if num_blocks > self.blocks.num_free - self.blocks.num_evictable(prefix):
            return  # until another sequence ends
        self.note_load()
        self.waiting.popleft()
        self.is_computing = True
        self.num_running += 1
        self.blocks.share(prefix)
        table = prefix + self.blocks.allocate(num_blocks)
        for block, block_hash in zip(table[len(prefix) :], request.hashes[len(prefix) :], strict=False):
            self.blocks.register(block, block_hash)
        num_cached = len(prefix) * BLOCK_SIZE
        self.simulation.num_hits += num_cached
        seconds = STEP_S + (len(request.request.prompt_token_ids) - num_cached) / PREFILL_TOKENS_PER_S
        self.simulation.at(seconds, lambda: self._has_output(request, table))

    def _has_output(self, request: _Request, table: list[int]) -> None:
        self.is_computing = False
        simulation = self.simulation
        simulation.ttft.append(simulation.now - request.arrived)
        self.reporter.note_outputs(request.ingress, [SequenceOutput(request.request.request_id, 0, [1])])
        for ingress, router in enumerate(simulation.routers):  # the frame with the first token brings a report
            if ingress == request.ingress:
                report = self.reporter.take(ingress)
                if report is not None:
                    router.report(self.number, report)
                router.has_output(request.request.request_id)
        step = STEP_S + STEP_S_PER_SEQUENCE * self.num_running
        simulation.at(step * request.num_output_tokens, lambda: self._end(request, table))
        self._compute_next()

    def _end(self, request: _Request, table: list[int]) -> None:
        self.note_load()
        self.num_running -= 1
        request.chat.answer(request.num_output_tokens)
        hashes = request.chat.hash(len(request.chat.token_ids))
        for block, block_hash in list(zip(table, hashes, strict=False))[len(request.hashes) :]:
            self.blocks.register(block, block_hash)
        self.blocks.free(table)
        self.reporter.end(request.ingress, request.request)
        self._will_report()
        self.simulation.routers[request.ingress].end(request.request.request_id)
        self._compute_next()
        self.simulation.go_on(request.chat)


class Simulation:
    """One router over one workload."""

    def __init__(self, workload: Workload, router: Callable[[Workload, Simulation, int], Router]) -> None:
        self.workload = workload
        self.now = 0.0
        self.index = PrefixIndex(1 << 60)
        """What is true now."""
        self.replicas = [_Replica(number, self) for number in range(workload.num_replicas)]
        self.routers = [router(workload, self, number) for number in range(workload.num_ingresses)]
        self.num_hits = self.num_best_hits = self.num_prompt_tokens = self.num_hashed = 0
        self.ttft: list[float] = []
        self.decision_s: list[float] = []
        self.hash_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._rng = random.Random(workload.seed)
        self._everybody = (1 << workload.num_replicas) - 1

    def at(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._numbers), event))

    def run(self) -> Outcome:
        rng, count = self._rng, self.workload.num_system_prompts
        prompts = [[rng.randrange(1 << 17) for _ in range(rng.randrange(128, 2048))] for _ in range(count)]
        weights = [1 / (1 + rank) for rank in range(count)]
        begins = 0.0
        while (
            begins := begins + rng.expovariate(self.workload.chats_per_s * len(self.replicas))
        ) < self.workload.seconds:
            chat = _Chat(f"chat-{next(self._numbers)}", rng.choices(prompts, weights)[0], rng)
            self.at(begins, lambda chat=chat: self._ask(chat))  # type: ignore[misc]
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
        for replica in self.replicas:
            replica.note_load()
        return Outcome(
            len(self.ttft),
            self.num_hits / self.num_prompt_tokens,
            self.num_best_hits / self.num_prompt_tokens,
            self.ttft,
            [replica.load_seconds / (self.workload.seconds / 2) for replica in self.replicas],
            self.decision_s,
            self.hash_s / max(1, self.num_hashed),
            max(len(router.placement.index) if isinstance(router, Prefixes) else 0 for router in self.routers),
        )

    def go_on(self, chat: _Chat) -> None:
        if chat.num_turns > 0 and self.now < self.workload.seconds:
            self.at(self._rng.expovariate(1 / 5), lambda: self._ask(chat))

    def _ask(self, chat: _Chat) -> None:
        chat.ask()
        num_tokens = len(chat.token_ids)
        started, known = time.perf_counter(), len(chat.hashes)
        hashes = chat.hash(num_tokens - 1)
        keys = block_keys(hashes)
        self.hash_s += time.perf_counter() - started
        self.num_hashed += max(1, len(hashes) - known)
        found = self.index.find(keys, self._everybody)
        self.num_best_hits += found[0][0] * BLOCK_SIZE if found else 0
        self.num_prompt_tokens += num_tokens
        ingress = self._rng.randrange(len(self.routers))
        name = f"{chat.name}/{next(self._numbers)}"
        prompt = Prompt(request_id=name, keys=keys, num_tokens=num_tokens, block_size=BLOCK_SIZE)
        started = time.perf_counter()
        number, new_tokens = self.routers[ingress].place(prompt)
        self.decision_s.append(time.perf_counter() - started)
        request = EngineRequest(
            request_id=name,
            prompt_token_ids=chat.token_ids[:],
            params=SamplingParams(max_tokens=1),
            num_new_tokens=new_tokens,
        )
        output = self._rng.randrange(20, 300)
        self.replicas[number].add(_Request(request, chat, hashes, ingress, output, self.now))


def simulate(workload: Workload, router: Callable[[Workload, Simulation, int], Router]) -> Outcome:
    return Simulation(workload, router).run()


def unevenness(loads: list[float]) -> tuple[float, float]:
    """(the greatest load over the mean, the standard deviation over the mean)."""
    mean = statistics.mean(loads)
    return max(loads) / mean, statistics.pstdev(loads) / mean

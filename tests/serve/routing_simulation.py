"""Hundreds of replicas in one process: the router's own code decides for chats that share system prompts.

Real are the decision (`cluster/serve/routing/`), the reports between engines and ingresses with their delay, and the
blocks of each KV cache with their eviction; simulated are time, the model, the network and the hashes of blocks, which
are drawn instead of computed. `simulate` runs one router over a workload, which is the same for every router.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from manta.cluster.engine.kv_blocks import KVBlocks
from manta.cluster.engine.request import EngineRequest, SequenceOutput
from manta.cluster.serve.channel.token_channel import BEAT_S
from manta.cluster.serve.routing.placement import Placement, Prompt
from manta.cluster.serve.routing.prefix_index import PrefixIndex, bit_of, slots_of
from manta.cluster.serve.routing.reports import CacheReporter, Report
from manta.workers.sampling_params import SamplingParams

BLOCK_SIZE = 16
GROUP = "engine"
PREFILL_TOKENS_PER_S = 20_000
STEP_S, STEP_S_PER_SEQUENCE = 0.02, 0.0002
"""Seconds of a decode step, as of a model of 8 billion parameters on a current GPU."""
ONE_CHOICE = SamplingParams()


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Chats of several turns, each begun by one of a few system prompts, most of them by the same ones."""

    num_replicas: int
    num_ingresses: int = 4
    num_blocks: int = 2000
    """Blocks of each replica's KV cache."""
    seconds: float = 24.0
    """Seconds of simulated time in which prompts are sent."""
    chats_per_s: float = 1.5
    """New chats a second for each replica."""
    num_system_prompts: int = 100
    seed: int = 1


class Outcome(NamedTuple):
    hit_rate: float
    """Prompt tokens that were found in the chosen replica's cache, of all."""
    loads: list[float]
    """Mean number of choices, running or waiting, of each replica over the second half of the time. They slow its steps
    and fill its cache.

    Momentary loads also differ by chance, because chats return when they like. Over 12 s, in which about thirty choices
    end at a replica, the rest is the router's doing.
    """


class _Turn(NamedTuple):
    num_asked: int
    """Tokens."""
    num_answered: int
    pause_s: float
    """Seconds until the next turn."""


class _Chat:
    """A conversation: the blocks of all its tokens so far, and the turns that are left."""

    def __init__(self, system_prompt: list[int], num_tokens: int, turns: list[_Turn]) -> None:
        self.keys = system_prompt[:]
        self.num_tokens = num_tokens
        self.turns = turns

    def grow(self, count: int, draw: Callable[[int], int]) -> None:
        self.num_tokens += count
        self.keys += [draw(64) for _ in range(self.num_tokens // BLOCK_SIZE - len(self.keys))]


class _Request(NamedTuple):
    request: EngineRequest
    chat: _Chat
    turn: _Turn
    ingress: int


class Router:
    """Chooses replicas by number for one ingress; `truth` is the simulation, which only those look at who may."""

    hears_reports = False

    def __init__(self, workload: Workload, truth: Simulation, number: int) -> None:
        self.workload, self.truth, self.number = workload, truth, number
        self.rng = random.Random(workload.seed + number)

    def place(self, prompt: Prompt) -> tuple[int, int]:
        """The replica, and the tokens that it is expected to compute."""
        raise NotImplementedError

    def has_output(self, request_id: str) -> None: ...

    def end(self, request_id: str) -> None: ...

    def report(self, replica: int, report: Report) -> None: ...


class Manta(Router):
    """The one that Serve asks."""

    hears_reports = True

    def __init__(self, workload: Workload, truth: Simulation, number: int) -> None:
        super().__init__(workload, truth, number)
        self.placement = Placement(random_seed=number)
        self.placement.set_running(GROUP, map(str, range(workload.num_replicas)))
        self.has_output = self.placement.has_output  # type: ignore[method-assign]
        self.end = self.placement.end  # type: ignore[method-assign]

    def place(self, prompt: Prompt) -> tuple[int, int]:
        name, new_tokens = self.placement.place(prompt, GROUP)
        return int(name), new_tokens

    def report(self, replica: int, report: Report) -> None:
        self.placement.report(str(replica), report)


class RoundRobin(Router):
    def place(self, prompt: Prompt) -> tuple[int, int]:
        self.number += 1
        return self.number % self.workload.num_replicas, 0


class Oracle(Router):
    """Knows what every replica has and runs at this moment. Of those whose load is not more than a tenth above the mean
    it takes one that has most of the prompt; of several such the least busy one.
    """

    def place(self, prompt: Prompt) -> tuple[int, int]:
        limit = int(1.1 * self.truth.num_sequences / self.workload.num_replicas)
        by_load = self.truth.by_load
        _, bits = next(self.truth.index.find(prompt.keys, sum(by_load[: limit + 1])))
        return next(slots_of(next(filter(None, map(bits.__and__, by_load))))), 0


class _Replica:
    """An engine: prompts are computed one after the other, each sequence then decodes beside the others."""

    def __init__(self, number: int, simulation: Simulation) -> None:
        self.number = number
        self.simulation = simulation
        self.blocks = KVBlocks(simulation.workload.num_blocks, BLOCK_SIZE)
        self.blocks.report_to(self._on_change)
        self.reporter = CacheReporter(lambda: self.blocks.num_free * BLOCK_SIZE, lambda: simulation.now)
        self.waiting: deque[_Request] = deque()
        self.is_computing = False
        self.num_running = self.num_sequences = 0
        """Choices that decode; these and those that wait."""
        self.load_seconds = 0.0
        self._since = 0.0
        self._will_report = False

    def _on_change(self, block_hash: bytes, is_cached: bool) -> None:
        keys = (int.from_bytes(block_hash, "little"),)
        (self.simulation.index.add if is_cached else self.simulation.index.discard)(self.number, keys)
        if self.simulation.has_reports:
            self.reporter.note(block_hash, is_cached)

    def _report_soon(self) -> None:
        """At the next beat."""
        if self.simulation.has_reports and not self._will_report:
            self._will_report = True
            self.simulation.at(BEAT_S, self._report)

    def _report(self) -> None:
        """To all, and again while anything runs."""
        self._will_report = False
        for ingress in range(len(self.simulation.routers)):
            self._report_to(ingress)
        if self.num_sequences:
            self._report_soon()

    def _report_to(self, ingress: int) -> None:
        report = self.reporter.take(ingress)
        if report is not None:
            self.simulation.routers[ingress].report(self.number, report)

    def add_sequences(self, count: int) -> None:
        now, middle = self.simulation.now, self.simulation.workload.seconds / 2
        self.load_seconds += self.num_sequences * max(0.0, now - max(self._since, middle))
        self._since = now
        self.simulation.by_load[self.num_sequences] ^= bit_of(self.number)
        self.num_sequences += count
        self.simulation.num_sequences += count
        self.simulation.by_load[self.num_sequences] ^= bit_of(self.number)

    def add(self, request: _Request) -> None:
        self.add_sequences(1)
        self.reporter.begin(request.ingress, request.request)
        self._report_soon()
        self.waiting.append(request)
        self._compute_next()

    def _compute_next(self) -> None:
        if self.is_computing or not self.waiting:
            return
        request = self.waiting[0]
        chat = request.chat
        hashes = [key.to_bytes(8, "little") for key in chat.keys]
        prefix = self.blocks.find_prefix(hashes[: (chat.num_tokens - 1) // BLOCK_SIZE])
        num_blocks = -(-(chat.num_tokens + request.turn.num_answered) // BLOCK_SIZE) - len(prefix)
        if num_blocks > self.blocks.num_free - self.blocks.num_evictable(prefix):
            return  # until another sequence ends
        self.waiting.popleft()
        self.is_computing = True
        self.num_running += 1
        self.blocks.share(prefix)
        table = prefix + self.blocks.allocate(num_blocks)
        for block, block_hash in zip(table[len(prefix) :], hashes[len(prefix) :], strict=False):
            self.blocks.register(block, block_hash)
        num_cached = len(prefix) * BLOCK_SIZE
        self.simulation.num_prompt_tokens += chat.num_tokens
        self.simulation.num_hits += num_cached
        seconds = STEP_S + (chat.num_tokens - num_cached) / PREFILL_TOKENS_PER_S
        self.simulation.at(seconds, functools.partial(self._has_output, request, table))

    def _has_output(self, request: _Request, table: list[int]) -> None:
        self.is_computing = False
        simulation, name = self.simulation, request.request.request_id
        if simulation.has_reports:  # the frame with the first token brings one
            self.reporter.note_outputs(request.ingress, [SequenceOutput(name, 0, [1])])
            self._report_to(request.ingress)
        simulation.routers[request.ingress].has_output(name)
        step = STEP_S + STEP_S_PER_SEQUENCE * self.num_running
        simulation.at(step * request.turn.num_answered, functools.partial(self._end, request, table))
        self._compute_next()

    def _end(self, request: _Request, table: list[int]) -> None:
        self.add_sequences(-1)
        self.num_running -= 1
        chat = request.chat
        num_computed = chat.num_tokens // BLOCK_SIZE
        chat.grow(request.turn.num_answered, self.simulation.draw)
        for block, key in zip(table[num_computed:], chat.keys[num_computed:], strict=False):
            self.blocks.register(block, key.to_bytes(8, "little"))
        self.blocks.free(table)
        self.reporter.end(request.ingress, request.request)
        self._report_soon()
        self.simulation.routers[request.ingress].end(request.request.request_id)
        self._compute_next()
        self.simulation.go_on(chat, request.turn.pause_s)


class Simulation:
    """One router over one workload."""

    def __init__(self, workload: Workload, router: type[Router]) -> None:
        self.workload = workload
        self.now = 0.0
        self.has_reports = router.hears_reports
        self.index = PrefixIndex(1 << 60)
        """The true contents of all caches."""
        self.replicas = [_Replica(number, self) for number in range(workload.num_replicas)]
        self.routers = [router(workload, self, number) for number in range(workload.num_ingresses)]
        self.num_hits = self.num_prompt_tokens = 0
        self.draw = random.Random(workload.seed).getrandbits
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._rng = random.Random(workload.seed)
        self.num_sequences = 0
        self.by_load = [(1 << workload.num_replicas) - 1] + [0] * workload.num_blocks
        """Replicas by their number of sequences, as bit sets."""

    def at(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._numbers), event))

    def run(self) -> Outcome:
        self._schedule_chats()
        while self._events and self._events[0][0] < self.workload.seconds:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = self.workload.seconds
        for replica in self.replicas:
            replica.add_sequences(0)
        loads = [replica.load_seconds / (self.workload.seconds / 2) for replica in self.replicas]
        return Outcome(self.num_hits / self.num_prompt_tokens, loads)

    def _schedule_chats(self) -> None:
        """All is drawn here, so that it does not depend on who goes where."""
        rng, count = self._rng, self.workload.num_system_prompts
        lengths = [rng.randrange(128, 2048) for _ in range(count)]
        prompts = [[rng.getrandbits(64) for _ in range(length // BLOCK_SIZE)] for length in lengths]
        cumulative = list(itertools.accumulate(1 / (1 + rank) for rank in range(count)))
        rate, begins = self.workload.chats_per_s * len(self.replicas), rng.expovariate(1.0)
        while (begins := begins + rng.expovariate(rate)) < self.workload.seconds:
            (number,) = rng.choices(range(count), cum_weights=cumulative)
            turns = [
                _Turn(rng.randrange(20, 200), rng.randrange(20, 300), rng.expovariate(1 / 5))
                for _ in range(1 + int(rng.expovariate(1 / 5)))
            ]
            chat = _Chat(prompts[number], lengths[number], turns[::-1])
            self.at(begins, functools.partial(self._ask, chat))

    def go_on(self, chat: _Chat, pause_s: float) -> None:
        if chat.turns:
            self.at(pause_s, functools.partial(self._ask, chat))

    def _ask(self, chat: _Chat) -> None:
        turn = chat.turns.pop()
        chat.grow(turn.num_asked, self.draw)
        prompt = Prompt(
            request_id=str(next(self._numbers)),
            keys=chat.keys[: (chat.num_tokens - 1) // BLOCK_SIZE],
            num_tokens=chat.num_tokens,
            block_size=BLOCK_SIZE,
        )
        ingress = self._rng.randrange(len(self.routers))
        number, new_tokens = self.routers[ingress].place(prompt)
        request = EngineRequest(
            request_id=prompt.request_id, prompt_token_ids=[], params=ONE_CHOICE, num_new_tokens=new_tokens
        )
        self.replicas[number].add(_Request(request, chat, turn, ingress))


def simulate(workload: Workload, router: type[Router]) -> Outcome:
    return Simulation(workload, router).run()

"""Which replica gets a request: the index of cached prefixes against a plain model of it, and the decision."""

from __future__ import annotations

import collections
import itertools
import random
import statistics
import types
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from manta.cluster.engine.kv_blocks import KVBlocks, hash_blocks
from manta.cluster.engine.request import EngineRequest, FinishStatus, SequenceOutput
from manta.cluster.serve.routing import placement
from manta.cluster.serve.routing.placement import SEQUENCE_TOKENS, SESSION_TOKENS, Placement, Prompt
from manta.cluster.serve.routing.prefix_index import NUM_SHARDS, PrefixIndex, block_keys, slots_of
from manta.cluster.serve.routing.replicas import Replicas
from manta.cluster.serve.routing.reports import CacheReporter, Report, unpacked
from manta.workers.kv_groups import KVGroup
from manta.workers.sampling_params import SamplingParams
from tests.conftest import PROVE
from tests.house.syntax_trees import modules
from tests.house.test_layering import packages
from tests.serve.routing_simulation import Manta, Oracle, RoundRobin, Workload, simulate

BLOCK = 16
NODES = st.integers(0, 60)


def chain(node: int) -> list[int]:
    """The keys of a prompt, from the first block on: a path down a tree, since a block's key covers all before it."""
    return [*chain(node - 1 if node % 4 else node - 3), node] if node > 0 else [0]


def brute_force(held: dict[int, set[int]], keys: Sequence[int], num_shards: int = NUM_SHARDS) -> list[tuple[int, int]]:
    """`PrefixIndex.find` over sets of keys by slot, one replica after the other."""
    by_depth: dict[int, int] = collections.Counter()
    for slot, its in held.items():
        depth = 0
        for number, key in enumerate(keys):
            if key % NUM_SHARDS < num_shards:
                if key not in its:
                    break
                depth = number + 1
        by_depth[depth] += 1 << slot
    return sorted(by_depth.items(), reverse=True)


class IndexMachine(RuleBasedStateMachine):
    """Blocks come and go in any order, told once or several times."""

    max_blocks = 10**9

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(self.max_blocks)
        self.held: dict[int, set[int]] = {slot: set() for slot in range(4)}

    @rule(slot=st.integers(0, 3), node=NODES)
    def add(self, slot: int, node: int) -> None:
        self.index.add(slot, chain(node))
        self.held[slot] |= set(chain(node))

    @rule(slot=st.integers(0, 3), node=NODES)
    def evict(self, slot: int, node: int) -> None:
        """A block goes after all that follow it."""
        keys = {key for key in range(61) if node in chain(key)}
        self.index.discard(slot, [*keys])
        self.held[slot] -= keys

    @rule(slot=st.integers(0, 3))
    def remove(self, slot: int) -> None:
        self.index.remove(slot)
        self.held[slot] = set()

    @rule(node=NODES, among=st.integers(0, 15))
    def find(self, node: int, among: int) -> None:
        keys = chain(node)
        held = {slot: its for slot, its in self.held.items() if among >> slot & 1}
        assert list(self.index.find(keys, among)) == brute_force(held, keys, len(self.index._shards))

    @rule(slot=st.integers(0, 3), node=NODES)
    def expect_in_vain(self, slot: int, node: int) -> None:
        """What is expected counts as held, until it is not."""
        keys = chain(node)
        self.index.expect(slot, keys)
        held = self.held | {slot: self.held[slot] | set(keys)}
        assert list(self.index.find(keys, 0b1111)) == brute_force(held, keys, len(self.index._shards))
        self.index.expect_no_more(slot, keys)

    @invariant()
    def counts_what_it_holds(self) -> None:
        kept = {slot: set(filter(self.index.keeps, its)) for slot, its in self.held.items()}
        assert len(self.index) == len(set().union(*kept.values())) <= self.max_blocks
        assert {slot: self.index.num_held(slot) for slot in kept} == {slot: len(its) for slot, its in kept.items()}


class SmallIndexMachine(IndexMachine):
    """It drops shard after shard: what it finds is right for those that are left."""

    max_blocks = 12


TestIndex = IndexMachine.TestCase
TestSmallIndex = SmallIndexMachine.TestCase


class Engine:
    """The prefix cache of an engine, and what it reports."""

    def __init__(self) -> None:
        self.blocks = KVBlocks(8, BLOCK)
        self.time = 0.0
        self.reporter = CacheReporter(lambda: self.blocks.num_free * BLOCK, self.tick)
        self.blocks.report_to(self.reporter.note)
        self.tables: list[list[int]] = []

    def tick(self) -> float:
        self.time += 1.0
        return self.time


class ReportMachine(RuleBasedStateMachine):
    """Engines fill and evict, report to two ingresses, lose connections, die: what ingresses know is what engines
    reported last, and after a report what is there.
    """

    @initialize()
    def begin(self) -> None:
        self.engines = {f"engine-{number}": Engine() for number in range(3)}
        self.ingresses = [Placement(random_seed=number) for number in range(2)]
        self.num_made = 3
        self.known: list[dict[str, set[int]]] = [collections.defaultdict(set) for _ in self.ingresses]
        """The keys at the last report, by ingress and replica."""
        self.show_replicas()

    def show_replicas(self) -> None:
        for ingress in self.ingresses:
            ingress.set_running("engine", self.engines)

    def engine(self, pick: int) -> tuple[str, Engine]:
        return list(self.engines.items())[pick % len(self.engines)]

    @rule(pick=st.integers(0, 9), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def run(self, pick: int, tokens: list[int]) -> None:
        """A prompt of as many blocks, each of one token over and over."""
        _, engine = self.engine(pick)
        hashes = hash_blocks([token for token in tokens for _ in range(BLOCK)], len(tokens), BLOCK)
        prefix = engine.blocks.find_prefix(hashes)
        if len(tokens) - len(prefix) > engine.blocks.num_free - engine.blocks.num_evictable(prefix):
            return
        engine.blocks.share(prefix)
        table = prefix + engine.blocks.allocate(len(tokens) - len(prefix))
        for block, block_hash in zip(table, hashes, strict=True):
            engine.blocks.register(block, block_hash)
        engine.tables.append(table)

    @rule(pick=st.integers(0, 9), table=st.integers(0, 9), is_corrupt=st.booleans())
    def end(self, pick: int, table: int, is_corrupt: bool) -> None:
        _, engine = self.engine(pick)
        if engine.tables:
            blocks = engine.tables.pop(table % len(engine.tables))
            if is_corrupt:
                engine.blocks.discard(blocks)
            engine.blocks.free(blocks)

    @rule(pick=st.integers(0, 9))
    def recompute(self, pick: int) -> None:
        self.engine(pick)[1].blocks.clear_cache()

    @rule(pick=st.integers(0, 9), number=st.integers(0, 1))
    def report(self, pick: int, number: int) -> None:
        name, engine = self.engine(pick)
        report = engine.reporter.take(number)
        if report is not None:
            self.ingresses[number].report(name, report)
        self.known[number][name] = set(block_keys([*engine.blocks._cached[0]]))

    @rule(pick=st.integers(0, 9), number=st.integers(0, 1))
    def lose_connection(self, pick: int, number: int) -> None:
        name, engine = self.engine(pick)
        engine.reporter.forget(number)
        self.ingresses[number].lose(name)
        self.known[number][name] = set()

    @rule(pick=st.integers(0, 9))
    def die(self, pick: int) -> None:
        name, _ = self.engine(pick)
        del self.engines[name]
        self.engines[f"engine-{self.num_made}"] = Engine()
        self.num_made += 1
        self.show_replicas()

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5), number=st.integers(0, 1))
    def find(self, tokens: list[int], number: int) -> None:
        ingress = self.ingresses[number]
        keys = block_keys(hash_blocks([token for token in tokens for _ in range(BLOCK)], len(tokens), BLOCK))
        slots = {name: ingress._replicas[name].slot for name in self.engines}
        held = {slot: self.known[number][name] for name, slot in slots.items()}
        assert list(ingress.index.find(keys, ingress._groups["engine"])) == brute_force(held, keys)


TestReports = ReportMachine.TestCase


# ---- the decision ------------------------------------------------------------------------------------------------


def prompt(name: str, *token_ids: int, num_blocks: int = 10, **fields: object) -> Prompt:
    """Of `num_blocks` blocks for each token id, and one token more."""
    tokens = [token for token in token_ids for _ in range(num_blocks * BLOCK)]
    keys = block_keys(hash_blocks(tokens, len(tokens) // BLOCK, BLOCK))
    return Prompt(request_id=name, keys=keys, num_tokens=len(tokens) + 1, block_size=BLOCK, **fields)  # type: ignore[arg-type]


def report(*prompts: Prompt, tokens: int = 0, sequences: int = 0, free_tokens: int = 10**6) -> Report:
    """Of an engine that holds these, with this work of other ingresses."""
    keys = b"".join(key.to_bytes(8, "little") for each in prompts for key in each.keys)
    return Report(keys, b"", False, tokens, sequences, free_tokens)


def some_replicas(count: int) -> tuple[Placement, list[str]]:
    names = [f"engine-{number}" for number in range(count)]
    made = Placement(random_seed=1)
    made.set_running("engine", names)
    return made, names


def test_a_prompt_goes_to_its_longest_cached_prefix() -> None:
    some, names = some_replicas(50)
    some.report(names[7], report(prompt("", 1)))
    some.report(names[31], report(prompt("", 1, 2)))
    assert some.place(prompt("a", 1, 2, 3), "engine") == (names[31], 161)
    some.end("a")
    assert some.place(prompt("b", 1, 5), "engine")[0] in (names[7], names[31])
    some.end("b")
    assert some.place(prompt("c", 1, 2), "engine") == (names[31], 1), "the last token is always computed"


def test_a_hot_prefix_spreads_under_load() -> None:
    some, names = some_replicas(4)
    some.report(names[0], report(prompt("", 1, num_blocks=64)))
    chosen = [some.place(prompt(str(number), 1, 100 + number, num_blocks=64), "engine")[0] for number in range(40)]
    counts = collections.Counter(chosen)
    assert chosen[0] == names[0]
    assert max(counts.values()) <= 12, "a replica's share is 10"
    assert len(counts) == 4


def test_prompts_of_one_body_share_a_replica() -> None:
    some, _ = some_replicas(20)
    # Each brings a block of its own after 100 that all share.
    chosen = [some.place(prompt(str(number), *([1] * 100), 2 + number, num_blocks=1), "engine") for number in range(4)]
    assert len({name for name, _ in chosen}) == 1
    assert [new_tokens for _, new_tokens in chosen] == [101 * BLOCK + 1, 17, 17, 17]


@pytest.mark.parametrize("kind", ["tokens", "sequences", "room"])
def test_what_other_ingresses_have_there_counts(kind: str) -> None:
    some, names = some_replicas(2)
    known = prompt("", 1)
    busy = {
        "tokens": report(known, tokens=1000),
        "sequences": report(known, sequences=1 + 1000 // SEQUENCE_TOKENS),
        "room": report(known, tokens=10, free_tokens=1),
    }[kind]
    some.report(names[0], busy)
    assert some.place(prompt("a", 1, 2, num_blocks=1), "engine")[0] == names[1]
    some.report(names[0], report())
    assert some.place(prompt("b", 1, 2, num_blocks=10), "engine")[0] == names[0]


def test_a_session_stays_until_its_replica_is_overloaded() -> None:
    some, names = some_replicas(30)
    (home, _) = some.place(prompt("a", 1, session="s", client="me"), "engine")
    some.end("a")
    for number in range(20):  # another conversation, of which nothing is known anywhere
        assert some.place(prompt("b", 50 + number, session="s", client="me"), "engine")[0] == home
        some.end("b")
    strangers = {some.place(prompt(str(n), 90 + n, session="s", client="you"), "engine")[0] for n in range(9)}
    assert len(strangers) == 1 or home not in strangers, "another client's session of this name is another one"
    some.report(home, report(tokens=SESSION_TOKENS))
    away = some.place(prompt("c", 99, session="s", client="me"), "engine")[0]
    assert away != home
    some.end("c")
    some.report(home, report())
    assert some.place(prompt("d", 98, session="s", client="me"), "engine")[0] == away, "it has moved"
    some.set_running("engine", [name for name in names if name != away])
    assert some.place(prompt("e", 97, session="s", client="me"), "engine")[0] != away


def test_sessions_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MAX_SESSIONS", 10)
    some, _ = some_replicas(3)
    for number in range(100):
        some.place(prompt(str(number), 1, session=f"s{number}"), "engine")
    assert len(some._sessions) == 10


def test_avoided_replicas_get_nothing_while_others_exist() -> None:
    some, names = some_replicas(10)
    some.report(names[3], report(prompt("", 1)))
    home = some.place(prompt("a", 1, session="s"), "engine")[0]
    assert home == names[3]
    for number in range(50):
        assert some.place(prompt(str(number), 1, session="s"), "engine", [names[3]])[0] != names[3]
        assert some.pick("engine", names[1:]) == names[0]
    assert some.place(prompt("b", 1), "engine", names)[0] in names, "if nobody is trusted somebody is tried"
    with pytest.raises(LookupError, match="standby has no replica"):
        some.place(prompt("c", 1), "standby")


def test_unknown_prompts_are_spread_by_load() -> None:
    some, _ = some_replicas(100)
    for number in range(1000):
        some.place(prompt(str(number), 1000 + number, num_blocks=1), "engine")
    counts = collections.Counter(placed.replica.name for placed in some._placed.values())
    assert len(counts) == 100
    assert max(counts.values()) <= 13, "one choice at random would give 20 to some"


def test_another_clients_flood_keeps_conversations_cached() -> None:
    some, names = some_replicas(2)
    mine = prompt("", 1, num_blocks=64)
    for number in range(200):
        some.place(prompt(f"flood-{number}", 1000 + number, num_blocks=64, client="flood"), "engine")
    some.report(names[0], report(mine))
    asked = prompt("mine", 1, 2, num_blocks=64, client="me")
    assert some.place(asked, "engine")[0] == names[0], "it waits for one turn of the other's there"


@given(
    st.lists(
        st.tuples(st.sampled_from(["place", "output", "end", "lose", "gone"]), st.integers(0, 9), st.integers(0, 4)),
        max_size=60,
    )
)
def test_what_has_ended_leaves_nothing(events: list[tuple[str, int, int]]) -> None:
    some, names = some_replicas(4)
    generation = 0
    for kind, number, other in events:
        if kind == "place":
            tokens = [other] * (1 + number % 3)
            fields = {"num_sequences": 1 + other, "client": str(other), "adapter": other}
            some.place(prompt(str(number), *tokens, num_blocks=2, **fields), "engine")
        elif kind == "output":
            some.has_output(str(number))
        elif kind == "end":
            some.end(str(number))
        elif kind == "lose":
            some.lose(names[other % len(names)])
        else:
            generation += 1
            names[other % len(names)] = f"new-{generation}"
            some.set_running("engine", names)
    for number in range(10):
        some.end(str(number))
    assert not some._placed
    assert (len(some.index), len(some.adapters)) == (0, 0), "what was expected is not"
    for replica in some._replicas.values():
        assert (replica.own_sequences, replica.num_own_tokens, replica.own_tokens) == (0, 0, {})
    assert sorted(some._replicas) == sorted(names)
    slots = {1 << replica.slot for replica in some._replicas.values()}
    assert (sum(slots), sum(some._by_load._classes)) == (some._by_load._classes[0],) * 2, "all have the least load"


def test_an_engine_reports_the_others_work_to_ingresses() -> None:
    reporter = Engine().reporter
    params = SamplingParams(n=3)
    one = EngineRequest(request_id="a", prompt_token_ids=[1] * 50, params=params, num_new_tokens=18)
    reporter.begin("first", one)
    seen = {name: reporter.take(name) for name in ("first", "second")}
    assert [(each.other_tokens, each.other_sequences) for each in seen.values() if each] == [(0, 0), (18, 3)]
    reporter.end("first", one)
    last = reporter.take("second")
    assert last is not None
    assert (last.other_tokens, last.other_sequences) == (0, 0)
    assert reporter.take("second") is None, "nothing is new"


@pytest.mark.parametrize(("block_size", "num_new_tokens"), [(0, [50, 50, 50]), (BLOCK, [50, 50 - 3 * BLOCK, 50])])
def test_requests_of_one_call_go_to_one_replica(block_size: int, num_new_tokens: list[int]) -> None:
    """Each learns what it shares with those before it, which is nothing without prefix caches."""
    replicas = Replicas()
    replicas.set_running("engine", ["one", "another"])
    prompts = {"a": [1] * 50, "b": [1] * 50, "c": [2] * 50}
    some = [EngineRequest(request_id=name, prompt_token_ids=p, params=SamplingParams()) for name, p in prompts.items()]
    replica, placed = replicas.place(some, "engine", block_size)
    assert replicas.routed == dict.fromkeys("abc", replica)
    assert [each.num_new_tokens for each in placed] == num_new_tokens
    assert [each.num_new_tokens for each in some] == [None] * 3, "the caller's own are in flight, and stay as they are"


def test_conversations_keep_their_caches_and_spread_evenly() -> None:
    """`make prove` simulates 200 replicas."""
    size = {"num_replicas": 200, "seconds": 40.0} if PROVE else {"num_replicas": 20, "seconds": 15.0}
    workload = Workload(num_ingresses=2, num_system_prompts=20, **size)  # type: ignore[arg-type]
    ours, oracle, turns = (simulate(workload, router) for router in (Manta, Oracle, RoundRobin))
    assert ours.hit_rate >= (0.95 if PROVE else 0.93) * oracle.hit_rate
    assert ours.hit_rate > 1.4 * turns.hit_rate
    assert max(ours.loads) < 1.2 * statistics.mean(ours.loads)


def test_hashes_are_the_same_in_every_process() -> None:
    (first, second) = hash_blocks([1] * BLOCK + list(range(BLOCK)), 2, BLOCK)
    assert first.hex() == "ca89fa9f52a7174496789ace7f4f6bd7"
    assert hash_blocks([1] * BLOCK + list(range(BLOCK)), 2, BLOCK, [first]) == [first, second]


def test_the_decision_needs_no_ray() -> None:
    using = {name for name, tree in modules("manta.cluster.serve.routing").items() if "ray" in packages(tree)}
    assert using == {"manta.cluster.serve.routing.replicas", "manta.cluster.serve.routing.request_router"}


def test_of_equally_busy_replicas_each_is_drawn() -> None:
    some, names = some_replicas(64)
    drawn = collections.Counter(some.pick("engine", random.Random(n).sample(names, 8)) for n in range(3000))
    assert len(drawn) == 64
    assert max(drawn.values()) < 2 * 3000 / 64


def test_reports_come_with_first_and_last_tokens() -> None:
    engine = Engine()
    reporter, now = CacheReporter(lambda: 0, lambda: 0.001), prompt("a", 1)
    request = EngineRequest(request_id="a", prompt_token_ids=[1] * now.num_tokens, params=SamplingParams())
    engine.blocks.report_to(reporter.note)
    reporter.begin("ingress", request)
    first = reporter.take("ingress")
    assert first is not None
    assert first.is_whole
    for output, comes in (([], False), ([5], True), ([6], False), ([7], False)):
        (block,) = engine.blocks.allocate(1)
        engine.blocks.register(block, bytes([block] * 16))
        reporter.note_outputs("ingress", [SequenceOutput("a", 0, output)])
        assert (reporter.take("ingress") is not None) == comes
    reporter.note_outputs("ingress", [SequenceOutput("a", 0, [8], finish=FinishStatus.FINISHED_LENGTH)])
    last = reporter.take("ingress")
    assert last is not None
    assert len(last.added) == 2 * 8


def test_lost_blocks_are_forgotten_after_every_ingress_knows() -> None:
    reporter = CacheReporter(lambda: 0, itertools.count().__next__)
    told: dict[str, set[int]] = {"often": set(), "seldom": set()}

    def take(ingress: str) -> None:
        report = reporter.take(ingress)
        if report is not None:
            told[ingress].difference_update(unpacked(report.removed))
            told[ingress].update(unpacked(report.added))

    for number in range(1, 6001):  # of which the last 10 stay
        reporter.note(number.to_bytes(16, "little"), True)
        if number > 10:
            reporter.note((number - 10).to_bytes(16, "little"), False)
        take("often")
        if number % 300 == 0:
            take("seldom")
    assert len(reporter._changes) < 3000
    assert told["often"] == told["seldom"] == set(range(5991, 6001))


@pytest.mark.parametrize("windows", [(None,), (1,), (None, 5)], ids=["hybrid", "without attention", "window"])
def test_replicas_of_a_recurrent_model_are_found_where_they_can_resume(windows: tuple[int | None, ...]) -> None:
    """After random evictions of blocks and of snapshots, against a direct model of what a prompt needs."""
    rng, size, index, replicas = random.Random(7), 4, PrefixIndex(), []
    for slot in range(3):
        blocks = KVBlocks(24, size, groups=tuple(map(KVGroup, windows)), states=KVBlocks(8, size))

        def note(block_hash: bytes, is_there: bool, slot: int = slot) -> None:
            (index.add if is_there else index.discard)(slot, block_keys([block_hash]))

        blocks.report_to(note)
        index.set_borders(slot, True)
        replicas.append(blocks)
    prompts = [[number % 2] * 8 + [number % 3] * 8 + [number] * 8 for number in range(9)]
    chains = [hash_blocks(prompt, 6, size) for prompt in prompts]

    def num_resumable(blocks: KVBlocks, hashes: list[bytes]) -> int:
        def has_all(end: int) -> bool:
            firsts = [0 if window is None else max(0, end * size - window + 1) // size for window in windows]
            needed = [(group, number) for group, first in enumerate(firsts) for number in range(first, end)]
            return all(blocks.find(hashes[number], group) is not None for group, number in needed)

        assert blocks.states is not None
        ends = [end for end in range(1, 7) if blocks.states.find(hashes[end - 1]) is not None and has_all(end)]
        return max(ends, default=0)

    lengths = set()
    for _ in range(400):
        blocks, hashes = rng.choice(replicas), rng.choice(chains)
        assert blocks.states is not None
        count = rng.randint(1, 6)
        rows = [blocks.allocate(len(windows)) for _ in range(count)]
        borders = rng.sample(range(count), min(2, count))
        slots = blocks.states.allocate(len(borders))
        for number, row in enumerate(rows):
            blocks.register_row(row, types.SimpleNamespace(block_hashes=hashes), number)
        for number, slot in zip(borders, slots, strict=True):
            blocks.register_snapshot(slot, types.SimpleNamespace(block_hashes=hashes), number)
            if rng.random() < 0.3:
                blocks.states.evict_first(slot)
        blocks.free([block for row in rows for block in row])
        blocks.states.free(slots)
        for hashes in chains:
            expected = sorted([num_resumable(each, hashes) for each in replicas], reverse=True)
            keys = block_keys(hashes)
            found = [length for length, bits in index.find(keys, 0b111) for _ in slots_of(bits)]
            assert found == expected
            lengths.update(expected)
    assert lengths == set(range(7))


@given(
    held=st.lists(st.sets(st.integers(0, 9)), min_size=1, max_size=6), keys=st.permutations(range(10)), data=st.data()
)
def test_replicas_are_found_by_their_longest_border(held: list[set[int]], keys: list[int], data: st.DataObject) -> None:
    """With sliding windows a replica may hold a border and none before it."""
    index = PrefixIndex()
    for slot, borders in enumerate(held):
        index.add(slot, [*borders, 77])
        index.set_borders(slot, True)
        lost = data.draw(st.sets(st.sampled_from(sorted(borders)))) if borders else set()
        index.discard(slot, [*lost])
        borders -= lost
    longest = [max((place + 1 for place, key in enumerate(keys) if key in each), default=0) for each in held]
    expected = sorted(((length, slot) for slot, length in enumerate(longest)), reverse=True)
    found = [(length, slot) for length, bits in index.find(keys, (1 << len(held)) - 1) for slot in slots_of(bits)]
    assert sorted(found, reverse=True) == expected
    assert [length for length, _ in found] == sorted(longest, reverse=True)

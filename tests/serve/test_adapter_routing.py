"""Which replica gets a request with an adapter: one that holds it, and others too when that one has more to do."""

from __future__ import annotations

import collections
import random
import struct

import pytest

from manta.cluster.engine.request import EngineRequest
from manta.cluster.serve.routing.adapter_holders import adapter_key, packed_keys
from manta.cluster.serve.routing.placement import ADAPTER_TOKENS, SEQUENCE_TOKENS, Placement, Prompt
from manta.cluster.serve.routing.replicas import Replicas
from manta.cluster.serve.routing.reports import CacheReporter, Report
from manta.workers.adapter_key import AdapterKey
from manta.workers.sampling_params import SamplingParams

NUM_TOKENS = 50
DIGESTS = [f"{number:032x}" for number in range(12)]


def prompt(name: str, digest: str = "") -> Prompt:
    """A prompt without cached blocks."""
    adapter = adapter_key(digest) if digest else 0
    return Prompt(request_id=name, keys=(), num_tokens=NUM_TOKENS, block_size=0, adapter=adapter)


def report(*digests: str, sequences: int = 0) -> Report:
    return Report(b"", b"", True, 0, sequences, 10**6, False, packed_keys(digests))


def some_replicas(count: int) -> tuple[Placement, list[str]]:
    names = [f"engine-{number}" for number in range(count)]
    made = Placement(random_seed=1)
    made.set_running("engine", names)
    return made, names


def test_a_prompt_goes_to_a_holder_of_its_adapter() -> None:
    some, names = some_replicas(30)
    some.report(names[7], report(*DIGESTS[:2], sequences=2))
    some.report(names[21], report(DIGESTS[1], sequences=1))
    for number in range(9):
        assert some.place(prompt("a", DIGESTS[0]), "engine")[0] == names[7]
        assert some.place(prompt("b", DIGESTS[1]), "engine")[0] == names[21], "the less busy one of two"
        assert some.place(prompt(f"c{number}"), "engine")[0] not in (names[7], names[21])
        some.end("a")
        some.end("b")
    some.report(names[7], report(DIGESTS[1]))
    assert some.place(prompt("d", DIGESTS[0]), "engine")[0] != names[7], "it has left"
    some.lose(names[21])
    some.set_running("engine", names[:20])
    assert some.place(prompt("e", DIGESTS[1]), "engine")[0] == names[7]


def test_another_replica_takes_a_hot_adapter_when_its_holder_is_loaded() -> None:
    """A replica that a prompt with the adapter is on its way to counts as a holder."""
    some, names = some_replicas(2)
    some.report(names[0], report(DIGESTS[0]))
    chosen = []
    while not chosen or chosen[-1] == names[0]:
        chosen.append(some.place(prompt(f"{len(chosen)}", DIGESTS[0]), "engine")[0])
    assert 2 <= len(chosen) <= 2 + ADAPTER_TOKENS // SEQUENCE_TOKENS
    later = [some.place(prompt(f"later-{number}", DIGESTS[0]), "engine")[0] for number in range(40)]
    counts = collections.Counter([*chosen, *later])
    assert abs(counts[names[0]] - counts[names[1]]) <= 2


@pytest.mark.parametrize("num_adapters", [1, 3])
def test_hot_adapters_use_every_replica(num_adapters: int) -> None:
    some, names = some_replicas(4)
    for number in range(num_adapters):
        some.report(names[number], report(DIGESTS[number]))
    asked = (prompt(f"{number}", DIGESTS[number % num_adapters]) for number in range(80))
    counts = collections.Counter(some.place(each, "engine")[0] for each in asked)
    assert min(counts.values()) >= 14, "the share of each is 20"
    assert len(counts) == 4


def test_adapters_that_do_not_all_fit_in_one_engine_find_homes() -> None:
    """Three engines with room for 4 of 12 adapters each hold all of them together, and read fewer again."""
    num_reads = {"by adapter": 0, "by load": 0}
    for kind in num_reads:
        some, names = some_replicas(3)
        held: dict[str, list[str]] = {name: [] for name in names}
        rng, running = random.Random(1), collections.deque[str]()
        for number in range(600):
            digest = rng.choice(DIGESTS)
            name, _ = some.place(prompt(f"{number}", digest if kind == "by adapter" else ""), "engine")
            if digest in held[name]:
                held[name].remove(digest)
            else:
                num_reads[kind] += 1
            held[name] = [*held[name], digest][-4:]
            some.report(name, report(*held[name]))
            some.has_output(f"{number}")
            running.append(f"{number}")
            if len(running) > 4:
                some.end(running.popleft())
    assert num_reads["by load"] > 300, "two thirds of 600, if nobody cares"
    assert num_reads["by adapter"] < num_reads["by load"] / 3


def test_an_engine_reports_its_adapters_when_they_change() -> None:
    held = frozenset(DIGESTS[:3])
    time = 0.0

    def tick() -> float:
        nonlocal time
        time += 1
        return time

    reporter = CacheReporter(lambda: 1000, tick, held_adapters=lambda: held)

    def told(ingress: str) -> set[int] | None:
        found = reporter.take(ingress)
        keys = None if found is None else found.adapters
        return None if keys is None else {*struct.unpack(f"<{len(keys) // 8}Q", keys)}

    assert told("first") == {adapter_key(each) for each in DIGESTS[:3]}
    assert told("first") is None
    held = frozenset(DIGESTS[1:2])
    assert told("first") == told("second") == {adapter_key(DIGESTS[1])}
    reporter.note(b"another block", is_cached=True)
    found = reporter.take("first")
    assert found is not None
    assert (len(found.added), found.adapters) == (8, None)
    held = frozenset()
    assert told("first") == set()


def test_scales_of_an_adapter_are_one_adapter_to_an_engine() -> None:
    replicas = Replicas()
    names = ["one", "another", "third"]
    replicas.set_running("engine", names)
    replicas.placement.report(names[1], report(DIGESTS[0]))
    for number, scale in enumerate((1.0, 0.5, -2.0)):
        key = AdapterKey(DIGESTS[0], scale).text
        request = EngineRequest(
            request_id=f"{number}", prompt_token_ids=[1] * NUM_TOKENS, params=SamplingParams(), adapter=key
        )
        assert replicas.place([request], "engine", 0)[0] == names[1]
        replicas.placement.end(f"{number}")

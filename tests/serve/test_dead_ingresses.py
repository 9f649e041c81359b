"""Keepers offer the streams of an ingress whose process has ended to others."""

from __future__ import annotations

import pytest

from manta.cluster.serve.channel.keeping import Keep, ToKeeper, Write
from manta.cluster.serve.channel.token_channel import Address
from manta.cluster.serve.recorded import keeper
from tests.async_tests import async_test
from tests.patience import until
from tests.serve.stream_world import World, opening, read, read_elsewhere, tokens_of

NUM_TOKENS = 40


@async_test
async def test_a_dead_ingress_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its streams go on at once. Those of one whose connection breaks meanwhile wait for its return."""
    monkeypatch.setattr(keeper, "GRACE_S", 3600.0)
    world = World(3, 1)
    world.tells_deaths = True
    dying, cut_off, _ = world.ingresses
    recordings = [each.streams.begin(opening(NUM_TOKENS, seed)) for seed, each in enumerate((dying, cut_off))]
    first, second = (each.opening.stream_id for each in recordings)
    world.run_engines(10)
    await until(lambda: sum(each.num_safe for each in recordings) == 10)
    world.cut(cut_off, world.keepers[0])
    world.kill_ingress(dying)
    await until(lambda: any(each.owns(first) for each in world.ingresses))
    world.connect(cut_off, world.keepers[0])
    world.run_engines()
    assert await read_elsewhere(world.ingresses[-1], first) == tokens_of(0, NUM_TOKENS)
    assert await read(cut_off, recordings[1]) == tokens_of(1, NUM_TOKENS)
    assert [each.owns(second) for each in world.ingresses] == [True, False]
    world.close()


@async_test
async def test_running_streams_are_adopted_before_ended_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ended one can be read meanwhile. No entry of any travels to a keeper that has it."""
    monkeypatch.setattr(keeper, "ENDED_AFTER_S", 0.3)
    world = World(2, 1)
    world.tells_deaths = True
    first, second = world.ingresses
    ended = first.streams.begin(opening(5, seed=1))
    world.run_engines(5)
    await until(lambda: ended.is_complete)
    running = first.streams.begin(opening(NUM_TOKENS, seed=2))
    world.run_engines(10)
    await until(lambda: running.num_safe == 10)
    kept, writes = world.keepers[0].keeper, list[Write]()
    receive = kept.receive

    def note(address: Address, message: ToKeeper) -> None:
        writes.extend(message.writes if isinstance(message, Keep) else ())
        receive(address, message)

    monkeypatch.setattr(kept, "receive", note)
    world.kill_ingress(first)
    await until(lambda: second.owns(running.opening.stream_id))
    assert not second.owns(ended.opening.stream_id)
    assert await read_elsewhere(second, ended.opening.stream_id) == tokens_of(1, 5)
    await until(lambda: second.owns(ended.opening.stream_id))
    world.run_engines()
    assert await read_elsewhere(second, running.opening.stream_id) == tokens_of(2, NUM_TOKENS)
    assert sum(len(write.entries) for write in writes) == NUM_TOKENS - 10
    world.close()


@async_test
async def test_an_orphan_waits_for_the_next_ingress(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only ingress has died. The one that comes need not wait for the time of another offer."""
    monkeypatch.setattr(keeper, "OFFER_S", 3600.0)
    world = World(1, 1)
    world.tells_deaths = True
    recording = world.ingresses[0].streams.begin(opening(NUM_TOKENS))
    stream_id = recording.opening.stream_id
    world.run_engines(10)
    await until(lambda: recording.num_safe == 10)
    kept = world.keepers[0].keeper
    world.kill_ingress(world.ingresses[0])
    offering = kept._offering
    await until(lambda: kept._offering is not offering and not kept._asking)
    successor = world.add()
    await until(lambda: successor.owns(stream_id))
    world.run_engines()
    assert await read_elsewhere(successor, stream_id) == tokens_of(3, NUM_TOKENS)
    assert successor.num_generated == NUM_TOKENS - 10
    world.close()

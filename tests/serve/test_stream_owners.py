"""Who owns a recorded stream, when ingresses die, keepers are slow, and two take over one stream at once."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from manta.cluster.errors import QueueFull, Unavailable
from manta.cluster.handshake import format_of
from manta.cluster.http.exchange.recorded_engines import MIN_UNREAD_S
from manta.cluster.http.exchange.recordings import OVERHEAD_BYTES, Opening
from manta.cluster.serve.channel.keeping import Ask, FromKeeper, Keep, Look, Notice, Write
from manta.cluster.serve.channel.token_channel import Address
from manta.cluster.serve.recorded import copies, following, keeper, streams
from manta.cluster.serve_limits import StreamLimits
from tests.async_tests import async_test
from tests.patience import until
from tests.serve.stream_world import OWNER, Ingress, KeeperProcess, World, opening, read, read_elsewhere, tokens_of

NUM_TOKENS = 40


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "ANSWER_S", 0.1)
    monkeypatch.setattr(copies, "MOVE_S", 0.3)
    monkeypatch.setattr(streams, "LOOK_UP_S", 0.1)
    monkeypatch.setattr(keeper, "GRACE_S", 0.05)
    monkeypatch.setattr(keeper, "ENDED_AFTER_S", 0.05)
    monkeypatch.setattr(keeper, "OFFER_S", 0.1)


async def leave_its_keeper(world: World, ingress: Ingress) -> None:
    """The keeper of an ingress does not answer for so long that the ingress writes to another one."""
    left = ingress.streams.copies.keeper
    assert left is not None
    left.hold()  # type: ignore[attr-defined]
    world.run_engines(3)
    await until(lambda: ingress.streams.copies.keeper is not left)
    left.hold(False)  # type: ignore[attr-defined]


async def is_unknown(ingress: Ingress, stream_id: str) -> bool:
    """Whether the ingress says that there is no such stream, once it is sure."""
    while True:
        try:
            return await ingress.streams.find(stream_id, OWNER) is None
        except Unavailable:
            await asyncio.sleep(0.01)


def prefer(world: World, ingress: Ingress, keeping: KeeperProcess) -> None:
    """Has an ingress write to this keeper, as if it had connected first."""
    copies = ingress.streams.copies
    for each in world.keepers:
        if each is not keeping:
            copies._avoided[world.link(ingress, each)] = float("inf")  # type: ignore[index]
    copies._choose()


@async_test
async def test_no_copy_from_before_a_takeover_runs_again() -> None:
    """A stream ends at its second owner, whose keeper is not the first one's. Then both the owner and its keeper go."""
    world = World(3, 2)
    first, second, third = world.ingresses
    for ingress, number in zip(world.ingresses, (0, 1, 0), strict=True):
        prefer(world, ingress, world.keepers[number])
    recording = first.streams.begin(opening(NUM_TOKENS))
    stream_id = recording.opening.stream_id
    world.run_engines(5)
    await until(lambda: recording.num_safe == 5)
    for each in world.keepers:
        world.link(third, each).hold()
    world.kill_ingress(first)
    await until(lambda: second.owns(stream_id))
    world.run_engines()
    found = await second.streams.find(stream_id, OWNER)
    assert found is not None
    assert await read(second, found) == tokens_of(3, NUM_TOKENS)
    await until(lambda: len(world.copies(stream_id)) == 1)
    for each in world.keepers:
        world.link(third, each).hold(False)
    world.kill_keeper(world.keepers[1])
    world.kill_ingress(second)
    assert await is_unknown(third, stream_id)
    assert third.num_generated == 0
    world.close()


class Counting:
    """A meter."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.has_ended = False

    def spend(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens

    def end(self) -> None:
        self.has_ended = True


@async_test
async def test_a_takeover_counts_each_token_once() -> None:
    world = World(2, 1)
    first, second = world.ingresses
    at_first, at_second = Counting(), Counting()
    second.streams.meter_of = lambda _: at_second
    recording = first.streams.begin(opening(NUM_TOKENS), at_first)
    world.run_engines(5)
    await until(lambda: recording.num_safe == 5)
    world.kill_ingress(first)
    await until(lambda: second.owns(recording.opening.stream_id))
    world.run_engines()
    found = await second.streams.find(recording.opening.stream_id, OWNER)
    assert found is not None
    assert await read(second, found) == tokens_of(3, NUM_TOKENS)
    assert (at_first.num_tokens, at_second.num_tokens) == (5, NUM_TOKENS - 5)
    assert at_second.has_ended
    world.close()


@pytest.mark.parametrize("step_s", [86_400.0, -86_400.0], ids=["forward", "back"])
@async_test
async def test_a_clock_that_is_set_moves_no_deadline(step_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever continues a stream gives it the time that is left, whatever the clock on the wall says since."""
    world, wall = World(2, 1), time.time
    first, second = world.ingresses
    recording = first.streams.begin(opening(NUM_TOKENS))
    world.run_engines(5)
    await until(lambda: recording.num_safe == 5)
    monkeypatch.setattr(time, "time", lambda: wall() + step_s)
    world.kill_ingress(first)
    await until(lambda: len(world.deadlines) == 2)
    assert second.owns(recording.opening.stream_id)
    before, after = world.deadlines
    assert before is not None
    assert after is not None
    assert 0 < after < before <= 600
    world.close()


@async_test
async def test_a_deleted_stream_is_adopted_by_nobody() -> None:
    """It was deleted while its ingress could not be reached, and then that one dies."""
    world = World(2, 2)
    first, second = world.ingresses
    recording = first.streams.begin(opening(NUM_TOKENS))
    stream_id = recording.opening.stream_id
    world.run_engines(5)
    await until(lambda: recording.num_safe == 5)
    second.streams.is_deleted = was_deleted
    world.kill_ingress(first)
    await until(lambda: not world.copies(stream_id))
    assert second.num_generated == 0
    world.close()


@async_test
async def test_a_deleted_stream_ends_at_an_owner_that_returns() -> None:
    """Its owner has lost its keeper, and looks before it writes the stream to another one."""
    world = World(1, 2)
    (owner,) = world.ingresses
    recording = owner.streams.begin(opening(NUM_TOKENS))
    world.run_engines(5)
    await until(lambda: recording.num_safe == 5)
    owner.streams.is_deleted = was_deleted
    await leave_its_keeper(world, owner)
    await until(lambda: recording.is_ended and not world.requests)
    world.close()


async def was_deleted(_: Opening) -> bool:
    return True


@async_test
async def test_no_copy_at_a_left_keeper_runs_again() -> None:
    """The stream has ended and was read. Then its owner and the only keeper that knows of the end are gone."""
    world = World(2, 2)
    first, second = world.ingresses
    recording = first.streams.begin(opening(NUM_TOKENS))
    stream_id = recording.opening.stream_id
    await until(lambda: len(world.copies(stream_id)) == 1)
    await leave_its_keeper(world, first)
    world.run_engines()
    assert await read(first, recording) == tokens_of(3, NUM_TOKENS)
    await until(lambda: len(world.copies(stream_id)) == 1)
    last = next(each for each in world.keepers if stream_id in each.keeper._streams)
    world.kill_keeper(last)
    world.kill_ingress(first)
    assert await is_unknown(second, stream_id)
    assert second.num_generated == 0
    world.close()


@async_test
async def test_one_of_two_that_claim_goes_on() -> None:
    """Two keepers have copies of an orphan, and each offers its own to an ingress that hears nothing of the other."""
    world = World(1, 2)
    (first,) = world.ingresses
    recording = first.streams.begin(opening(NUM_TOKENS))
    stream_id = recording.opening.stream_id
    await until(lambda: len(world.copies(stream_id)) == 1)
    left = first.streams.copies.keeper
    assert left is not None
    left.hold()  # type: ignore[attr-defined]
    world.run_engines(3)
    await until(lambda: len(world.copies(stream_id)) == 2)
    takers = [world.add(), world.add()]
    for taker, keeping in zip(takers, world.keepers, strict=True):
        prefer(world, taker, keeping)
        other = next(each for each in world.keepers if each is not keeping)
        world.link(taker, other).hold()
    world.kill_ingress(first)
    await until(lambda: all(taker.owns(stream_id) for taker in takers))
    epochs = [taker.streams._own[stream_id].epoch for taker in takers]
    assert epochs[0] != epochs[1]
    world.run_engines()
    for taker in takers:
        for each in world.keepers:
            world.link(taker, each).hold(False)
    await until(lambda: sum(taker.owns(stream_id) for taker in takers) == 1 == len(world.copies(stream_id)))
    (copy,) = world.copies(stream_id)
    assert copy.epoch == max(epochs)
    assert takers[epochs.index(max(epochs))].owns(stream_id)
    for taker in takers:
        found = await taker.streams.find(stream_id, OWNER)
        assert found is not None
        assert await read(taker, found) == tokens_of(3, NUM_TOKENS)
    world.close()


@async_test
async def test_a_silent_owners_stream_goes_on_elsewhere() -> None:
    """No connection breaks. Another owner answers and generates nothing meanwhile, and keeps its stream."""
    world = World(3, 1)
    world.keepers[0].keeper.times = keeper.SilenceTimes(silent_s=0.3, min_read_s=0.05, read_share=0.0)
    silent, idle, third = world.ingresses
    recordings = [each.streams.begin(opening(NUM_TOKENS, seed)) for seed, each in enumerate((silent, idle))]
    first, second = (each.opening.stream_id for each in recordings)
    world.run_engines(10)
    await until(lambda: sum(each.num_safe for each in recordings) == 10)
    world.link(silent, world.keepers[0]).hold()
    reading = [asyncio.ensure_future(read_elsewhere(third, each)) for each in (first, second)]
    await until(lambda: bool(idle.owns(first) or third.owns(first)))
    await asyncio.sleep(2 * 0.3)
    assert idle.owns(second)
    world.run_engines()
    assert [await each for each in reading] == [tokens_of(seed, NUM_TOKENS) for seed in (0, 1)]
    world.link(silent, world.keepers[0]).hold(False)
    await until(lambda: not silent.owns(first))
    assert await read(silent, recordings[0]) == tokens_of(0, NUM_TOKENS)
    world.close()


@async_test
async def test_a_new_ingress_claims_no_old_copy() -> None:
    """The owner lives, but its connection to an old copy broke. The keeper offers that to an ingress that has just
    started, and is not connected to the keeper of the newer copy yet.
    """
    world = World(1, 2)
    (owner,) = world.ingresses
    recording = owner.streams.begin(opening(NUM_TOKENS))
    stream_id = recording.opening.stream_id
    await until(lambda: len(world.copies(stream_id)) == 1)
    old = next(each for each in world.keepers if stream_id in each.keeper._streams)
    (other,) = (each for each in world.keepers if each is not old)
    world.cut(owner, old)
    world.run_engines(10)
    await until(lambda: recording.num_safe == 10)
    new = world.add(old)

    async def until_greeted() -> None:
        await asyncio.sleep(0.05)
        if other.name not in new.replicas_running:
            world.connect(new, other)

    new.until_greeted = until_greeted  # type: ignore[method-assign]
    await until(lambda: stream_id not in old.keeper._streams)
    assert owner.owns(stream_id)
    world.run_engines()
    assert await read(owner, recording) == tokens_of(3, NUM_TOKENS)
    assert new.num_generated == 0
    world.close()


@async_test
async def test_an_owner_returns_to_its_old_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper of its newest copy dies just when an ingress was offered the old one, and asks who has a newer one."""
    monkeypatch.setattr(copies, "SETTLE_S", 0.2)
    world = World(2, 2)
    owner, other = world.ingresses
    recording = owner.streams.begin(opening(NUM_TOKENS))
    stream_id = recording.opening.stream_id
    await until(lambda: len(world.copies(stream_id)) == 1)
    old = next(each for each in world.keepers if stream_id in each.keeper._streams)
    (new,) = (each for each in world.keepers if each is not old)
    world.link(other, new).hold()
    world.cut(owner, old)
    world.run_engines(10)
    await until(lambda: recording.num_safe == 10 and stream_id in other.streams._adopting)
    world.kill_keeper(new)
    await asyncio.sleep(0.05)
    assert set(other.streams._adopting) == {stream_id}
    world.connect(owner, old)
    world.run_engines()
    assert await read(owner, recording) == tokens_of(3, NUM_TOKENS)
    await until(lambda: not other.streams._adopting)
    assert (owner.owns(stream_id), other.num_generated) == (True, 0)
    world.close()


@async_test
async def test_one_of_two_repeated_runs_goes_on() -> None:
    world = World(2, 2)
    asked = opening(NUM_TOKENS)
    for taker, keeping in zip(world.ingresses, world.keepers, strict=True):
        prefer(world, taker, keeping)
    found = [taker.streams.begin(asked, is_repeated=True) for taker in world.ingresses]
    world.run_engines()
    await until(lambda: sum(taker.owns(asked.stream_id) for taker in world.ingresses) == 1)
    await until(lambda: len(world.copies(asked.stream_id)) == 1)
    for taker, recording in zip(world.ingresses, found, strict=True):
        assert await read(taker, recording) == tokens_of(3, NUM_TOKENS)
    world.close()


@async_test
async def test_an_owner_learns_that_another_took_its_stream() -> None:
    """The owner lives, but lost its connection to one keeper. The ingress that takes over from there cannot reach the
    keeper to which the owner writes now.
    """
    world = World(1, 2)
    (first,) = world.ingresses
    recording = first.streams.begin(opening(NUM_TOKENS))
    stream_id = recording.opening.stream_id
    await until(lambda: len(world.copies(stream_id)) == 1)
    broken = next(each for each in world.keepers if stream_id in each.keeper._streams)
    other = next(each for each in world.keepers if each is not broken)
    taker = world.add(broken)
    link = broken.links.pop(first.address)
    link.cut()
    broken.keeper.lose(first.address)
    first.streams.copies.lost(link)  # type: ignore[arg-type]
    await until(lambda: taker.owns(stream_id))
    assert first.owns(stream_id)
    world.connect(taker, other)
    await until(lambda: not first.owns(stream_id))
    world.run_engines()
    found = await taker.streams.find(stream_id, OWNER)
    assert found is not None
    assert await read(taker, found) == tokens_of(3, NUM_TOKENS)
    assert first.num_generated == 0
    world.connect(first, broken)
    world.close()


@async_test
async def test_streams_beyond_twice_the_limit_end() -> None:
    """A client may begin a stream below the limit. Others' streams are none of its business."""
    limits = StreamLimits(max_client_bytes=2 * OVERHEAD_BYTES, max_bytes=100 * OVERHEAD_BYTES)
    world = World(1, 1, limits)
    (ingress,) = world.ingresses
    long, short = (ingress.streams.begin(opening(1000, owner=owner)) for owner in ("ann", "ben"))
    world.run_engines(2000)
    with pytest.raises(QueueFull, match=rf"your streams .* limit is {4 * OVERHEAD_BYTES}: 2 times ") as caught:
        await read(ingress, long)
    assert caught.value.refusal.kind == "too_many_streams"
    assert 4 * OVERHEAD_BYTES <= ingress.streams.shares.held("ann") < 4 * OVERHEAD_BYTES + 1000
    assert long.num_tokens > 100, "what came before is still there"
    with pytest.raises(QueueFull, match=r"streams\.max_client_bytes"):
        ingress.streams.begin(opening(5, owner="ann"))
    await until(lambda: short.num_tokens > long.num_tokens or short.is_complete)
    world.close()


def test_an_owner_hears_of_readers_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a stream with the shortest time would be dropped under its reader."""
    now, told = 100.0, [100.0]
    monkeypatch.setattr(keeper.time, "monotonic", lambda: now)
    owner, reader = (Address("127.0.0.1", port, "secret") for port in (1, 2))

    def send(address: Address, message: FromKeeper) -> None:
        if address == owner and isinstance(message, Notice):
            told.append(now)

    kept = keeper.Keeper(send)
    kept.receive(owner, Keep(1, [Write("strm", 0, 0, [b"entry"])]))
    while now < 103.0:
        kept.receive(reader, Ask(2, "strm", "read"))
        now += following.POLL_S
    assert max(later - earlier for earlier, later in zip(told, [*told[1:], now], strict=True)) <= MIN_UNREAD_S / 2


@async_test
async def test_a_stream_outlives_a_node_after_another() -> None:
    """Its owner begins beside the only keeper, so the copy must move to the node that comes. Then the first node dies
    with both.
    """
    world = World(0, 2)
    world.keepers[0].node, world.keepers[1].node = "one", "two"
    first = world.add(world.keepers[0], node="one")
    recording = first.streams.begin(opening(NUM_TOKENS))
    stream_id = recording.opening.stream_id
    world.run_engines(5)
    await until(lambda: recording.num_safe == 5)
    here, there = world.keepers
    assert stream_id in here.keeper._streams
    world.connect(first, there)
    await until(lambda: stream_id in there.keeper._streams and stream_id not in here.keeper._streams)
    second = world.add(node="two")
    world.kill_keeper(here)
    world.kill_ingress(first)
    world.run_engines()
    assert await read_elsewhere(second, stream_id) == tokens_of(3, NUM_TOKENS)
    assert second.num_generated == NUM_TOKENS - 5
    world.close()


@async_test
async def test_a_copy_that_moves_is_found() -> None:
    """It moves from a keeper that hears the question late to one that has answered."""
    world = World(0, 2)
    world.keepers[0].node, world.keepers[1].node = "one", "two"
    here, there = world.keepers
    owner = world.add(here, node="one")
    asking = world.add(node="two")
    stream_id = owner.streams.begin(opening(NUM_TOKENS)).opening.stream_id
    await until(lambda: stream_id in here.keeper._streams)
    world.link(asking, here).hold()
    finding = asyncio.ensure_future(asking.streams.find(stream_id, OWNER))
    await asyncio.sleep(0.01)
    world.connect(owner, there)
    await until(lambda: stream_id in there.keeper._streams and stream_id not in here.keeper._streams)
    world.link(asking, here).hold(False)
    assert await finding is not None
    world.close()


@async_test
async def test_a_stream_without_any_copy_is_not_unknown() -> None:
    """Its keeper has died, and the next one has not answered its owner yet."""
    world = World(2, 2)
    owner, asking = world.ingresses
    stream_id = owner.streams.begin(opening(NUM_TOKENS)).opening.stream_id
    await until(lambda: len(world.copies(stream_id)) == 1)
    for each in world.keepers:
        world.link(owner, each).hold()
    world.kill_keeper(next(each for each in world.keepers if stream_id in each.keeper._streams))
    with pytest.raises(Unavailable, match="not every engine says"):
        await asking.streams.find(stream_id, OWNER)
    world.keepers.append(KeeperProcess("another keeper"))
    starting = world.add()
    with pytest.raises(Unavailable, match="not every engine says"):
        await starting.streams.find(stream_id, OWNER)
    world.link(owner, world.keepers[0]).hold(False)
    await until(lambda: len(world.copies(stream_id)) == 1)
    assert await asking.streams.find(stream_id, OWNER) is not None
    world.close()


@async_test
async def test_a_copy_returns_to_the_other_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other node's keeper does not answer for a while, and streams do not wait for it twice."""
    monkeypatch.setattr(copies, "AVOID_S", 0.2)
    world = World(0, 2)
    world.keepers[0].node, world.keepers[1].node = "one", "two"
    here, there = world.keepers
    ingress = world.add(node="one")
    found = ingress.streams.copies
    assert found.keeper is world.link(ingress, there)
    recording = ingress.streams.begin(opening(NUM_TOKENS))
    stream_id = recording.opening.stream_id
    world.link(ingress, there).hold()
    world.run_engines(5)
    await until(lambda: recording.num_safe == 5)
    assert found.keeper is world.link(ingress, here)
    num_writes = world.link(ingress, there).num_sent[Keep]
    await asyncio.sleep(3 * 0.2)
    assert world.link(ingress, there).num_sent[Keep] == num_writes
    world.link(ingress, there).hold(False)
    await until(lambda: found.keeper is world.link(ingress, there))
    await until(lambda: stream_id in there.keeper._streams and stream_id not in here.keeper._streams)
    world.close()


@async_test
async def test_a_keeper_of_another_version_counts_as_dead(caplog: pytest.LogCaptureFixture) -> None:
    """An older engine and an older ingress are left among themselves; the streams of new ones go on at new ones."""
    world = World(0, 2)
    old, new = world.keepers
    old.name, old.stream_format = "an old engine", "older"
    first = world.add(old)
    assert "an old engine is of another version" in caplog.text
    assert not sum(world.link(first, old).num_sent.values())
    with pytest.raises(Unavailable, match="no engine is of this ingress's version"):
        first.streams.begin(opening(NUM_TOKENS))
    world.connect(first, new)
    second = world.add()
    recording = first.streams.begin(opening(NUM_TOKENS))
    world.run_engines(5)
    await until(lambda: recording.num_safe == 5)
    assert [world.link(each, old).num_sent.total() for each in world.ingresses] == [0, 0]
    with pytest.raises(Unavailable, match="not every engine says"):
        await second.streams.find("strm_of_an_old_one", OWNER)
    world.kill_ingress(first)
    world.run_engines()
    assert await read_elsewhere(second, recording.opening.stream_id) == tokens_of(3, NUM_TOKENS)
    world.kill_keeper(old)
    assert await is_unknown(second, "strm_of_an_old_one")
    world.close()


def test_a_changed_field_is_another_format() -> None:
    fields = [("stream_id", str), ("epoch", int)]
    same, longer, typed = (
        msgspec.defstruct("Message", each, array_like=True, tag="message")
        for each in (fields, [*fields, ("more", int, 0)], [fields[0], ("epoch", float)])
    )
    explained = msgspec.defstruct("Message", fields, array_like=True, tag="message", namespace={"__doc__": "Prose."})
    assert format_of(explained) == format_of(same)
    assert len({format_of(each) for each in (same, longer, typed)}) == 3


def test_a_late_drop_spares_an_owned_copy() -> None:
    """An ingress was offered the orphan and found a newer copy. Meanwhile the owner returned to this keeper."""
    owner, other = (Address("127.0.0.1", port, "secret") for port in (1, 2))
    kept = keeper.Keeper(lambda _address, _message: None)
    kept.receive(owner, Keep(1, [Write("strm", 0, 0, [b"entry"])]))
    kept.receive(other, Ask(0, "strm", "drop", epoch=0))
    assert kept.num_streams == 1
    kept.receive(owner, Ask(0, "strm", "drop", epoch=0))
    assert kept.num_streams == 0


@async_test
async def test_one_message_asks_about_all_read_streams() -> None:
    """Meanwhile the owner changes its keeper, so that the readers must find the streams again."""
    world = World(2, 2)
    owner, reader = world.ingresses
    begun = [owner.streams.begin(opening(NUM_TOKENS, seed)).opening for seed in range(50)]
    await until(lambda: sum(len(each.keeper._streams) for each in world.keepers) == 50)
    reading = [asyncio.ensure_future(read_elsewhere(reader, each.stream_id)) for each in begun]
    await until(lambda: len(reader.streams._following) == 50)
    links = [world.link(reader, each) for each in world.keepers]
    for link in links:
        link.num_sent.clear()
    num_before = reader.streams._following._num_looks
    world.run_engines(50 * 10)
    await leave_its_keeper(world, owner)
    world.run_engines(50 * NUM_TOKENS)
    assert await asyncio.gather(*reading) == [tokens_of(seed, NUM_TOKENS) for seed in range(50)]
    num_looks = reader.streams._following._num_looks - num_before
    for link in links:
        assert link.num_sent[Look] <= num_looks
        assert link.num_sent[Ask] == 0
    await until(lambda: len(reader.streams._following) == 0)
    world.close()


@async_test
async def test_a_reader_hears_that_every_copy_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "LOST_S", 0.3)
    world = World(2, 2)
    owner, reader = world.ingresses
    begun = owner.streams.begin(opening(NUM_TOKENS))
    await until(lambda: len(world.copies(begun.opening.stream_id)) == 1)
    reading = asyncio.ensure_future(read_elsewhere(reader, begun.opening.stream_id))
    await until(lambda: len(reader.streams._following) == 1)
    for keeping in world.keepers:
        keeping.keeper._streams.clear()
    world.kill_ingress(owner)
    with pytest.raises(Unavailable, match="every copy of this stream is gone"):
        await reading
    world.close()

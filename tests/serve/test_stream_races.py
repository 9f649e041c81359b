"""Random deaths and delays among ingresses and keepers, in one event loop, and readers that come back anywhere.

An output has a random number of tokens. So a part of a stream that readers have seen and that is generated again
differs in its entries, and the checker finds it, although its tokens are equal.
"""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from manta.cluster.errors import Unavailable
from manta.cluster.serve.recorded import copies, keeper, streams
from tests.async_tests import async_test
from tests.conftest import PROVE
from tests.patience import until
from tests.serve.stream_world import OWNER, Ingress, KeeperProcess, World, opening, tokens_of

NUM_SEEDS = 200 if PROVE else 4
NUM_TOKENS, NUM_STREAMS, NUM_FAULTS = 120, 6, 8


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, seconds in (
        (copies, "ANSWER_S", 0.1),
        (copies, "AVOID_S", 0.2),
        (copies, "MOVE_S", 1.0),
        (copies, "SETTLE_S", 0.03),
        (streams, "LOOK_UP_S", 0.5),
        (keeper, "GRACE_S", 0.03),
        (keeper, "ENDED_AFTER_S", 0.03),
        (keeper, "OFFER_S", 0.05),
    ):
        monkeypatch.setattr(module, name, seconds)


class Node:
    """An ingress, and an engine with its keeper."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.name = world, f"node {number}"
        self.keeping = KeeperProcess(f"engine {number}", self.name)
        for ingress in world.ingresses:
            world.connect(ingress, self.keeping)
        world.keepers.append(self.keeping)
        self.ingress = world.add(node=self.name)

    def kill(self) -> None:
        self.world.kill_ingress(self.ingress)
        self.world.kill_keeper(self.keeping)


class Races:
    """Some nodes, streams and readers. `chooser` decides what happens."""

    def __init__(self, seed: int) -> None:
        self.chooser = random.Random(seed)
        self.world = World(0, 0)
        self.world.tells_deaths = seed % 2 == 0
        self.world.tokens_at_once = lambda: self.chooser.randint(1, 3)
        self.nodes = [Node(self.world, number) for number in range(3)]
        self.num_nodes = 3
        self.openings = [opening(NUM_TOKENS, seed) for seed in range(NUM_STREAMS)]
        self.seen: dict[tuple[str, int], list[int]] = {}
        """Tokens of each entry that a reader has seen."""
        self.reading: dict[asyncio.Task[bool], Ingress] = {}
        self.readers: list[asyncio.Task[None]] = []

    async def read(self, stream_id: str, seed: int) -> None:
        """Reads a stream to its end, from its beginning at another ingress whenever the one that it reads at dies.

        One that has just started does not know that a keeper was lost before.
        """
        while True:
            ingress = self.chooser.choice(self.world.ingresses)
            task = asyncio.ensure_future(self._read_at(ingress, stream_id, seed))
            self.reading[task] = ingress
            await asyncio.wait([task])
            del self.reading[task]
            if not task.cancelled() and task.result():
                return
            await asyncio.sleep(0.01)

    async def _read_at(self, ingress: Ingress, stream_id: str, seed: int) -> bool:
        """Returns whether the end was read."""
        try:
            found = await ingress.streams.find(stream_id, OWNER)
        except Unavailable:
            return False
        assert found is not None, f"stream {seed} is lost"
        tokens: list[int] = []
        reader = ingress.streams.read(found)
        with contextlib.closing(reader):
            async for event in reader:
                tokens += event.token_ids
                known = self.seen.setdefault((stream_id, reader.num_read), event.token_ids)
                assert known == event.token_ids, f"entry {reader.num_read} of stream {seed} was another one before"
        assert tokens == tokens_of(seed, NUM_TOKENS)
        return True

    def _is_safe(self, stream_id: str) -> bool:
        """Whether the stream's owner and a copy with all that any reader has seen are on two nodes."""
        owners = [node for node in self.nodes if node.ingress.owns(stream_id)]
        num_seen = max((number for each, number in self.seen if each == stream_id), default=0)
        return len(owners) == 1 and any(
            found.owner == owners[0].ingress.address and len(found.entries) >= num_seen
            for node in self.nodes
            if node is not owners[0] and (found := node.keeping.keeper._streams.get(stream_id)) is not None
        )

    async def until_safe(self) -> None:
        """Waits until one more death can harm no stream. Raises what a reader has raised meanwhile."""

        def are_safe() -> bool:
            for reader in self.readers:
                if reader.done():
                    reader.result()
            return all(self._is_safe(each.stream_id) for each in self.openings)

        await until(are_safe)

    async def kill_node(self) -> None:
        node = self.chooser.choice(self.nodes)
        self.nodes.remove(node)
        node.kill()
        for task, ingress in self.reading.items():
            if ingress is node.ingress:
                task.cancel()
        await asyncio.sleep(self.chooser.uniform(0, 0.1))
        self.nodes.append(Node(self.world, self.num_nodes))
        self.num_nodes += 1

    async def hold_link(self) -> None:
        """A keeper and an ingress do not hear each other for a while, which is longer than a keeper gets to answer."""
        nodes = self.chooser.choices(self.nodes, k=2)
        link = self.world.link(nodes[0].ingress, nodes[1].keeping)
        link.hold()
        await asyncio.sleep(self.chooser.uniform(0, 0.3))
        link.hold(False)

    async def kill_node_in_delay(self) -> None:
        """A node dies while two do not hear each other, of which it may be one."""

        async def kill_later() -> None:
            await asyncio.sleep(self.chooser.uniform(0, 0.2))
            await self.kill_node()

        await asyncio.gather(self.hold_link(), kill_later())

    async def cut_link(self) -> None:
        """A connection breaks between two that live, and is made again."""
        nodes = self.chooser.choices(self.nodes, k=2)
        self.world.cut(nodes[0].ingress, nodes[1].keeping)
        await asyncio.sleep(self.chooser.uniform(0, 0.1))
        self.world.connect(nodes[0].ingress, nodes[1].keeping)

    async def run(self) -> None:
        for each in self.openings:
            self.chooser.choice(self.nodes).ingress.streams.begin(each)
        await self.until_safe()
        self.readers = [
            asyncio.ensure_future(self.read(each.stream_id, seed))
            for seed, each in enumerate(self.openings)
            for _ in range(2)
        ]
        for _ in range(NUM_FAULTS):
            self.world.run_engines(self.chooser.randrange(60))
            await asyncio.sleep(self.chooser.uniform(0, 0.05))
            await self.until_safe()
            await self.chooser.choice([self.kill_node, self.kill_node_in_delay, self.hold_link, self.cut_link])()
        self.world.run_engines()
        await asyncio.gather(*self.readers)
        self.world.close()


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
@async_test
async def test_readers_see_every_entry_once_and_equal(seed: int) -> None:
    await Races(seed).run()

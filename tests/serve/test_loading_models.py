"""Which models on demand are loaded, and who waits for them: the loader beside a stand-in for Serve, the ingresses and
the engines, with a clock that the tests set.

The faults of other servers that swap models are cases here: a model that leaves before the request that loaded it, or
while it loads; two requests of which one waits for ever; a limit that two loads at once exceed; an unload that counts
as a failure. `tests/serve/test_held_back_models.py` has the models that do not load.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

import msgspec
import pytest

from manta.cluster.config import EngineConfig, ServedModel
from manta.cluster.errors import ServingError
from manta.cluster.http.exchange.condition import Condition, Stage
from manta.cluster.serve.fleet.deployments import Told
from manta.cluster.serve.fleet.found import FoundModel, application_name
from manta.cluster.serve.fleet.listed_models import ListedModels
from manta.cluster.serve.fleet.loaded_amount import Amount
from manta.cluster.serve.fleet.loader import MOST_LOADING_S, Loader
from manta.cluster.serve.fleet.loader_deployment import is_in_charge
from manta.cluster.serve.fleet.model_application import check_continues
from manta.cluster.serve.fleet.model_changes import ModelChanges
from tests.async_tests import async_test
from tests.patience import PATIENCE_S, until

NAMES = ("a", "b", "c", "d", "e", "f", "g", "h")
MIN_LOADED_S = 10.0
SIZE = 100
"""Bytes of a model."""
MOST_THREADS = 64
"""Cores of the largest node."""
ADDRESS = "manta"


def on_demand(name: str, **options: str) -> ServedModel:
    return ServedModel(name=name, on_demand=True, engine=EngineConfig(model="demo", **options))


def kept(name: str, **options: str) -> ServedModel:
    return ServedModel(name=name, engine=EngineConfig(model="demo", **options))


class KeptChanges:
    """In place of Ray's store."""

    def __init__(self) -> None:
        self.changes = ModelChanges()

    def read(self) -> ModelChanges:
        return self.changes

    def replace(self, changes: ModelChanges) -> bool:
        if changes.version != self.changes.version + 1:
            return False
        self.changes = msgspec.json.decode(msgspec.json.encode(changes), type=ModelChanges)
        return True


class World:
    """Serve, which loads and ends what it is told when the test says so, and ingresses, which use `busy` models."""

    def __init__(self, max_loaded: int, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self.sizes: dict[str, int] = {}
        """Memory of models that take another amount than `SIZE`."""
        self.unreadable: set[str] = set()
        """Models whose files are gone."""
        self.found: dict[str, FoundModel] = {}
        self.leaving: set[str] = set()
        """Applications that are being deleted."""
        self.is_in_charge = True
        """Whether the loader is the one that decides."""
        self.busy: set[str] = set()
        self.idle: dict[str, float] = {}
        self.now = 0.0
        self.tried: list[str] = []
        self.deployed: list[str] = []
        self.deleted: list[str] = []
        self.asked_to_let_go: list[str] = []
        self.refusal: str | None = None
        """The reason why Serve deploys nothing; None if it does."""
        self.kept = KeptChanges()
        self.loader = self.new_loader(max_loaded, *map(on_demand, NAMES))

    def new_loader(self, max_loaded: int, *models: ServedModel) -> Loader:
        listed = ListedModels(models, models, self.kept)
        most = Amount(max_loaded, self.max_bytes)
        return Loader(ADDRESS, listed, most, MIN_LOADED_S, self, lambda: self.now)

    async def look(self) -> Told:
        return Told(list(self.found.values()), frozenset(self.leaving), self.is_in_charge)

    async def place(self, entry: ServedModel, before: ServedModel | None) -> ServedModel:
        if entry.engine.num_threads is not None and entry.engine.num_threads > MOST_THREADS:
            raise ValueError("no node has so many cores")
        if before is not None:
            check_continues(before.engine, entry.engine)
        return entry

    async def num_bytes(self, model: ServedModel) -> int:
        if model.model_name in self.unreadable:
            raise ValueError("its files are gone")
        return self.sizes.get(model.model_name, SIZE)

    async def deploy(self, model: ServedModel) -> None:
        self.tried.append(model.model_name)
        if self.refusal is not None:
            raise ValueError(self.refusal)
        self.deployed.append(model.model_name)
        self.found[model.model_name] = found_as(model, "loading")

    async def delete(self, application: str) -> None:
        name = application.removeprefix(f"{ADDRESS}.")
        self.deleted.append(name)
        del self.found[name]
        self.leaving.add(application)

    async def release_cores(self) -> None:
        """Does nothing: nobody claims any."""

    async def idle_seconds(self) -> dict[str, float]:
        return self.idle | dict.fromkeys(self.busy, 0.0)

    async def let_go(self, found: FoundModel, num_waiting: Mapping[str, int]) -> bool:
        self.asked_to_let_go.append(found.model.model_name)
        return found.model.model_name not in self.busy

    # ---- what the test says ------------------------------------------------------------------------------------------

    def tell(self, name: str, stage: Stage, reason: str = "") -> None:
        self.found[name] = found_as(self.found[name].model, stage, reason)

    async def ask(self, name: str, client: str = "", timeout_s: float = PATIENCE_S) -> asyncio.Task[None]:
        """Returns a request that waits for a model, after a step of the loader."""
        asked = asyncio.ensure_future(self.loader.load(name, client, timeout_s))
        await self.step()
        return asked

    async def step(self) -> None:
        await turns()
        await self.loader.step()
        await turns()

    async def change_to(self, name: str) -> None:
        """Lets the model that leaves go, and loads the one that takes its place."""
        self.leaving.clear()
        await self.step()
        self.tell(name, "loaded")
        await self.step()

    async def have(self, name: str) -> None:
        """Loads a model for a request that is over."""
        asked = await self.ask(name)
        self.tell(name, "loaded")
        await self.step()
        await asked

    @property
    def there(self) -> set[str]:
        """Models that take memory, or may take some again."""
        leaving = {application.removeprefix(f"{ADDRESS}.") for application in self.leaving}
        return leaving | self.found.keys()

    @property
    def num_bytes_there(self) -> int:
        return sum(self.sizes.get(name, SIZE) for name in self.there)


def found_as(model: ServedModel, stage: Stage, reason: str = "", by_loader: bool = True) -> FoundModel:
    application = application_name(ADDRESS, model.model_name)
    return FoundModel(application, model, Condition(stage, reason), stage == "loaded", by_loader)


async def turns() -> None:
    """Lets tasks go on."""
    for _ in range(6):
        await asyncio.sleep(0)


async def refusal_of(asked: asyncio.Task[None]) -> tuple[str, float | None]:
    with pytest.raises(ServingError) as error:
        await asked
    return error.value.refusal.kind, error.value.refusal.retry_after_s


@async_test
async def test_a_request_loads_a_model_and_waits_for_it() -> None:
    world = World(2)
    first, second = await world.ask("a"), await world.ask("a", "another")
    assert world.deployed == ["a"]
    assert not first.done()
    world.tell("a", "loaded")
    await world.step()
    await asyncio.gather(first, second)
    assert await (await world.ask("a")) is None
    assert world.deployed == ["a"]
    assert await refusal_of(await world.ask("z")) == ("unknown_model", None)


@async_test
async def test_the_model_that_was_used_longest_ago_leaves() -> None:
    world = World(2)
    for name in ("a", "b"):
        await world.have(name)
    world.now = 100.0
    world.idle = {"a": 50.0, "b": 60.0}
    asked = await world.ask("c")
    assert world.deleted == ["b"]
    await world.step()
    assert world.deployed == ["a", "b"], "what leaves takes memory until it is gone"
    world.leaving.clear()
    await world.step()
    assert world.deployed == ["a", "b", "c"]
    world.tell("c", "loaded")
    await world.step()
    await asked
    assert world.deleted == ["b"]


@async_test
async def test_a_busy_model_and_one_just_loaded_stay() -> None:
    world = World(2)
    await world.have("a")
    world.now, world.busy = 100.0, {"a"}
    await world.have("b")
    asked = await world.ask("c")
    world.now += MIN_LOADED_S / 2
    await world.step()
    assert not world.deleted
    world.now += MIN_LOADED_S / 2
    await world.step()
    assert world.deleted == ["b"]
    asked.cancel()


@async_test
async def test_a_load_that_never_ends_gives_its_place_to_others() -> None:
    """Its client asks again and again, and no node has a GPU for it."""
    world = World(1)
    first, second = await world.ask("a", "one"), await world.ask("b", "two")
    world.now = MOST_LOADING_S
    await world.step()
    assert world.deleted == ["a"]
    await world.change_to("b")
    await second
    first.cancel()


@async_test
async def test_engines_that_start_again_are_not_unloaded_under_their_streams() -> None:
    world = World(1)
    await world.have("a")
    world.busy = {"a"}
    world.tell("a", "loading")
    await world.loader.begin_unload("a")
    await world.step()
    assert not world.deleted
    world.tell("a", "loaded")
    world.busy = set()
    await world.step()
    assert world.deleted == ["a"]


@async_test
async def test_a_model_that_loads_stays_until_its_request_was_answered() -> None:
    """Neither does it leave while it loads, nor before its request is over."""
    world = World(1)
    first, second = await world.ask("a", "one"), await world.ask("b", "two")
    world.now = MOST_LOADING_S - 1
    await world.step()
    assert not world.deleted
    world.tell("a", "loaded")
    world.busy = {"a"}  # the ingress counts the request from before it asked
    await world.step()
    await first
    for _ in range(3):
        world.now += MIN_LOADED_S
        await world.step()
    assert not world.deleted
    world.busy = set()
    await world.step()
    assert world.deleted == ["a"]
    await world.change_to("b")
    await second


@async_test
async def test_of_two_that_wait_none_waits_for_ever() -> None:
    world = World(1)
    await world.have("a")
    world.now = 100.0
    asked = [await world.ask(name) for name in ("b", "c")]
    for name in ("b", "c"):
        await world.change_to(name)
        world.now += MIN_LOADED_S
        await world.step()
    await asyncio.gather(*asked)
    assert world.deployed == ["a", "b", "c"]


@async_test
async def test_a_busy_model_takes_turns_with_the_one_that_waits() -> None:
    """New requests for it wait once the other has waited for `min_loaded_s`, so that streams without a pause keep
    nobody out. A request that gives up opens it again.
    """
    world = World(1)
    await world.have("a")
    world.now, world.busy = 100.0, {"a"}
    waiting = await world.ask("b")
    assert await (await world.ask("a")) is None
    world.now += MIN_LOADED_S
    await world.step()
    held_up = await world.ask("a")
    assert not held_up.done()
    waiting.cancel()
    await world.step()
    await held_up

    waiting = await world.ask("b")
    world.now += MIN_LOADED_S
    await world.step()
    held_up = await world.ask("a")
    world.busy = set()
    await world.step()
    assert world.deleted == ["a"]
    await world.change_to("b")
    await waiting
    assert not held_up.done()
    world.now += MIN_LOADED_S
    await world.step()
    await world.change_to("a")
    await held_up


@async_test
async def test_clients_take_turns() -> None:
    """A client that wants all models gets one, and then the others theirs."""
    world = World(1)
    greedy = [await world.ask(name, "greedy") for name in ("a", "b", "c")]
    modest = await world.ask("h", "modest")
    for name in ("a", "h", "b"):
        assert world.deployed[-1] == name
        world.tell(name, "loaded")
        await world.step()
        world.now += MIN_LOADED_S
        await world.step()
        world.leaving.clear()
        await world.step()
    await modest
    assert [each.done() for each in greedy] == [True, True, False]
    greedy[-1].cancel()


@async_test
async def test_an_unload_waits_for_the_models_requests_and_is_no_failure() -> None:
    world = World(2)
    await world.have("a")
    world.busy = {"a"}
    await world.loader.begin_unload("a")
    await world.step()
    later = await world.ask("a")
    assert not later.done()
    world.busy = set()
    await world.step()
    assert world.deleted == ["a"]
    world.leaving.clear()
    await world.step()
    assert world.deployed == ["a", "a"]
    world.tell("a", "loaded")
    await world.step()
    await later
    await world.loader.begin_unload("b")  # nothing is there to unload
    await world.step()
    assert world.deleted == ["a"]
    await world.loader.begin_load("c", PATIENCE_S)
    await world.step()
    await world.loader.begin_unload("c")
    await world.step()
    world.leaving.clear()
    await world.step()
    assert (world.deployed[2:], world.deleted[1:]) == (["c"], ["c"]), (
        "what is unloaded is not loaded by what was before"
    )


@async_test
async def test_an_accepted_unload_outlives_its_loader() -> None:
    """Two loaders change over before the model's requests have ended. The one that is replaced accepts no unload."""
    world = World(2)
    await world.have("a")
    world.busy = {"a"}
    replaced = world.loader
    await replaced.begin_unload("a")
    world.is_in_charge = False
    await world.step()
    with pytest.raises(ConnectionError):
        await replaced.begin_unload("a")

    world.is_in_charge, world.loader = True, world.new_loader(2, *map(on_demand, NAMES))
    await world.step()
    assert world.deleted == [], "it has requests"
    world.busy = set()
    await world.step()
    assert (world.deleted, world.kept.changes.unloading) == (["a"], frozenset())
    world.leaving.clear()
    await world.have("a")

    world.busy = {"a"}
    await world.loader.begin_unload("a")
    world.loader = world.new_loader(2, *map(on_demand, NAMES))
    await world.loader.begin_load("a", PATIENCE_S)
    world.busy = set()
    await world.step()
    assert (world.deleted, world.kept.changes.unloading) == (["a"], frozenset()), "a later load ends the unload"


@async_test
async def test_a_load_goes_on_when_its_client_leaves() -> None:
    world = World(1)
    asked = await world.ask("a")
    asked.cancel()
    await world.step()
    world.tell("a", "loaded")
    assert await (await world.ask("a")) is None
    assert (world.deployed, world.deleted) == (["a"], [])


@async_test
async def test_a_load_that_nobody_waits_for_leaves_for_others() -> None:
    world = World(1)
    (await world.ask("a")).cancel()
    await world.step()
    world.now = MIN_LOADED_S
    asked = await world.ask("b")
    assert world.deleted == ["a"]
    asked.cancel()


@async_test
async def test_a_late_request_is_told_when_to_come_again() -> None:
    world = World(1)
    kind, retry_after_s = await refusal_of(await world.ask("a", timeout_s=0.0))
    assert kind == "unavailable"
    assert retry_after_s is not None
    assert retry_after_s > 0


@async_test
async def test_a_loader_that_is_replaced_decides_nothing() -> None:
    world = World(1)
    waiting = await world.ask("a")
    world.is_in_charge = False
    asked = await world.ask("b")
    for each in (waiting, asked):
        with pytest.raises(ConnectionError):
            await each
    assert world.deployed == ["a"]

    world.is_in_charge = True
    world.loader = world.new_loader(1, on_demand("a"))
    world.tell("a", "loaded")
    assert await (await world.ask("a")) is None
    assert world.deployed == ["a"]


@async_test
async def test_a_loader_waits_until_it_is_in_charge() -> None:
    """Nobody tells it that the one before has ended, so it goes on looking."""
    world = World(1)
    await world.have("a")
    world.loader = world.new_loader(1, on_demand("a", dtype="float32"))
    world.is_in_charge = False
    running = asyncio.ensure_future(world.loader.run())
    await turns()
    assert world.deployed == ["a"]
    world.is_in_charge = True
    await until(lambda: world.deployed == ["a", "a"])
    running.cancel()


@pytest.mark.parametrize(
    ("own", "others", "decides"),
    [
        ("RUNNING", (), True),
        ("STARTING", (), True),
        ("STOPPING", (), False),
        (None, ("RUNNING",), False),
        ("RUNNING", ("STARTING",), True),
        ("PENDING_MIGRATION", ("STARTING",), True),
        ("STARTING", ("STOPPING",), False),
        ("STARTING", ("PENDING_MIGRATION",), False),
        ("RUNNING", ("STOPPING",), False),
    ],
)
def test_one_loader_is_in_charge(own: str | None, others: tuple[str, ...], decides: bool) -> None:
    """Serve starts one before another has ended, when the deployment changes or its node is drained."""
    told = [{"replica_id": f"other {number}", "state": state} for number, state in enumerate(others)]
    told += [{"replica_id": "own", "state": own}] * (own is not None)
    assert is_in_charge({"deployments": {"loader": {"replicas": told}}}, "own") == decides


@pytest.mark.parametrize("seed", range(20))
@async_test
async def test_any_order_keeps_the_limit_and_answers_everybody(seed: int) -> None:
    """Requests in random order, loads that succeed and fail, requests that end and clients that leave."""
    draw = random.Random(seed)
    world, limit, max_bytes = World(3, 5 * SIZE), 3, 5 * SIZE
    world.sizes = {"a": 4 * SIZE, "b": 3 * SIZE, "c": 2 * SIZE}
    broken = {"h"}
    asked: dict[asyncio.Task[None], str] = {}
    for number in range(400):
        choice = draw.random()
        if choice < 0.4 and number < 300:
            name = draw.choice(NAMES)
            asked[asyncio.ensure_future(world.loader.load(name, draw.choice("xyz"), PATIENCE_S))] = name
        elif choice < 0.45 and asked:
            draw.choice(list(asked)).cancel()
        elif choice < 0.6:
            world.leaving.clear()
        elif choice < 0.8:
            for name, each in list(world.found.items()):
                if each.condition.stage == "loading" and draw.random() < 0.5:
                    world.tell(name, "failed" if name in broken else "loaded")
        world.busy = {name for name in world.found if draw.random() < 0.3}
        world.now += draw.choice((0.1, 1.0, 20.0))
        await world.step()
        assert len(world.there) <= limit
        assert world.num_bytes_there <= max_bytes
        for task in [task for task in asked if task.done()]:
            name = asked.pop(task)
            assert task.cancelled() or task.exception() is None or name in broken
    world.busy = set()
    for _ in range(100):
        world.leaving.clear()
        for name, each in list(world.found.items()):
            if each.condition.stage == "loading":
                world.tell(name, "failed" if name in broken else "loaded")
        world.now += MIN_LOADED_S
        await world.step()
    assert all(task.done() for task in asked)

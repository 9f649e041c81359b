"""Which models on demand are loaded, and who waits for them: the loader beside a stand-in for Serve, the ingresses and
the engines, with a clock that the tests set.

The faults of other servers that swap models are cases here: a model that leaves before the request that loaded it, or
while it loads; two requests of which one waits for ever; a limit that two loads at once exceed; an unload that counts
as a failure; a failed load that is repeated for each request, or after which nothing loads.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Mapping

import msgspec
import pytest

from manta.cluster.config import EngineConfig, ServedModel
from manta.cluster.errors import ServingError
from manta.cluster.http.exchange.condition import Condition, Stage
from manta.cluster.serve.fleet.found import FoundModel, application_name
from manta.cluster.serve.fleet.listed_models import ListedModels
from manta.cluster.serve.fleet.loaded_amount import Amount
from manta.cluster.serve.fleet.loader import (
    MAX_RETRY_DEPLOY_S,
    MOST_LOADING_S,
    RETRY_DEPLOY_S,
    RETRY_FAILED_S,
    Loader,
    Told,
)
from manta.cluster.serve.fleet.model_changes import GcsChanges, ModelChange, ModelChanges
from manta.cluster.serve.starting import kept_versions
from tests.async_tests import async_test
from tests.patience import PATIENCE_S, until
from tests.serve.test_adapter_directory import Store

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
        self.empty: set[str] = set()
        """Applications without a process, because their engines have failed."""
        self.is_over = False
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
        return Told(list(self.found.values()), frozenset(self.leaving), self.is_over)

    async def place(self, entry: ServedModel) -> ServedModel:
        if entry.engine.num_threads is not None and entry.engine.num_threads > MOST_THREADS:
            raise ValueError("no node has so many cores")
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
        self.empty.discard(model.model_name)
        self.found[model.model_name] = found_as(model, "loading")

    async def delete(self, application: str) -> None:
        name = application.removeprefix(f"{ADDRESS}.")
        self.deleted.append(name)
        del self.found[name]
        self.leaving.add(application)

    async def idle_seconds(self) -> dict[str, float]:
        return self.idle | dict.fromkeys(self.busy, 0.0)

    async def let_go(self, found: FoundModel, num_waiting: Mapping[str, int]) -> bool:
        self.asked_to_let_go.append(found.model.model_name)
        return found.model.model_name not in self.busy

    # ---- what the test says ------------------------------------------------------------------------------------------

    def tell(self, name: str, stage: Stage, reason: str = "") -> None:
        model = self.found[name].model
        if stage == "failed":
            self.empty.add(name)
        self.found[name] = found_as(model, stage, reason)

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
        """Models that take memory."""
        leaving = {application.removeprefix(f"{ADDRESS}.") for application in self.leaving}
        return (leaving | self.found.keys()) - self.empty

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
async def test_a_failed_load_is_told_and_not_repeated() -> None:
    world = World(1)
    asked = [await world.ask("a", f"client {number}") for number in range(20)]
    world.tell("a", "failed", "its files are gone")
    await world.step()
    for each in asked:
        with pytest.raises(ServingError) as error:
            await each
        assert error.value.refusal.kind == "model_failed"
        assert "its files are gone" in error.value.refusal.cause
    await refusal_of(await world.ask("a"))
    assert (world.deployed, world.deleted) == (["a"], [])
    await world.have("b")  # a failed one takes no place

    world.now = RETRY_FAILED_S
    again = await world.ask("a")
    assert world.deleted == ["a", "b"], "the limit holds for the second attempt too"
    await world.step()
    assert world.deployed == ["a", "b"]
    world.leaving.clear()
    await world.step()
    assert world.deployed == ["a", "b", "a"]
    world.tell("a", "loaded")
    await world.step()
    await again


@async_test
async def test_an_operator_tries_a_failed_model_again_at_once() -> None:
    world = World(1)
    await world.loader.begin_load("a", PATIENCE_S)
    await world.step()
    world.tell("a", "failed")
    await world.step()
    assert world.deployed == ["a"], "a load that fails is no failed model that is loaded again"
    await world.loader.begin_load("a", PATIENCE_S)
    await world.step()
    world.leaving.clear()
    await world.step()
    assert world.deployed == ["a", "a"]
    world.tell("a", "loaded")
    await world.step()
    assert await (await world.ask("a")) is None


@async_test
async def test_what_serve_does_not_deploy_is_refused() -> None:
    world = World(1)
    world.refusal = "num_threads is more than any node has"
    asked = await world.ask("a")
    with pytest.raises(ServingError) as error:
        await asked
    assert (error.value.refusal.kind, "num_threads" in error.value.refusal.cause) == ("model_failed", True)
    assert await refusal_of(await world.ask("a")) == ("model_failed", None)
    assert world.tried == ["a"], "requests repeat no deployment that was just refused"
    world.now = RETRY_DEPLOY_S
    world.refusal = None
    (await world.ask("a")).cancel()
    assert world.deployed == ["a"]


@async_test
async def test_a_kept_model_that_serve_refuses_is_tried_again_later_and_later(caplog: pytest.LogCaptureFixture) -> None:
    world = World(1)
    world.loader = world.new_loader(1, kept("k"))
    world.refusal = "no such node"
    pauses, last = [], 0.0
    for _ in range(300):
        num_tried = len(world.tried)
        await world.step()
        if len(world.tried) > num_tried:
            pauses.append(world.now - last)
            last = world.now
        world.now += RETRY_DEPLOY_S / 2
    assert pauses[1:6] == [RETRY_DEPLOY_S * 2**count for count in range(5)]
    assert max(pauses) == MAX_RETRY_DEPLOY_S
    assert len(caplog.records) == 1
    world.refusal = "no such option"
    world.now = last + MAX_RETRY_DEPLOY_S
    await world.step()
    assert len(caplog.records) == 2, "a reason is told when it is new"
    world.refusal = None
    world.now += MAX_RETRY_DEPLOY_S
    await world.step()
    assert world.deployed == ["k"]


@async_test
async def test_new_options_that_serve_refuses_are_tried_again() -> None:
    world = World(1)
    world.loader = world.new_loader(1, kept("k"))
    await world.step()
    world.tell("k", "loaded")
    world.loader = world.new_loader(1, kept("k", dtype="float32"))
    world.refusal = "no such option"
    await world.step()
    await world.step()
    assert world.tried == ["k", "k"]
    world.refusal = None
    world.now = RETRY_DEPLOY_S
    await world.step()
    assert world.deployed == ["k", "k"]


@async_test
async def test_a_loader_that_nobody_asks_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manta.cluster.serve.fleet.loader.RETRY_DEPLOY_S", 0.01)
    world = World(1)
    world.refusal = "no such node"
    loader = Loader(
        ADDRESS, ListedModels([kept("k")], [kept("k")], world.kept), Amount(1, None), MIN_LOADED_S, world, step_s=0.001
    )
    running = asyncio.ensure_future(loader.run())
    await until(lambda: len(world.tried) == 2)
    world.refusal = None
    await until(lambda: world.deployed == ["k"])
    running.cancel()


# ---- a bound in bytes -----------------------------------------------------------------------------------------------


@async_test
async def test_a_bound_in_bytes_makes_idle_models_leave() -> None:
    """As many as needed, the one that was used longest ago first. Small ones wait behind a large one."""
    world = World(8, max_bytes=4 * SIZE)
    world.sizes = {"h": 3 * SIZE}
    for name in ("a", "b", "c", "d"):
        await world.have(name)
    world.now, world.idle = 100.0, {"a": 50.0, "b": 40.0, "c": 30.0, "d": 20.0}
    world.busy = {"c"}
    large, small = await world.ask("h", "one"), await world.ask("e", "another")
    assert world.deleted == ["a", "b", "d"]
    world.leaving.clear()
    await world.step()
    assert world.deployed[4:] == ["h"]
    world.tell("h", "loaded")
    await world.step()
    await large
    assert world.num_bytes_there == 4 * SIZE
    world.now, world.busy = 200.0, {"h"}
    await world.step()
    assert world.deleted[3:] == ["c"], "never one with requests"
    await world.change_to("e")
    await small


@async_test
async def test_a_model_that_never_fits_is_refused() -> None:
    world = World(8, max_bytes=2 * SIZE)
    world.sizes, world.unreadable = {"h": 3 * SIZE, "new": 3 * SIZE}, {"g"}
    await world.have("a")
    for name in ("h", "g"):
        assert await refusal_of(await world.ask(name)) == ("model_failed", None)
    assert await refusal_to(world.loader.add(on_demand("new"))) == ("unfit", "")
    assert (world.deployed, world.deleted, world.kept.changes.of) == (["a"], [], {})
    await world.loader.add(kept("new"))
    assert world.deployed == ["a", "new"], "only models on demand are counted"


@async_test
async def test_a_loader_that_is_replaced_counts_what_is_there() -> None:
    world = World(8, max_bytes=2 * SIZE)
    for name in ("a", "b"):
        await world.have(name)
    world.busy = {"a"}
    world.loader = world.new_loader(8, *map(on_demand, NAMES))
    world.now = MIN_LOADED_S
    await world.step()
    world.now += MIN_LOADED_S
    world.unreadable = {"b"}
    asked = await world.ask("c")
    assert (world.deleted, world.deployed) == (["b"], ["a", "b"])
    await world.change_to("c")
    await asked
    assert world.there == {"a", "c"}


# ---- what operators change ------------------------------------------------------------------------------------------


async def refusal_to(change: Awaitable[None]) -> tuple[str, str]:
    """Returns the kind and the field of a refused change."""
    with pytest.raises(ServingError) as error:
        await change
    return error.value.refusal.kind, error.value.refusal.field


@async_test
async def test_operators_add_update_and_remove_models() -> None:
    world = World(2)
    world.loader = world.new_loader(2, kept("k"), on_demand("a"))
    await world.step()
    world.tell("k", "loaded")
    await world.loader.add(kept("new"))
    assert world.deployed == ["k", "new"]
    world.tell("new", "loaded")
    await world.loader.add(on_demand("later"))
    assert world.deployed == ["k", "new"], "it loads when a request names it"
    await world.have("later")
    await world.loader.update("later", {"aliases": ["l"], "engine": {"dtype": "float32"}})
    assert world.deployed[3:] == ["later"]
    assert world.found["later"].model.names == ("later", "l")
    assert world.found["later"].model.engine.dtype == "float32"
    await world.step()
    assert world.deployed[4:] == [], "it was deployed already"

    world.tell("later", "loaded")
    world.busy = {"later"}
    await world.loader.remove("later")
    await world.step()
    assert not world.deleted
    assert await refusal_of(await world.ask("later")) == ("unknown_model", None)
    world.busy = set()
    await world.step()
    assert world.deleted == ["later"]
    await world.loader.remove("k")
    await world.step()
    assert world.deleted == ["later", "k"]
    for _ in range(3):
        world.leaving.clear()
        await world.step()
    assert (world.deployed[4:], world.there) == ([], {"new"})


@async_test
async def test_who_waits_for_a_model_that_is_removed_is_told() -> None:
    world = World(1)
    asked = await world.ask("a")
    await world.loader.remove("a")
    assert await refusal_of(asked) == ("unknown_model", None)
    await world.step()
    assert world.deleted == ["a"], "it was loading"


@async_test
async def test_a_model_that_is_added_again_while_it_leaves_stays() -> None:
    world = World(1)
    world.loader = world.new_loader(1, kept("k"))
    await world.step()
    world.tell("k", "loaded")
    world.busy = {"k"}
    await world.loader.remove("k")
    await world.step()
    await world.loader.add(kept("k"))
    world.busy = set()
    await world.step()
    assert (world.deployed, world.deleted) == (["k"], [])
    await world.loader.remove("k")
    await world.step()
    await world.loader.add(kept("k"))
    assert world.deployed == ["k"], "Serve is still deleting it"
    world.leaving.clear()
    await world.step()
    assert world.deployed == ["k", "k"]


@async_test
async def test_a_change_that_cannot_be_is_refused_and_changes_nothing() -> None:
    world = World(1)
    world.loader = world.new_loader(1, kept("k"), ServedModel(name="l", aliases=("x",), engine=EngineConfig()))
    world.found["other"] = found_as(ServedModel(name="other", aliases=("o",)), "loaded", by_loader=False)
    world.found["other"] = msgspec.structs.replace(world.found["other"], application="its.own")
    await world.step()
    num_deployed = len(world.deployed)
    loader = world.loader
    for change, expected in (
        (loader.add(kept("k", dtype="float32")), ("name_taken", "name")),
        (loader.add(kept("x")), ("name_taken", "name")),
        (loader.add(ServedModel(name="n", aliases=("k",))), ("name_taken", "aliases")),
        (
            loader.add(ServedModel(name="n", engine=EngineConfig(adapters={"o": "f"}))),
            ("name_taken", "engine.adapters"),
        ),
        (loader.add(ServedModel(name="n", engine=EngineConfig(num_threads=MOST_THREADS + 1))), ("unfit", "")),
        (loader.update("z", {}), ("unknown_model", "model")),
        (loader.update("other", {}), ("not_allowed", "model")),
        (loader.update("k", {"name": "m"}), ("not_allowed", "name")),
        (loader.update("k", {"aliases": ["x"]}), ("name_taken", "aliases")),
        (loader.update("k", {"engine": {"max_model_length": 5}}), ("unfit", "")),
        (loader.update("k", {"engine": {"max_model_len": "long"}}), ("unfit", "")),
        (loader.remove("z"), ("unknown_model", "model")),
        (loader.remove("other"), ("not_allowed", "model")),
    ):
        assert await refusal_to(change) == expected
    world.refusal = "no such option"
    assert await refusal_to(loader.add(kept("n"))) == ("unfit", "")
    assert await refusal_to(loader.update("k", {"num_engine_replicas": 2})) == ("unfit", "")
    world.refusal = None
    world.now = MAX_RETRY_DEPLOY_S
    await world.step()
    assert (len(world.deployed), world.kept.changes.of) == (num_deployed, {})
    await loader.add(kept("k"))  # it is there as it is to be, so a repeated request does no harm


@async_test
async def test_what_operators_have_changed_outlives_the_loader() -> None:
    """A new loader, also one of the same list that is deployed again, goes on with it. An entry of the list that is
    another by then counts anew.
    """
    world = World(2)
    listed = (kept("k"), kept("gone"), on_demand("a"))
    world.loader = world.new_loader(2, *listed)
    await world.step()
    for name in ("k", "gone"):
        world.tell(name, "loaded")
    await world.loader.add(kept("new"))
    world.tell("new", "loaded")
    await world.loader.update("k", {"engine": {"dtype": "float32"}})
    world.tell("k", "loaded")
    await world.loader.remove("gone")
    await world.step()
    world.leaving.clear()
    num_deployed = len(world.deployed)

    world.loader = world.new_loader(2, *listed)
    await world.step()
    await world.step()
    assert (world.deployed[num_deployed:], world.there) == ([], {"k", "new"})
    assert world.found["k"].model.engine.dtype == "float32"

    world.loader = world.new_loader(2, kept("k", dtype="bfloat16"), kept("gone", dtype="float32"), on_demand("a"))
    await world.step()
    assert sorted(world.deployed[num_deployed:]) == ["gone", "k"]
    assert world.found["k"].model.engine.dtype == "bfloat16"
    assert [*world.kept.changes.of] == ["new"]
    await world.loader.remove("new")
    assert [*world.kept.changes.of] == ["new"], "ingresses refuse it while its engines end"
    await world.step()
    await world.loader.add(on_demand("last"))
    assert [*world.kept.changes.of] == ["last"], "nothing is left of what was added and has gone"


@async_test
async def test_a_new_loader_answers_for_models_that_were_added() -> None:
    world = World(1)
    await world.loader.add(on_demand("new"))
    world.loader = world.new_loader(1, *map(on_demand, NAMES))
    asked = await world.ask("new")
    world.tell("new", "loaded")
    await world.step()
    await asked


@async_test
async def test_of_two_loaders_that_change_the_list_one_is_asked_again() -> None:
    world = World(1)
    await world.step()
    first, second = world.loader, world.new_loader(1, *map(on_demand, NAMES))
    await second.add(on_demand("new"))
    await first.add(on_demand("newer"))  # it reads what the other one has kept
    assert [*world.kept.changes.of] == ["new", "newer"]
    world.is_over = True
    with pytest.raises(ConnectionError):
        await first.remove("new")


def test_changes_are_kept_in_rays_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    monkeypatch.setattr(kept_versions, "internal_kv", store)
    first, second, other = GcsChanges(ADDRESS), GcsChanges(ADDRESS), GcsChanges("other")
    change = ModelChange(None, on_demand("new"), on_demand("new"))
    changes = first.read().with_change("new", change)
    assert first.replace(changes)
    assert (second.read(), other.read()) == (changes, ModelChanges())
    assert not second.replace(ModelChanges(1))
    for key in store.found:
        store.found[key] = b'{"of": {"new": {"of": "another version"}}}'
    assert second.read() == ModelChanges(1), "what is not understood counts for nothing, and may be replaced"
    assert second.replace(ModelChanges(2))
    second.clear()
    assert (first.read(), store.found) == (ModelChanges(), {})


@async_test
async def test_the_models_of_the_command_that_serves_are_in_the_list() -> None:
    """It has deployed them before there was a loader."""
    world = World(1)
    world.found["k"] = found_as(kept("k"), "loaded", by_loader=False)
    world.loader = world.new_loader(1, kept("k"))
    await world.step()
    assert world.deployed == []
    await world.loader.update("k", {"num_engine_replicas": 2})
    assert world.deployed == ["k"]
    world.tell("k", "loaded")
    await world.loader.remove("k")
    await world.step()
    assert world.deleted == ["k"]


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
    world.is_over = True
    asked = await world.ask("b")
    for each in (waiting, asked):
        with pytest.raises(ConnectionError):
            await each
    assert world.deployed == ["a"]

    world.is_over = False
    world.loader = world.new_loader(1, on_demand("a"))
    world.tell("a", "loaded")
    assert await (await world.ask("a")) is None
    assert world.deployed == ["a"]


@async_test
async def test_a_changed_list_changes_what_is_loaded() -> None:
    world = World(3)
    for name in ("a", "b", "c"):
        await world.have(name)
    world.busy = {"c"}
    world.loader = world.new_loader(3, on_demand("a"), on_demand("b", dtype="float32"))
    await world.step()
    assert world.deployed[3:] == ["b"]
    assert not world.deleted
    world.tell("b", "loaded")
    world.busy = set()
    await world.step()
    assert (world.deployed[3:], world.deleted) == (["b"], ["c"])


@async_test
async def test_models_that_are_not_on_demand_are_deployed_at_once_and_stay() -> None:
    world = World(1)
    world.loader = world.new_loader(1, kept("k"), on_demand("a"), on_demand("b"))
    await world.step()
    assert world.deployed == ["k"]
    world.tell("k", "loaded")
    await world.have("a")
    world.now = 100.0
    (await world.ask("b")).cancel()
    assert (world.deployed, world.deleted) == (["k", "a"], ["a"])
    world.loader = world.new_loader(1, kept("k", dtype="float32"), kept("l"))
    await world.step()
    assert world.deployed[2:] == ["k", "l"]
    world.loader = world.new_loader(1, kept("l"))
    world.tell("k", "loaded")
    await world.step()
    assert (world.deployed[4:], world.deleted) == ([], ["a", "k"])


@async_test
async def test_other_models_of_the_address_are_left_alone() -> None:
    """What an operator deploys by itself neither counts nor leaves."""
    world = World(1)
    world.found["other"] = found_as(kept("other"), "loaded", by_loader=False)
    world.now = 100.0
    await world.have("a")
    world.now = 200.0
    (await world.ask("b")).cancel()
    assert world.deleted == ["a"]


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

"""Lists of models that operators or deployments change beside a stand-in for Serve, and a bound in bytes for models on
demand. The world is that of `tests/serve/test_loading_models.py`.
"""

from __future__ import annotations

import asyncio
import pathlib
import shutil
from collections.abc import Awaitable
from typing import Literal

import msgspec
import pytest

from manta.cluster.config import EngineConfig, ServedModel
from manta.cluster.errors import ServingError
from manta.cluster.serve.fleet.deployments import Told
from manta.cluster.serve.fleet.held_back import MAX_RETRY_DEPLOY_S
from manta.cluster.serve.fleet.listed_models import ListedModels
from manta.cluster.serve.fleet.loaded_amount import Amount
from manta.cluster.serve.fleet.loader import Loader
from manta.cluster.serve.fleet.model_changes import GcsChanges, ModelChange, ModelChanges
from manta.cluster.serve.starting import kept_versions
from tests.async_tests import async_test
from tests.checkpoints import checkpoint
from tests.patience import PATIENCE_S, until
from tests.serve.test_adapter_directory import Store
from tests.serve.test_loading_models import (
    ADDRESS,
    MIN_LOADED_S,
    MOST_THREADS,
    NAMES,
    SIZE,
    KeptChanges,
    World,
    found_as,
    kept,
    on_demand,
    refusal_of,
)

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
async def test_streams_get_no_engines_of_another_tokenizer(tmp_path: pathlib.Path) -> None:
    """The ids that clients were sent so far would be other texts. A model without engines has no streams."""
    folders = {name: str(checkpoint(name)) for name in ("llama", "qwen2")}
    other = tmp_path / "other"
    shutil.copytree(folders["llama"], other)
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"a":', '"$$":'))
    world = World(1)
    world.loader = world.new_loader(
        1, ServedModel(name="k", on_demand=True, engine=EngineConfig(model=folders["llama"]))
    )
    await world.have("k")
    assert await refusal_to(world.loader.update("k", {"engine": {"model": str(other)}})) == ("unfit", "")
    await world.loader.update("k", {"engine": {"model": folders["qwen2"]}})
    assert world.deployed == ["k", "k"]
    world.tell("k", "loaded")
    await world.loader.begin_unload("k")
    await world.step()
    await world.loader.update("k", {"engine": {"model": str(other)}})
    assert (world.deployed, world.deleted) == (["k", "k"], ["k"])


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
    world.is_in_charge = False
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
    """A model that an operator deploys by itself does not count, and does not leave."""
    world = World(1)
    world.found["other"] = found_as(kept("other"), "loaded", by_loader=False)
    world.now = 100.0
    await world.have("a")
    world.now = 200.0
    (await world.ask("b")).cancel()
    assert world.deleted == ["a"]


@async_test
async def test_a_loader_that_nobody_asks_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manta.cluster.serve.fleet.held_back.RETRY_DEPLOY_S", 0.01)
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


# ---- failures midway ------------------------------------------------------------------------------------------------


class FailingWorld(World):
    """Serve and its store, which fail as the test says."""

    def __init__(self, *models: ServedModel) -> None:
        self.num_looks = 0
        self.num_failing_looks = 0
        self.loses_answers = False
        """Whether Serve takes what is deployed, and the caller is told of an error."""
        super().__init__(1)
        self.use(*models)

    def use(self, *models: ServedModel) -> None:
        """Has a new loader, of another list of models."""
        listed, most = ListedModels(models, models, self.kept), Amount(1, None)
        self.loader = Loader(ADDRESS, listed, most, MIN_LOADED_S, self, lambda: self.now, step_s=0.001)

    async def look(self) -> Told:
        self.num_looks += 1
        if self.num_looks <= self.num_failing_looks:
            raise ConnectionError("the controller is being restarted")
        return await super().look()

    async def deploy(self, model: ServedModel) -> None:
        await super().deploy(model)
        if self.loses_answers:
            raise ConnectionError("the controller does not answer")


class FailingChanges(KeptChanges):
    """A store that takes a change and then breaks the connection, or breaks it before."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: Literal["before", "behind"] | None = None

    def replace(self, changes: ModelChanges) -> bool:
        if self.fails == "before":
            raise ConnectionError("the store does not answer")
        is_latest = super().replace(changes)
        if self.fails == "behind":
            raise ConnectionError("the store does not answer")
        return is_latest


@async_test
async def test_a_model_that_is_added_while_serve_deletes_it_is_deployed() -> None:
    """Nobody tells the loader when Serve is done, so it goes on looking."""
    world = FailingWorld(kept("k"))
    running = asyncio.ensure_future(world.loader.run())
    await until(lambda: world.deployed == ["k"])
    world.tell("k", "loaded")
    await world.loader.remove("k")
    await until(lambda: world.deleted == ["k"])
    await world.loader.add(kept("k"))
    num_looks = world.num_looks
    await until(lambda: world.num_looks > num_looks + 3)
    assert world.deployed == ["k"]
    world.leaving.clear()
    await until(lambda: world.deployed == ["k", "k"])
    running.cancel()


@async_test
async def test_a_step_that_fails_is_made_again() -> None:
    """Else a list that was changed while the controller restarts would count from the next request on only."""
    world = FailingWorld(on_demand("a"))
    await world.have("a")
    world.use(on_demand("a", dtype="float32"))
    world.num_failing_looks = world.num_looks + 2
    running = asyncio.ensure_future(world.loader.run())
    await until(lambda: world.deployed == ["a", "a"])
    running.cancel()


@pytest.mark.parametrize("fails", ["before", "behind"])
@async_test
async def test_a_store_that_fails_is_asked_what_it_has(fails: Literal["before", "behind"]) -> None:
    """Ingresses read the store, so the loader may not go by what it meant to keep."""
    world, store = FailingWorld(), FailingChanges()
    world.kept = store
    world.use(on_demand("a"))
    await world.step()
    running = asyncio.ensure_future(world.loader.run())
    store.fails = fails
    for entry in (on_demand("new"), kept("k")):
        with pytest.raises(ConnectionError):
            await world.loader.add(entry)
    store.fails = None
    is_kept = fails == "behind"
    asked = asyncio.ensure_future(world.loader.load("new", "", PATIENCE_S))
    if is_kept:
        await until(lambda: sorted(world.deployed) == ["k", "new"])
        asked.cancel()
    else:
        assert await refusal_of(asked) == ("unknown_model", None)
    await world.loader.add(on_demand("last"))
    assert [*store.changes.of] == [*(("new", "k") if is_kept else ()), "last"]
    running.cancel()


@async_test
async def test_options_that_serve_has_taken_are_replaced_if_the_change_is_refused() -> None:
    world = FailingWorld(kept("k"))
    await world.step()
    world.tell("k", "loaded")
    await world.step()
    world.loses_answers = True
    assert await refusal_to(world.loader.update("k", {"engine": {"dtype": "float32"}})) == ("unfit", "")
    assert world.found["k"].model.engine.dtype == "float32"
    world.loses_answers = False
    await world.step()
    assert world.found["k"].model == kept("k")
    assert world.deployed == ["k"] * 3

"""Models that cannot be loaded, in the world of `tests/serve/test_loading_models.py`: their engines fail, or Serve
refuses to deploy them. Faults of other servers are a failed load that is repeated for each request, and one after which
nothing loads.
"""

from __future__ import annotations

import asyncio

import pytest

from manta.cluster.errors import ServingError
from manta.cluster.serve.fleet.held_back import MAX_RETRY_DEPLOY_S, RETRY_DEPLOY_S, RETRY_FAILED_S
from tests.async_tests import async_test
from tests.patience import PATIENCE_S
from tests.serve.test_loading_models import NAMES, World, kept, on_demand, refusal_of


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
    assert (world.deployed, world.deleted) == (["a"], ["a"]), "Serve's controller would start it again"
    other = await world.ask("b")
    assert world.deployed == ["a"], "it takes a place until it is gone"
    await world.change_to("b")
    await other

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
async def test_a_failed_load_outlives_its_loader() -> None:
    """The next loader tries again when a request comes a minute later, or when the entry is another."""
    world = World(1)
    asked = await world.ask("a")
    world.tell("a", "failed", "its files are gone")
    await world.step()
    await refusal_of(asked)
    world.leaving.clear()
    world.loader = world.new_loader(1, *map(on_demand, NAMES))
    with pytest.raises(ServingError) as error:
        await (await world.ask("a"))
    assert "its files are gone" in error.value.refusal.cause
    world.now = RETRY_FAILED_S
    again = await world.ask("a")
    assert (world.deployed, world.kept.changes.failed) == (["a", "a"], {})
    again.cancel()
    world.tell("a", "failed", "they are still gone")
    await world.step()
    world.leaving.clear()
    assert [*world.kept.changes.failed] == ["a"]
    world.loader = world.new_loader(1, on_demand("a", dtype="float32"))
    again = await world.ask("a")
    assert (world.deployed, world.kept.changes.failed) == (["a"] * 3, {})
    again.cancel()


@async_test
async def test_a_failed_model_that_is_unloaded_or_changed_starts_nothing() -> None:
    """An operator who mends a model takes no place from others. The next request loads it at once."""
    world = World(2)
    await world.have("a")
    for has_looked in (False, True):
        for change in (
            lambda: world.loader.begin_unload("b"),
            lambda: world.loader.update("b", {"engine": {"dtype": "float32"}}),
            lambda: world.loader.update("b", {"engine": {"dtype": "bfloat16"}}),
        ):
            asked = await world.ask("b")
            assert world.deployed[-1] == "b"
            num_deployed = len(world.deployed)
            world.tell("b", "failed")
            if has_looked:
                await world.step()
            await change()
            await world.step()
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            world.leaving.clear()
            await world.step()
            assert (len(world.deployed), world.found.keys()) == (num_deployed, {"a"})
            assert not world.kept.changes.failed


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

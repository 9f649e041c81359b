"""The names of adapters that operators have loaded stay those of their model: while it is not loaded, while it loads,
and beside other models that operators add.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import msgspec
import pytest

from manta.cluster.config import EngineConfig, ServedModel
from manta.cluster.engine.adapter_table import AdapterTable, LoadedAdapter
from tests.async_tests import async_test
from tests.checkpoints import checkpoint
from tests.loaded_adapters import MemoryRegistry, memory_registries
from tests.patience import PATIENCE_S, until
from tests.serve.test_models_on_demand import Ingress, ready, world_of

FOLDERS = {name: str(checkpoint(family)) for name, family in (("a", "llama"), ("b", "phi3"))}
MODELS = [
    ServedModel(name=name, on_demand=True, engine=EngineConfig(model=folder, adapter_roots=("/adapters",)))
    for name, folder in FOLDERS.items()
]


@pytest.fixture
def registry() -> Iterator[MemoryRegistry]:
    """The registry of the model `b`, for which the adapter `x` was loaded."""
    with memory_registries() as registries:
        loaded = {"x": LoadedAdapter("/adapters/x", "00")}
        found = registries[FOLDERS["b"]]
        found.table = msgspec.structs.replace(AdapterTable(), loaded=loaded)
        yield found


async def names(ingress: Ingress) -> list[tuple[str, str | None]]:
    """The listed names, each with the model whose adapter it is."""
    cards = (await ingress.ask("GET", "/v1/models")).json()["data"]
    return [(card["id"], card["parent"]) for card in cards]


@async_test
async def test_the_adapter_of_an_unloaded_model_keeps_its_name(registry: MemoryRegistry) -> None:
    """Else another model could load an adapter of that name, and clients of the one would get the other."""
    async with world_of(*MODELS) as world:
        ingress = await ready(world)
        assert await names(ingress) == [("a", None), ("b", None), ("x", "b")]
        listed = (await ingress.ask("GET", "/lora-adapters?model=b")).json()
        assert listed == [{"id": 0, "name": "x", "path": "/adapters/x", "scale": 0.0}]
        assert not world.deployed


@async_test
async def test_no_model_gets_the_name_of_an_adapter(registry: MemoryRegistry) -> None:
    """It would answer the requests of the adapter's clients."""
    async with world_of(*MODELS) as world:
        ingress = await ready(world)
        engine = {"model": "demo"}
        for method, path, body, field in (
            ("POST", "", {"name": "x", "on_demand": True, "engine": engine}, "name"),
            ("POST", "", {"name": "new", "aliases": ["b:x"], "on_demand": True, "engine": engine}, "aliases"),
            ("PATCH", "/a", {"aliases": ["x"]}, "aliases"),
            ("PATCH", "/b", {"aliases": ["x"]}, "aliases"),
        ):
            refused = await ingress.ask(method, f"/v1/models{path}", **body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (409, field), body
        assert world.kept.changes.of == {}
        assert (await ingress.ask("PATCH", "/v1/models/b", aliases=["c"])).status_code == 200


@async_test
async def test_adapters_keep_their_names_while_their_model_loads_and_changes(registry: MemoryRegistry) -> None:
    """The table of adapters is read after the engines were found, and the store may take its time."""
    may_read, read = threading.Event(), registry.read

    def slowly() -> AdapterTable:
        assert may_read.wait(PATIENCE_S)
        return read()

    async with world_of(*MODELS) as world:
        ingress = await ready(world)
        world.may_load.clear()
        await ingress.ask("POST", "/models/load", model="b")
        registry.read = slowly  # type: ignore[method-assign]
        world.may_load.set()
        await until(lambda: world.applications.get("manta.b", {}).get("status") == "RUNNING")
        looking = asyncio.ensure_future(ingress.fleet.look())
        await until(lambda: ingress.stage_of("b") == "loaded")
        assert ("x", "b") in await names(ingress)
        assert not ingress.fleet.is_served("b"), "a request for the adapter could not be sent yet"
        may_read.set()
        await looking
        assert ingress.fleet.is_served("b")

        may_read.clear()
        await world.update("b", {"aliases": ["c"]})
        while ("c", None) not in await names(ingress):
            looking = asyncio.ensure_future(ingress.fleet.look())
            await asyncio.wait([looking], timeout=0.01)
        assert ("x", "b") in await names(ingress)
        assert ingress.table.named("b").loaded_adapters is not None
        may_read.set()
        await looking

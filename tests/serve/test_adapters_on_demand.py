"""The names of adapters that operators have loaded stay those of their model while it is not loaded."""

from __future__ import annotations

import msgspec

from manta.cluster.config import EngineConfig, ServedModel
from manta.cluster.engine.adapter_table import AdapterTable, LoadedAdapter
from tests.async_tests import async_test
from tests.checkpoints import checkpoint
from tests.loaded_adapters import memory_registries
from tests.serve.test_models_on_demand import ready, world_of


@async_test
async def test_the_adapter_of_an_unloaded_model_keeps_its_name() -> None:
    """Else another model could load an adapter of that name, and clients of the one would get the other."""
    folders = {name: str(checkpoint(family)) for name, family in (("a", "llama"), ("b", "phi3"))}
    models = [
        ServedModel(name=name, on_demand=True, engine=EngineConfig(model=folder, adapter_roots=("/adapters",)))
        for name, folder in folders.items()
    ]
    with memory_registries() as registries:
        loaded = {"x": LoadedAdapter("/adapters/x", "00")}
        registries[folders["b"]].table = msgspec.structs.replace(AdapterTable(), loaded=loaded)
        async with world_of(*models) as world:
            ingress = await ready(world)
            cards = (await ingress.ask("GET", "/v1/models")).json()["data"]
            assert [(card["id"], card["parent"]) for card in cards] == [("a", None), ("b", None), ("x", "b")]
            assert not world.deployed

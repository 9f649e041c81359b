"""The claim of the models on demand on their node's cores: how much they claim together, and when the loader claims it
and gives it back. `tests/serve/test_joined_ray.py` and `tests/serve/test_models_on_demand_on_ray.py` have it on Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from manta.cluster.config import EngineConfig, ServedModel
from manta.cluster.serve.fleet import loader_deployment, model_application
from manta.cluster.serve.fleet.loader_deployment import LOADER, DeployedModels
from manta.cluster.serve.fleet.model_application import placed_model
from manta.cluster.serve.fleet.shared_cores import shared_bundles, shares_cores
from tests.async_tests import async_test
from tests.patience import until
from tests.serve.test_fleet import ADDRESS, details
from tests.serve.test_models_on_demand import on_demand, ready, world_of

NODES = [4]


def placed(name: str, on_demand: bool = True, **options: Any) -> ServedModel:
    engine = EngineConfig(model="demo", device="cpu", **options)
    return placed_model(ServedModel(name=name, on_demand=on_demand, engine=engine), NODES)


@pytest.mark.parametrize(
    ("most_nodes", "free", "cpus", "num_nodes"),
    [
        (3, [4.0], 4, 1),
        (3, [4.0, 4.0, 0.0], 4, 2),  # no node without cores
        (1, [4.0, 4.0], 4, 1),
        (3, [8.0, 4.0], 4, 2),  # engines have as many threads as the smallest node has cores
        (3, [2.0], 2, 1),  # a model with threads of its own claims the others
        (3, [2.5, 1.0], 2, 1),
        (3, [0.5, 0.0], 4, 1),  # it waits
        (3, [], 4, 1),
    ],
)
def test_cores_are_claimed_once(most_nodes: int, free: Sequence[float], cpus: int, num_nodes: int) -> None:
    assert shared_bundles(4, most_nodes, free) == [{"CPU": cpus}] * num_nodes


def test_who_shares() -> None:
    model = placed("a")
    assert (model.engine.num_threads, shares_cores(model)) == (4, True)
    assert not shares_cores(placed("a", num_threads=2))
    assert not shares_cores(placed("a", on_demand=False))
    on_gpu = placed_model(ServedModel(on_demand=True, engine=EngineConfig(model="demo", device="cuda")), NODES)
    assert not shares_cores(on_gpu)


class OwnCores:
    """In place of the claim in Ray."""

    def __init__(self) -> None:
        self.claimed: list[int] = []
        self.num_released = 0

    def claim(self, num_cores: int) -> None:
        self.claimed.append(num_cores)

    def release(self) -> None:
        self.num_released += 1


@async_test
async def test_the_loader_claims_before_the_first_and_gives_back_after_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {"replicas": [{"replica_id": "own", "state": "RUNNING"}]}
    applications: dict[str, Any] = {ADDRESS: {"status": "RUNNING", "deployments": {LOADER: own}}}
    models = {f"{ADDRESS}.{name}": placed(name) for name in "ab"} | {f"{ADDRESS}.own": placed("own", num_threads=2)}

    def run_many(targets: list[Any], **_: Any) -> None:
        for target in targets:
            if target.name not in models:
                raise RuntimeError("Serve takes no application")
            applications[target.name] = details(models[target.name], "DEPLOYING", ("STARTING",), by_loader=True)

    monkeypatch.setattr(loader_deployment, "serve_applications", lambda: applications)
    monkeypatch.setattr(loader_deployment.serve, "run_many", run_many)
    for asked in ("has_one_node", "has_room_for_another"):
        monkeypatch.setattr(model_application, asked, lambda *_: True)
    cores = OwnCores()
    deployed = DeployedModels(ADDRESS, "own", cores)

    async def look() -> None:
        await deployed.look()
        await deployed.release_cores()

    for _ in range(2):
        await look()
    assert cores.num_released == 1, "a loader before it may have left the claim"
    await deployed.deploy(models["manta.own"])
    assert (cores.claimed, [*applications]) == ([], [ADDRESS, "manta.own"])
    for name in ("a", "b"):
        await deployed.deploy(models[f"manta.{name}"])
        await look()
    assert (cores.claimed, cores.num_released) == ([4, 4], 1)

    del applications["manta.a"]
    await look()
    applications["manta.b"] = {"status": "DELETING", "deployments": {}}
    await look()
    assert cores.num_released == 1, "its engine has not ended yet"
    del applications["manta.b"]
    for _ in range(2):
        await look()
    assert cores.num_released == 2
    with pytest.raises(RuntimeError, match="takes no application"):
        await deployed.deploy(placed("refused"))
    await deployed.release_cores()
    assert (cores.claimed, cores.num_released) == ([4, 4, 4], 3)


@async_test
async def test_the_cores_of_models_that_are_not_loaded_are_given_back_later() -> None:
    """When the loader has had nothing to do for a while. It waits until the last model has ended."""
    async with world_of(on_demand("a"), keep_cores_s=0.001) as world:
        ingress = await ready(world)
        await until(lambda: world.num_released > 0)
        await ingress.text("a")
        await world.begin_unload("a")
        await until(lambda: not world.applications)
        world.num_released = 0
        await until(lambda: world.num_released > 0)
        await ingress.text("a")
        assert world.deployed == ["a", "a"]

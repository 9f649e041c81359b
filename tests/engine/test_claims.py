"""The resources that engines and ranks claim of Ray, and whether a cluster has room for another engine."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from manta.cluster.config import EngineConfig
from manta.cluster.engine.ranks import claims
from manta.cluster.engine.ranks.claims import (
    CannotPlace,
    check_room,
    has_room_for_another,
    num_claimed,
    own_cpus,
    rank_bundle,
    threads_each,
    with_device,
)
from manta.cluster.serve.engine.engine_deployment import engine_deployment


@pytest.mark.parametrize(
    ("device", "num_gpus", "resolved"),
    [("auto", 0, "cpu"), ("auto", 2, "cuda"), ("cpu", 2, "cpu"), ("cuda", 0, "cuda")],
)
def test_the_device_is_known_before_anything_is_placed(device: Any, num_gpus: int, resolved: str) -> None:
    """Ray shows every GPU to an actor that claims none, so an engine on the CPU hides them from itself."""
    config = with_device(EngineConfig(device=device, num_threads=1), num_gpus)
    assert config.device == resolved
    options = engine_deployment(config, 1).ray_actor_options
    assert options["num_gpus"] == (resolved == "cuda")
    hidden = options["runtime_env"]["env_vars"].get("CUDA_VISIBLE_DEVICES")
    assert hidden == (None if resolved == "cuda" else "")


def test_claims_share_nodes_out() -> None:
    def each(num_engines: int, nodes: list[int], **options: Any) -> int:
        return threads_each(EngineConfig(**options), num_engines, nodes)

    assert each(1, [2]) == 2
    assert each(2, [2]) == 1
    assert each(3, [2]) == 1
    assert each(2, [8, 4]) == 4
    assert each(1, [8], tensor_parallel_size=2) == 4
    assert each(2, [8], tensor_parallel_size=2) == 2
    assert each(2, [8, 8], tensor_parallel_size=2) == 4
    assert each(1, [8, 8], tensor_parallel_size=2, placement_strategy="SPREAD") == 8
    assert each(1, [8, 8], tensor_parallel_size=2, placement_strategy="PACK") == 4
    assert each(5, [2], num_threads=3) == 3
    assert num_claimed(EngineConfig(tensor_parallel_size=2), 2, [2]) == 4
    assert own_cpus(EngineConfig(num_threads=3)) == 3
    assert own_cpus(EngineConfig(num_threads=3, tensor_parallel_size=2)) == 0
    assert own_cpus(EngineConfig(num_threads=3, claims_cpus=False)) == 0
    assert rank_bundle(EngineConfig(num_threads=3)) == {"CPU": 3}
    assert rank_bundle(EngineConfig(num_threads=3, device="cuda")) == {"CPU": 3, "GPU": 1}
    assert rank_bundle(EngineConfig(num_threads=3, device="cuda", claims_cpus=False)) == {"GPU": 1}
    assert rank_bundle(EngineConfig(num_threads=3, claims_cpus=False)) == {"memory": 1}
    check_room(EngineConfig(num_threads=2), 3, [4, 3])
    check_room(EngineConfig(num_threads=2, claims_cpus=False), 4, [4, 3])
    with pytest.raises(CannotPlace, match=r"engines claim 4 x 2 CPUs, .* have 4, 3 CPUs; lower"):
        check_room(EngineConfig(num_threads=2), 4, [4, 3])


@pytest.mark.parametrize(
    ("options", "num_engines", "free", "has_room"),
    [
        ({"num_threads": 2}, 1, [2, 0], True),
        ({"num_threads": 2}, 1, [1, 1], False),  # others use the rest
        ({"num_threads": 2}, 4, [4, 4], False),  # the nodes have room for four
        ({"num_threads": 2, "tensor_parallel_size": 2}, 1, [2, 2], True),
        ({"num_threads": 2, "tensor_parallel_size": 2}, 1, [3, 1], False),
        ({"num_threads": 2, "claims_cpus": False}, 9, [0, 0], True),
        ({"num_threads": 1, "device": "cuda"}, 1, [4, 4], False),  # there is one GPU
    ],
)
def test_an_update_starts_new_engines_first_where_there_is_room(
    options: dict[str, Any], num_engines: int, free: list[int], has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0, "memory": 1e9, "GPU": gpus}} for gpus in (1.0, 0.0)]
    left = {str(number): {"CPU": float(cpus), "memory": 1e9} for number, cpus in enumerate(free)}
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(claims, "available_resources_per_node", lambda: left)
    config = EngineConfig(**options)
    assert has_room_for_another(config, num_engines) == has_room
    deployment = engine_deployment(config, num_engines, starts_new_first=has_room)
    assert deployment._deployment_config.max_surge_percent == int(has_room)

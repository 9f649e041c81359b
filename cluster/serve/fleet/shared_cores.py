"""The claim of the models on demand on their node's cores. Each may use all of them, so they claim them once together.

The claim is a placement group of Ray, which the loader makes before the first of them is deployed, and removes some
seconds after the last one has ended. It outlives the loader. No engine runs in the group: engines of these models claim
no CPUs, and start wherever Ray places them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group

from manta.cluster.config import ServedModel


def shares_cores(placed: ServedModel) -> bool:
    """Returns whether a model takes part in the claim: one on demand that computes on CPUs and claims none itself."""
    return placed.on_demand and placed.engine.device == "cpu" and not placed.engine.claims_cpus


def shared_bundles(num_cores: int, most_nodes: int, free: Sequence[float]) -> list[dict[str, float]]:
    """Returns the bundles of the claim, one for each node: `num_cores`, or what is free on the node with most of that.
    `free` are the free CPUs of each node. With no free core there is one bundle, which waits.
    """
    cpus = min(num_cores, int(max(free, default=0.0))) or num_cores
    num_fitting = sum(count >= cpus for count in free)
    return [{"CPU": float(cpus)}] * max(1, min(most_nodes, num_fitting))


class Cores(Protocol):
    """The claim of an address on cores. Its methods wait for whoever grants it."""

    def claim(self, num_cores: int) -> None:
        """Claims `num_cores` of each node, unless cores are claimed. Does not wait until they are free."""
        ...

    def release(self) -> None:
        """Gives the cores back if they are claimed."""
        ...


class SharedCores:
    """The claim of the application `address` on the cores of up to `most_nodes` nodes, in Ray. Implements `Cores`."""

    def __init__(self, address: str, most_nodes: int) -> None:
        self._name = f"manta-cores-{address}"
        self._most_nodes = most_nodes

    def claim(self, num_cores: int) -> None:
        if self._find() is None:
            free = [node.get("CPU", 0.0) for node in available_resources_per_node().values()]
            bundles = shared_bundles(num_cores, self._most_nodes, free)
            placement_group(bundles, "STRICT_SPREAD", self._name, lifetime="detached")

    def release(self) -> None:
        group = self._find()
        if group is not None:
            remove_placement_group(group)

    def _find(self) -> PlacementGroup | None:
        try:
            return get_placement_group(self._name)
        except ValueError:  # there is none of this name
            return None

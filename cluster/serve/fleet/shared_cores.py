"""The claim of the models on demand on their node's cores. Each may use all of them, so they claim them once together.

The claim is a placement group of Ray, which the loader makes before the first of them is deployed, and removes some
seconds after the last one has ended. It outlives the loader. Each engine claims a trifle of a resource that Ray gives
to the nodes of the group, and so starts on one of them. While no node has a free core the group waits, and the engines
wait with it: a cluster that grows by its demand learns of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group

from manta.cluster.config import ServedModel
from manta.cluster.engine.ranks.claims import shared_resource

GRANT_S, COUNT_AGAIN_S = 6.0, 2.0
"""Longest wait in seconds for a claim of cores that are free, and the seconds after which what is free is counted
again: nodes tell of cores that were given back up to a second later.
"""


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

    def claim(self, num_cores: int) -> str:
        """Claims `num_cores` of each node, unless cores are claimed. Returns the resource of which each engine claims
        `SHARE`.
        """
        ...

    def release(self) -> None:
        """Gives the cores back if they are claimed."""
        ...


class SharedCores:
    """The claim of the application `address` on the cores of up to `most_nodes` nodes, in Ray. Implements `Cores`."""

    def __init__(self, address: str, most_nodes: int) -> None:
        self._name = f"manta-cores-{address}"
        self._most_nodes = most_nodes

    def claim(self, num_cores: int) -> str:
        group, deadline = self._find(), time.monotonic() + GRANT_S
        while group is None:
            free = [node.get("CPU", 0.0) for node in available_resources_per_node().values()]
            bundles = shared_bundles(num_cores, self._most_nodes, free)
            group = placement_group(bundles, "STRICT_SPREAD", self._name, lifetime="detached")
            if not group.wait(COUNT_AGAIN_S) and time.monotonic() < deadline:
                remove_placement_group(group)
                group = self._find()
        return shared_resource(group.id.hex())

    def release(self) -> None:
        group = self._find()
        if group is not None:
            remove_placement_group(group)

    def _find(self) -> PlacementGroup | None:
        try:
            return get_placement_group(self._name)
        except ValueError:  # there is none of this name
            return None

"""The interface by which the loader of an address learns of its models and acts on them. `loader_deployment.py`
implements it with Serve, and tests with a stand-in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from manta.cluster.config import ServedModel
from manta.cluster.serve.fleet.found import FoundModel


class Told(NamedTuple):
    """The models of an address as Serve tells them."""

    models: list[FoundModel]
    """Models that have an application."""
    leaving: frozenset[str]
    """Applications of models that Serve is deleting."""
    is_in_charge: bool = True
    """False if another loader takes this one's place, if the one before has not ended yet, or if the address ends."""


class Deployments(Protocol):
    """The loader's view of one address: it asks Serve, the ingresses and the engines, and gives them orders."""

    async def look(self) -> Told:
        """Asks Serve."""
        ...

    async def place(self, entry: ServedModel, before: ServedModel | None) -> ServedModel:
        """Returns an entry as it is deployed, with threads, device and absolute paths. Raises `ValueError` if no node
        has room for it, or if its engines cannot go on with the streams of the model as it is there `before`.
        """
        ...

    async def num_bytes(self, model: ServedModel) -> int:
        """Returns the memory of a model's engines. Raises what the files raise, and `ValueError` if it is unknown."""
        ...

    async def deploy(self, model: ServedModel) -> None:
        """Deploys the application of a model, or replaces it. Its engines start after this returns."""
        ...

    async def delete(self, application: str) -> None:
        """Makes Serve delete an application. Its engines end after this returns."""
        ...

    async def release_cores(self) -> None:
        """Gives back the cores that models on demand share, if none of them is there."""
        ...

    async def idle_seconds(self) -> dict[str, float]:
        """Returns the seconds since the last request of each model that was used; 0 for one that is in use."""
        ...

    async def let_go(self, found: FoundModel, num_waiting: Mapping[str, int]) -> bool:
        """Makes all ingresses ask the loader again before a request uses the model. `num_waiting` is the number of
        requests that wait for it here, by ingress. Returns whether it is certain that no request uses it.
        """
        ...

"""The models of an address that requests load and operators change, as the HTTP application sees them.
`cluster/serve/fleet/holds.py` implements the protocol.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from manta.cluster.config import ServedModel


class OnDemand(Protocol):
    """Loads and unloads the models of an address that are on demand, by their names, and changes the list of all."""

    def use(self, name: str, client: str, timeout_s: float) -> contextlib.AbstractAsyncContextManager[None]:
        """Keeps a model loaded during the body of the `async with`, which begins when it is loaded. Refuses with 503 if
        it has failed or is not loaded in time, and with 429 if too many requests of the client wait for models.
        """
        ...

    def using(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Counts a use of a model that is not on demand, so that it does not end under the body of the `with` if it is
        removed.
        """
        ...

    async def load(self, name: str, timeout_s: float) -> None:
        """Begins to load a model for an operator, and gives up after `timeout_s`. A failed one is tried again."""
        ...

    async def unload(self, name: str) -> None:
        """Makes a model leave once its requests have ended."""
        ...

    async def add(self, entry: ServedModel) -> None:
        """Adds a model to the list, for good. Refuses names that others have, and what cannot be deployed."""
        ...

    async def update(self, name: str, fields: dict[str, Any]) -> None:
        """Changes fields of a model's entry, for good. Refuses what `add` refuses, and an unknown model."""
        ...

    async def remove(self, name: str) -> None:
        """Takes a model from the list, for good. It ends once its requests have ended. Refuses an unknown model."""
        ...

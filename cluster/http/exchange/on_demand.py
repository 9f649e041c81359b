"""Models on demand as the HTTP application sees them. `cluster/serve/fleet/holds.py` implements the protocol."""

from __future__ import annotations

import contextlib
from typing import Protocol


class OnDemand(Protocol):
    """Loads and unloads the models of an address that are loaded on demand, by their names."""

    def use(self, name: str, client: str, timeout_s: float) -> contextlib.AbstractAsyncContextManager[None]:
        """Keeps a model loaded during the body of the `async with`, which begins when it is loaded. Refuses with 503 if
        it has failed or is not loaded in time, and with 429 if too many requests of the client wait for models.
        """
        ...

    async def load(self, name: str, timeout_s: float) -> None:
        """Begins to load a model for an operator, and gives up after `timeout_s`. A failed one is tried again."""
        ...

    async def unload(self, name: str) -> None:
        """Makes a model leave once its requests have ended."""
        ...

"""The adapters of one model that operators have loaded, as the HTTP application sees them. `cluster/serve/adapters/`
implements the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from manta.cluster.engine.adapter_table import AppliedAdapter

Tell = Callable[[Collection[str]], None]
"""Function that gets the names of the loaded adapters whenever they change."""


class LoadedAdapters(Protocol):
    """The loaded adapters of a model as this process knows them, and the way to change them everywhere."""

    tell: Tell

    @property
    def paths(self) -> Mapping[str, str]:
        """The folder of each adapter, by name."""
        ...

    @property
    def applied(self) -> Sequence[AppliedAdapter]:
        """The adapters of requests that name the model itself; none if these do without."""
        ...

    @property
    def is_settling(self) -> bool:
        """Whether this process has started so lately that others may not tell it of changes yet. It then reads the
        table before each request.
        """
        ...

    def digest_of(self, name: str) -> str | None:
        """Returns the digest of an adapter's values; None if no such adapter is loaded."""
        ...

    async def refresh(self) -> None:
        """Reads the table of loaded adapters again."""
        ...

    async def load(self, name: str, path: str, in_place: bool) -> None:
        """Loads the adapter in a folder under a name. Returns when every ingress and every engine has it. With
        `in_place` it may take the place of the adapter of this name. Raises `ServingError` if it cannot be loaded, and
        nothing has changed then.
        """
        ...

    async def apply(self, applied: Sequence[AppliedAdapter]) -> None:
        """Lets later requests that name the model itself have these adapters. Returns when every ingress knows."""
        ...

    async def unload(self, name: str, waits: bool = False) -> None:
        """Unloads an adapter. Requests that run end with it, and no other one begins. Returns when every ingress knows,
        and if it `waits`, when they have ended, unless another adapter has the same values. Raises `ServingError` if no
        such adapter is loaded.
        """
        ...

"""The adapters that operators have loaded while the server runs: names, folders, and the values that count.

One table is the truth for all ingresses and engines of a model. Each change makes a new table.
`cluster/serve/adapters/` keeps it, and tells everybody.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec


class LoadedAdapter(msgspec.Struct, frozen=True):
    """One loaded adapter."""

    path: str
    """The folder that the operator named."""
    digest: str
    """Hexadecimal digest of its values (`AdapterInfo.digest`)."""


class AppliedAdapter(msgspec.Struct, frozen=True):
    """An adapter of requests that name the model itself."""

    name: str
    scale: float
    """Factor on what it adds; not 0."""


class AdapterTable(msgspec.Struct, frozen=True):
    """The loaded adapters at one time."""

    version: int = 0
    """Number of changes so far."""
    loaded: dict[str, LoadedAdapter] = {}
    """The adapters by name."""
    replaced: dict[str, float] = {}
    """Digests of earlier values, each with the time until which streams may need them, in seconds since 1970."""
    scaled: tuple[AppliedAdapter, ...] = ()
    """The adapters, loaded ones or those of the configuration, of requests that name the model."""

    @property
    def digests(self) -> frozenset[str]:
        """The digests that requests name now."""
        return frozenset(each.digest for each in self.loaded.values())

    def needed(self, now: float) -> frozenset[str]:
        """Returns the digests of which engines keep the values, `now` in seconds since 1970."""
        return self.digests | {digest for digest, until in self.replaced.items() if until > now}

    def path_of(self, digest: str) -> str | None:
        """Returns the folder that had the values with this digest when it was loaded; None for earlier values."""
        return next((each.path for each in self.loaded.values() if each.digest == digest), None)

    def changed(self, loaded: Mapping[str, LoadedAdapter], now: float, keep_s: float) -> AdapterTable:
        """Returns the next table, with other loaded adapters. What no name stands for any more is kept for `keep_s`
        seconds. An adapter that is unloaded is not applied any more.
        """
        digests = {each.digest for each in loaded.values()}
        replaced = {digest: until for digest, until in self.replaced.items() if until > now}
        replaced |= dict.fromkeys(self.digests, now + keep_s)
        kept = {digest: until for digest, until in replaced.items() if digest not in digests}
        unloaded = self.loaded.keys() - loaded.keys()
        scaled = tuple(each for each in self.scaled if each.name not in unloaded)
        return AdapterTable(self.version + 1, dict(loaded), kept, scaled)

    def keeping(self, used: Collection[str], now: float, keep_s: float) -> AdapterTable:
        """Returns the next table, in which replaced values that requests use stay for at least `keep_s` seconds more;
        this one if they do anyway for half of that.
        """
        late = {digest for digest in used if self.replaced.get(digest, math.inf) < now + keep_s / 2}
        if not late:
            return self
        replaced = self.replaced | dict.fromkeys(late, now + keep_s)
        return msgspec.structs.replace(self, version=self.version + 1, replaced=replaced)

    def applying(self, scaled: Sequence[AppliedAdapter]) -> AdapterTable:
        """Returns the next table, in which requests that name the model have other adapters."""
        return msgspec.structs.replace(self, version=self.version + 1, scaled=tuple(scaled))

"""Changes that operators make to the models of an address while it runs, and the models on demand that have failed:
their table, and the registry that keeps it. An unload that an operator was told of is in it too, until the model has
left.

The loader (`loader.py`) alone changes the table. Ingresses read it, and so does a command that deploys the address
again. A change counts as long as the configuration has the entry that was changed. An operator who changes that entry
and deploys it decides anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from manta.cluster.config import ServedModel
from manta.cluster.serve.starting.kept_versions import KeptVersions
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)

_NAMESPACE = "manta-models"


class ModelChange(msgspec.Struct, frozen=True):
    """The change that operators have made to one model."""

    base: ServedModel | None
    """The model's entry in the configuration when it was changed; None if that had none."""
    entry: ServedModel | None
    """The entry that counts instead; None if the model was removed."""
    placed: ServedModel | None
    """The same entry as it is deployed: with threads, device and absolute paths."""

    @property
    def is_undone(self) -> bool:
        """Whether the model is as the configuration has it. A removed one that was added may still run."""
        return self.entry == self.base and self.entry is not None

    @property
    def is_past(self) -> bool:
        """Whether the model was added and removed, and so matters only until its engines have ended."""
        return self.base is None and self.entry is None


class FailedLoad(msgspec.Struct, frozen=True):
    """A model on demand that has failed. It has no application any more."""

    entry: ServedModel
    """The model's entry when it failed."""
    reason: str


class ModelChanges(msgspec.Struct, frozen=True):
    """The changed models by name, those that have failed, and those that are to leave."""

    version: int = 0
    """Number of changes so far."""
    of: dict[str, ModelChange] = {}
    failed: dict[str, FailedLoad] = {}
    unloading: frozenset[str] = frozenset()
    """Names of the models that operators have unloaded, and that have not left yet."""

    @property
    def removed(self) -> frozenset[str]:
        """Names of the models that operators have removed."""
        return frozenset(name for name, change in self.of.items() if change.entry is None)

    def entries(self, listed: Mapping[str, ServedModel]) -> dict[str, ServedModel]:
        """Returns the entries that count, by name, instead of those that the configuration has `listed`."""
        found = dict(listed) | {name: change.entry for name, change in self.of.items() if change.entry is not None}
        return {name: entry for name, entry in found.items() if name not in self.removed}

    def placed(self, models: Iterable[ServedModel]) -> tuple[ServedModel, ...]:
        """Returns the models as they are deployed, instead of `models` of the configuration."""
        found = {model.model_name: model for model in models}
        found |= {name: change.placed for name, change in self.of.items() if change.placed is not None}
        return tuple(model for name, model in found.items() if name not in self.removed)

    def still_valid(self, listed: Mapping[str, ServedModel]) -> ModelChanges:
        """Returns the changes without those of models whose entries in the configuration are others by now. A model
        whose entry is another has not failed yet.
        """
        valid = {name: change for name, change in self.of.items() if change.base == listed.get(name)}
        entries = ModelChanges(of=valid).entries(listed)
        failed = {name: load for name, load in self.failed.items() if load.entry == entries.get(name)}
        return self if (valid, failed) == (self.of, self.failed) else self._next(of=valid, failed=failed)

    def with_change(self, name: str, change: ModelChange, there: Collection[str] = ()) -> ModelChanges:
        """Returns the next version, in which a model is as `change` says, has not failed and is not to leave. Nothing
        stays of a change that is undone, nor of models that were added and removed and are not among those that are
        `there`.
        """
        rest = {other: each for other, each in self.of.items() if other in there or not each.is_past}
        rest.pop(name, None)
        of, failed = rest if change.is_undone else rest | {name: change}, self.with_failed(name, None).failed
        return self._next(of=of, failed=failed, unloading=self.unloading - {name})

    def with_failed(self, name: str, load: FailedLoad | None) -> ModelChanges:
        """Returns the next version, in which the last load of a model has failed. With None it has not."""
        failed = {other: each for other, each in self.failed.items() if other != name}
        return self._next(failed=failed if load is None else failed | {name: load})

    def with_unloading(self, names: Collection[str]) -> ModelChanges:
        """Returns the next version, in which exactly these models are to leave."""
        return self._next(unloading=frozenset(names))

    def _next(self, **fields: Any) -> ModelChanges:
        return msgspec.structs.replace(self, version=self.version + 1, **fields)


class ChangesRegistry(Protocol):
    """The changes of the models of one address, as a store keeps them. Its methods wait for the store."""

    def read(self) -> ModelChanges:
        """Returns the latest changes. Raises what the store raises."""
        ...

    def replace(self, changes: ModelChanges) -> bool:
        """Makes `changes` the latest ones. Returns False if another process was faster."""
        ...


class GcsChanges:
    """The changes of the models of the application `address`, in Ray's GCS. Implements `ChangesRegistry`."""

    def __init__(self, address: str) -> None:
        self._versions = KeptVersions(_NAMESPACE, address)

    def read(self) -> ModelChanges:
        version, stored = self._versions.latest()
        if stored is None:
            return ModelChanges()
        try:
            return msgspec.json.decode(stored, type=ModelChanges)
        except msgspec.ValidationError as error:  # another version of Manta has written them
            logger.error("what operators have changed of the models is not understood, and is left out: %s", error)
            return ModelChanges(version)

    def replace(self, changes: ModelChanges) -> bool:
        return self._versions.put(changes.version, msgspec.json.encode(changes))

    def clear(self) -> None:
        """Forgets all changes, because their address ends or begins anew."""
        self._versions.clear()


def no_changes() -> ModelChanges:
    """Returns no changes, for an address without a loader."""
    return ModelChanges()

"""The models of an address as its loader has them: the list of the configuration, with what operators have changed."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping

import msgspec

from manta.cluster.config import ServedModel
from manta.cluster.serve.fleet.model_changes import ChangesRegistry, FailedLoad, ModelChange, ModelChanges
from manta.structured.visible_logs import logger_of

logger = logger_of(__name__)


class ListedModels:
    """The models of an address. `entries` are those of the configuration, `placed` the same as they are deployed, and
    `registry` keeps the changes.
    """

    def __init__(
        self, entries: Iterable[ServedModel], placed: Iterable[ServedModel], registry: ChangesRegistry
    ) -> None:
        self._listed = {entry.model_name: entry for entry in entries}
        self._placed = tuple(placed)
        self._registry = registry
        self._changes = ModelChanges()
        self.is_read = False
        """Whether the changes are known. They are not before they were read, nor after the store has failed to say
        whether it has kept new ones.
        """
        self.entries = dict(self._listed)
        """The entries that count now, by name."""
        self.models = {model.model_name: model for model in self._placed}
        """The same models as they are deployed."""

    def knows(self, name: str) -> bool:
        """Returns whether the configuration lists a model, or operators have added it. Both may be past."""
        return name in self._listed or name in self._changes.of

    async def read(self) -> None:
        """Reads the changes, and forgets those of models whose entries in the configuration are others by now. Raises
        what the registry raises, and `ConnectionError` if another loader changes them at the same time.
        """
        changes = await asyncio.to_thread(self._registry.read)
        valid = changes.still_valid(self._listed)
        for name in changes.of.keys() - valid.of.keys():
            logger.warning("the model %s is again as the configuration has it, where its entry is another by now", name)
        if valid is changes:
            self._take(valid)
        else:
            await self._keep(valid)

    async def change(
        self, name: str, entry: ServedModel | None, placed: ServedModel | None, there: Collection[str]
    ) -> ModelChanges:
        """Changes a model's entry for good; None removes it. `there` are the models with engines. Returns the changes
        as they were before, for `undo`.
        """
        before, change = self._changes, ModelChange(self._listed.get(name), entry, placed)
        await self._keep(before.with_change(name, change, there))
        return before

    async def undo(self, before: ModelChanges) -> None:
        """Makes the changes again what they were."""
        await self._keep(msgspec.structs.replace(before, version=self._changes.version + 1))

    @property
    def failed(self) -> Mapping[str, str]:
        """The reasons of the models on demand whose last load has failed, by name."""
        return {name: load.reason for name, load in self._changes.failed.items()}

    async def note_failed(self, name: str, reason: str) -> None:
        """Keeps the reason why a model of the list has failed, until it is changed or loads again."""
        await self._keep(self._changes.with_failed(name, FailedLoad(self.entries[name], reason)))

    async def forget_failed(self, name: str) -> None:
        """Forgets that a model has failed."""
        await self._keep(self._changes.with_failed(name, None))

    @property
    def unloading(self) -> frozenset[str]:
        """Names of the models that operators have unloaded, and that have not left yet."""
        return self._changes.unloading

    async def set_unloading(self, names: Collection[str]) -> None:
        """Keeps which models are to leave, so that a loader that replaces this one makes them leave."""
        if self.unloading != frozenset(names):
            await self._keep(self._changes.with_unloading(names))

    async def _keep(self, changes: ModelChanges) -> None:
        self.is_read = False
        if not await asyncio.to_thread(self._registry.replace, changes):
            raise ConnectionError("another loader has changed the models")
        self._take(changes)

    def _take(self, changes: ModelChanges) -> None:
        self._changes, self.is_read = changes, True
        self.entries = changes.entries(self._listed)
        self.models = {model.model_name: model for model in changes.placed(self._placed)}

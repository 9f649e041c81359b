"""The names under which a model and its adapters are served: one table, in which a name has one owner."""

from __future__ import annotations

from collections.abc import Collection

from manta.cluster.config import ServeConfig


class ModelNames:
    """The names of one model. An adapter is found by its own name and as `MODEL:ADAPTER`; whole names win."""

    def __init__(self, config: ServeConfig) -> None:
        self._own = (config.model_name, *config.model_aliases)
        self.configured = (*self._own, *config.engine.adapters)
        """The names of the configuration."""
        self.model = config.model_name
        """The model's name in answers."""
        self.serve(())

    def serve(self, loaded: Collection[str]) -> None:
        """Serves the loaded adapters with these names beside those of the configuration, and no others. The model's own
        names stay its own.
        """
        names = dict.fromkeys((*self.configured, *loaded))
        self.adapters = tuple(each for each in names if each not in self._own)
        """The adapters' own names."""
        self.listed = (*self._own, *self.adapters)
        """The names that `/v1/models` lists."""
        table = {f"{name}:{adapter}": adapter for name in self._own for adapter in self.adapters}
        self._adapters = table | dict.fromkeys(self._own, "") | {adapter: adapter for adapter in self.adapters}

    @property
    def every(self) -> tuple[str, ...]:
        """All names that requests may give."""
        return tuple(self._adapters)

    def granting(self, name: str) -> tuple[str, ...]:
        """Returns the names of which a key needs one in order to use what a name stands for: the model's own, and for
        an adapter also its names.
        """
        adapter = self._adapters.get(name)
        return (*self._own, adapter, *(f"{own}:{adapter}" for own in self._own)) if adapter else self._own

    def adapter_of(self, name: str) -> str | None:
        """Returns the adapter that a name stands for, empty for the model alone; None for an unknown name."""
        return self._adapters.get(name)

"""The names under which a model and its adapters are served: one table, in which a name has one owner."""

from __future__ import annotations

from manta.cluster.config import ServeConfig


class ModelNames:
    """The names of one model. An adapter is found by its own name and as `MODEL:ADAPTER`; whole names win."""

    def __init__(self, config: ServeConfig) -> None:
        own = (config.model_name, *config.model_aliases)
        adapters = config.engine.adapters
        self.model = config.model_name
        """The model's name in answers."""
        self.listed = (*own, *adapters)
        """The names that `/v1/models` lists."""
        self._adapters = {f"{name}:{adapter}": adapter for name in own for adapter in adapters}
        self._adapters |= dict.fromkeys(own, "") | {adapter: adapter for adapter in adapters}

    @property
    def every(self) -> tuple[str, ...]:
        """All names that requests may give."""
        return tuple(self._adapters)

    def adapter_of(self, name: str) -> str | None:
        """Returns the adapter that a name stands for, empty for the model alone; None for an unknown name."""
        return self._adapters.get(name)

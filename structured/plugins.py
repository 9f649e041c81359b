"""Finds what users extend Manta with by name: grammar backends and logits processors.

A name stands for a `module:attribute`: a given one, or an installed entry point of the group.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any


class Plugins:
    """The names of one kind. `paths` maps given names to `module:attribute`, or to None for the entry point of that
    name.
    """

    def __init__(self, group: str, paths: Mapping[str, str | None]) -> None:
        self._group = group
        self._paths = paths

    def names(self) -> list[str]:
        """Given and installed names."""
        return sorted({*self._paths, *(entry.name for entry in entry_points(group=self._group))})

    def path(self, name: str) -> str | None:
        """The `module:attribute` of a name; None if it is unknown."""
        installed = entry_points(group=self._group, name=name)
        return self._paths.get(name) or next((entry.value for entry in installed), None)


def imported(path: str) -> Any:
    """The object at `module:attribute`. Raises whatever its import raises."""
    module, _, attribute = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found

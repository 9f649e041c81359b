"""Keeps the table of loaded adapters in Ray's GCS (`cluster/serve/starting/kept_versions.py`), where it outlives
engines, ingresses and Serve's controller.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import msgspec
import ray

from manta.cluster.engine.adapter_table import AdapterTable
from manta.cluster.serve.starting.kept_versions import KeptVersions

_NAMESPACE = "manta-adapters"


class AdapterRegistry(Protocol):
    """The table of one model's loaded adapters. Its methods wait for the store."""

    @property
    def server(self) -> str:
        """The name under which a node keeps the server's copies of adapters: 32 hexadecimal digits."""
        ...

    def read(self) -> AdapterTable:
        """Returns the latest table. Raises what the store raises."""
        ...

    def replace(self, table: AdapterTable) -> bool:
        """Makes `table` the latest one. Returns False if another one of its version was faster."""
        ...


class GcsRegistry:
    """The registry of a model that the engines of an application serve, in the GCS of the cluster. A model that takes
    another one's place in the application begins with an empty table.
    """

    def __init__(self, application: str, model: str) -> None:
        self._versions = KeptVersions(_NAMESPACE, _hashed(application, model))
        self.server = _hashed(ray.get_runtime_context().get_session_name(), application, model)

    def read(self) -> AdapterTable:
        _, stored = self._versions.latest()
        return AdapterTable() if stored is None else msgspec.json.decode(stored, type=AdapterTable)

    def replace(self, table: AdapterTable) -> bool:
        return self._versions.put(table.version, msgspec.json.encode(table))


def open_registry(application: str, model: str) -> AdapterRegistry:
    """Returns the registry of a model that the engines of an application serve."""
    return GcsRegistry(application, model)


def _hashed(*texts: str) -> str:
    return hashlib.blake2b(msgspec.json.encode(texts), digest_size=16).hexdigest()

"""Keeps the table of loaded adapters in the store in which Serve's controller keeps its applications, Ray's GCS.

So the table outlives engines, ingresses and the controller, and is lost only with the applications themselves. Each
version is an object of its own, which is created once: of two changes at the same time one fails, and is made again.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import msgspec
import ray
from ray.experimental import internal_kv

from manta.cluster.engine.adapter_table import AdapterTable

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
        self._prefix = f"{_hashed(application, model)}/"
        self.server = _hashed(ray.get_runtime_context().get_session_name(), application, model)

    def read(self) -> AdapterTable:
        while versions := self._versions():
            stored = internal_kv._internal_kv_get(self._key(max(versions)), namespace=_NAMESPACE)
            if stored is not None:  # else it was removed, because there is a later one
                return msgspec.json.decode(stored, type=AdapterTable)
        return AdapterTable()

    def replace(self, table: AdapterTable) -> bool:
        stored = msgspec.json.encode(table)
        if internal_kv._internal_kv_put(self._key(table.version), stored, overwrite=False, namespace=_NAMESPACE):
            return False
        versions = self._versions()
        is_latest = table.version >= max(versions)  # else later ones came and removed the one of this version
        for version in versions:
            if version < max(versions):
                internal_kv._internal_kv_del(self._key(version), namespace=_NAMESPACE)
        return is_latest

    def _versions(self) -> list[int]:
        keys = internal_kv._internal_kv_list(self._prefix, namespace=_NAMESPACE)
        return [int(key.decode().removeprefix(self._prefix)) for key in keys]

    def _key(self, version: int) -> str:
        return f"{self._prefix}{version}"


def open_registry(application: str, model: str) -> AdapterRegistry:
    """Returns the registry of a model that the engines of an application serve."""
    return GcsRegistry(application, model)


def _hashed(*texts: str) -> str:
    return hashlib.blake2b(msgspec.json.encode(texts), digest_size=16).hexdigest()

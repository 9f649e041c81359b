"""Keeps the versions of a table in the store in which Serve's controller keeps its applications, Ray's GCS.

So the table outlives replicas and the controller, and is lost only with the cluster. Each version is an object of its
own, which is created once: of two changes at the same time one fails, and is made again.
"""

from __future__ import annotations

from collections.abc import Iterable

from ray.experimental import internal_kv


class KeptVersions:
    """The versions of one table, under a key of a namespace. Its methods wait for the store, and raise its errors."""

    def __init__(self, namespace: str, key: str) -> None:
        self._namespace = namespace
        self._prefix = f"{key}/"

    def latest(self) -> tuple[int, bytes | None]:
        """Returns the number of the latest version and what is stored as it; 0 and None before the first one."""
        while versions := self._versions():
            latest = max(versions)
            stored: bytes | None = internal_kv._internal_kv_get(self._key(latest), namespace=self._namespace)
            if stored is not None:  # else it was removed, because there is a later one
                return latest, stored
        return 0, None

    def put(self, version: int, stored: bytes) -> bool:
        """Makes a version the latest one. Returns False if another one of its number was faster."""
        if internal_kv._internal_kv_put(self._key(version), stored, overwrite=False, namespace=self._namespace):
            return False
        versions = self._versions()
        is_latest = version >= max(versions)  # else later ones came and removed the one of this number
        self._remove(each for each in versions if each < max(versions))
        return is_latest

    def clear(self) -> None:
        """Removes all versions."""
        self._remove(self._versions())

    def _remove(self, versions: Iterable[int]) -> None:
        for version in versions:
            internal_kv._internal_kv_del(self._key(version), namespace=self._namespace)

    def _versions(self) -> list[int]:
        keys = internal_kv._internal_kv_list(self._prefix, namespace=self._namespace)
        return [int(key.decode().removeprefix(self._prefix)) for key in keys]

    def _key(self, version: int) -> str:
        return f"{self._prefix}{version}"

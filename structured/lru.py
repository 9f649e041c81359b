"""A cache bounded in bytes, which evicts the least recently used entry."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class ByteLRU(Generic[Key, Value]):
    """Keeps values of at most `max_bytes` in total. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[Key, tuple[Value, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        """Returns the value and marks it as used, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Key, value: Value, num_bytes: int) -> None:
        """Sets the key's value. `num_bytes` is the memory of key and value together. A value above the bound empties
        the cache.
        """
        self.forget(key)
        self._entries[key] = (value, num_bytes)
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            _, (_, oldest_bytes) = self._entries.popitem(last=False)
            self.num_bytes -= oldest_bytes

    def forget(self, key: Key) -> None:
        """Drops a key's value, if there is one."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry[1]

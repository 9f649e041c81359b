"""A gateway that reads KV events as vLLM publishes them, checks each, and knows what is cached."""

from __future__ import annotations

import collections
from typing import Any

import msgspec

from manta.cluster.engine.kv_blocks import KVBlocks, hash_blocks

NEEDED: dict[str, dict[str, Any]] = {
    "BlockStored": {
        "block_hashes": list,
        "parent_block_hash": int | None,
        "token_ids": list,
        "block_size": int,
        "lora_id": int | None,
        "medium": str | None,
        "lora_name": str | None,
    },
    "BlockRemoved": {"block_hashes": list, "medium": str | None},
    "AllBlocksCleared": {},
}
"""Fields that each of vLLM's events has, and their types."""
OPTIONAL: dict[str, Any] = {
    "extra_keys": list,
    "group_idx": int,
    "kv_cache_spec_kind": str,
    "kv_cache_spec_sliding_window": int,
}
"""Fields that are left out where they are null."""


class Gateway:
    """What one engine has cached, by its events."""

    def __init__(self) -> None:
        self.stored: dict[int, set[int]] = collections.defaultdict(set)
        """Hashes of the cached blocks of each group."""
        self.tokens: dict[int | None, list[int]] = {None: []}
        """The tokens up to the end of each block that was ever stored."""
        self.kinds: dict[int, tuple[str, int | None]] = {}
        self.adapters: dict[int, str | None] = {}
        self.salts: dict[int, str] = {}
        self._full: dict[int | None, bytes] = {None: b""}
        """The engine's hash of each of them, if its request has no root of its own."""

    def read(self, payload: bytes) -> int:
        """Reads a batch as it is on the wire. Returns the engine's rank."""
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert isinstance(ts, float), "AIBrix reads no other time"
        self.hear(events)
        return rank

    def hear(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            kind = event.pop("type")
            types = NEEDED[kind]
            assert types.keys() <= event.keys()
            for name, value in event.items():
                assert isinstance(value, types.get(name) or OPTIONAL[name])
            if kind == "AllBlocksCleared":
                self.stored.clear()
            elif kind == "BlockRemoved":
                for block_hash in event["block_hashes"]:
                    self.stored[event["group_idx"]].remove(block_hash)
            else:
                self._store(event)

    def _store(self, event: dict[str, Any]) -> None:
        hashes, size, group = event["block_hashes"], event["block_size"], event["group_idx"]
        assert len(event["token_ids"]) == len(hashes) * size
        assert len(set(hashes)) == len(hashes), "Dynamo drops a store with a hash that comes twice"
        self.kinds[group] = event["kv_cache_spec_kind"], event.get("kv_cache_spec_sliding_window")
        parent = event["parent_block_hash"]
        salts = event.get("extra_keys") or [None] * len(hashes)
        for number, (block_hash, salt) in enumerate(zip(hashes, salts, strict=True)):
            assert block_hash not in self.stored[group], "it is there already"
            self.stored[group].add(block_hash)
            self.adapters[block_hash] = event["lora_name"]
            if salt is not None:
                (self.salts[block_hash],) = salt
            tokens = event["token_ids"][number * size :][:size]
            whole = self.tokens[parent] + tokens
            assert self.tokens.setdefault(block_hash, whole) == whole, "a hash of two prefixes"
            (self._full[block_hash],) = hash_blocks(tokens, 1, size, root=self._full[parent])
            parent = block_hash

    def check(self, blocks: KVBlocks) -> None:
        """Checks that the cache holds what the events say and nothing else. No request has a root of its own."""
        num_cached = blocks.num_cached + (blocks.states.num_cached if blocks.states is not None else 0)
        assert sum(map(len, self.stored.values())) == num_cached
        for group, stored in self.stored.items():
            for block_hash in stored:
                full = self._full[block_hash]
                assert block_hash == int.from_bytes(full[-8:], "big")
                assert blocks.find_part(full, group) is not None

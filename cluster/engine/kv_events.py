"""Events about the prefix cache in vLLM's format, for gateways that choose servers by the prefixes in their caches.

`CacheLog` turns the changes that `KVBlocks` tells into events, and `event_publisher.py` sends them. The structs are
those of vLLM's `vllm/distributed/kv_events.py` since its pull request 42892: an event is a map with its kind under
`type`, and a batch is an array. llm-d, AIBrix and Dynamo read it.

- A hash is the last 8 bytes of a block's hash as an integer, which is how vLLM and llm-d shorten theirs.
- Each group of layers has events of its own, numbered by `group_idx`. Snapshots of recurrent states are the last group.
- `extra_keys` hold the client's `cache_salt` beside the first block, and nothing else: llm-d takes every other text
  there for an image (its issue 2927). Adapters are named in `lora_name`.
- The events of one group are in the order of its changes, so a block that leaves and returns within a step is there.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from manta.cluster.engine.kv_blocks import TokenChain
from manta.workers.adapter_key import AdapterKey
from manta.workers.kv_groups import KVGroup

MEDIUM = "GPU"
"""vLLM's name for the memory in which a device computes, also that of CPUs and TPUs. Routers weigh it as the first
tier. Kept prefixes on disk (`kept_prefixes.py`) have no events until a request loads them.
"""
EXTERNAL_HASH_BYTES = 8
"""Length of a hash in events, in bytes."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Consecutive blocks of a chain that have entered the cache of one group."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """The hash of the block before the first one; None at the beginning of a prompt."""
    token_ids: list[int]
    """Tokens of all these blocks, `block_size` for each."""
    block_size: int
    lora_id: int | None
    """None; vLLM keeps the field for old subscribers."""
    medium: str | None
    lora_name: str | None
    """The adapter that computed them; None for the model alone."""
    extra_keys: list[list[str] | None] | None = None
    """Texts of each block that tell prompts apart beside their tokens; None if no block has any."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    """vLLM's name for the kind of the group's layers."""
    kv_cache_spec_sliding_window: int | None = None
    """Positions that a token sees, its own included; None for all."""


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that have left the cache of one group."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """The cache is empty, or no event before this one counts any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, gc=False):
    """The events of a step."""

    ts: float
    """Seconds since 1970."""
    events: list[KVEvent]
    data_parallel_rank: int
    """Number of the engine among those that listen on its node."""


class CacheLog:
    """Notes the changes of a prefix cache as events, the oldest first, until they are taken.

    `groups` are those of the blocks; snapshots, if there are any, are the group after them. `adapter_names` holds the
    names of adapters by their digests. An adapter without a name is called by its digest.
    """

    def __init__(self, groups: tuple[KVGroup, ...], block_size: int, adapter_names: Mapping[str, str]) -> None:
        self._kinds: list[tuple[str, int | None]] = [
            ("full_attention" if group.window is None else "sliding_window", group.window) for group in groups
        ]
        self._kinds.append(("mamba", None))
        self._block_size = block_size
        self._adapter_names = adapter_names
        self._events: list[KVEvent] = []
        self._last: dict[int, KVEvent] = {}
        """The last event of each group, which the next change may lengthen."""
        self.clear()

    def store(self, chain: TokenChain, number: int, group: int) -> None:
        """Notes that a group's block with this number of a chain has entered the cache."""
        block_hash = _external(chain.block_hashes[number])
        parent = _external(chain.block_hashes[number - 1]) if number else None
        token_ids = chain.token_ids[number * self._block_size : (number + 1) * self._block_size]
        last = self._last.get(group)
        if number and isinstance(last, BlockStored) and last.block_hashes[-1] == parent:
            last.block_hashes.append(block_hash)
            last.token_ids += token_ids
            if last.extra_keys is not None:
                last.extra_keys.append(None)
            return
        kind, window = self._kinds[group]
        event = BlockStored(
            block_hashes=[block_hash],
            parent_block_hash=parent,
            token_ids=token_ids,
            block_size=self._block_size,
            lora_id=None,
            medium=MEDIUM,
            lora_name=self._name_of(chain.adapter) if chain.adapter else None,
            extra_keys=[[chain.cache_salt]] if chain.cache_salt and not number else None,
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )
        self._add(event, group)

    def _name_of(self, adapter: str) -> str:
        """Returns the name of an adapter and its scale, given its key."""
        key = AdapterKey.of(adapter)
        return key._replace(digest=self._adapter_names.get(key.digest, key.digest)).text

    def remove(self, block_hash: bytes, group: int) -> None:
        """Notes that a group's block has left the cache."""
        last = self._last.get(group)
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(_external(block_hash))
        else:
            self._add(BlockRemoved([_external(block_hash)], MEDIUM, group), group)

    def _add(self, event: KVEvent, group: int) -> None:
        self._events.append(event)
        self._last[group] = event

    def clear(self) -> None:
        """Notes that the cache is empty, which voids what was noted before."""
        self._events = [AllBlocksCleared()]
        self._last = {}

    def take(self) -> list[KVEvent]:
        """Returns the events since the last call."""
        if not self._events:
            return []
        events, self._events, self._last = self._events, [], {}
        return events


def _external(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-EXTERNAL_HASH_BYTES:], "big")

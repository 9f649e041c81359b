"""The KV blocks that each sequence holds: finds its cached prefix, and grows, shares and frees its block table.

The scheduler decides what each sequence computes and is the only caller. `KVBlocks` counts references and knows no
sequences.
"""

from __future__ import annotations

from collections.abc import Iterable

from manta.cluster.engine.kv_blocks import KVBlocks
from manta.cluster.engine.sequence import Sequence


class KVCacheManager:
    """Manages block tables. `num_lookahead_tokens` is the room that a sequence should have after its own tokens, where
    a draft model writes.
    """

    def __init__(self, blocks: KVBlocks, num_lookahead_tokens: int = 0) -> None:
        self.blocks = blocks
        self.num_lookahead_tokens = num_lookahead_tokens
        self._block_size = blocks.block_size

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the whole cache can hold."""
        return self.blocks.num_blocks * self.blocks.block_size

    @property
    def usage(self) -> float:
        """Share of blocks that sequences hold, in [0, 1]."""
        return 1.0 - self.blocks.num_free / self.blocks.num_blocks

    # ---- admission ---------------------------------------------------------------------------------------------

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Returns the cached blocks that the sequence may read. They never cover its last token, which must be computed
        for its logits.
        """
        if sequence.params.prompt_logprobs is not None:
            return []
        count = (len(sequence.token_ids) - 1) // self._block_size
        return self.blocks.find_prefix(sequence.hash_blocks(count, self._block_size))

    def fits(self, sequence: Sequence, prefix: list[int]) -> bool:
        """Returns whether the whole prompt fits, not only its first chunk, so that admission does not lead to a
        preemption soon.
        """
        missing = self._num_blocks_for(len(sequence.token_ids)) - len(prefix)
        return missing <= self.blocks.num_free - self.blocks.num_evictable(prefix)

    def start_on(self, sequence: Sequence, prefix: list[int]) -> None:
        """Starts the sequence on the cached blocks of its prefix; it computes from their end on."""
        self.blocks.share(prefix)
        sequence.block_table = list(prefix)
        sequence.num_shared_blocks = sequence.num_registered_blocks = len(prefix)
        sequence.begin_at(len(prefix) * self._block_size)

    # ---- a step ------------------------------------------------------------------------------------------------

    def can_grow(self, sequence: Sequence, count: int) -> bool:
        """Returns whether enough blocks are free for the next `count` tokens."""
        missing = self._num_blocks_for(sequence.num_computed_tokens + count) - len(sequence.block_table)
        return missing <= 0 or missing <= self.blocks.num_free

    def grow(self, sequence: Sequence, count: int, num_others: int) -> bool:
        """Gives the sequence blocks for its next `count` tokens. Returns False and changes nothing if too few are free.

        Also adds blocks for the lookahead tokens if at least `num_others` free blocks remain, one for each other
        sequence.
        """
        end = sequence.num_computed_tokens + count
        missing = self._num_blocks_for(end) - len(sequence.block_table)
        if missing > 0:
            if missing > self.blocks.num_free:
                return False
            sequence.block_table += self.blocks.allocate(missing)
        if self.num_lookahead_tokens and end >= len(sequence.token_ids):
            ahead = self._num_blocks_for(min(end + self.num_lookahead_tokens, sequence.max_length))
            ahead -= len(sequence.block_table)
            if 0 < ahead <= self.blocks.num_free - num_others:
                sequence.block_table += self.blocks.allocate(ahead)
        return True

    def register_full_blocks(self, sequence: Sequence) -> None:
        """Adds to the prefix cache the blocks that computed tokens fill, as far as the tokens are known."""
        if sequence.num_computed_tokens // self._block_size > sequence.num_registered_blocks:
            full = min(sequence.num_computed_tokens, len(sequence.token_ids)) // self._block_size
            hashes = sequence.hash_blocks(full, self._block_size)
            for block in range(sequence.num_registered_blocks, full):
                self.blocks.register(sequence.block_table[block], hashes[block])
            sequence.num_registered_blocks = full

    def _num_blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self._block_size - 1) // self._block_size  # rounded up

    # ---- forks and ends ----------------------------------------------------------------------------------------

    def can_share(self, parent: Sequence, num_tokens: int) -> bool:
        """Returns whether another sequence can start on the parent's first tokens. If they end inside a block, that
        needs a free block for the copy.
        """
        return bool(parent.block_table) and (num_tokens % self._block_size == 0 or self.blocks.num_free > 0)

    def share(self, parent: Sequence, child: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Starts the child on the blocks of the parent's first `num_tokens` tokens.

        Returns the (source, destination) copies, at most one, that must be made before the child computes.
        """
        child.block_table, copies = self.blocks.fork(parent.block_table, num_tokens)
        child.begin_at(num_tokens)
        child.num_shared_blocks = child.num_registered_blocks = num_tokens // self._block_size
        return copies

    def release(self, sequence: Sequence) -> None:
        """Frees all blocks of the sequence and resets its progress."""
        self.blocks.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_shared_blocks = sequence.num_registered_blocks = 0
        sequence.restart()

    def discard(self, sequence: Sequence, others: Iterable[Sequence]) -> list[Sequence]:
        """Removes all blocks that a failed sequence read or wrote from the prefix cache.

        Returns those of `others` that read blocks that it wrote. The blocks of these readers from the first such block
        on are removed too; a prefix is found from its head, so no other sequence can reach them. Other readers of
        blocks that the sequence only read go on: if such a block caused the failure, they fail by themselves, and no
        new sequence reads it.
        """
        written = set(sequence.block_table[sequence.num_shared_blocks :])
        self.blocks.discard(sequence.block_table)
        readers = [other for other in others if not written.isdisjoint(other.block_table)]
        for reader in readers:
            first = next(index for index, block in enumerate(reader.block_table) if block in written)
            self.blocks.discard(reader.block_table[first:])
        return readers

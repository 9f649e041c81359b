"""Which KV blocks each sequence holds: finds its prefix, and grows, shares and gives back its block table.

It stands between the scheduler, which decides what each sequence computes, and `KVBlocks`, which counts references and
knows no sequences. The scheduler is its only caller.
"""

from __future__ import annotations

from collections.abc import Iterable

from cluster.engine.kv_blocks import KVBlocks
from cluster.engine.sequence import Sequence


class KVCacheManager:
    """A sequence's blocks should have room for `num_lookahead_tokens` after its own tokens: a draft model writes
    there.
    """

    def __init__(self, blocks: KVBlocks, num_lookahead_tokens: int = 0) -> None:
        self.blocks = blocks
        self.num_lookahead_tokens = num_lookahead_tokens
        self._block_size = blocks.block_size

    @property
    def num_tokens(self) -> int:
        """Tokens for which the whole cache has room."""
        return self.blocks.num_blocks * self.blocks.block_size

    @property
    def usage(self) -> float:
        """Share of blocks that sequences hold, in [0, 1]."""
        return 1.0 - self.blocks.num_free / self.blocks.num_blocks

    # ---- admission ---------------------------------------------------------------------------------------------

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks that the sequence may read. They never cover its last token, which must be computed to get
        logits.
        """
        if sequence.params.prompt_logprobs is not None:
            return []
        count = (len(sequence.token_ids) - 1) // self._block_size
        return self.blocks.find_prefix(sequence.hash_blocks(count, self._block_size))

    def fits(self, sequence: Sequence, prefix: list[int]) -> bool:
        """Whether there is room for the whole prompt, not only for its first chunk: a sequence that is admitted should
        not be preempted at once.
        """
        missing = self._num_blocks_for(len(sequence.token_ids)) - len(prefix)
        return missing <= self.blocks.num_free - self.blocks.num_evictable(prefix)

    def start_on(self, sequence: Sequence, prefix: list[int]) -> None:
        """Lets the sequence read these blocks and compute from their end on."""
        self.blocks.share(prefix)
        sequence.block_table = list(prefix)
        sequence.num_shared_blocks = sequence.num_registered_blocks = len(prefix)
        sequence.begin_at(len(prefix) * self._block_size)

    # ---- a step ------------------------------------------------------------------------------------------------

    def can_grow(self, sequence: Sequence, count: int) -> bool:
        """Whether the blocks for the next `count` tokens are free."""
        missing = self._num_blocks_for(sequence.num_computed_tokens + count) - len(sequence.block_table)
        return missing <= 0 or missing <= self.blocks.num_free

    def grow(self, sequence: Sequence, count: int, num_others: int) -> bool:
        """Gives the sequence blocks for its next `count` tokens; False, and none, if too few are free. It also gets
        blocks for the lookahead tokens, if one free block for each of `num_others` other sequences remains.
        """
        end = sequence.num_computed_tokens + count
        missing = -(-end // self._block_size) - len(sequence.block_table)
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
        """Offers the blocks that computed tokens fill to the prefix cache, as far as the tokens are known."""
        if sequence.num_computed_tokens // self._block_size > sequence.num_registered_blocks:
            full = min(sequence.num_computed_tokens, len(sequence.token_ids)) // self._block_size
            hashes = sequence.hash_blocks(full, self._block_size)
            for block in range(sequence.num_registered_blocks, full):
                self.blocks.register(sequence.block_table[block], hashes[block])
            sequence.num_registered_blocks = full

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    # ---- forks and ends ----------------------------------------------------------------------------------------

    def can_share(self, parent: Sequence, num_tokens: int) -> bool:
        """Whether another sequence can start on the parent's first tokens. If they end inside a block, it needs a free
        block for a copy of that one.
        """
        return bool(parent.block_table) and (num_tokens % self._block_size == 0 or self.blocks.num_free > 0)

    def share(self, parent: Sequence, child: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Starts the child on the blocks of the parent's first tokens. Returns the copies (source, destination), at
        most one, that must be made before the child computes.
        """
        child.block_table, copies = self.blocks.fork(parent.block_table, num_tokens)
        child.begin_at(num_tokens)
        child.num_shared_blocks = child.num_registered_blocks = num_tokens // self._block_size
        return copies

    def release(self, sequence: Sequence) -> None:
        """Gives back all blocks, and what was computed in them."""
        self.blocks.free(sequence.block_table)
        sequence.block_table = []
        sequence.num_shared_blocks = sequence.num_registered_blocks = 0
        sequence.restart()

    def discard(self, sequence: Sequence, others: Iterable[Sequence]) -> list[Sequence]:
        """Removes all blocks that a sequence read or wrote from the prefix cache. Returns those of `others` that read
        blocks that it wrote; the blocks that these readers wrote after them are removed too.

        A prefix is found from its head, so no sequence reads a reader's blocks without those before them. Blocks that
        the sequence only read are removed as well, but their other readers go on: if the failure came from such a
        block, they fail by themselves, and no new sequence reads it.
        """
        written = set(sequence.block_table[sequence.num_shared_blocks :])
        self.blocks.discard(sequence.block_table)
        readers = [other for other in others if not written.isdisjoint(other.block_table)]
        for reader in readers:
            first = next(index for index, block in enumerate(reader.block_table) if block in written)
            self.blocks.discard(reader.block_table[first:])
        return readers

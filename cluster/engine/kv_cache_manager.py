"""The KV blocks that each sequence holds: finds its cached prefix, and grows, shares and frees its block tables.

A sequence has a block table for each group of layers (`workers/kv_groups.py`). A group with a window gives back blocks
that no layer will read again; they stay in the prefix cache until they are evicted. The scheduler decides what each
sequence computes and is the only caller. `KVBlocks` counts references and knows no sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

from manta.cluster.engine.kept_prefixes import KeptPrefixes
from manta.cluster.engine.kv_blocks import KVBlocks
from manta.cluster.engine.sequence import Sequence
from manta.cluster.engine.state_manager import StateManager
from manta.workers.kv_groups import BlockNeeds, first_needed
from manta.workers.prefix_store import BlockPart
from manta.workers.step import NO_BLOCK, StateUse

Prefix = list[list[int]]
"""The block table of each group over a cached prefix, `NO_BLOCK` where the group needs no block."""


_IsThere = Callable[[bytes, int], bool]
"""Returns whether a group has the block with a hash; see `KVBlocks.pool`."""


class KVCacheManager:
    """Manages block tables. `needs` has the groups and the most blocks that a sequence holds. `num_lookahead_tokens` is
    the room that a sequence should have after its own tokens, where a draft model writes.
    """

    def __init__(
        self,
        blocks: KVBlocks,
        needs: BlockNeeds,
        num_lookahead_tokens: int = 0,
        states: StateManager | None = None,
        kept: KeptPrefixes | None = None,
    ) -> None:
        self.blocks = blocks
        self.states = states
        """The recurrent states; None for a model without."""
        self._kept = kept
        """The prefixes that outlive the engine; None if there are none."""
        self._looked_for: tuple[int, int] | None = None
        """The last sequence that was looked for among the kept prefixes, and its first step."""
        self._refused: tuple[int, int] | None = None
        """The last sequence that found too few blocks, and its first step."""
        self._enough = 0
        """Value of `_num_gained` from which on that sequence may find enough."""
        self.num_lookahead_tokens = num_lookahead_tokens
        self._needs = needs
        self._block_size = blocks.block_size
        self._num_groups = len(needs.groups)
        self._windows = [(group, each.window) for group, each in enumerate(needs.groups) if each.window is not None]
        """Groups with a window, and their windows."""
        self._whole = [group for group, each in enumerate(needs.groups) if each.window is None]
        """Groups whose readers need all blocks."""

    def longest(self, most_tokens: int) -> int:
        """Returns the longest sequence that the whole cache holds, in tokens, at most `most_tokens`."""
        return min(most_tokens, self._needs.longest(self.blocks.num_blocks, most_tokens))

    @property
    def usage(self) -> float:
        """Share of blocks that sequences hold, in [0, 1]."""
        return 1.0 - self.blocks.num_free / self.blocks.num_blocks

    # ---- admission ---------------------------------------------------------------------------------------------

    def find_room(self, sequence: Sequence) -> Prefix | None:
        """Returns the cached prefix on which a waiting sequence may start; None if too few blocks are free.

        The prefix of a prompt of 128k tokens is thousands of blocks. While such a sequence waits, its prefix is looked
        up again only once so many blocks have become free, or have entered the prefix cache, as were missing.
        """
        looking = sequence.sequence_id, sequence.first_step
        if looking == self._refused and self._num_gained < self._enough:
            return None
        prefix = self._find_any_prefix(sequence)
        num_missing = self._num_missing(sequence, prefix)
        if num_missing <= 0:
            return prefix
        if not self.blocks.resumes_at_borders:  # else one block or snapshot may make many others readable
            self._refused, self._enough = looking, self._num_gained + num_missing
        return None

    @property
    def _num_gained(self) -> int:
        """Number that grows by at least one for each block by which `_num_missing` of a waiting sequence shrinks, until
        another sequence starts.
        """
        return self.blocks.num_free + self.blocks.num_stored

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """Returns the cached blocks that the sequence may read, of the longest prefix for which every group has what it
        needs: all blocks, or those in the window of the token after the prefix. They never cover a token that must be
        computed for its logits.
        """
        count = self._num_readable(sequence)
        if not count or not self.blocks.enable_prefix_caching:
            return [[] for _ in range(self._num_groups)]
        sequence.hash_blocks(count, self._block_size)
        hashes = sequence.block_hashes
        chains = {group: self.blocks.find_prefix(itertools.islice(hashes, count), group) for group in self._whole}
        if self._windows or len(chains) > 1 or self.states is not None:
            longest = min(map(len, chains.values()), default=count)
            count = self._num_resumable(hashes, longest, self._is_cached)
        for group, window in self._windows:
            first = first_needed(window, count * self._block_size, self._block_size)
            found = self.blocks.find_prefix(hashes[first:count], group)
            chains[group] = [NO_BLOCK] * first + found
        return [chains[group][:count] for group in range(self._num_groups)]

    def _num_readable(self, sequence: Sequence) -> int:
        """Returns the number of leading blocks whose logits nobody needs: all up to the last token, or up to the first
        prompt token whose log-probability is still wanted.
        """
        num_tokens = len(sequence.token_ids) - 1
        if sequence.params.prompt_logprobs is not None:
            num_tokens = min(num_tokens, sequence.num_prompt_logprobs)
        return num_tokens // self._block_size

    def _num_resumable(self, hashes: list[bytes], count: int, is_there: _IsThere) -> int:
        """Returns the most blocks, up to `count`, after which every group with a window has the blocks that the next
        token reads, and there is a snapshot of the recurrent states, as far as `is_there` knows.
        """
        before = -1
        while count != before:
            before = count
            while self.states is not None and count and not is_there(hashes[count - 1], self._num_groups):
                count -= 1
            for group, window in self._windows:
                missing = self._last_missing(hashes, count, group, window, is_there)
                while missing is not None:
                    count = missing
                    missing = self._last_missing(hashes, count, group, window, is_there)
        return count

    def _last_missing(self, hashes: list[bytes], count: int, group: int, window: int, is_there: _IsThere) -> int | None:
        """Returns the last block that the token after `count` blocks reads and the group lacks; None if it has all."""
        for index in range(count - 1, first_needed(window, count * self._block_size, self._block_size) - 1, -1):
            if not is_there(hashes[index], group):
                return index
        return None

    def _is_cached(self, block_hash: bytes, group: int) -> bool:
        """Returns whether a group has a block in memory, or whether there is a snapshot (`KVBlocks.pool`)."""
        return self.blocks.find_part(block_hash, group) is not None

    # ---- kept prefixes -----------------------------------------------------------------------------------------

    def _find_any_prefix(self, sequence: Sequence) -> Prefix:
        """Returns what `find_prefix` does, after it has loaded the kept blocks that lengthen the prefix. They are
        looked for once.
        """
        prefix = self.find_prefix(sequence)
        looking = sequence.sequence_id, sequence.first_step
        if self._kept is None or looking == self._looked_for or not self._num_readable(sequence):
            return prefix
        if not self.fits(sequence, prefix):
            return prefix
        self._looked_for = looking
        return self.find_prefix(sequence) if self._load_kept(sequence, self._kept, len(prefix[0])) else prefix

    def _load_kept(self, sequence: Sequence, kept: KeptPrefixes, num_found: int) -> bool:
        """Loads the kept blocks of a sequence's longest prefix, if it is longer than `num_found` blocks. Returns
        whether it loaded any.
        """

        def is_there(block_hash: bytes, group: int) -> bool:
            return self._is_cached(block_hash, group) or kept.has(block_hash, group)

        num_readable = self._num_readable(sequence)
        sequence.hash_blocks(num_readable, self._block_size)
        hashes = sequence.block_hashes
        count = num_found
        most = min(num_readable, num_found + kept.most_restored)
        while count < most and all(is_there(hashes[count], group) for group in self._whole):
            count += 1
        count = self._num_resumable(hashes, count, is_there)
        if count <= num_found:
            return False
        found = {each: self.blocks.find_part(hashes[each[0]], each[1]) for each in self._parts(count)}
        held = [place for (_, group), place in found.items() if place is not None and group < self._num_groups]
        missing = [each for each, place in found.items() if place is None]
        num_blocks = sum(group < self._num_groups for _, group in missing)
        if num_blocks > self.blocks.num_free - self.blocks.num_evictable(held):
            return False
        self.blocks.share(held)
        parts = [
            BlockPart(hashes[number], group, self.blocks.pool(group)[0].allocate(1)[0]) for number, group in missing
        ]
        for (number, group), part, is_restored in zip(missing, parts, kept.restore(parts), strict=True):
            if is_restored:
                self.blocks.register_block(part.place, sequence, number, group)
        for part in reversed(parts):
            self.blocks.pool(part.group)[0].free([part.place])
        self.blocks.free(held)
        return True

    def _parts(self, count: int) -> Iterator[tuple[int, int]]:
        """Yields the (block number, group) of all that the token after `count` blocks reads."""
        for group in self._whole:
            yield from ((number, group) for number in range(count))
        for group, window in self._windows:
            first = first_needed(window, count * self._block_size, self._block_size)
            yield from ((number, group) for number in range(first, count))
        if self.states is not None:
            yield count - 1, self._num_groups

    def fits(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Returns whether the whole prompt fits, not only its first chunk, so that admission does not lead to a
        preemption soon.
        """
        return self._num_missing(sequence, prefix) <= 0

    def _num_missing(self, sequence: Sequence, prefix: Prefix) -> int:
        """Returns how many more blocks would have to be free."""
        found = _real(prefix)
        num_new = self._needs.of_sequence(len(sequence.token_ids)) - len(found)
        return num_new - (self.blocks.num_free - self.blocks.num_evictable(found))

    def start_on(self, sequence: Sequence, prefix: Prefix, step_id: int) -> None:
        """Starts the sequence on the cached blocks of its prefix; it computes from their end on. The step with this id
        is the first that does so.
        """
        self._refused = None  # it may share blocks of the prefix that another sequence waits for
        self.blocks.share(_real(prefix))
        sequence.block_tables = prefix
        sequence.num_shared_blocks = sequence.num_registered_blocks = sequence.num_blocks
        sequence.begin_at(sequence.num_blocks * self._block_size)
        if self.states is not None:
            self.states.start_on(sequence, sequence.block_hashes[: sequence.num_blocks])
        if self._kept is not None and sequence.num_blocks and sequence.num_cached_tokens is None:
            self._kept.note_use(step_id, sequence.block_hashes[: sequence.num_blocks], prefix)

    # ---- a step ------------------------------------------------------------------------------------------------

    def can_grow(self, sequence: Sequence, count: int) -> bool:
        """Returns whether enough blocks are free for the next `count` tokens."""
        missing = self._num_blocks_for(sequence.num_computed_tokens + count) - sequence.num_blocks
        return missing <= 0 or missing * self._num_groups <= self.blocks.num_free

    def grow(self, sequence: Sequence, count: int, num_others: int) -> bool:
        """Gives the sequence blocks for its next `count` tokens. Returns False if too few are free.

        Also adds blocks for the lookahead tokens if at least `num_others` free blocks of each group remain, one for
        each other sequence.
        """
        end = sequence.num_computed_tokens + count
        if end > len(sequence.block_tables[0]) * self._block_size:
            missing = self._num_blocks_for(end) - sequence.num_blocks
            self._give_back(sequence)
            if missing * self._num_groups > self.blocks.num_free:
                return False
            self._append(sequence, missing)
        if self.num_lookahead_tokens and end >= len(sequence.token_ids):
            ahead = self._num_blocks_for(min(end + self.num_lookahead_tokens, sequence.max_length))
            ahead -= sequence.num_blocks
            if ahead > 0:
                self._give_back(sequence)
            if 0 < ahead * self._num_groups <= self.blocks.num_free - num_others * self._num_groups:
                self._append(sequence, ahead)
        return True

    def _append(self, sequence: Sequence, count: int) -> None:
        for table in sequence.block_tables:
            table += self.blocks.allocate(count)

    def _give_back(self, sequence: Sequence) -> None:
        """Frees the blocks that no layer will read again. A step under way, a rejected draft or a late mask may take
        the sequence back to its accepted tokens, so these decide.
        """
        if self._windows:
            self.register_full_blocks(sequence)  # accepted drafts may have filled a block and left the window at once
        for group, window in self._windows:
            table = sequence.block_tables[group]
            end = first = first_needed(window, sequence.num_accepted_tokens, self._block_size)
            while first > 0 and table[first - 1] != NO_BLOCK:
                first -= 1
            if first < end:
                self.blocks.free(table[first:end])
                table[first:end] = [NO_BLOCK] * (end - first)

    def register_full_blocks(self, sequence: Sequence) -> None:
        """Adds to the prefix cache the blocks that computed tokens fill, as far as the tokens are known."""
        if sequence.num_computed_tokens // self._block_size > sequence.num_registered_blocks:
            full = min(sequence.num_computed_tokens, len(sequence.token_ids)) // self._block_size
            sequence.hash_blocks(full, self._block_size)
            for index in range(sequence.num_registered_blocks, full):
                self.blocks.register_row([table[index] for table in sequence.block_tables], sequence, index)
            sequence.num_registered_blocks = full

    def _num_blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self._block_size - 1) // self._block_size  # rounded up

    # ---- forks and ends ----------------------------------------------------------------------------------------

    def can_share(self, parent: Sequence, num_tokens: int) -> bool:
        """Returns whether another sequence can start on the parent's first tokens. If they end inside a block, that
        needs a free block for the copy in each group.
        """
        needs_copies = num_tokens % self._block_size != 0
        return bool(parent.block_tables) and (not needs_copies or self.blocks.num_free >= self._num_groups)

    def share(self, parent: Sequence, child: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Starts the child on the blocks of the parent's first `num_tokens` tokens.

        Returns the (source, destination) copies, at most one for each group, that must be made before the child
        computes.
        """
        forks = [self.blocks.fork(table, num_tokens) for table in parent.block_tables]
        child.block_tables = [table for table, _ in forks]
        child.begin_at(num_tokens)
        child.num_shared_blocks = child.num_registered_blocks = num_tokens // self._block_size
        if self.states is not None:
            self.states.share(parent, child)
        return [copy for _, copies in forks for copy in copies]

    def release(self, sequence: Sequence) -> None:
        """Frees all blocks and slots of the sequence and resets its progress."""
        if self.states is not None:
            self.states.release(sequence)
        self.blocks.free(sequence.held_blocks())
        sequence.block_tables = []
        sequence.num_shared_blocks = sequence.num_registered_blocks = 0
        sequence.restart()

    def settle(self, sequence: Sequence, use: StateUse) -> None:
        """Notes that a step with these slots has succeeded."""
        if self.states is not None:
            self.states.settle(sequence, use)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raises `IntegrityError` if a block or a slot leaked, or a reference count is wrong."""
        self.blocks.check_integrity(sequence.held_blocks() for sequence in running)
        if self.states is not None:
            self.states.check_integrity(running)

    def discard(self, sequence: Sequence, others: Iterable[Sequence]) -> list[Sequence]:
        """Removes all blocks that a failed sequence read or wrote from the prefix cache, those that it has given back
        too.

        Returns those of `others` that read blocks that it wrote. The blocks of these readers from the first such block
        on are removed too; a prefix is found from its head, so no other sequence can reach them. Other readers of
        blocks that the sequence only read go on: if such a block caused the failure, they fail by themselves, and no
        new sequence reads it.
        """
        written = self._blocks_from(sequence, sequence.num_shared_blocks)
        readers = {}
        for other in others:
            first = self._first_of(other, written)
            if first is None and self.states is not None:
                first = self._first_same(other, sequence)
            if first is not None:
                readers[other.sequence_id] = (other, first)
        for each, first in ((sequence, 0), *readers.values()):
            self.blocks.discard(self._blocks_from(each, first))
            if self._kept is not None:
                self._kept.drop(each.block_hashes[first:])
            if self.states is not None:
                self.states.discard(each, first)
        return [reader for reader, _ in readers.values()]

    def _blocks_from(self, sequence: Sequence, first: int) -> set[int]:
        """Returns the sequence's blocks from number `first` on in every group. Of those that it has given back, these
        are the blocks that the prefix cache has in their place.
        """
        blocks = {block for table in sequence.block_tables for block in table[first:]}
        if NO_BLOCK in blocks:
            blocks.discard(NO_BLOCK)
            for group, table in enumerate(sequence.block_tables):
                given_back = [index for index in range(first, len(table)) if table[index] == NO_BLOCK]
                found = (self.blocks.find(sequence.block_hashes[index], group) for index in given_back)
                blocks.update(block for block in found if block is not None)
        return blocks

    def _first_of(self, reader: Sequence, written: set[int]) -> int | None:
        """Returns the first place in the reader's tables of a block that is in `written`; None if there is none."""
        rows = zip(*reader.block_tables, strict=True)
        return next((index for index, row in enumerate(rows) if not written.isdisjoint(row)), None)

    def _first_same(self, reader: Sequence, writer: Sequence) -> int | None:
        """Returns the first block with the same tokens that the writer computed and before whose end the reader began:
        it may have started on a snapshot of the writer's. None if there is none.
        """
        first = writer.num_shared_blocks
        own, other = reader.block_hashes[first : reader.num_shared_blocks], writer.block_hashes[first:]
        return first if own and other and own[0] == other[0] else None


def _real(prefix: Prefix) -> list[int]:
    return [block for table in prefix for block in table if block != NO_BLOCK]

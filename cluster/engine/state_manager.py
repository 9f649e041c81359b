"""The recurrent states that each sequence holds: which slots a step reads and writes, and which become snapshots.

A slot has the state of all recurrent layers after the first tokens of a sequence, and never changes once a step has
written it. So sequences share slots by reference, and a sequence whose computed length falls back (a late mask, a
rejected draft) goes on from the last slot that it holds before that length. A slot at a block border becomes a snapshot
in the prefix cache when its step has succeeded. `KVCacheManager` is the only caller.
"""

from __future__ import annotations

from collections.abc import Iterable

from manta.cluster.engine.kv_blocks import KVBlocks
from manta.cluster.engine.sequence import Sequence
from manta.workers.kv_groups import most_states
from manta.workers.step import NUM_FIXED_STATES, ZERO_STATE, StateUse


class StateManager:
    """Gives slots to sequences. `blocks` has the prefix cache and `states`, the pool of slots.

    `num_steps_ahead` steps are planned before the results of an earlier one are known. A step verifies at most
    `max_draft_tokens` drafts of a sequence.
    """

    def __init__(
        self, blocks: KVBlocks, states: KVBlocks, max_num_sequences: int, num_steps_ahead: int, max_draft_tokens: int
    ) -> None:
        self._blocks = blocks
        self._states = states
        self._block_size = blocks.block_size
        self._fixed = states.allocate(NUM_FIXED_STATES)
        """Slots that no sequence writes: the zeros, and the one that nobody reads."""
        most = most_states(num_steps_ahead, max_draft_tokens > 0)
        num_slots = states.num_blocks - NUM_FIXED_STATES
        self.max_num_sequences = min(max_num_sequences, num_slots // most)
        if self.max_num_sequences < 1:
            raise ValueError(f"{num_slots} slots of recurrent states are fewer than the {most} of one sequence")
        """Sequences that run at a time. Each may hold the most slots that a sequence ever does, so none lacks one."""
        self._keeps_draft_states = num_slots >= self.max_num_sequences * (most + max_draft_tokens)
        """Whether a step keeps the state after each draft. Otherwise accepted drafts are computed again, in the next
        step.
        """

    # ---- prefixes ------------------------------------------------------------------------------------------------

    def start_on(self, sequence: Sequence, hashes: list[bytes]) -> None:
        """Starts the sequence on the snapshot after the blocks with these hashes.

        If it shares more blocks with earlier sequences, it will leave a snapshot where it parts from them: a prompt
        that many requests begin with, such as a system prompt, has one from the second request on.
        """
        sequence.branch_border = len(self._blocks.find_prefix(sequence.block_hashes)) * self._block_size
        slot = self._states.find(hashes[-1]) if hashes else ZERO_STATE
        assert slot is not None, "the prefix was chosen by its snapshot"
        self._states.share([slot])
        sequence.states = {len(hashes) * self._block_size: slot}

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Gives the child the parent's slots from which it may go on."""
        own = {position: slot for position, slot in parent.states.items() if position <= len(child.token_ids)}
        first = _last_before(own, len(child.token_ids) - 1)
        child.states = {position: slot for position, slot in own.items() if position >= first}
        self._states.share(child.states.values())

    # ---- a step --------------------------------------------------------------------------------------------------

    def aligned(self, sequence: Sequence, count: int) -> int:
        """Returns how many of the next `count` tokens a step computes. A chunk that does not reach the last known token
        ends at a block border if it can, so that its state becomes a snapshot.
        """
        end = sequence.num_computed_tokens + count
        if end < len(sequence.token_ids):
            border = end // self._block_size * self._block_size
            return border - sequence.num_computed_tokens if border > sequence.num_computed_tokens else count
        return count

    def grow(self, sequence: Sequence, count: int) -> StateUse:
        """Returns the slots that the step over the next `count` tokens reads and writes."""
        start = sequence.num_computed_tokens
        end = start + count
        self._give_back(sequence)
        read = sequence.states[start]
        positions = [end] if count == 1 else sorted(self._positions(sequence, start, end))
        writes = list(zip(positions, self._states.allocate(len(positions)), strict=True))
        sequence.states.update(writes)
        return StateUse(read, writes)

    def _positions(self, sequence: Sequence, start: int, end: int) -> Iterable[int]:
        """Returns the positions whose states a step over `[start, end)` writes: its end, and where the sequence may go
        on otherwise.
        """
        known = len(sequence.token_ids) + sequence.num_pending_tokens
        positions = {end}
        if sequence.is_masked:
            positions.add(known - 1)  # a late mask makes the last known token uncomputed
        if end > known:
            positions.update(range(known, end) if self._keeps_draft_states else [known])
        if self._blocks.enable_prefix_caching:
            positions.update(self._prompt_borders(sequence))
        return [position for position in positions if start < position <= end]

    def _prompt_borders(self, sequence: Sequence) -> tuple[int, int, int]:
        """Returns the block borders of a prompt at which later ones are most likely to go on: where it parts from
        earlier ones, and the last two before its last token. A later prompt may differ in the last tokens, which a chat
        template adds before the answer.
        """
        last = (sequence.num_prompt_tokens - 1) // self._block_size * self._block_size
        return sequence.branch_border, last - self._block_size, last

    def _give_back(self, sequence: Sequence) -> None:
        """Frees the slots from which the sequence cannot go on: those after its computed tokens, because they hold
        rejected drafts, and all before the last one within its accepted tokens, to which it may fall back.

        Keeps border slots of steps under way, which may become snapshots.
        """
        states = sequence.states
        keep = _last_before(states, sequence.num_accepted_tokens)
        num_computed, num_settled = sequence.num_computed_tokens, sequence.num_settled_tokens
        for position in list(states):
            is_settled = position <= num_settled or position % self._block_size
            if position > num_computed or (position < keep and is_settled):
                self._states.free([states.pop(position)])

    def settle(self, sequence: Sequence, use: StateUse) -> None:
        """Adds a step's slots at block borders to the prefix cache, because the step has succeeded. Slots of rejected
        drafts do not count.

        The snapshots at other borders of the prompt, where chunks ended, are evicted first, and so are those in the
        output before the last one.
        """
        sequence.num_settled_tokens = use.writes[-1][0]
        for position, slot in use.writes:
            if position % self._block_size:
                continue
            is_valid = position <= min(sequence.num_computed_tokens, len(sequence.token_ids))
            if not is_valid or sequence.states.get(position) != slot:
                continue
            number = position // self._block_size - 1
            sequence.hash_blocks(number + 1, self._block_size)
            self._blocks.register_snapshot(slot, sequence, number)
            if sequence.last_snapshot not in self._prompt_borders(sequence):
                self._demote(sequence, sequence.last_snapshot)
            sequence.last_snapshot = position

    def _demote(self, sequence: Sequence, position: int) -> None:
        if position:
            slot = self._states.find(sequence.block_hashes[position // self._block_size - 1])
            if slot is not None:
                self._states.evict_first(slot)

    # ---- ends ----------------------------------------------------------------------------------------------------

    def release(self, sequence: Sequence) -> None:
        """Frees all slots of the sequence."""
        self._states.free(sequence.states.values())
        sequence.states = {}
        sequence.num_settled_tokens = sequence.last_snapshot = sequence.branch_border = 0

    def discard(self, sequence: Sequence, first_block: int) -> None:
        """Removes from the prefix cache the snapshots after the sequence's blocks from number `first_block` on."""
        found = map(self._states.find, sequence.block_hashes[first_block:])
        self._states.discard([slot for slot in found if slot is not None])

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises `IntegrityError` as `KVBlocks.check_integrity` does."""
        self._states.check_integrity([self._fixed, *(sequence.states.values() for sequence in sequences)])


def _last_before(states: Iterable[int], position: int) -> int:
    """Returns the last of the positions of states that is at most `position`. There must be one."""
    last = 0
    for each in states:
        if last < each <= position:
            last = each
    return last

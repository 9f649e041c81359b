"""The proposers `draft` and `mtp`: a small model with the same tokenizer, or the draft head in the model's checkpoint,
drafts the model's next tokens.

Their keys and values are in a separate tensor, but its blocks have the ids and block tables of the model's, so the
scheduler allocates both at once. When the proposer is asked for drafts, it computes missing keys and values from a
sequence's tokens. This module tracks which of them are valid; `DraftRunner` of `workers/ranks/rank_worker.py` computes
and draws. Called by `specdecode/proposers.py`; imports no framework.

A head makes the keys and values at position `i` of the model's hidden state there and of the token at position `i + 1`,
so it has one position fewer than the sequence has tokens. Blocks that the prefix cache gives to a sequence have hidden
states too, except those that come from the prefix store: there a head reads zeros. The last position of a block is made
with the token that followed it first, even in a sequence that goes on in another way. At drafted positions a head reads
its own hidden states, so these are computed again when the model has computed them.

While no drafts are `wanted`, steps keep no hidden states for a head. Later it reads a sequence from the first block on
whose states are all there. Likewise a trial reads the last tokens of a sequence alone. Such a sequence has a window:
for the draft model or head it begins with the window's first block, at position 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from manta.specdecode.acceptance import num_accepted
from manta.specdecode.lengths import StepCost
from manta.specdecode.proposers import DraftRequest
from manta.specdecode.speculative_config import HEADS
from manta.structured.constraint import ConstraintError
from manta.structured.vocabulary import Vocabulary
from manta.workers.models.model_config import ModelError
from manta.workers.ranks.rank_sequences import RankSequences
from manta.workers.ranks.rank_worker import DraftRunner
from manta.workers.sampling.sampling_state import SequenceState
from manta.workers.step import StepInput


@dataclasses.dataclass(slots=True)
class Progress:
    """The part of one sequence that the cache of the draft model or head holds."""

    num_draft_computed: int
    """Leading positions whose keys and values are in that cache."""
    num_marked_blocks: int
    """Leading full blocks that are in `DraftModel._written` and may serve other sequences."""
    first_block: int = 0
    """The block with which the sequence's window begins."""
    era: int = 0
    """The era (`DraftModel._era`) of the last step."""
    kept_from: int = 0
    """The first position from which on the hidden states of all positions are kept, at the start of a block."""
    num_known: int = 0
    """Positions that the model had computed with known tokens after the last step that kept hidden states."""
    proposed_at: int = 0
    """Length of the sequence when `proposed` was drafted."""
    proposed: list[int] = dataclasses.field(default_factory=list)

    def settle(self, tokens: np.ndarray) -> None:
        """Counts the accepted drafts as computed. The last draft was drawn but not computed, so it has no keys and
        values.
        """
        drafts, self.proposed = self.proposed, []
        if drafts:
            gained = tokens[self.proposed_at : self.proposed_at + len(drafts) - 1].tolist()
            self.num_draft_computed = self.proposed_at + num_accepted(drafts, gained)


@dataclasses.dataclass(slots=True)
class _Drafting:
    sequence_id: int
    state: SequenceState
    progress: Progress
    num_tokens: int
    count: int
    proposed: list[int] = dataclasses.field(default_factory=list)


class DraftModel:
    """The proposer `draft`, or one of `HEADS`. Reads tokens, parameters and block tables from `sequences`, the target
    model's.

    In one step it computes at most `max_catch_up_tokens` missing tokens; sequences that lack more get drafts later.
    """

    def __init__(
        self, runner: DraftRunner, sequences: RankSequences, max_catch_up_tokens: int, name: str = "draft"
    ) -> None:
        self.name = name
        self.runner = runner
        self._is_draft_head = name in HEADS
        self._shift = int(self._is_draft_head)
        """Distance from the position of keys and values to that of the token of which they are made."""
        self._sequences = sequences
        self._max_catch_up_tokens = max_catch_up_tokens
        self.wanted = True
        self._era = 0
        """The number of times that keeping hidden states began again."""
        self._keeps = self._is_draft_head
        """Whether the last step kept hidden states."""
        self._unkept: set[int] = set()
        """Ids of blocks with positions whose hidden states were not kept."""
        self._written: set[int] = set()
        """Ids of full blocks whose draft keys and values match the tokens in the model's cache. They stay valid if the
        prefix cache gives the block to another sequence.
        """
        self._progress: dict[int, Progress] = {}

    def measure(self) -> StepCost:
        """Measures the cost of drafting one token by the number of sequences. Call it before anything is cached."""
        return StepCost(self.runner.measure())

    def take_upkeep_seconds(self) -> float:
        """Returns the seconds that steps took longer since the last call, to keep hidden states."""
        return self.runner.take_keeping_seconds()

    def begin(self, step: StepInput) -> None:
        """Updates valid blocks for a step's new blocks. Of blocks from the prefix cache, the leading ones that the
        draft model or head has written count as computed.
        """
        for sequence_id in step.finished:
            self._progress.pop(sequence_id, None)
        if self._is_draft_head:
            self._keep_states(self.wanted)
        size = self._sequences.block_size
        for item in step.scheduled:
            if item.new_block_ids:
                num_found = 0
                block_ids = item.new_block_ids[: len(item.new_block_ids) // self._sequences.num_groups]
                if item.sequence_id not in self._progress:
                    num_found = item.start // size
                    self._start(item.sequence_id, item.start, block_ids[:num_found])
                self._written.difference_update(block_ids[num_found:])
                if self._keeps:
                    self._unkept.difference_update(block_ids[num_found:])
                elif self._is_draft_head:
                    self._unkept.update(block_ids[num_found:])
            progress = self._progress.get(item.sequence_id) if self._keeps else None
            if progress is not None:
                if progress.era != self._era:
                    progress.era, progress.kept_from = self._era, -(-item.start // size) * size
                progress.num_known = item.start + item.num_tokens - len(item.draft_token_ids)

    def _keep_states(self, keeps: bool) -> None:
        """Tells the model's runner whether the next step keeps hidden states."""
        if keeps == self._keeps:
            return
        self._keeps = keeps
        self.runner.keep_hidden_states(keeps)
        if keeps:
            self._era += 1
            return
        for sequence_id, progress in self._progress.items():
            first = progress.num_known // self._sequences.block_size
            (table,) = self._sequences.block_tables([sequence_id])
            self._unkept.update(table[first : self._sequences.num_blocks(sequence_id)].tolist())

    def _start(self, sequence_id: int, start: int, found: list[int]) -> None:
        """Begins a sequence that has the blocks `found` from the prefix cache or from the one that it is a fork of."""
        size, kept_from = self._sequences.block_size, 0
        if self._unkept:
            stale = [index for index, block_id in enumerate(found) if block_id in self._unkept]
            kept_from = -(-start // size) * size if start % size else size * (stale[-1] + 1 if stale else 0)
        num_written = self._num_written(found)
        self._progress[sequence_id] = Progress(num_written * size, num_written, 0, self._era, kept_from)

    def _num_written(self, block_ids: list[int]) -> int:
        """Returns the number of leading blocks that the draft model or head has written."""
        count = 0
        while count < len(block_ids) and block_ids[count] in self._written:
            count += 1
        return count

    def propose(self, requests: Sequence[DraftRequest]) -> dict[int, list[int]]:
        """Returns drafts by sequence id, for sequences whose blocks have room for them. Sequences with logits
        processors get none, because the processors would have to be rebuilt after every draft.
        """
        batch = self._batch(requests)
        if not batch:
            return {}
        try:
            self._draft(batch)
        finally:
            for each in batch:
                self._sequences.sampling.truncate(each.sequence_id, each.num_tokens)
        for each in batch:
            each.progress.proposed_at, each.progress.proposed = each.num_tokens, each.proposed
        return {each.sequence_id: list(each.proposed) for each in batch if each.proposed}

    def _batch(self, requests: Sequence[DraftRequest]) -> list[_Drafting]:
        batch = []
        for each in requests:
            progress = self._progress.get(each.sequence_id)
            if progress is None or each.state.processors is not None:
                continue
            num_tokens = each.state.num_tokens
            if not self._is_draft_head:
                progress.settle(each.state.tokens[:num_tokens])
            elif not self._keeps or progress.era != self._era:
                continue
            self._move_window(progress, num_tokens, each.most_context)
            first = progress.first_block * self._sequences.block_size
            if first >= num_tokens - self._shift:
                continue
            capacity = self._sequences.num_blocks(each.sequence_id) * self._sequences.block_size
            capacity = min(capacity, first + self.runner.max_model_len)
            count = min(each.count, capacity - num_tokens + 1)
            if count > 0:
                batch.append(_Drafting(each.sequence_id, each.state, progress, num_tokens, count))
        return batch

    def _move_window(self, progress: Progress, num_tokens: int, most_context: int | None) -> None:
        """Moves the begin of a sequence's window behind positions without hidden states. If more than `most_context`
        positions are missing, the window begins with the last of them.
        """
        size, first = self._sequences.block_size, 0
        if progress.num_draft_computed < progress.kept_from:
            first = progress.kept_from
        if most_context is not None and num_tokens - max(first, progress.num_draft_computed) > most_context:
            first = -(-(num_tokens - most_context) // size) * size
        if first:
            progress.first_block, progress.num_draft_computed = first // size, first

    def _tables(self, batch: list[_Drafting]) -> np.ndarray:
        """Returns the block tables of the sequences' windows, int32 [n, number of blocks of the longest]."""
        tables = self._sequences.block_tables([each.sequence_id for each in batch])
        for table, each in zip(tables, batch, strict=True):
            if first := each.progress.first_block:
                table[: len(table) - first] = table[first:].copy()
        return tables

    def _draft(self, batch: list[_Drafting]) -> None:
        tables, size = self._tables(batch), self._sequences.block_size
        rows, drawn = self._catch_up(batch, tables)
        while rows:
            going_on = []
            for row, token_id in zip(rows, drawn, strict=True):
                each = batch[row]
                if token_id is None:
                    continue
                each.proposed.append(token_id)
                self._sequences.sampling.append(each.sequence_id, (token_id,))
                if len(each.proposed) < each.count and token_id not in each.state.stop_ids:
                    going_on.append(row)
            rows = going_on
            if rows:
                firsts = [batch[row].progress.first_block * size for row in rows]
                newest = [
                    batch[row].state.num_tokens - 1 - self._shift - first
                    for row, first in zip(rows, firsts, strict=True)
                ]
                tokens = np.array([batch[row].proposed[-1] for row in rows])
                drawing = {index: batch[row].state for index, row in enumerate(rows)}
                drawn = self.runner.compute(newest, [1] * len(rows), tokens, tables[rows], drawing)

    def _catch_up(self, batch: list[_Drafting], tables: np.ndarray) -> tuple[list[int], list[int | None]]:
        """Computes missing keys and values within the budget of one step. Returns the rows in `batch` of the sequences
        that are complete, and the next token of each.
        """
        budget, size = self._max_catch_up_tokens, self._sequences.block_size
        chosen: list[int] = []
        starts, counts, pieces = [], [], []
        drawing: dict[int, SequenceState] = {}
        for row, each in enumerate(batch):
            end = each.num_tokens - self._shift
            start = min(each.progress.num_draft_computed, end - 1)
            count = min(end - start, budget)
            if count == 0:
                continue
            budget -= count
            if start + count == end:
                drawing[len(chosen)] = each.state
            chosen.append(row)
            starts.append(start - each.progress.first_block * size)
            counts.append(count)
            pieces.append(each.state.tokens[start + self._shift : start + self._shift + count])
        drawn = self.runner.compute(starts, counts, np.concatenate(pieces), tables[chosen], drawing)
        for row, start, count in zip(chosen, starts, counts, strict=True):
            progress = batch[row].progress
            progress.num_draft_computed = progress.first_block * size + start + count
            if not progress.first_block:
                self._mark(progress, tables[row])
        return [chosen[index] for index in drawing], drawn

    def _mark(self, progress: Progress, table: np.ndarray) -> None:
        full = progress.num_draft_computed // self._sequences.block_size
        self._written.update(table[progress.num_marked_blocks : full].tolist())
        progress.num_marked_blocks = max(progress.num_marked_blocks, full)

    def overwrite(self, block_ids: Iterable[int]) -> None:
        """Notes that blocks got the model's keys and values of other tokens, without a step."""
        self._written.difference_update(block_ids)

    def reset(self) -> None:
        """Forgets everything; called when the model's cache is lost and block ids start again."""
        self._progress.clear()
        self._written.clear()
        self._unkept.clear()


def check_same_tokenizer(target: str, draft: str, vocab_size: int) -> None:
    """Raises `ModelError` if an id means different tokens in the tokenizers of the two folders, or one
    cannot be read.
    """
    try:
        ours, theirs = (Vocabulary.load(folder, vocab_size, ()) for folder in (target, draft))
    except ConstraintError as error:
        raise ModelError(f"whether {draft} drafts with the tokenizer of {target} cannot be told: {error}") from error
    difference = ours.difference(theirs)
    if difference is not None:
        raise ModelError(
            f"the draft model {draft} has another tokenizer than {target} ({difference}); take one of the same family"
        )

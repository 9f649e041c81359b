"""The state of a rank's sequences on any device: block tables, tokens and parameters, in numpy.

The worker of each framework applies every step to its `RankSequences` before the forward pass, and reads its inputs
from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from manta.structured.logits_processors import LogitsProcessorRegistry
from manta.structured.visible_logs import logger_of
from manta.workers.adapter_key import AdapterKey
from manta.workers.sampling.sampling_state import SamplingState
from manta.workers.sampling_params import SamplingParams
from manta.workers.step import RowError, SequenceStart, StepInput

logger = logger_of(__name__)


RAGGED_ENTRIES = 1 << 18
"""Entries of a step's block tables, those after the ends of the sequences included, from which tables of sequences of
very different lengths are copied one by one. One sequence of 128k tokens would otherwise make all tables as wide.
"""


class PromptTargets(NamedTuple):
    """Prompt tokens of a step's chunk whose log-probabilities a sequence requested."""

    sequence_id: int
    first_row: int
    """Flat token row that predicts the first of them; the next rows predict the others."""
    next_token_ids: np.ndarray
    """The prompt tokens, int32 [n]."""
    num_top: int
    """Number of alternatives to report with each."""


class RankSequences:
    """The sequences of a rank. Not thread-safe.

    There are at most `max_num_sequences` sequences of at most `max_model_len` tokens, in blocks of `block_size`. Each
    has `num_groups` block tables, one for each group of layers. `registry` has the factories of logits processors,
    which only a rank that draws uses.
    """

    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        max_num_sequences: int,
        max_model_len: int,
        registry: LogitsProcessorRegistry | None = None,
        draws: bool = True,
        num_groups: int = 1,
    ) -> None:
        self.num_groups = num_groups
        self.block_size = block_size
        self.max_num_sequences = max_num_sequences
        self.max_model_len = max_model_len
        self.sampling = SamplingState(vocab_size, registry)
        self._draws = draws
        self.clear()

    def clear(self) -> None:
        """Forgets every sequence."""
        max_blocks = -(-self.max_model_len // self.block_size)
        # np.zeros maps pages lazily, so only the used parts of the tables take memory.
        self._block_tables = np.zeros((self.num_groups, self.max_num_sequences, max_blocks), dtype=np.int32)
        self._num_blocks = [0] * self.max_num_sequences
        self._free_rows = list(range(self.max_num_sequences - 1, -1, -1))
        self._rows: dict[int, int] = {}
        self._adapters: dict[int, AdapterKey] = {}
        """The adapters of sequences that have one, by sequence id."""
        self._start_errors: dict[int, RowError] = {}
        """Sequences that could not be started, each with its error, until they end."""
        self.sampling.clear()

    # ---- what a step changes -------------------------------------------------------------------------------------

    def begin(self, step: StepInput) -> None:
        """Applies a step's changes: sequences end, start and fork, and block tables grow.

        A sequence that cannot be started fails alone.
        """
        for sequence_id in step.finished:
            self._forget(sequence_id)
        for sequence in step.started:
            self._start(sequence)
        for fork in step.forked:
            self._start(self.sampling.start_of_fork(fork.parent_id, fork.sequence_id, fork.seed))
            self.sampling.fork_processors(fork.parent_id, fork.sequence_id)
            if fork.parent_id in self._adapters:
                self._adapters[fork.sequence_id] = self._adapters[fork.parent_id]
            if fork.parent_id in self._start_errors:
                self._start_errors[fork.sequence_id] = self._start_errors[fork.parent_id]
        for item in step.scheduled:
            if item.new_block_ids:
                self._append_blocks(self._rows[item.sequence_id], item.new_block_ids)

    def _start(self, sequence: SequenceStart) -> None:
        """Starts one sequence. If that fails, its steps report the error, and it runs with default parameters until it
        ends: every rank must compute the tokens that were scheduled.
        """
        if not self._draws and sequence.params.logits_processors:
            params = msgspec.structs.replace(sequence.params, logits_processors=())
            sequence = msgspec.structs.replace(sequence, params=params)
        row = self._free_rows.pop()
        self._rows[sequence.sequence_id] = row
        self._num_blocks[row] = 0
        if sequence.adapter:
            self._adapters[sequence.sequence_id] = AdapterKey.of(sequence.adapter)
        try:
            self.sampling.start(sequence)
        except Exception as error:
            logger.exception("sequence %d could not be started", sequence.sequence_id)
            reason = f"the sequence could not be started: {type(error).__name__}: {error}"
            self._start_errors[sequence.sequence_id] = RowError(reason)
            tokens = sequence.token_ids, sequence.num_prompt_tokens
            self.sampling.start(SequenceStart(sequence.sequence_id, SamplingParams(), 0, *tokens))

    def _forget(self, sequence_id: int) -> None:
        row = self._rows.pop(sequence_id, None)
        if row is not None:
            self._free_rows.append(row)
            self.sampling.forget(sequence_id)
            self._start_errors.pop(sequence_id, None)
            self._adapters.pop(sequence_id, None)

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        first = self._num_blocks[row]
        end = self._num_blocks[row] = first + len(block_ids) // self.num_groups
        if self.num_groups == 1:
            self._block_tables[0, row, first:end] = block_ids
        else:
            self._block_tables[:, row, first:end] = np.reshape(block_ids, (self.num_groups, -1))

    # ---- what a step reads ---------------------------------------------------------------------------------------

    def num_blocks(self, sequence_id: int) -> int:
        """Returns the number of KV blocks that a sequence has; 0 if it has none yet."""
        return self._num_blocks[self._rows[sequence_id]]

    def block_tables(self, sequence_ids: Sequence[int]) -> np.ndarray:
        """Returns a copy of the first group's block tables, int32 [n, number of blocks of the longest]. Entries after a
        sequence's last block, and those of blocks that its tokens read no more, are undefined.
        """
        return self._tables(self._block_tables[0], sequence_ids)

    def other_tables(self, sequence_ids: Sequence[int]) -> tuple[np.ndarray, ...]:
        """Returns copies of the further groups' block tables, in the same form."""
        return tuple(self._tables(tables, sequence_ids) for tables in self._block_tables[1:])

    def _tables(self, tables: np.ndarray, sequence_ids: Sequence[int]) -> np.ndarray:
        rows = [self._rows[sequence_id] for sequence_id in sequence_ids]
        counts = [self._num_blocks[row] for row in rows]
        width = max(counts)
        if len(rows) * width < RAGGED_ENTRIES or 2 * sum(counts) > len(rows) * width:
            return tables[:, :width][np.array(rows)]
        ragged = np.zeros((len(rows), width), dtype=tables.dtype)  # its pages are mapped where they are written
        for to, row, count in zip(ragged, rows, counts, strict=True):
            to[:count] = tables[row, :count]
        return ragged

    def adapter_keys(self, sequence_ids: Sequence[int]) -> list[AdapterKey | None]:
        """Returns the adapters of sequences, None for one without; an empty list if none has one."""
        if not self._adapters or self._adapters.keys().isdisjoint(sequence_ids):
            return []
        return [self._adapters.get(each) for each in sequence_ids]

    def written_blocks(self, step: StepInput) -> np.ndarray:
        """Returns the first and the last block of each group that the step writes for each sequence, int32
        [2, groups, n].
        """
        rows = [self._rows[item.sequence_id] for item in step.scheduled]
        first = [item.start // self.block_size for item in step.scheduled]
        last = [(item.start + item.num_tokens - 1) // self.block_size for item in step.scheduled]
        return np.stack([self._block_tables[:, rows, first], self._block_tables[:, rows, last]])

    def token_ids(self, step: StepInput) -> np.ndarray:
        """Returns the input ids of the step's flat batch, int64 [num_tokens]: known tokens, then drafts of each
        sequence.
        """
        if step.is_decode:
            return self.sampling.last_tokens([item.sequence_id for item in step.scheduled])
        pieces = []
        for item in step.scheduled:
            tokens = self.sampling.tokens(item.sequence_id)
            known = item.num_tokens - len(item.draft_token_ids)
            pieces.append(tokens[item.start : item.start + known])
            if missing := known - len(pieces[-1]):  # they were expected of drafts that have been rejected
                pieces.append(np.zeros(missing, dtype=tokens.dtype))
            if item.draft_token_ids:
                pieces.append(np.array(item.draft_token_ids, dtype=tokens.dtype))
        return np.concatenate(pieces).astype(np.int64, copy=False)

    def overtaken(self, step: StepInput) -> set[int]:
        """Returns the sequences of a step that lack tokens before it, because drafts that it assumes were rejected."""
        state = self.sampling
        if not step.assumes_drafts or not state.rejecting:
            return set()
        return {
            item.sequence_id
            for item in step.scheduled
            if item.sequence_id in state.rejecting
            and item.start + item.num_tokens - len(item.draft_token_ids) > state.sequences[item.sequence_id].num_tokens
        }

    def prompt_targets(self, step: StepInput) -> Iterator[PromptTargets]:
        """Yields the prompt tokens of the step for which log-probabilities are reported."""
        state, first_row = self.sampling, 0
        for item in step.scheduled:
            num_top = state.prompt_logprobs(item.sequence_id)
            last = min(item.start + item.num_tokens, state.num_prompt_tokens(item.sequence_id) - 1)
            if num_top is not None and last > item.start:
                targets = state.tokens(item.sequence_id)[item.start + 1 : last + 1]
                yield PromptTargets(item.sequence_id, first_row, targets, num_top)
            first_row += item.num_tokens

    def start_errors(self, step: StepInput) -> dict[int, RowError]:
        """Returns the errors of the step's sequences that could not be started, by sequence id."""
        if not self._start_errors:
            return {}
        members = {each.sequence_id for each in step.scheduled} | {each.sequence_id for each in step.forked}
        return {each: self._start_errors[each] for each in members & self._start_errors.keys()}

"""The recurrent states that one step reads and writes, as tensors for the mixers of `workers/decoders/mixers/`.

A slot holds the state of all recurrent layers of one sequence after some of its tokens, and is written once. The tokens
of a sequence are cut into segments at the positions whose states are kept: the first segment starts from the slot that
the driver names, and each further one from the slot that the one before it has written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from manta.workers.step import StateUse


class RecurrentStep(NamedTuple):
    """One flat batch of tokens, cut into segments in the order of their rows. Each segment has at least one token.

    The tensors are int64. On an accelerator they are int32, and a padded step has segments and sequences without rows
    at its end (`workers/kernels/triton/metadata.py`).
    """

    starts: torch.Tensor
    """[num_segments + 1]: segment `g` owns the flat rows `[starts[g], starts[g + 1])`."""
    reads: torch.Tensor
    """[num_segments]: the slot with the state before the segment."""
    writes: torch.Tensor
    """[num_segments]: the slot that gets the state after it. No two are equal, and none is read by a segment that does
    not follow it in the same sequence.
    """
    first_segments: torch.Tensor
    """[num_sequences + 1]: sequence `s` has the segments `[first_segments[s], first_segments[s + 1])`."""
    sequence_starts: torch.Tensor
    """[num_sequences + 1]: sequence `s` owns the flat rows `[sequence_starts[s], sequence_starts[s + 1])`."""
    row_sequences: torch.Tensor
    """[num_tokens]: the sequence of each flat row."""
    row_segments: torch.Tensor
    """[num_tokens]: the segment of each flat row."""
    is_decode: bool
    """Whether every sequence has one token: segment, sequence and row have the same number."""

    @classmethod
    def build(cls, starts: Sequence[int], lens: Sequence[int], uses: Sequence[StateUse]) -> RecurrentStep:
        """Returns the step of sequences that compute `lens[s]` tokens from position `starts[s]`, on the CPU."""
        num_sequences = len(lens)
        if sum(lens) == num_sequences:
            reads = torch.tensor([use.read for use in uses])
            writes = torch.tensor([use.writes[0][1] for use in uses])
            rows = torch.arange(num_sequences + 1)
            return cls(rows, reads, writes, rows, rows, rows[:-1], rows[:-1], is_decode=True)
        segment_starts, sequence_starts, first_segments = [0], [0], [0]
        segment_reads: list[int] = []
        segment_writes: list[int] = []
        for start, num_tokens, use in zip(starts, lens, uses, strict=True):
            first_row, read = sequence_starts[-1], use.read
            for position, slot in use.writes:
                segment_starts.append(first_row + position - start)
                segment_reads.append(read)
                segment_writes.append(slot)
                read = slot
            first_segments.append(len(segment_reads))
            sequence_starts.append(first_row + num_tokens)
        return cls(
            starts=torch.tensor(segment_starts),
            reads=torch.tensor(segment_reads),
            writes=torch.tensor(segment_writes),
            first_segments=torch.tensor(first_segments),
            sequence_starts=torch.tensor(sequence_starts),
            row_sequences=torch.from_numpy(np.repeat(np.arange(num_sequences), lens)),
            row_segments=torch.from_numpy(np.repeat(np.arange(len(segment_reads)), np.diff(segment_starts))),
            is_decode=False,
        )

    def to(self, device: torch.device) -> RecurrentStep:
        """Returns the step with its tensors on a device."""
        return self._replace(
            starts=self.starts.to(device),
            reads=self.reads.to(device),
            writes=self.writes.to(device),
            first_segments=self.first_segments.to(device),
            sequence_starts=self.sequence_starts.to(device),
            row_sequences=self.row_sequences.to(device),
            row_segments=self.row_segments.to(device),
        )

"""The recurrent states that one step reads and writes, as tensors for the mixers of `workers/decoders/mixers/`.

A slot holds the state of all recurrent layers of one sequence after some of its tokens, and is written once. The tokens
of a sequence are cut into segments at the positions whose states are kept: the first segment starts from the slot that
the driver names, and each further one from the slot that the one before it has written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from manta.workers.step import SCRATCH_STATE, ZERO_STATE, StateUse


class RecurrentStep(NamedTuple):
    """One flat batch of tokens, cut into segments in the order of their rows. Each segment has at least one token."""

    starts: torch.Tensor
    """int64 [num_segments + 1]: segment `g` owns the flat rows `[starts[g], starts[g + 1])`."""
    reads: torch.Tensor
    """int64 [num_segments]: the slot with the state before the segment."""
    writes: torch.Tensor
    """int64 [num_segments]: the slot that gets the state after it. No two are equal, and none is read by a segment
    that does not follow it in the same sequence.
    """
    rounds: tuple[torch.Tensor, ...]
    """The segments, int64, that may run at once: the first of every sequence, then the second ones, and so on."""
    sequence_starts: torch.Tensor
    """int64 [num_sequences + 1]: sequence `s` owns the flat rows `[sequence_starts[s], sequence_starts[s + 1])`."""
    is_decode: bool
    """Whether every sequence has one token: segment, sequence and row have the same number."""

    @classmethod
    def measuring(
        cls, num_tokens: int, place: Callable[[np.ndarray], torch.Tensor] = torch.from_numpy
    ) -> RecurrentStep:
        """Builds a step of no sequence, whose result nobody reads."""
        return cls.build([0], [num_tokens], [StateUse(ZERO_STATE, [(num_tokens, SCRATCH_STATE)])], place)

    @classmethod
    def build(
        cls,
        starts: Sequence[int],
        lens: Sequence[int],
        uses: Sequence[StateUse],
        place: Callable[[np.ndarray], torch.Tensor] = torch.from_numpy,
    ) -> RecurrentStep:
        """Returns the step of sequences that compute `lens[s]` tokens from position `starts[s]`. `place` brings arrays
        to the device.
        """
        num_sequences = len(lens)
        if sum(lens) == num_sequences:
            reads = np.array([use.read for use in uses], dtype=np.int64)
            writes = np.array([use.writes[0][1] for use in uses], dtype=np.int64)
            rows = place(np.arange(num_sequences + 1))
            return cls(rows, place(reads), place(writes), (rows[:-1],), rows, is_decode=True)
        segment_starts, sequence_starts = [0], [0]
        segment_reads: list[int] = []
        segment_writes: list[int] = []
        rounds: list[list[int]] = []
        for start, num_tokens, use in zip(starts, lens, uses, strict=True):
            first_row, read = sequence_starts[-1], use.read
            for number, (position, slot) in enumerate(use.writes):
                if number == len(rounds):
                    rounds.append([])
                rounds[number].append(len(segment_reads))
                segment_starts.append(first_row + position - start)
                segment_reads.append(read)
                segment_writes.append(slot)
                read = slot
            sequence_starts.append(first_row + num_tokens)

        def placed(numbers: list[int]) -> torch.Tensor:
            return place(np.array(numbers, dtype=np.int64))

        return cls(
            placed(segment_starts),
            placed(segment_reads),
            placed(segment_writes),
            rounds=tuple(map(placed, rounds)),
            sequence_starts=placed(sequence_starts),
            is_decode=False,
        )

"""The shape of one step's attention: which tokens, at which positions, in which KV slots, over which context.

`AttentionMetadata` is built once a step, on the platform that the model runs on, and read by every layer's kernels.
Computes no attention: see `workers/kernels/`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from manta.workers.kernels.adapter_rows import AdapterRows
from manta.workers.kernels.query_tokens import QueryTokens
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.kernels.shared_prefixes import SharedPrefixes, find_shared_prefixes
from manta.workers.kernels.transfer import place


@dataclasses.dataclass(slots=True)
class AttentionMetadata:
    """One flat batch of query tokens, grouped by sequence in order; prefill chunks and decodes alike.

    Sequence `s` owns the flat rows `[query_start[s], query_start[s + 1])`, which are its last tokens: row `i` of them
    is at position `context_lens[s] - query_len + i` and sees the keys at positions up to its own.
    """

    positions: torch.Tensor
    """int64 [num_tokens]."""
    slot_mapping: torch.Tensor
    """int64 [num_tokens]: the KV slot `block_id * block_size + offset` that the token's key and value are written
    to.
    """
    query_start: torch.Tensor
    """int32 [num_sequences + 1], cumulative; the last entry is num_tokens."""
    context_lens: torch.Tensor
    """int32 [num_sequences]: keys of the sequence, including those of this step's tokens."""
    block_tables: torch.Tensor
    """int32 [num_sequences, max_blocks]. Entries past a sequence's last block are never read, nor are those of blocks
    before the window of its first query token, if the layer has one.
    """
    block_size: int
    """Tokens of a KV block."""
    max_query_len: int
    max_context_len: int
    total_context_len: int
    """Sum of `context_lens`: the keys that a decode step reads."""
    shared_prefixes: SharedPrefixes | None = None
    """Groups of sequences whose shared leading keys a kernel may read once for all of them; the result is the same
    without.
    """
    other_groups: tuple[AttentionMetadata, ...] = ()
    """The same step with the KV slots and block tables of further groups of layers (`workers/kv_groups.py`). Empty if
    all layers have the same blocks.
    """
    states: RecurrentStep | None = None
    """The recurrent states that the step reads and writes; None for models without."""
    adapters: AdapterRows | None = None
    """The rows with adapters; None if no row has one."""
    is_tapped: bool = True
    """Whether the step gives out the residual streams of `ModelConfig.taps`. Steps that a graph may run always do."""

    def of_group(self, group: int) -> AttentionMetadata:
        """Returns the metadata for the layers of a group."""
        return self.other_groups[group - 1] if group and self.other_groups else self

    def in_chunks(self, chunk_size: int) -> AttentionMetadata:
        """Returns metadata in which each chunk of a sequence is a sequence of its own, for layers whose tokens see
        those of their chunk (Llama 4). `chunk_size` is a multiple of `block_size`.
        """
        query_start, context_lens = self.query_start.tolist(), self.context_lens.tolist()
        blocks_per_chunk, width = chunk_size // self.block_size, self.block_tables.shape[1]
        starts, lens, tables = [0], [], []
        for sequence, context_len in enumerate(context_lens):
            first = context_len - (query_start[sequence + 1] - query_start[sequence])
            for chunk in range(first // chunk_size, -(-context_len // chunk_size)):
                end = min(context_len, (chunk + 1) * chunk_size)
                starts.append(starts[-1] + end - max(first, chunk * chunk_size))
                lens.append(end - chunk * chunk_size)
                row = self.block_tables[sequence, chunk * blocks_per_chunk : (chunk + 1) * blocks_per_chunk]
                tables.append(torch.nn.functional.pad(row, (0, min(blocks_per_chunk, width) - len(row))))
        return dataclasses.replace(
            self,
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=torch.stack(tables),
            max_query_len=max(end - start for start, end in itertools.pairwise(starts)),
            max_context_len=max(lens),
            total_context_len=sum(lens),
            shared_prefixes=None,
            other_groups=(),
        )

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.context_lens.shape[0]

    @classmethod
    def build(cls, tokens: QueryTokens) -> AttentionMetadata:
        """Returns metadata on the CPU, which shares the memory of `starts` and `block_tables` where it can.

        A numpy call costs 1 to 3 us whatever its size, so a step of decodes makes as few as possible.
        """
        starts, query_lens, block_size = tokens.starts, tokens.lens, tokens.block_size
        num_sequences = len(starts)
        max_query_len = int(query_lens.max()) if num_sequences else 0
        rows = np.arange(num_sequences + 1)
        if max_query_len <= 1:
            query_start = rows.astype(np.int32)
            rows = rows[:-1]
            positions: np.ndarray = np.ascontiguousarray(starts, dtype=np.int64)
        else:
            query_start = np.zeros(num_sequences + 1, dtype=np.int32)
            np.cumsum(query_lens, out=query_start[1:])
            rows = np.repeat(rows[:-1], query_lens)
            positions = np.arange(query_start[-1], dtype=np.int64) + (starts - query_start[:-1])[rows]
        context_lens = starts + query_lens
        numbers, offsets = positions // block_size, positions % block_size

        def slots_in(tables: np.ndarray) -> torch.Tensor:
            slots = tables[rows, numbers].astype(np.int64)
            slots *= block_size
            slots += offsets
            return torch.from_numpy(slots)

        block_tables = np.ascontiguousarray(tokens.block_tables, dtype=np.int32)
        step = cls(
            positions=torch.from_numpy(positions),
            slot_mapping=slots_in(block_tables),
            query_start=torch.from_numpy(query_start),
            context_lens=torch.from_numpy(context_lens.astype(np.int32)),
            block_tables=torch.from_numpy(block_tables),
            block_size=block_size,
            max_query_len=max_query_len,
            max_context_len=int(context_lens.max()) if num_sequences else 0,
            total_context_len=int(context_lens.sum()),
            shared_prefixes=find_shared_prefixes(tokens) if tokens.may_share else None,
            adapters=tokens.adapters,
            is_tapped=tokens.is_tapped,
        )
        if tokens.states:
            step.states = RecurrentStep.build(starts.tolist(), query_lens.tolist(), tokens.states)
        if tokens.other_tables:
            step.other_groups = tuple(
                dataclasses.replace(
                    step,
                    slot_mapping=slots_in(tables),
                    block_tables=torch.from_numpy(tables),
                    shared_prefixes=None,
                )
                for tables in tokens.other_tables
            )
        return step


def copy_blocks(kv: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies whole blocks (source, destination) of a KV cache [num_layers, 2, num_blocks, ...], on any device.

    All sources are read before any write.
    """
    if not pairs:
        return
    sources, destinations = place(np.array(pairs, dtype=np.int64), kv.device).unbind(1)
    kv[:, :, destinations] = kv[:, :, sources]

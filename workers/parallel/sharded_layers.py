"""The parts of a model that end in a sum or a gather over ranks, around a rank's own embedding and head. The sums after
an attention's output and an MLP's `down` are `Group.row_parallel`'s. Called by the loader.
"""

from __future__ import annotations

import torch

from workers.kernels.attention_metadata import AttentionMetadata
from workers.kernels.weights import Embedding, Linear
from workers.parallel.group import Group


class VocabularyParallelEmbedding:
    """Each rank looks up the tokens whose rows it has, with zeros for the others, so the sum over ranks is exact."""

    def __init__(self, embedding: Embedding, group: Group, rows_per_rank: int) -> None:
        self._embedding = embedding
        self._group = group
        self._first = group.rank * rows_per_rank
        self._num_rows = rows_per_rank

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [num_tokens] -> [num_tokens, hidden]"""
        rows = token_ids - self._first
        is_elsewhere = (rows < 0) | (rows >= self._num_rows)
        embedded = self._embedding(rows.masked_fill(is_elsewhere, 0)).masked_fill_(is_elsewhere.unsqueeze(1), 0)
        return self._group.all_reduce(embedded)


class GatheredHead:
    """Gives rank 0 the logits of the whole vocabulary. The other ranks get their own columns, which nobody reads."""

    def __init__(self, head: Linear, group: Group, vocab_size: int) -> None:
        self._head = head
        self._group = group
        self._vocab_size = vocab_size

    def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
        """[num_rows, hidden] -> [num_rows, vocab_size] on rank 0."""
        own = self._head.forward(x, step)
        parts = self._group.gather(own)
        return own if parts is None else torch.cat(parts, dim=1)[:, : self._vocab_size]

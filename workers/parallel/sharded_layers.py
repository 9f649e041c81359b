"""The layers of a model that end in a sum or a gather over ranks, around a rank's embedding and head.

`Group.row_parallel` sums after the attention's output and the MLP's `down`; `Group.column_parallel` gathers around
them instead. Called by the loader.
"""

from __future__ import annotations

import torch

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.weights import Embedding, Linear
from manta.workers.parallel.group import Group


class VocabularyParallelEmbedding:
    """Looks up the tokens of the rank's rows, and zeros for others, so that the sum over ranks is exact."""

    def __init__(self, embedding: Embedding, group: Group, rows_per_rank: int) -> None:
        self._embedding = embedding
        self._group = group
        self._first = group.rank * rows_per_rank
        self._num_rows = rows_per_rank

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [num_tokens, hidden] of token ids int64 [num_tokens]."""
        rows = token_ids - self._first
        is_elsewhere = (rows < 0) | (rows >= self._num_rows)
        embedded = self._embedding(rows.masked_fill(is_elsewhere, 0)).masked_fill_(is_elsewhere.unsqueeze(1), 0)
        return self._group.all_reduce(embedded)


class WideNorm:
    """The RMS norm of all query heads, or of all key heads, together. Of ranks each has some of them."""

    def __init__(self, weight: torch.Tensor, size: int, eps: float, group: Group) -> None:
        """`weight` is the rank's share of `size` numbers. Ranks with the same key heads have them several times."""
        self._weight = weight.float()
        self._size = group.num_ranks * weight.numel()
        assert self._size % size == 0
        self._eps = eps
        self._group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x [num_tokens, the rank's width] after the norm, in its dtype."""
        wide = x.float()
        squares = self._group.all_reduce(wide.square().sum(-1, keepdim=True))
        return (wide * torch.rsqrt(squares / self._size + self._eps) * self._weight).to(x.dtype)


class GatheredHead:
    """Computes the logits of the whole vocabulary on rank 0. Other ranks return their own columns, which
    are not used.
    """

    def __init__(self, head: Linear, group: Group, vocab_size: int) -> None:
        self._head = head
        self._group = group
        self._vocab_size = vocab_size

    def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
        """Returns logits [num_rows, vocab_size] on rank 0 from x [num_rows, hidden]."""
        own = self._head.forward(x, step)
        parts = self._group.gather(own)
        return own if parts is None else torch.cat(parts, dim=1)[:, : self._vocab_size]

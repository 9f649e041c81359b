"""The layers of a model that end in a sum or a gather over ranks, around a rank's embedding, experts and head.

`Group.row_parallel` sums after the attention's output and the MLP's `down`; `Group.column_parallel` gathers around
them instead. Called by the loader.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import RecurrentKernels
from manta.workers.kernels.weights import Embedding, Experts, Linear
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


class SquaresOverRanks:
    """Sums the squares of rows of which each rank has a part, or several ranks the same part. If exact, every rank has
    the whole rows before it sums them, so that the sums have the bits of one rank; otherwise ranks add up their sums.
    """

    def __init__(self, group: Group, is_exact: bool) -> None:
        self._group = group
        self._is_exact = is_exact

    def __call__(self, x: torch.Tensor, size: int, kernels: RecurrentKernels) -> torch.Tensor:
        """Returns sums [num_tokens, 1] over rows of `size` numbers, given a rank's part x [num_tokens, width]."""
        return self.sums(x, size, kernels.sums_of_squares)

    def sums(self, x: torch.Tensor, size: int, sum_rows: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Returns what `__call__` does, with sums that `sum_rows` makes of rows instead of those of squares."""
        rank, (num_tokens, width) = self._group.rank, x.shape
        repeats = self._group.num_ranks * width // size
        if width == size:
            return sum_rows(x)
        if not self._is_exact:
            total = self._group.all_reduce(sum_rows(x))
            return total if repeats == 1 else total / repeats
        rows = x.new_zeros((num_tokens, size))
        if rank % repeats == 0:
            first = rank // repeats * width
            rows[:, first : first + width] = x
        return sum_rows(self._group.all_reduce(rows))


class WideNorm:
    """The RMS norm of all query heads, or of all key heads, together. Of ranks each has some of them."""

    def __init__(self, weight: torch.Tensor, size: int, eps: float, squares_over_ranks: SquaresOverRanks) -> None:
        """`weight` is the rank's share of `size` numbers. Ranks with the same key heads have them several times."""
        self._weight = weight.float()
        self._size = size
        self._eps = eps
        self._squares_over_ranks = squares_over_ranks

    def __call__(self, x: torch.Tensor, kernels: RecurrentKernels) -> torch.Tensor:
        """Returns x [num_tokens, the rank's width] after the norm, in its dtype."""
        wide = x.float()
        squares = self._squares_over_ranks(wide, self._size, kernels)
        return kernels.row_norm(wide, squares, self._size, self._weight, self._eps).to(x.dtype)


class ExpertsOfRank:
    """The experts of a layer that this rank has, whole. It adds nothing for those of other ranks, so that the sum over
    ranks has all.
    """

    def __init__(self, experts: Experts, held: range) -> None:
        self._experts = experts
        self._held = held

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        own = chosen - self._held.start
        return self._experts.forward(x, own.masked_fill((own < 0) | (own >= len(self._held)), -1), shares)


class ExactExpertsOfRanks:
    """The experts of all ranks, each of which has some whole, with the bits of one rank. Ranks exchange the result of
    each expert, and each rank adds up a row's results in the order of the experts.
    """

    def __init__(self, experts: ExpertsOfRank, group: Group) -> None:
        self._experts = experts
        self._group = group

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        num_rows, num_chosen = chosen.shape
        rows = x.repeat_interleave(num_chosen, 0)
        own = self._experts.forward(rows, chosen.reshape(-1, 1), shares.reshape(-1, 1))
        results = self._group.all_reduce(own).view(num_rows, num_chosen, -1)  # all but one rank add zeros: it is exact
        every_row = torch.arange(num_rows, device=x.device)
        total = torch.zeros_like(results[:, 0])
        for place in chosen.argsort(dim=1).unbind(1):
            total += results[every_row, place]
        return total


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

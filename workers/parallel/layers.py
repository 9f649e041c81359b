"""Applies tensor parallelism to a finished decoder's weights, from outside: `workers/models/decoder.py` and the kernels
run a rank's share as they run a whole model.

Two sums over ranks a layer, after `attention_output` and `down` (Shoeybi et al., 2019, "Megatron-LM"), one after the
embedding; logits are gathered on rank 0. Called by the loader.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from workers.checkpoints.weights import DecoderWeights, LayerWeights, Linear
from workers.parallel.group import Group


def parallelise(weights: DecoderWeights, group: Group, vocab_size: int, rows_per_rank: int) -> DecoderWeights:
    """The weights of a rank's share, `rows_per_rank` of the vocabulary's `vocab_size` rows, with the sums over ranks
    built into their linears, embedding and head.
    """
    hidden = weights.final_norm.shape[0]

    def layer(each: LayerWeights) -> LayerWeights:
        return dataclasses.replace(
            each,
            attention_output=group.row_parallel(each.attention_output, hidden, weights.dtype),
            down=group.row_parallel(each.down, hidden, weights.dtype),
        )

    return dataclasses.replace(
        weights,
        embedding=_VocabularyParallelEmbedding(weights.embedding, group, rows_per_rank),
        layers=[layer(each) for each in weights.layers],
        head=_GatheredHead(weights.head, group, vocab_size),
    )


class _VocabularyParallelEmbedding:
    """Each rank looks up the tokens whose rows it has, with zeros for the others, so the sum over ranks is exact."""

    def __init__(self, embedding: Callable[[torch.Tensor], torch.Tensor], group: Group, rows_per_rank: int) -> None:
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


class _GatheredHead:
    """[num_rows, hidden] -> [num_rows, vocab_size] on rank 0; on the others their own columns, which nobody reads."""

    def __init__(self, head: Linear, group: Group, vocab_size: int) -> None:
        self._head = head
        self._group = group
        self._vocab_size = vocab_size

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        own = self._head(hidden)
        parts = self._group.gather(own)
        return own if parts is None else torch.cat(parts, dim=1)[:, : self._vocab_size]

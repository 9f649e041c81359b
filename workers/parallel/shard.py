"""One rank's shard of a checkpoint: its slice of each tensor.

The descriptions in `workers/models/` say how each tensor is split: by heads, by the MLP's inner width, by outputs, or
by rows of the vocabulary. Other tensors are whole on every rank. Computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from manta.workers.checkpoints.checkpoint import Checkpoint
from manta.workers.checkpoints.weight_parts import take_inputs, take_rows
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.models.families import describe
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.specs import Split
from manta.workers.parallel.split import split_outputs

_EVEN = (Split.QUERY_HEADS, Split.INNER, Split.OUTPUTS)
"""Splits that give each rank a part of the outputs of its own, all of one size."""


class CheckpointShard:
    """One rank's view of a checkpoint: given the name and shape of the rank's tensor, it slices the whole one. Slices
    are views of the mapped files, so only they are read.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, rank: int, num_ranks: int, exact: bool = False
    ) -> None:
        """Takes the configuration of the whole model, not of the shard. With `exact` no inputs are split."""
        self._checkpoint = checkpoint
        self._config = config
        self._rank = rank
        self._num_ranks = num_ranks
        spec = split_outputs(describe(config), 1) if exact else describe(config)
        self._splits = {spec.embedding.name: (spec.embedding.split, False)}
        self._shapes = {spec.embedding.name: (spec.embedding.out_features, config.hidden_size)}
        for linear in spec.linears():
            self._splits |= {part.name: (part.split, linear.splits_inputs) for part in linear.parts}
            self._shapes |= {part.name: (part.out_features, linear.in_features) for part in linear.parts}

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def view(self, name: str, shape: tuple[int, ...], kind: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns the rank's slice of a tensor, and raises `ModelError` as `Checkpoint.view` does."""
        split, splits_inputs = self._splits.get(name.rpartition(".")[0], (Split.NOTHING, False))
        if split in _EVEN:
            return self._slice(name, shape, kind, 0, self._rank, self._num_ranks)
        if split is Split.KV_HEADS:
            num_heads = self._config.num_kv_heads
            num_parts = min(num_heads, self._num_ranks)
            return self._slice(name, shape, kind, 0, self._rank * num_parts // self._num_ranks, num_parts)
        if split is Split.VOCABULARY:
            return self._vocabulary_rows(name, shape, kind)
        if splits_inputs and len(shape) > 1:
            return self._slice(name, shape, kind, 1, self._rank, self._num_ranks)
        whole = self._checkpoint.view(name, shape, kind)
        if splits_inputs and name.endswith(".bias") and self._rank > 0:
            return torch.zeros_like(whole)  # the sum over ranks must add the bias once
        return whole

    def _slice(
        self, name: str, shape: tuple[int, ...], kind: torch.dtype, dim: int, part: int, num_parts: int
    ) -> torch.Tensor:
        whole = (*shape[:dim], shape[dim] * num_parts, *shape[dim + 1 :])
        return self._checkpoint.view(name, whole, kind).narrow(dim, part * shape[dim], shape[dim])

    def _vocabulary_rows(self, name: str, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        """Returns the rank's rows of a tensor with a row for each token; the last ranks' rows are padded with zeros."""
        whole = self._checkpoint.view(name, (self._config.vocab_size, *shape[1:]), kind)
        rows = whole[self._rank * shape[0] : (self._rank + 1) * shape[0]]
        return rows if len(rows) == shape[0] else F.pad(rows, (0, 0, 0, shape[0] - len(rows)))

    # ---- quantised weights: whole tensors, of which the weight that they stand for is cut ---------------------------

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape_of(name)

    def kind_of(self, name: str) -> str:
        return self._checkpoint.kind_of(name)

    def has_blocks(self, name: str) -> bool:
        return self._checkpoint.has_blocks(name)

    def stored(self, name: str, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        return self._checkpoint.stored(name, shape, kind)

    def blocks(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._checkpoint.blocks(name, shape)

    def whole_shape(self, name: str, shape: tuple[int, int]) -> tuple[int, int]:
        """Returns the shape of the whole weight of a part, of which a rank holds `shape`."""
        return self._shapes[name]

    def cut(self, name: str, weight: QuantizedWeight | torch.Tensor) -> QuantizedWeight | torch.Tensor:
        """Returns the rank's outputs or inputs of the whole weight of a part.

        Raises `ModelError` if its inputs cannot be divided, because act-order has mixed them.
        """
        split, splits_inputs = self._splits[name]
        out_features, in_features = self._shapes[name]
        if split in _EVEN:
            return take_rows(weight, *_share(out_features, self._rank, self._num_ranks))
        if split is Split.KV_HEADS:
            num_parts = min(self._config.num_kv_heads, self._num_ranks)
            return take_rows(weight, *_share(out_features, self._rank * num_parts // self._num_ranks, num_parts))
        if split is Split.VOCABULARY:
            rows = -(-out_features // self._num_ranks)
            return take_rows(weight, self._rank * rows, (self._rank + 1) * rows)
        if splits_inputs:
            return take_inputs(name, weight, *_share(in_features, self._rank, self._num_ranks))
        return weight

    def release(self, names: Iterable[str]) -> None:
        self._checkpoint.release(names)

    def check_all_used(self, but: Iterable[str] = ()) -> None:
        self._checkpoint.check_all_used(but)


def _share(size: int, part: int, num_parts: int) -> tuple[int, int]:
    """The first of one of several equal shares, and the one after its last."""
    share = size // num_parts
    return part * share, (part + 1) * share

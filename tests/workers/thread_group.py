"""Ranks in threads of one process, whose sums meet in memory: the group of tests that look into the ranks' models."""

from __future__ import annotations

import threading

import torch

from manta.workers.kernels.linears import GatheringLinear, SummedLinear
from manta.workers.kernels.weights import Linear
from manta.workers.parallel.group import OneRank
from tests.patience import PATIENCE_S


class ThreadGroup(OneRank):
    """Ranks in threads of one process."""

    def __init__(self, rank: int, barrier: threading.Barrier, parts: list[torch.Tensor]) -> None:
        self.rank = rank
        self.num_ranks = barrier.parties
        self._barrier = barrier
        self._parts = parts

    @classmethod
    def of(cls, num_ranks: int) -> list[ThreadGroup]:
        barrier, parts = threading.Barrier(num_ranks, timeout=PATIENCE_S), [torch.empty(0)] * num_ranks
        return [cls(rank, barrier, parts) for rank in range(num_ranks)]

    def abort(self) -> None:
        """Lets the other ranks go that wait for this one, which has failed."""
        self._barrier.abort()

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._parts[self.rank] = x.clone()
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(x)).sum(0)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        parts = self._all(x)
        return parts if self.rank == 0 else None

    def row_parallel(self, linear: Linear, out_features: int, dtype: torch.dtype) -> Linear:
        return SummedLinear(linear, self.all_reduce)

    def column_parallel(self, linear: Linear, in_features: int, out_features: int, dtype: torch.dtype) -> Linear:
        return GatheringLinear(linear, lambda x: torch.cat(self._all(x), dim=1))

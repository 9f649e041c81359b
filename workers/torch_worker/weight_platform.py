"""What the loader needs of a platform: the class of `workers/platforms/`, or one that counts what would be loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from manta.workers.kernels.weights import Experts, ExpertsWeights, GatedMlpWeights, Linear, LinearWeight
from manta.workers.models.model_config import ExpertsConfig


class WeightPlatform(Protocol):
    """The members of a `Platform` that concern weights."""

    keeps_float8: bool
    reads_tables_in_files: bool

    def make_linear(self, weight: LinearWeight) -> Linear: ...

    def make_router(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear: ...

    def join_experts(self, experts: Iterable[GatedMlpWeights], config: ExpertsConfig, activation: str) -> Experts: ...

    def fuse_mixture(self, mixture: ExpertsWeights, dtype: torch.dtype) -> Linear | None: ...

    def place_weight(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...

    def place_embedding(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...

    def tied_head(self, table: torch.Tensor) -> Linear | None: ...

"""Factors on queries that grow with their position. Called by the decoder."""

from __future__ import annotations

import torch

from manta.workers.kernels.protocol import Kernels
from manta.workers.models.model_config import QueryGrowth


def query_growth(growth: QueryGrowth | None, positions: torch.Tensor, kernels: Kernels) -> torch.Tensor | None:
    """Returns the factors on the queries of tokens, float32 [num_tokens, 1]; None in a model without any."""
    if growth is None:
        return None
    steps = (positions.float() + growth.first).div_(growth.period)
    steps = steps.floor_() if growth.has_steps else steps.sub_(1).clamp_(min=0)
    return kernels.log1p(steps).mul_(growth.rate).add_(1).unsqueeze(-1)

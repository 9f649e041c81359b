"""The interface of a linear, which `weights.py` and `block_weights.py` hold."""

from __future__ import annotations

from typing import Protocol

import torch

from manta.workers.kernels.attention_metadata import AttentionMetadata


class Linear(Protocol):
    """A linear of any scheme, on any platform; of a model's share, perhaps with the sum over ranks inside."""

    def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
        """x [num_rows, in_features] -> [num_rows, out_features], same dtype. `step` tells which sequence each row
        belongs to, for linears that differ by sequence; None where the rows are not those of a step.
        """
        ...

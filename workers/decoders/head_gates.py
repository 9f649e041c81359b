"""Gates on the values that attention has summed, before its output linear. Called by the decoder."""

from __future__ import annotations

import torch

from manta.workers.kernels.protocol import Kernels


def gated_heads(attended: torch.Tensor, gates: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Returns attended values [num_tokens, num_heads * value_dim] times the sigmoids of `gates`, in their dtype.

    `gates` [num_tokens, num_gates] are before the sigmoid: one for each value, or one for each head.
    """
    factors = kernels.recurrent.sigmoid(gates.float()).unsqueeze(-1)
    return (attended.unflatten(-1, (gates.shape[-1], -1)) * factors).flatten(1).to(attended.dtype)

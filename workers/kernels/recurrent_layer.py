"""The parts of a recurrent layer besides its linears, in plain torch: they define what faster forms compute.

`workers/kernels/recurrence.py` and `workers/kernels/convolution.py` have the two parts with a state. The others are
here: gates, and norms of heads. All numbers are float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from manta.workers.kernels.convolution import convolve
from manta.workers.kernels.recurrence import recur

__all__ = ["convolve", "gated_norm", "recur", "sigmoid", "softplus", "unit_heads"]


def unit_heads(x: torch.Tensor, scale: float, eps: float) -> torch.Tensor:
    """Returns heads x [num_tokens, num_heads, size] of length 1, times `scale`."""
    return x * (torch.rsqrt(x.square().sum(-1, keepdim=True) + eps) * scale)


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    has_sigmoid: bool = False,
    gates_first: bool = False,
) -> torch.Tensor:
    """Returns the RMS norm of each group of x [num_tokens, num_groups, size], times `weight` [size] or
    [num_groups * size] and times SiLU, or with `has_sigmoid` the sigmoid, of `gate` [num_tokens, num_groups * size].
    With `gates_first` the gate comes before the norm. The result is [num_tokens, num_groups * size].
    """
    gates = (gate.sigmoid() if has_sigmoid else F.silu(gate)).view(x.shape)
    gated = x * gates if gates_first else x
    normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    normed = normed * weight.view(-1, x.shape[-1])
    return (normed if gates_first else normed * gates).flatten(1)


def softplus(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Returns `log(1 + exp(x + bias))` of x [num_tokens, width] and `bias` [width]."""
    return F.softplus(x + bias)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return x.sigmoid()

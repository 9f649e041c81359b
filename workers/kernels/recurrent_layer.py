"""The parts of a recurrent layer besides its linears, in plain torch: they define what faster forms compute.

`workers/kernels/recurrence.py` and `workers/kernels/convolution.py` have the two parts with a state. The others are
here: gates, and norms of heads. All numbers are float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from manta.workers.kernels.convolution import convolve
from manta.workers.kernels.recurrence import recur
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.kernels.reference import cap, head_products
from manta.workers.kernels.running_max import running_max
from manta.workers.models.recurrent_shapes import DeltaShape

__all__ = [
    "cap",
    "centred_heads",
    "convolve",
    "delta_step",
    "exp",
    "gated_norm",
    "head_products",
    "recur",
    "row_norm",
    "running_max",
    "sigmoid",
    "silu",
    "softplus",
    "sqrt",
    "sums_of_squares",
    "unit_heads",
]


def delta_step(
    projected: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    shape: DeltaShape,
    unit_eps: float,
    states: tuple[torch.Tensor, ...],
    step: RecurrentStep,
) -> torch.Tensor | None:
    """Computes a gated delta net between its linears in one call, for one token of each sequence. Returns None if the
    device has no such call, or if it does not support the step, dtype or sizes: then nothing has been computed.

    `projected` [num_tokens, width] and the result [num_tokens, num_value_heads * value_dim] are in the dtype of the
    activations. `workers/decoders/mixers/gated_delta.py` says what `projected`, `tensors` and `states` hold, and
    defines the result. `unit_eps` is the constant in the norms of queries and keys.
    """
    return None


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


def silu(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x)


def exp(x: torch.Tensor) -> torch.Tensor:
    """Returns e^x of numbers that are at most 88."""
    return x.exp()


def sqrt(x: torch.Tensor) -> torch.Tensor:
    return x.sqrt()


def centred_heads(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns heads x [num_tokens, num_heads, size] less their mean, divided by their deviation."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)


def sums_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Returns one sum of each row of x [num_tokens, width], [num_tokens, 1]."""
    return x.square().sum(-1, keepdim=True)


def row_norm(
    x: torch.Tensor, squares: torch.Tensor, size: int, weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Returns the RMS norm of rows x [num_tokens, width], times `weight` [width] if there is one. `squares`
    [num_tokens, 1] are the sums of squares of whole rows of `size` numbers, of which x may be one rank's part.
    """
    normed = x * torch.rsqrt(squares / size + eps)
    return normed if weight is None else normed * weight

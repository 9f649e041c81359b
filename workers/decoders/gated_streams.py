"""Several residual streams, of which each part of a layer reads the gated mean and to which it adds its result in
shares of the token's own (Qwen4-Exp). They begin equal. Called by the decoder.

Streams are [num_streams, num_tokens, hidden]. What reads all of them has them side by side, [num_tokens, num_streams *
hidden].
"""

from __future__ import annotations

import torch

from manta.workers.kernels.protocol import Kernels
from manta.workers.kernels.weights import Linear, NormGateWeights


def norm_streams(streams: torch.Tensor, weight: torch.Tensor, eps: float, kernels: Kernels) -> torch.Tensor:
    """Returns the RMS norm of each stream by its part of `weight` [num_streams * hidden], side by side."""
    of_streams = weight.float().view(len(streams), -1)
    normed = []
    for stream, own in zip(streams.float(), of_streams, strict=True):
        squares = kernels.recurrent.sums_of_squares(stream)
        normed.append(kernels.recurrent.row_norm(stream, squares, stream.shape[-1], own.contiguous(), eps))
    return torch.cat(normed, dim=-1).to(streams.dtype)


def norm_gates(gate: NormGateWeights, normed: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Returns the factors on a norm's result, float32 [num_tokens, width]."""
    inner = kernels.recurrent.silu(gate.down.forward(normed).float())
    return kernels.recurrent.sigmoid(gate.up.forward(inner.to(normed.dtype)).float())


def mean_stream(normed: torch.Tensor, gate: NormGateWeights, num_streams: int, kernels: Kernels) -> torch.Tensor:
    """Returns the mean [num_tokens, hidden] of the streams' norms, side by side, times their gates."""
    first, *others = (normed.float() * norm_gates(gate, normed, kernels)).chunk(num_streams, dim=-1)
    for other in others:
        first = first + other
    return (first / num_streams).to(normed.dtype)


def shared_update(
    streams: torch.Tensor, update: torch.Tensor, normed: torch.Tensor, shares: Linear, kernels: Kernels
) -> torch.Tensor:
    """Returns the streams with an update [num_tokens, hidden] times each stream's share of it, at most 2."""
    factors = kernels.recurrent.sigmoid(shares.forward(normed.float())) * 2
    return streams + update * factors.to(update.dtype).T.unsqueeze(-1)

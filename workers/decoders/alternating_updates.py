"""Several residual streams, of which a layer computes one and predicts the others (AltUp; Baykal et al., 2023), and a
residual of low rank beside attention (LAuReL; Menghani et al., 2024), as in Gemma 3n. Called by the decoder.

Streams are [num_streams, num_tokens, hidden], the computed one first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from manta.workers.kernels import reference
from manta.workers.kernels.weights import Linear, UpdatesWeights

Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns the norm of rows, given the norm's weight."""
_LEAST_SQUARE = 1e-5
"""Least mean square of a projected stream, which is scaled to that of the first."""


def spread_streams(linears: tuple[Linear, ...], embedded: torch.Tensor) -> torch.Tensor:
    """Returns all streams of embeddings [num_tokens, hidden]: these, and projections of the same size."""
    size = _mean_square(embedded).sqrt()
    return torch.stack([embedded, *(_of_size(linear.forward(embedded), size) for linear in linears)])


def gathered_streams(linears: tuple[Linear, ...], streams: torch.Tensor) -> torch.Tensor:
    """Returns the mean [num_tokens, hidden] of the first stream and of projections of the others of the same size."""
    size = _mean_square(streams[0]).sqrt()
    others = [_of_size(linear.forward(each), size) for linear, each in zip(linears, streams[1:], strict=True)]
    return torch.stack([streams[0], *others]).mean(dim=0)


def predicted_streams(weights: UpdatesWeights, streams: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Returns what the streams would be after the layer."""
    count = len(streams)
    factors = weights.prediction.forward(_routed(weights, streams[0], norm)).unflatten(-1, (count, count))
    return streams + torch.einsum("nto,onh->tnh", factors.to(streams.dtype), streams)


def corrected_streams(
    weights: UpdatesWeights, predicted: torch.Tensor, computed: torch.Tensor, norm: Norm
) -> torch.Tensor:
    """Returns the streams after the layer, which has computed the first, [num_tokens, hidden]."""
    factors = weights.correction.forward(_routed(weights, computed, norm)) + 1
    return predicted + (computed - predicted[0]) * factors.to(computed.dtype).T.unsqueeze(-1)


def low_rank_residual(weights: UpdatesWeights, normed: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Returns the residual beside attention, of normed hidden states [num_tokens, hidden]."""
    left, right = weights.low_rank
    return normed + norm(right.forward(left.forward(normed)), weights.low_rank_norm)


def sparse_gate(
    activation: str,
    width: int,
    deviations: float,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
    gate_up: torch.Tensor,
) -> torch.Tensor:
    """Returns `activation(relu(gate - cutoff)) * up` of gate_up [num_tokens, 2 * inner], gates first. The cutoff of a
    token lies so many standard deviations above the mean of its `width` gates, of which each rank has a part.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    mean = sum_over_ranks(gate.sum(-1, keepdim=True)) / width
    variance = sum_over_ranks((gate - mean).square().sum(-1, keepdim=True)) / width
    kept = F.relu(gate - mean - deviations * variance.sqrt())
    return reference.GATES[activation](kept, up).to(gate_up.dtype)


def _routed(weights: UpdatesWeights, stream: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Returns the router's numbers, float32 [num_tokens, num_streams]."""
    normed = norm(stream, weights.router_norm) * stream.shape[-1] ** -1.0
    return torch.tanh(weights.router.forward(normed.float()))


def _mean_square(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean(dim=-1, keepdim=True)


def _of_size(projected: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    return projected * size / _mean_square(projected).clamp(min=_LEAST_SQUARE).sqrt()

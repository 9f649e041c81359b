"""Several residual streams, of which a layer computes one and predicts the others (AltUp; Baykal et al., 2023), and a
residual of low rank beside attention (LAuReL; Menghani et al., 2024), as in Gemma 3n. Called by the decoder.

Streams are [num_streams, num_tokens, hidden], the computed one first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from manta.workers.kernels.protocol import Kernels
from manta.workers.kernels.weights import Linear, SparseGates, UpdatesWeights

Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns the norm of rows, given the norm's weight."""
_LEAST_SQUARE = 1e-5
"""Least mean square of a projected stream, which is scaled to that of the first."""
_LEAST_VARIANCE = 1e-30
"""A number that is added to variances below a root, so that a variance of zero has one."""


def spread_streams(linears: tuple[Linear, ...], embedded: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Returns all streams of embeddings [num_tokens, hidden]: these, and projections of the same size."""
    size = _mean_square(embedded, kernels)
    projected = (_of_size(linear.forward(embedded), size, kernels) for linear in linears)
    return torch.stack([embedded, *(each.to(embedded.dtype) for each in projected)])


def gathered_streams(linears: tuple[Linear, ...], streams: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Returns the mean [num_tokens, hidden] of the first stream and of projections of the others of the same size."""
    size, total = _mean_square(streams[0], kernels), streams[0].float()
    for linear, stream in zip(linears, streams[1:], strict=True):
        total = total + _of_size(linear.forward(stream), size, kernels)
    return (total / len(streams)).to(streams.dtype)


def predicted_streams(weights: UpdatesWeights, streams: torch.Tensor, norm: Norm, kernels: Kernels) -> torch.Tensor:
    """Returns what the streams would be after the layer. The streams are added one after the other, in float32."""
    count = len(streams)
    factors = weights.prediction.forward(_routed(weights, streams[0], norm, kernels)).unflatten(-1, (count, count))
    total = streams.float()
    for number, stream in enumerate(streams):
        total = total + factors[:, :, number].T.unsqueeze(-1) * stream.float()
    return total.to(streams.dtype)


def corrected_streams(
    weights: UpdatesWeights, predicted: torch.Tensor, computed: torch.Tensor, norm: Norm, kernels: Kernels
) -> torch.Tensor:
    """Returns the streams after the layer, which has computed the first, [num_tokens, hidden]."""
    factors = weights.correction.forward(_routed(weights, computed, norm, kernels)) + 1
    return predicted + (computed - predicted[0]) * factors.to(computed.dtype).T.unsqueeze(-1)


def low_rank_residual(weights: UpdatesWeights, normed: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Returns the residual beside attention, of normed hidden states [num_tokens, hidden]."""
    left, right = weights.low_rank
    return normed + norm(right.forward(left.forward(normed)), weights.low_rank_norm)


def sparse_gate(activation: str, gates: SparseGates, kernels: Kernels, gate_up: torch.Tensor) -> torch.Tensor:
    """Returns `activation(relu(gate - cutoff)) * up` of gate_up [num_tokens, 2 * inner], gates first. The cutoff of a
    token lies `gates.deviations` standard deviations above the mean of all of its gates, of which each rank has a part.
    """

    def sum_rows(x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, n] -> [num_tokens, 1]"""
        return kernels.head_products(x.unsqueeze(1), x.new_ones((1, x.shape[1], 1))).squeeze(1)

    gate, up = gate_up.chunk(2, dim=-1)
    wide, width = gate.float(), gates.width
    centred = wide - gates.sums_over_ranks.sums(wide, width, sum_rows) / width
    variance = gates.sums_over_ranks(centred, width, kernels.recurrent) / width
    deviation = kernels.recurrent.row_norm(variance, variance, 1, None, _LEAST_VARIANCE)
    kept = F.relu(centred - deviation * gates.deviations)
    return kernels.gate(activation, torch.cat((kept.to(up.dtype), up), dim=-1))


def _routed(weights: UpdatesWeights, stream: torch.Tensor, norm: Norm, kernels: Kernels) -> torch.Tensor:
    """Returns the router's numbers, float32 [num_tokens, num_streams]."""
    normed = norm(stream, weights.router_norm) * stream.shape[-1] ** -1.0
    return kernels.recurrent.cap(weights.router.forward(normed.float()), 1.0)


def _mean_square(x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Returns the mean squares of rows x [num_tokens, hidden], float32 [num_tokens, 1]."""
    return kernels.recurrent.sums_of_squares(x.float()) / x.shape[-1]


def _of_size(projected: torch.Tensor, size: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Returns rows, float32 [num_tokens, hidden], scaled to the mean squares `size` [num_tokens, 1]."""
    relative = _mean_square(projected, kernels).clamp(min=_LEAST_SQUARE) / size
    return kernels.recurrent.row_norm(projected.float(), relative, 1, None, 0.0)

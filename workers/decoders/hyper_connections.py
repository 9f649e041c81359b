"""Hyper-connections (Zhu et al., 2024): several residual streams. Each part of a layer reads the sum of all streams by
shares that it computes of them, and its result is added to every stream by further shares. In manifold-constrained ones
(mHC; Xie et al., 2026; DeepSeek-V4) the streams are mixed before, by a matrix whose rows and columns sum to 1.

Streams are [num_tokens, num_streams, hidden]. All sums are made one term after the other. Called by the decoder.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from manta.workers.kernels.protocol import Kernels
from manta.workers.kernels.weights import ConnectionWeights
from manta.workers.models.part_shapes import HyperConnections


class Connection:
    """One part of a layer between the streams: `read` computes the shares, by which `write` adds the part's result."""

    def __init__(
        self, weights: ConnectionWeights, *, shape: HyperConnections, norm_eps: float, kernels: Kernels
    ) -> None:
        self._weights = weights
        self._shape = shape
        self._norm_eps = norm_eps
        self._kernels = kernels.recurrent
        self._numbers = torch.empty(0)
        """What the shares for writing and mixing are made of, float32 [num_tokens, num_shares - num_streams]."""

    def read(self, streams: torch.Tensor) -> torch.Tensor:
        """Returns what the part reads, [num_tokens, hidden]."""
        count, weights, kernels = self._shape.num_streams, self._weights, self._kernels
        wide = streams.flatten(1).float()
        normed = kernels.row_norm(wide, kernels.sums_of_squares(wide), wide.shape[1], None, self._norm_eps)
        numbers = weights.shares.forward(normed) * weights.scales + weights.bases
        read, self._numbers = numbers[:, :count], numbers[:, count:]
        shares = kernels.sigmoid(read) + self._shape.eps
        terms = (share * stream.float() for share, stream in zip(shares.split(1, -1), streams.unbind(1), strict=True))
        return _sum(terms).to(streams.dtype)

    def write(self, update: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """Returns the streams after the part, whose result `update` is [num_tokens, hidden]."""
        count, shape = self._shape.num_streams, self._shape
        written = self._kernels.sigmoid(self._numbers[:, :count]) * shape.magnitude + shape.write_eps
        kept = streams.float()
        if shape.mixing_steps:
            rows = self._mixing(self._numbers[:, count:].unflatten(-1, (count, count))).unbind(1)
            kept = _sum(
                row.unsqueeze(-1) * stream.unsqueeze(1) for row, stream in zip(rows, kept.unbind(1), strict=True)
            )
        return (written.unsqueeze(-1) * update.float().unsqueeze(1) + kept).to(streams.dtype)

    def _mixing(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns matrices [num_tokens, num_streams, num_streams] whose rows and columns sum to about 1. The share of a
        stream in a mixed one is in the row of the stream and the column of the mixed one.
        """
        eps = self._shape.eps
        powers = self._kernels.exp(numbers - numbers.amax(-1, keepdim=True))
        shares = powers / _sum(powers.split(1, -1)) + eps
        shares = shares / (_sum(shares.split(1, -2)) + eps)
        for _ in range(self._shape.mixing_steps - 1):
            shares = shares / (_sum(shares.split(1, -1)) + eps)
            shares = shares / (_sum(shares.split(1, -2)) + eps)
        return shares


def _sum(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, terms)

"""Hyper-connections (Zhu et al., 2024): several residual streams. Each part of a layer reads the sum of all streams by
shares that it computes of them, and its result is added to every stream by further shares. In manifold-constrained ones
(mHC; Xie et al., 2026; DeepSeek-V4) the streams are mixed before, by a matrix whose rows and columns sum to 1.

Streams are [num_tokens, num_streams, hidden]. All sums are made one term after the other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import torch

from manta.workers.kernels.protocol import Kernels
from manta.workers.kernels.weights import ConnectionWeights, DecoderWeights, LayerWeights
from manta.workers.models.model_config import ModelConfig
from manta.workers.models.part_shapes import HyperConnections


class ConnectedStreams:
    """`ResidualStreams` with hyper-connections. They begin equal."""

    def __init__(self, weights: DecoderWeights, config: ModelConfig, shape: HyperConnections, kernels: Kernels) -> None:
        self._final_norm = weights.final_norm
        self._gathering = weights.gathering
        self._shape = shape
        self._eps = config.rms_norm_eps
        self._kernels = kernels

    def spread(self, embedded: torch.Tensor) -> torch.Tensor:
        return embedded.unsqueeze(1).expand(-1, self._shape.num_streams, -1)

    def parts(self, layer: LayerWeights, own_input: torch.Tensor | None) -> tuple[Connection, Connection]:
        of_mixer, of_mlp = layer.connections
        return self._connection(of_mixer, layer.input_norm), self._connection(of_mlp, layer.mlp_norm)

    def gather(self, streams: torch.Tensor) -> torch.Tensor:
        """Returns the normed mean of the streams, or what one more part reads of them."""
        if self._gathering is not None:
            return self._connection(self._gathering, self._final_norm).read(streams)
        mean = _sum(streams.float().unbind(1)) / self._shape.num_streams
        return self._kernels.rms_norm(mean.to(streams.dtype), self._final_norm, self._eps)

    def _connection(self, weights: ConnectionWeights, norm: torch.Tensor | None) -> Connection:
        assert norm is not None
        return Connection(weights, norm, self._shape, self._eps, self._kernels)


@dataclasses.dataclass(slots=True)
class Connection:
    """One part of a layer between the streams: `read` computes the shares, by which `write` adds the part's result."""

    weights: ConnectionWeights
    norm: torch.Tensor
    """The weight of the norm of what the part reads."""
    shape: HyperConnections
    eps: float
    """The constant in norms."""
    kernels: Kernels
    numbers: torch.Tensor = dataclasses.field(init=False)
    """What the shares for writing and mixing are made of, float32 [num_tokens, num_shares - num_streams]."""

    def read(self, streams: torch.Tensor) -> torch.Tensor:
        count, weights, kernels = self.shape.num_streams, self.weights, self.kernels.recurrent
        wide = streams.flatten(1).float()
        normed = kernels.row_norm(wide, kernels.sums_of_squares(wide), wide.shape[1], None, self.eps)
        numbers = weights.shares.forward(normed) * weights.scales + weights.bases
        read, self.numbers = numbers[:, :count], numbers[:, count:]
        shares = kernels.sigmoid(read) + self.shape.eps
        terms = (share * stream.float() for share, stream in zip(shares.split(1, -1), streams.unbind(1), strict=True))
        return self.kernels.rms_norm(_sum(terms).to(streams.dtype), self.norm, self.eps)

    def write(self, update: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        count, shape = self.shape.num_streams, self.shape
        written = self.kernels.recurrent.sigmoid(self.numbers[:, :count]) * shape.magnitude + shape.write_eps
        kept = streams.float()
        if shape.mixing_steps:
            rows = self._mixing(self.numbers[:, count:].unflatten(-1, (count, count))).unbind(1)
            kept = _sum(
                row.unsqueeze(-1) * stream.unsqueeze(1) for row, stream in zip(rows, kept.unbind(1), strict=True)
            )
        return (written.unsqueeze(-1) * update.float().unsqueeze(1) + kept).to(streams.dtype)

    def _mixing(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns matrices [num_tokens, num_streams, num_streams] whose rows and columns sum to about 1. The share of a
        stream in a mixed one is in the row of the stream and the column of the mixed one.
        """
        eps = self.shape.eps
        powers = self.kernels.recurrent.exp(numbers - numbers.amax(-1, keepdim=True))
        shares = powers / _sum(powers.split(1, -1)) + eps
        shares = shares / (_sum(shares.split(1, -2)) + eps)
        for _ in range(self.shape.mixing_steps - 1):
            shares = shares / (_sum(shares.split(1, -1)) + eps)
            shares = shares / (_sum(shares.split(1, -2)) + eps)
        return shares


def _sum(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, terms)

"""Several residual streams, of which each part of a layer reads the gated mean and to which it adds its result in
shares of the token's own (Qwen4-Exp). They begin equal.

Streams are [num_streams, num_tokens, hidden]. What reads all of them has them side by side, [num_tokens, num_streams *
hidden].
"""

from __future__ import annotations

import dataclasses

import torch

from manta.workers.kernels.protocol import Kernels
from manta.workers.kernels.weights import DecoderWeights, LayerWeights, Linear, NormGateWeights
from manta.workers.models.model_config import ModelConfig


class GatedStreams:
    """`ResidualStreams` whose gated norms are averaged."""

    def __init__(self, weights: DecoderWeights, config: ModelConfig, kernels: Kernels) -> None:
        self._final_norm = weights.final_norm
        self._final_gate = weights.final_gate
        self._count = config.num_gated_streams
        self._eps = config.rms_norm_eps
        self._kernels = kernels

    def spread(self, embedded: torch.Tensor) -> torch.Tensor:
        return embedded.expand(self._count, -1, -1)

    def parts(self, layer: LayerWeights, own_input: torch.Tensor | None) -> tuple[GatedPart, GatedPart]:
        assert layer.stream_shares is not None
        of_mixer, of_mlp = layer.stream_shares
        return (
            self._part(layer.input_norm, layer.input_gate, of_mixer),
            self._part(layer.mlp_norm, layer.mlp_gate, of_mlp),
        )

    def gather(self, streams: torch.Tensor) -> torch.Tensor:
        assert self._final_gate is not None
        normed = norm_streams(streams, self._final_norm, self._eps, self._kernels)
        return mean_stream(normed, self._final_gate, self._count, self._kernels)

    def _part(self, norm: torch.Tensor | None, gate: NormGateWeights | None, shares: Linear) -> GatedPart:
        assert norm is not None
        assert gate is not None
        return GatedPart(norm, gate, shares, self._eps, self._kernels)


@dataclasses.dataclass(slots=True)
class GatedPart:
    """One part of a layer between the streams: `write` makes its shares of the norms that `read` has computed."""

    norm: torch.Tensor
    gate: NormGateWeights
    shares: Linear
    eps: float
    kernels: Kernels
    normed: torch.Tensor = dataclasses.field(init=False)

    def read(self, streams: torch.Tensor) -> torch.Tensor:
        self.normed = norm_streams(streams, self.norm, self.eps, self.kernels)
        return mean_stream(self.normed, self.gate, len(streams), self.kernels)

    def write(self, update: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """Adds to each stream its share of the update, at most twice."""
        factors = self.kernels.recurrent.sigmoid(self.shares.forward(self.normed.float())) * 2
        return streams + update * factors.to(update.dtype).T.unsqueeze(-1)


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

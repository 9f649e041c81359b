"""Several residual streams, of which a layer computes one and predicts the others (AltUp; Baykal et al., 2023), and a
residual of low rank beside attention (LAuReL; Menghani et al., 2024), as in Gemma 3n.

Streams are [num_streams, num_tokens, hidden], the computed one first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from manta.workers.decoders.layer_inputs import add_own_input
from manta.workers.kernels.linears import GatedLinear
from manta.workers.kernels.protocol import Kernels
from manta.workers.kernels.weights import DecoderWeights, GatedMlpWeights, LayerWeights, SparseGates
from manta.workers.models.model_config import ModelConfig

_LEAST_SQUARE = 1e-5
"""Least mean square of a projected stream, which is scaled to that of the first."""
_LEAST_VARIANCE = 1e-30
"""A number that is added to variances below a root, so that a variance of zero has one."""


class AlternatingUpdates:
    """`ResidualStreams` of which a layer computes one."""

    def __init__(self, weights: DecoderWeights, config: ModelConfig, kernels: Kernels) -> None:
        assert weights.streams is not None
        self._weights = weights.streams
        self._final_norm = weights.final_norm
        self._config = config
        self._kernels = kernels

    def spread(self, embedded: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings, and projections of the same size."""
        size = _mean_square(embedded, self._kernels)
        projected = (_of_size(linear.forward(embedded), size, self._kernels) for linear in self._weights.spread)
        return torch.stack([embedded, *(each.to(embedded.dtype) for each in projected)])

    def parts(self, layer: LayerWeights, own_input: torch.Tensor | None) -> tuple[ComputedPart, ComputedPart]:
        computed = ComputedStream(layer, own_input, self._config, self._kernels)
        return (
            ComputedPart(computed.read_for_mixer, computed.write_mixed),
            ComputedPart(computed.read_for_mlp, computed.write_corrected),
        )

    def gather(self, streams: torch.Tensor) -> torch.Tensor:
        """Returns the normed mean of the first stream and of projections of the others of the same size."""
        size, total = _mean_square(streams[0], self._kernels), streams[0].float()
        for linear, stream in zip(self._weights.gather, streams[1:], strict=True):
            total = total + _of_size(linear.forward(stream), size, self._kernels)
        mean = (total / len(streams)).to(streams.dtype)
        return self._kernels.rms_norm(mean, self._final_norm, self._config.rms_norm_eps)


class ComputedPart(NamedTuple):
    """A `StreamPart`: a layer's mixer or its MLP."""

    read: Callable[[torch.Tensor], torch.Tensor]
    write: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class ComputedStream:
    """The first stream in a layer, and all streams, predicted before the layer's mixer and corrected after its MLP."""

    def __init__(
        self, layer: LayerWeights, own_input: torch.Tensor | None, config: ModelConfig, kernels: Kernels
    ) -> None:
        assert layer.updates is not None
        self._layer = layer
        self._updates = layer.updates
        self._own_input = own_input
        self._config = config
        self._kernels = kernels
        self._predicted = torch.empty(0)
        self._stream = torch.empty(0)

    def read_for_mixer(self, streams: torch.Tensor) -> torch.Tensor:
        self._predicted = self._predictions(streams)
        self._stream = self._norm(self._predicted[0], self._layer.input_norm)
        return self._stream

    def write_mixed(self, update: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """Adds the mixer's result and a residual of low rank to the first stream. Returns all as predicted."""
        normed, (left, right) = self._stream, self._updates.low_rank
        beside = normed + self._norm(right.forward(left.forward(normed)), self._updates.low_rank_norm)
        attended = self._predicted[0] + self._norm(update, self._layer.mixer_output_norm)
        self._stream = (attended + beside) * 2**-0.5
        return self._predicted

    def read_for_mlp(self, streams: torch.Tensor) -> torch.Tensor:
        return self._norm(self._stream, self._layer.mlp_norm)

    def write_corrected(self, update: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """Corrects all streams by the first, and adds the layer's own input to the others."""
        assert self._layer.own_input is not None
        assert self._own_input is not None
        computed = self._stream + self._norm(update, self._layer.mlp_output_norm)
        factors = self._updates.correction.forward(self._routed(computed)) + 1
        corrected = streams + (computed - streams[0]) * factors.to(computed.dtype).T.unsqueeze(-1)
        scale = self._updates.output_scale
        first = corrected[0] if scale is None else corrected[0] * scale
        corrected[1:] += add_own_input(self._layer.own_input, first, self._own_input, self._config, self._kernels)
        return corrected

    def _predictions(self, streams: torch.Tensor) -> torch.Tensor:
        """Returns what the streams would be after the layer. They are added one after the other, in float32."""
        count = len(streams)
        factors = self._updates.prediction.forward(self._routed(streams[0])).unflatten(-1, (count, count))
        total = streams.float()
        for number, stream in enumerate(streams):
            total = total + factors[:, :, number].T.unsqueeze(-1) * stream.float()
        return total.to(streams.dtype)

    def _routed(self, stream: torch.Tensor) -> torch.Tensor:
        """Returns the router's numbers, float32 [num_tokens, num_streams]."""
        normed = self._norm(stream, self._updates.router_norm) * stream.shape[-1] ** -1.0
        return self._kernels.recurrent.cap(self._updates.router.forward(normed.float()), 1.0)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        assert weight is not None
        return self._kernels.rms_norm(x, weight, self._config.rms_norm_eps)


def with_sparse_gates(layer: LayerWeights, activation: str, kernels: Kernels) -> LayerWeights:
    """Returns the layer with an MLP that turns off a part of its gates, if it has such."""
    gates = None if layer.updates is None else layer.updates.sparse_gates
    if gates is None:
        return layer
    assert isinstance(layer.mlp, GatedMlpWeights)
    gate = functools.partial(sparse_gate, activation, gates, kernels)
    return dataclasses.replace(layer, mlp=GatedMlpWeights(GatedLinear(layer.mlp.gated, gate), layer.mlp.down))


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


def _mean_square(x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Returns the mean squares of rows x [num_tokens, hidden], float32 [num_tokens, 1]."""
    return kernels.recurrent.sums_of_squares(x.float()) / x.shape[-1]


def _of_size(projected: torch.Tensor, size: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Returns rows, float32 [num_tokens, hidden], scaled to the mean squares `size` [num_tokens, 1]."""
    relative = _mean_square(projected, kernels).clamp(min=_LEAST_SQUARE) / size
    return kernels.recurrent.row_norm(projected.float(), relative, 1, None, 0.0)

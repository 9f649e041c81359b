"""Several residual streams as one object: each part of a layer, its mixer and its MLP, reads hidden states of them and
writes its result to them. `residual_streams` returns the kind that a model has. Called by the decoder.

The shape of the streams is that of each kind. Callers only hand them from one call to the next.
"""

from __future__ import annotations

from typing import Protocol

import torch

from manta.workers.decoders.alternating_updates import AlternatingUpdates
from manta.workers.decoders.gated_streams import GatedStreams
from manta.workers.decoders.hyper_connections import ConnectedStreams
from manta.workers.kernels.protocol import Kernels
from manta.workers.kernels.weights import DecoderWeights, LayerWeights
from manta.workers.models.model_config import ModelConfig


class StreamPart(Protocol):
    """A part of a layer between the streams, for one step: `read` is called once, and then `write`."""

    def read(self, streams: torch.Tensor, /) -> torch.Tensor:
        """Returns what the part reads, normed hidden states [num_tokens, hidden]."""
        ...

    def write(self, update: torch.Tensor, streams: torch.Tensor, /) -> torch.Tensor:
        """Returns the streams after the part, whose result `update` is [num_tokens, hidden]."""
        ...


class ResidualStreams(Protocol):
    def spread(self, embedded: torch.Tensor) -> torch.Tensor:
        """Returns the streams before the first layer, of embeddings [num_tokens, hidden]."""
        ...

    def parts(self, layer: LayerWeights, own_input: torch.Tensor | None) -> tuple[StreamPart, StreamPart]:
        """Returns a layer's mixer and its MLP between the streams, given the input that the layer has of its own."""
        ...

    def gather(self, streams: torch.Tensor) -> torch.Tensor:
        """Returns the hidden states after the last norm, [num_tokens, hidden], of the streams after the last layer."""
        ...


def residual_streams(weights: DecoderWeights, config: ModelConfig, kernels: Kernels) -> ResidualStreams | None:
    """Returns the residual streams of a model; None for a model with one."""
    if config.connections is not None:
        return ConnectedStreams(weights, config, config.connections, kernels)
    if config.num_gated_streams > 1:
        return GatedStreams(weights, config, kernels)
    return None if weights.streams is None else AlternatingUpdates(weights, config, kernels)

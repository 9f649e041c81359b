"""From the vectors of a text's tokens to the answer: pooling, dense layers, normalisation, activations.

Computes in float32, whatever the model's dtype. Source: sentence-transformers' modules of the same names.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import torch
from safetensors.torch import load_file
from torch.nn import functional

from manta.workers.checkpoints.stored_files import find_file
from manta.workers.models.model_config import ModelError
from manta.workers.pooling_info import Activation, DenseLayer, PoolingInfo, PoolingMode

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda numbers: numbers,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "sigmoid": torch.sigmoid,
    "softmax": lambda numbers: numbers.softmax(-1),
}


class EmbeddingHead:
    """Makes a vector of the tokens of a text. Raises `ModelError` if the weights of a dense layer are missing."""

    def __init__(self, folder: pathlib.Path, info: PoolingInfo, device: torch.device) -> None:
        self._info = info
        self._dense = [_Dense(folder, layer, device) for layer in info.dense]

    def __call__(self, hidden: torch.Tensor, num_skipped: int) -> torch.Tensor:
        """Returns [dimension] of hidden states [num_tokens, hidden]. The first `num_skipped` tokens belong to a prompt,
        which is pooled only if the model was trained so.
        """
        first = 0 if self._info.includes_prompt else min(num_skipped, hidden.shape[0] - 1)
        hidden = hidden.float()
        vector = torch.cat([pool(hidden, mode, first) for mode in self._info.modes])
        for layer in self._dense:
            vector = layer(vector)
        return functional.normalize(vector, dim=0) if self._info.normalises else vector


class _Dense:
    def __init__(self, folder: pathlib.Path, layer: DenseLayer, device: torch.device) -> None:
        name = f"{layer.folder}/model.safetensors"
        if find_file(folder, name) is None:
            raise ModelError(f"{folder / name} is missing; the weights of a dense layer must be safetensors")
        stored = load_file(str(folder / name))
        shape = (layer.out_features, layer.in_features)
        weight, bias = stored.get("linear.weight"), stored.get("linear.bias")
        if weight is None or tuple(weight.shape) != shape or (bias is None) == layer.has_bias:
            raise ModelError(f"{folder / name} must hold linear.weight {list(shape)} and its bias, if there is one")
        self._weight = weight.float().to(device)
        self._bias = None if bias is None else bias.float().to(device)
        self._activation = ACTIVATIONS[layer.activation]

    def __call__(self, vector: torch.Tensor) -> torch.Tensor:
        return self._activation(functional.linear(vector, self._weight, self._bias))


def pool(hidden: torch.Tensor, mode: PoolingMode, first: int = 0) -> torch.Tensor:
    """Returns [hidden] of a text's tokens [num_tokens, hidden], without those before `first`."""
    own = hidden[first:]
    if mode == "cls":
        return own[0]
    if mode == "lasttoken":
        return own[-1]
    if mode == "max":
        return own.max(dim=0).values
    if mode == "weightedmean":
        weights = torch.arange(first + 1, hidden.shape[0] + 1, device=hidden.device, dtype=hidden.dtype)
        return weights @ own / weights.sum()
    total = own.sum(dim=0)
    return total / (own.shape[0] if mode == "mean" else own.shape[0] ** 0.5)

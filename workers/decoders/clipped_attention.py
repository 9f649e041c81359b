"""Inkling 2's attention: queries and keys are not longer than a bound, and values have a norm. Convolutions over
earlier tokens are added to keys and values, in some layers with taps that depend on the token. Called by the decoder.
"""

from __future__ import annotations

import torch

from manta.workers.decoders.distance_attention import attend_with_distances
from manta.workers.decoders.head_gates import gated_heads
from manta.workers.decoders.mixers.short_conv import with_convolution
from manta.workers.decoders.mixers.windows import channels_of
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.block_weights import ClippedAttentionWeights, ConvolutionWeights
from manta.workers.kernels.protocol import Kernels, RecurrentKernels
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.models.model_config import HeadShape
from manta.workers.models.part_shapes import InklingShape

_LENGTH_EPS = 1e-6
"""A number that is added to lengths, as in transformers."""


def attend_clipped(
    weights: ClippedAttentionWeights,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cos_sin: torch.Tensor,
    metadata: AttentionMetadata,
    caches: tuple[torch.Tensor, ...],
    heads: HeadShape,
    shape: InklingShape,
    sliding_window: int | None,
    growth: torch.Tensor | None,
    eps: float,
    kernels: Kernels,
) -> torch.Tensor:
    """Returns the result [num_tokens, hidden], and writes keys, values and the windows of convolutions. `rows` are what
    queries, keys and values are made of, [num_tokens, hidden] each. `caches` are keys, values, and the windows of both.
    `growth` [num_tokens, 1] multiplies queries and the numbers for distances.
    """
    step = metadata.states
    assert step is not None
    of_query, of_key, of_value = rows
    k_cache, v_cache, *windows = caches
    scale = 1.0 if growth is None else growth.unsqueeze(-1)

    def bounded(projected: torch.Tensor, factors: torch.Tensor, limit: float) -> torch.Tensor:
        by_head = projected.float().unflatten(-1, (heads.num_heads, -1)) * factors
        return clipped(by_head, limit, kernels) * scale

    query = bounded(weights.query.forward(of_query, metadata), weights.query_scale, shape.head_limit)
    cached = [
        _convolved(convolution, linear.forward(row, metadata), row, channels_of(window), heads, metadata, step, kernels)
        for convolution, linear, row, window in zip(
            weights.convolutions, (weights.key, weights.value), (of_key, of_value), windows, strict=False
        )
    ]
    key, value = (each.unflatten(-1, (heads.num_kv_heads, -1)) for each in cached)
    key, value = clipped(key, shape.head_limit, kernels), normed(value, eps, kernels)
    qkv = torch.cat([each.to(of_query.dtype).flatten(1) for each in (query, key, value)], dim=-1)
    kernels.rope_and_cache(qkv, cos_sin, metadata, k_cache, v_cache, heads)
    numbers = bounded(weights.distances.numbers.forward(of_query, metadata), weights.distance_scale, shape.number_limit)
    attended = attend_with_distances(
        qkv,
        numbers,
        weights.distances.profiles,
        (k_cache, v_cache),
        metadata,
        heads,
        sliding_window,
        kernels,
        sinks=weights.sinks.forward(of_query, metadata).float(),
    )
    return weights.output.forward(gated_heads(attended, weights.gate.forward(of_query, metadata), kernels), metadata)


def clipped(x: torch.Tensor, limit: float, kernels: Kernels) -> torch.Tensor:
    """Returns heads x [num_tokens, num_heads, size], float32, of which those longer than `limit` become so long."""
    lengths = kernels.recurrent.sqrt(_squares(x, kernels))
    return x * (limit / (lengths + _LENGTH_EPS)).clamp(max=1.0)


def normed(x: torch.Tensor, eps: float, kernels: Kernels) -> torch.Tensor:
    """Returns the RMS norm over the last dimension of x, float32, without a weight."""
    rows, width = x.reshape(-1, x.shape[-1]), x.shape[-1]
    recurrent = kernels.recurrent
    return recurrent.row_norm(rows, recurrent.sums_of_squares(rows), width, None, eps).view(x.shape)


def _squares(x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """Returns the sums of squares over the last dimension of x, which stays with the size 1."""
    return kernels.recurrent.sums_of_squares(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], 1)


def _convolved(
    weights: ConvolutionWeights,
    x: torch.Tensor,
    row: torch.Tensor,
    window: torch.Tensor,
    heads: HeadShape,
    metadata: AttentionMetadata,
    step: RecurrentStep,
    kernels: Kernels,
) -> torch.Tensor:
    """Returns keys or values x [num_tokens, channels] and their convolution, added and scaled, in float32. They and
    taps are made of `row`.
    """
    width, wide = weights.taps.shape[-1], x.float()
    if weights.added is None:
        return with_convolution(wide, weights.taps, window, step, kernels.recurrent, (width + 1) ** -0.5)
    added = weights.added.forward(row, metadata).float().unflatten(-1, (heads.num_kv_heads, 1, width))
    by_head = weights.taps.view(heads.num_kv_heads, -1, width)
    total = wide.unflatten(-1, (heads.num_kv_heads, -1))
    for lag in range(width):
        earlier = _earlier(wide, lag, width, window, step, kernels.recurrent).unflatten(-1, (heads.num_kv_heads, -1))
        total = total + earlier * (by_head[..., -1 - lag] + added[..., lag])
    return total.flatten(1) / (2 * width + 1) ** 0.5


def _earlier(
    x: torch.Tensor, lag: int, width: int, window: torch.Tensor, step: RecurrentStep, kernels: RecurrentKernels
) -> torch.Tensor:
    """Returns the rows of `lag` tokens before those of x, by a convolution that takes these alone."""
    taps = x.new_zeros((x.shape[-1], width))
    taps[:, -1 - lag] = 1
    return kernels.convolve(x, taps, None, window, step)

"""Compressed convolutional attention (CCA; Figliolia et al., 2025): grouped-query attention whose queries and keys go
through two causal convolutions, and half of whose values are those of the token before, as in ZAYA.

A layer has keys and values in the cache, and a recurrent state besides: the last tokens' queries and keys before the
convolutions, and the half of the values that the next token has. Called by the decoder.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import Kernels, RecurrentKernels
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.kernels.weights import RecurrentWeights
from manta.workers.models.model_config import HeadShape
from manta.workers.models.recurrent_shapes import ConvolvedShape

_LEAST_SQUARE = torch.finfo(torch.float32).eps ** 2
"""A constant that is added to the squared length of a head before it is divided by its length."""


def mixing_layout(stored: torch.Tensor, shape: ConvolvedShape) -> torch.Tensor:
    """Returns the weight of the second convolution for `Kernels.head_products`, [num_heads + num_kv_heads, second_width
    * head_dim, head_dim], of the stored one [channels, head_dim * second_width].
    """
    by_head = stored.view(-1, shape.head_dim, shape.head_dim, shape.second_width)  # head, output, input, tap
    return by_head.permute(0, 3, 2, 1).flatten(1, 2).contiguous()


def attend_convolved(
    weights: RecurrentWeights,
    normed: torch.Tensor,
    cos_sin: torch.Tensor,
    metadata: AttentionMetadata,
    cache: tuple[torch.Tensor, ...],
    heads: HeadShape,
    sliding_window: int | None,
    kernels: Kernels,
) -> torch.Tensor:
    """Returns the attention's result [num_tokens, hidden] of normed hidden states. Writes the tokens' keys and values
    to their KV slots, and the step's states. `cache` holds the caches of keys and of values, then the states.
    """
    shape, step = weights.shape, metadata.states
    assert isinstance(shape, ConvolvedShape)
    assert step is not None
    k_cache, v_cache, *states = cache
    projected = weights.inputs["input"].forward(normed, metadata).float()
    queries, keys, current, delayed = projected.split(shape.sizes, dim=-1)
    query, key = _convolved(queries, keys, weights, states[0], step, kernels.recurrent)
    of_token_before = F.pad(delayed.new_ones(delayed.shape[1], 1), (0, 1))  # a convolution of width 2
    delayed = kernels.recurrent.convolve(delayed, of_token_before, None, states[1], step)
    row = torch.cat((*(_in_halves(each, shape) for each in (query, key)), current, delayed), dim=-1).to(normed.dtype)
    kernels.rope_and_cache(row, cos_sin, metadata, k_cache, v_cache, heads)
    attended = kernels.paged_attention(row, k_cache, v_cache, metadata, heads, sliding_window)
    return weights.output.forward(attended, metadata)


def _convolved(
    queries: torch.Tensor,
    keys: torch.Tensor,
    weights: RecurrentWeights,
    state: torch.Tensor,
    step: RecurrentStep,
    kernels: RecurrentKernels,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns query and key heads of equal length, [num_tokens, heads, head_dim]: the convolutions' results, and a mean
    of each query and its key beside them.
    """
    shape, tensors = weights.shape, weights.tensors
    assert isinstance(shape, ConvolvedShape)
    mixed = _mixed(torch.cat((queries, keys), dim=-1), weights, state, step, kernels)
    query, key = (each.unflatten(-1, (-1, shape.head_dim)) for each in (queries, keys))
    repeats = shape.num_heads // shape.num_kv_heads
    query_mean = (query + key.repeat_interleave(repeats, dim=1)) * 0.5
    first, *others = query_mean.unflatten(1, (-1, repeats)).unbind(2)
    for other in others:
        first = first + other
    query = mixed[:, : shape.num_heads] + query_mean
    key = mixed[:, shape.num_heads :] + first / repeats
    query, key = (kernels.unit_heads(each, shape.head_dim**0.5, _LEAST_SQUARE) for each in (query, key))
    return query, key * tensors["key_scales"].unsqueeze(-1)


def _mixed(
    channels: torch.Tensor,
    weights: RecurrentWeights,
    state: torch.Tensor,
    step: RecurrentStep,
    kernels: RecurrentKernels,
) -> torch.Tensor:
    """Returns what both convolutions make of queries and keys [num_tokens, channels]: [num_tokens, heads, head_dim].

    Results of the first one for earlier tokens are computed again from the window of its inputs. Before a sequence
    these are zeros, and the results are its bias.
    """
    shape, tensors = weights.shape, weights.tensors
    assert isinstance(shape, ConvolvedShape)
    taps = []
    for distance in reversed(range(shape.second_width)):
        kernel = F.pad(tensors["kernel"], (shape.second_width - 1 - distance, distance))
        tap = kernels.convolve(channels, kernel, tensors["kernel_bias"], state, step)
        taps.append(tap.unflatten(1, (-1, shape.head_dim)))
    products = kernels.head_products(torch.cat(taps, dim=-1), tensors["mixing"])
    return products + tensors["mixing_bias"].view(-1, shape.head_dim)


def _in_halves(heads: torch.Tensor, shape: ConvolvedShape) -> torch.Tensor:
    """Returns heads [num_tokens, heads, head_dim] as rows in the order of `HeadOrder`: dimensions that rotate together
    lie half a head apart.
    """
    half, rest = shape.rotary_dim // 2, (shape.head_dim - shape.rotary_dim) // 2
    if not rest:
        return heads.flatten(1)
    rotated, second, kept, last = heads.split((half, half, rest, rest), dim=-1)
    return torch.cat((rotated, kept, second, last), dim=-1).flatten(1)

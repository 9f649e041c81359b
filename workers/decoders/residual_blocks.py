"""Runs the layers of Inkling 2. The results of some layers are summed to a block, and each part of a later layer reads
a mean of the norms of all blocks before it and of its own block so far, by shares that it computes with a learned query
(transformers calls it attention residuals).

Layers may run several times. Each pass begins with what the first one began with. From the second on, its parts take up
messages, which are such means of the blocks of the pass before. Called by the decoder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from manta.workers.decoders.clipped_attention import attend_clipped, normed
from manta.workers.decoders.mixers.short_conv import with_convolution
from manta.workers.decoders.query_growth import query_growth
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.block_weights import BlockReadsWeights, ClippedAttentionWeights, MessageGateWeights
from manta.workers.kernels.protocol import Kernels, KVCaches, RotaryTables
from manta.workers.kernels.weights import DecoderWeights
from manta.workers.models.model_config import ModelConfig

_READ_EPS = 1e-6
"""The constant in the norms of blocks."""


def run_residual_blocks(
    config: ModelConfig,
    weights: DecoderWeights,
    layers: Sequence[tuple[Any, ...]],
    run_mlp: Callable[..., torch.Tensor],
    kernels: Kernels,
    residual: torch.Tensor,
    cos_sin: RotaryTables,
    metadata: AttentionMetadata,
    kv_caches: KVCaches,
    inputs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs all layers, as `Forward` says. `layers` and `run_mlp` are those of the decoder."""
    shape, step, eps, dtype = config.inkling, metadata.states, config.rms_norm_eps, residual.dtype
    assert shape is not None
    assert step is not None
    assert weights.blocks is not None
    growth = query_growth(config.query_growth, metadata.positions, kernels)
    scale, recurrent = (shape.conv_width + 1) ** -0.5, kernels.recurrent
    stream, blocks = residual, list[torch.Tensor]()
    beginning, earlier = (stream, blocks), list[torch.Tensor]()
    for place, ((layer, kv_place, source, heads, window, grows, _), table) in enumerate(
        zip(layers, cos_sin, strict=True)
    ):
        number, number_of_pass = shape.layer_at(place)
        mixer, reads, cache = layer.mixer, layer.reads, kv_caches[source]
        assert isinstance(mixer, ClippedAttentionWeights)
        if shape.loop is not None and number == shape.loop.first:
            if number_of_pass:  # what the first layer of a pass reads is no message
                earlier = [*blocks[len(beginning[1]) + 1 :], stream]
                stream, blocks = beginning[0], [*beginning[1]]
            else:
                beginning = stream, [*blocks]
        messages: Sequence[torch.Tensor] = ()
        if number_of_pass:
            assert shape.loop is not None
            assert weights.blocks.messages is not None
            messages = read_blocks(earlier, weights.blocks.messages[number - shape.loop.first], kernels)
        rows = _attention_rows(reads, blocks, stream, messages, eps, kernels)
        group, of_layer = metadata.of_group(kv_place.group), (heads, shape, window, growth if grows else None)
        update = attend_clipped(mixer, rows, table, group, cache[:4], *of_layer, eps, kernels)
        update = with_convolution(update, layer.convolutions[0], cache[4], step, recurrent, scale).float()
        if number % shape.layers_per_block:
            update = stream.float() + update
        else:
            blocks.append(stream)
        (read,) = read_blocks([*blocks, update], reads.mlp, kernels)
        if messages:
            read = _taken_up(reads.gates[3], read, messages[3], dtype, eps, kernels)
        result = run_mlp(layer.mlp, kernels.rms_norm(read.to(dtype), layer.mlp_norm, eps), metadata)
        result = with_convolution(result, layer.convolutions[1], cache[5], step, recurrent, scale)
        stream = (update + result.float()).to(dtype)
    (read,) = read_blocks([*blocks, stream], weights.blocks.final, kernels)
    return kernels.rms_norm(read.to(dtype), weights.final_norm, eps)


def _attention_rows(
    reads: BlockReadsWeights,
    blocks: Sequence[torch.Tensor],
    stream: torch.Tensor,
    messages: Sequence[torch.Tensor],
    eps: float,
    kernels: Kernels,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns what queries, keys and values are made of."""
    found: Sequence[torch.Tensor] = [stream]
    if reads.attention is not None:
        found = read_blocks([*blocks, stream], reads.attention, kernels)
    if messages:
        pairs = zip(reads.gates[:3], _three(found), messages[:3], strict=True)
        found = [_taken_up(gate, each, message, stream.dtype, eps, kernels) for gate, each, message in pairs]
    if len(found) == len(reads.norms) == 1:
        same = kernels.rms_norm(found[0].to(stream.dtype), reads.norms[0], eps)
        return same, same, same
    query, key, value = (
        kernels.rms_norm(each.to(stream.dtype), norm, eps)
        for each, norm in zip(_three(found), _three(reads.norms), strict=True)
    )
    return query, key, value


def _three(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Returns the parts of queries, keys and values, which may be one."""
    return parts if len(parts) == 3 else [*parts] * 3


def read_blocks(states: Sequence[torch.Tensor], queries: torch.Tensor, kernels: Kernels) -> Sequence[torch.Tensor]:
    """Returns the mean of the norms of states [num_tokens, hidden] for each of the queries [num_queries, hidden], in
    float32. Every sum over states is made one term after the other.
    """
    stacked = normed(torch.stack([each.float() for each in states], dim=1), _READ_EPS, kernels)
    num_tokens, num_states, hidden = stacked.shape
    products = kernels.head_products(stacked.view(-1, 1, hidden), queries.T.contiguous().unsqueeze(0))
    logits = products.reshape(num_tokens, num_states, -1) * hidden**-0.5
    powers = kernels.recurrent.exp(logits - logits.amax(1, keepdim=True))
    shares = powers / _sum(powers.unbind(1)).unsqueeze(1)
    pairs = zip(shares.unbind(1), stacked.unbind(1), strict=True)
    return _sum([share.unsqueeze(-1) * state.unsqueeze(1) for share, state in pairs]).unbind(1)


def _taken_up(
    gate: MessageGateWeights,
    read: torch.Tensor,
    message: torch.Tensor,
    dtype: torch.dtype,
    eps: float,
    kernels: Kernels,
) -> torch.Tensor:
    """Returns what a part reads with a message of the pass before, both float32 [num_tokens, hidden]."""
    both = torch.cat((normed(read.float(), eps, kernels), normed(message, eps, kernels)), dim=-1)
    numbers = gate.down.forward(both.to(dtype)).float()
    forgotten, taken = (
        kernels.recurrent.cap(linear.forward(numbers), 1.0) for linear in (gate.forgetting, gate.taking)
    )
    return (1 - forgotten) * read.float() + taken * message


def _sum(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, terms)

"""RWKV-4 (Peng et al., 2023, section 3): time mixing, whose channels each average their earlier values by exponentials
of keys that decay, and channel mixing, an MLP. Both read each token beside the one before it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from manta.workers.decoders.mixers.windows import channels_of
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import RecurrentKernels
from manta.workers.kernels.recurrence import RecurrentInputs
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.kernels.weights import RecurrentWeights

_ADDED_TO_KEYS = 64.0
"""A number that is added to all keys, which changes no average. The largest key before a sequence is 0, so that keys of
-150 still have an exponential.
"""


def time_mixing(
    weights: RecurrentWeights,
    x: torch.Tensor,
    metadata: AttentionMetadata,
    step: RecurrentStep,
    states: tuple[torch.Tensor, ...],
    kernels: RecurrentKernels,
) -> torch.Tensor:
    """Returns what a layer adds to the residual stream, from its normed hidden states x [num_tokens, hidden].

    A token's average has all values up to its own, whose key has the bonus of the channel instead of decays. `states`
    are the hidden state of the last token, its key and value, the largest key before these and that of the token
    before, and the channels' sums of values and of exponentials, both divided by the exponential of the largest key.
    """
    tensors = weights.tensors
    before = _of_token_before(x.float(), states[0], step, kernels)
    key, value, receptance = (_product(name, weights, x, before, metadata) for name in ("key", "value", "receptance"))
    key = key + _ADDED_TO_KEYS
    together = torch.stack((key, value), dim=-1).flatten(1)
    earlier = _of_token_before(together, channels_of(states[1]), step, kernels).unflatten(1, (-1, 2))
    earlier_key, earlier_value = (each.contiguous() for each in earlier.unbind(-1))
    log_decay = tensors["rates"].expand(len(x), -1).contiguous()
    largest = kernels.running_max(earlier_key, log_decay, states[2], step)
    decay = _of_token_before(largest, states[3], step, kernels) + log_decay - largest
    share = kernels.exp(earlier_key - largest).masked_fill((metadata.positions == 0).unsqueeze(1), 0.0)
    ones = share.new_ones((len(x), 1, 1))
    added = torch.stack((share * earlier_value, share), dim=-1)
    inputs = RecurrentInputs(ones, ones, added, decay, rates=share.new_ones((share.shape[1], 1)))
    total, divisor = kernels.recur(inputs, states[4], step).unbind(-1)
    own_key = key + tensors["bonus"]
    bound = torch.maximum(largest, own_key)
    old, own = kernels.exp(largest - bound), kernels.exp(own_key - bound)
    mean = (old * total + own * value) / (old * divisor + own)
    return weights.output.forward((mean * kernels.sigmoid(receptance)).to(x.dtype), metadata)


def channel_mixing(
    weights: RecurrentWeights,
    x: torch.Tensor,
    metadata: AttentionMetadata,
    step: RecurrentStep,
    states: tuple[torch.Tensor, ...],
    kernels: RecurrentKernels,
) -> torch.Tensor:
    """Returns what a layer adds to the residual stream, from its normed hidden states x [num_tokens, hidden]. `key` has
    its activation. `states` are the hidden state of the last token.
    """
    before = _of_token_before(x.float(), states[0], step, kernels)
    key, receptance = (_product(name, weights, x, before, metadata) for name in ("key", "receptance"))
    values = weights.output.forward(key.to(x.dtype), metadata)
    return (values * kernels.sigmoid(receptance)).to(x.dtype)


def _of_token_before(
    rows: torch.Tensor, state: torch.Tensor, step: RecurrentStep, kernels: RecurrentKernels
) -> torch.Tensor:
    """Returns for each token the row [channels] of the one before it, zeros before a sequence."""
    tap = F.pad(rows.new_ones(rows.shape[1], 1), (0, 1))  # a convolution of width 2
    return kernels.convolve(rows, tap, None, state, step)


def _product(
    name: str, weights: RecurrentWeights, x: torch.Tensor, before: torch.Tensor, metadata: AttentionMetadata
) -> torch.Tensor:
    """Returns the product, float32, of a linear and each token mixed with the one before it."""
    share = weights.tensors[f"{name}_mix"]
    mixed = x.float() * share + before * (1 - share)
    return weights.inputs[name].forward(mixed.to(x.dtype), metadata).float()

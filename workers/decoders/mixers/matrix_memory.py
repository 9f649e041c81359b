"""The matrix memory of xLSTM (Beck et al., 2024): a recurrence whose tokens have gates of their own, an exponential one
on what they add. Outputs are divided by what the same recurrence makes of ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import RecurrentKernels
from manta.workers.kernels.recurrence import RecurrentInputs
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.kernels.weights import RecurrentWeights
from manta.workers.models.recurrent_shapes import MatrixMemoryShape


def matrix_memory(
    weights: RecurrentWeights,
    x: torch.Tensor,
    metadata: AttentionMetadata,
    step: RecurrentStep,
    states: tuple[torch.Tensor, ...],
    kernels: RecurrentKernels,
) -> torch.Tensor:
    """Returns what a layer adds to the residual stream, from its normed hidden states x [num_tokens, hidden].

    `input` gives queries, keys, values and output gates of all heads, and `gates` an input and a forget gate of each
    head. `states` are the heads' matrices, whose last column is that of the ones, and the largest input gate so far.

    The paper divides states by the exponential of this gate. They are bounded without, because gates are capped, so it
    is here only where it decides: in the constant below the division.
    """
    shape, tensors = weights.shape, weights.tensors
    assert isinstance(shape, MatrixMemoryShape)
    keys, values = shape.num_heads * shape.key_dim, shape.num_heads * shape.value_dim
    projected = weights.inputs["input"].forward(x, metadata).float()
    query, key, value, output_gate = projected.split([keys, keys, values, values], dim=-1)
    gates = kernels.cap(weights.inputs["gates"].forward(x, metadata).float(), shape.gate_cap)
    input_gate, forget_gate = gates.chunk(2, dim=-1)
    log_decay = -kernels.softplus(-forget_gate, forget_gate.new_zeros(shape.num_heads))  # of the sigmoid
    by_head = value.unflatten(-1, (shape.num_heads, -1))
    with_ones = F.pad(by_head, (0, 1), value=1.0) * kernels.exp(input_gate).unsqueeze(-1)
    query, key = (each.unflatten(-1, (shape.num_heads, -1)) for each in (query, key))
    inputs = RecurrentInputs(query * shape.key_dim**-0.5, key, with_ones, log_decay, dtype=x.dtype)
    outputs, ones = kernels.recur(inputs, states[0], step).split((shape.value_dim, 1), dim=-1)
    largest = kernels.running_max(input_gate, log_decay, states[1], step).unsqueeze(-1)
    outputs = outputs / (ones.abs().clamp(min=1) + shape.eps * kernels.exp(largest))
    normed = kernels.centred_heads(outputs, shape.norm_eps)
    gated = normed.flatten(1) * tensors["norm"] * kernels.sigmoid(output_gate.contiguous())
    return weights.output.forward(gated.to(x.dtype), metadata)

"""Mamba 1 (Gu and Dao, 2023): a state space in which each number of each channel's state has a rate of its own."""

from __future__ import annotations

import torch

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.protocol import RecurrentKernels
from manta.workers.kernels.recurrence import RecurrentInputs
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.kernels.weights import RecurrentWeights
from manta.workers.models.recurrent_shapes import SelectiveShape

_NORMS = ("time_norm", "b_norm", "c_norm")
"""The names of the norms' weights, which Falcon Mamba does not have."""


def selective_scan(
    weights: RecurrentWeights,
    x: torch.Tensor,
    metadata: AttentionMetadata,
    step: RecurrentStep,
    states: tuple[torch.Tensor, ...],
    kernels: RecurrentKernels,
) -> torch.Tensor:
    """Returns what a layer adds to the residual stream, from its normed hidden states x [num_tokens, hidden].

    `input` gives x and a gate of each channel. Of each head's x, `selection` makes the vector of the time steps, B and
    C, and `time` the time steps of the head's channels. `states` are the windows of the convolution and the states of
    the channels.
    """
    shape, tensors, inputs = weights.shape, weights.tensors, weights.inputs
    assert isinstance(shape, SelectiveShape)
    projected = inputs["input"].forward(x, metadata)
    values, gate = projected.float().chunk(2, dim=-1)
    values = kernels.convolve(values, tensors["kernel"], tensors.get("kernel_bias"), states[0], step, activates=True)
    by_head = values.to(x.dtype).chunk(shape.num_heads, dim=-1)
    selected = [_selected(head, rows.contiguous(), weights, metadata, kernels) for head, rows in enumerate(by_head)]
    time, b, c = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) for parts in zip(*selected, strict=True))
    time = kernels.softplus(time.float(), tensors["time_bias"])
    of_tokens = RecurrentInputs(
        query=c.float(),
        key=b.float(),
        value=(values * time).unsqueeze(-1),
        log_decay=time,
        rates=tensors["rates"],
        dtype=x.dtype,
    )
    outputs = kernels.recur(of_tokens, states[1], step).squeeze(-1) + values * tensors["skip"]
    return weights.output.forward((outputs * kernels.silu(gate)).to(x.dtype), metadata)


def _selected(
    head: int, rows: torch.Tensor, weights: RecurrentWeights, metadata: AttentionMetadata, kernels: RecurrentKernels
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns what a head selects of its rows [num_tokens, channels]: the time steps of its channels before softplus,
    [num_tokens, channels], and B and C, [num_tokens, 1, state_size].
    """
    shape, tensors, inputs = weights.shape, weights.tensors, weights.inputs
    assert isinstance(shape, SelectiveShape)
    selected = inputs[shape.of_head("selection", head)].forward(rows, metadata)
    parts = selected.split([shape.step_rank, shape.state_size, shape.state_size], dim=-1)
    if shape.norm_eps is not None:
        parts = tuple(
            _normed(part, tensors.get(name), shape.norm_eps, kernels) for name, part in zip(_NORMS, parts, strict=True)
        )
    time, b, c = parts
    time = inputs[shape.of_head("time", head)].forward(time.contiguous(), metadata)
    return time, b.unsqueeze(1), c.unsqueeze(1)


def _normed(part: torch.Tensor, weight: torch.Tensor | None, eps: float, kernels: RecurrentKernels) -> torch.Tensor:
    """Returns the RMS norm of time steps, B or C [num_tokens, width], in their dtype."""
    wide = part.float()
    return kernels.row_norm(wide, kernels.sums_of_squares(wide), part.shape[-1], weight, eps).to(part.dtype)

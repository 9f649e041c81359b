"""The causal convolution over the last tokens of a sequence, a filter for each channel, which most recurrent mixers
begin with.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from manta.workers.kernels.recurrent_step import RecurrentStep


def convolve(
    x: torch.Tensor,
    kernel: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    step: RecurrentStep,
    activates: bool = False,
) -> torch.Tensor:
    """Returns float32 [num_tokens, channels]: `sum(kernel[:, j] * x[i - width + 1 + j])` of each token `i`, plus the
    bias; with `activates`, SiLU of it.

    `x` is float32 [num_tokens, channels], `kernel` float32 [channels, width], `bias` float32 [channels]. `states` is
    float32 [num_slots, channels, width - 1]: the inputs of the last `width - 1` tokens. Every token has the same order
    of operations, wherever its segment begins.
    """
    width = kernel.shape[1]
    if step.is_decode:
        window = torch.cat((states[step.reads], x.unsqueeze(2)), dim=2)
        states[step.writes] = window[:, :, 1:]
        return _weighted([window[:, :, number] for number in range(width)], kernel, bias, activates)
    # The inputs of each sequence behind those of its state, one sequence after the other
    num_before = width - 1
    sequences = torch.arange(len(step.sequence_starts) - 1, device=x.device)
    places = torch.arange(len(x), device=x.device) + num_before * (1 + step.row_sequences)
    before = torch.arange(num_before, device=x.device)
    padded = x.new_empty(len(x) + num_before * len(sequences), x.shape[1])
    padded[places] = x
    first_places = step.sequence_starts[:-1] + num_before * sequences
    padded[first_places.unsqueeze(1) + before] = states[step.reads[step.first_segments[:-1]]].transpose(1, 2)
    ends = places[step.starts[1:] - 1]
    states[step.writes] = padded[ends.unsqueeze(1) - num_before + 1 + before].transpose(1, 2)
    return _weighted([padded[places - num_before + number] for number in range(width)], kernel, bias, activates)


def _weighted(
    taps: list[torch.Tensor], kernel: torch.Tensor, bias: torch.Tensor | None, activates: bool
) -> torch.Tensor:
    result = taps[0] * kernel[:, 0]
    for number, tap in enumerate(taps[1:], start=1):
        result += tap * kernel[:, number]
    if bias is not None:
        result.add_(bias)
    return F.silu(result) if activates else result

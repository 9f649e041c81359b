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
    padded, places = behind_states(x, states.transpose(1, 2), step)
    return _weighted([padded[places - width + 1 + number] for number in range(width)], kernel, bias, activates)


def behind_states(x: torch.Tensor, states: torch.Tensor, step: RecurrentStep) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows x [num_tokens, width] of each sequence behind the rows before them, one sequence after the
    other, and where each of x is among them. Writes the last rows of each segment to its slot. `states` is float32
    [num_slots, num_before, width]: the rows of the last `num_before` tokens.
    """
    num_before = states.shape[1]
    sequences = torch.arange(len(step.sequence_starts) - 1, device=x.device)
    places = torch.arange(len(x), device=x.device) + num_before * (1 + step.row_sequences)
    before = torch.arange(num_before, device=x.device)
    padded = x.new_empty(len(x) + num_before * len(sequences), x.shape[1])
    padded[places] = x
    first_places = step.sequence_starts[:-1] + num_before * sequences
    padded[first_places.unsqueeze(1) + before] = states[step.reads[step.first_segments[:-1]]]
    ends = places[step.starts[1:] - 1]
    states[step.writes] = padded[ends.unsqueeze(1) - num_before + 1 + before]
    return padded, places


def _weighted(
    taps: list[torch.Tensor], kernel: torch.Tensor, bias: torch.Tensor | None, activates: bool
) -> torch.Tensor:
    result = taps[0] * kernel[:, 0]
    for number, tap in enumerate(taps[1:], start=1):
        result += tap * kernel[:, number]
    if bias is not None:
        result.add_(bias)
    return F.silu(result) if activates else result

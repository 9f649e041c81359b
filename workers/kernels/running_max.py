"""The largest number of a sequence so far, of which the earlier ones decay: the stabiliser of matrix memories (Beck et
al., 2024). On CPUs only, because it walks over a step's segments.
"""

from __future__ import annotations

import torch

from manta.workers.kernels.recurrent_step import RecurrentStep


def running_max(
    numbers: torch.Tensor, log_decay: torch.Tensor, states: torch.Tensor, step: RecurrentStep
) -> torch.Tensor:
    """Returns `m[t] = max(m[t - 1] + log_decay[t], numbers[t])` of each head, float32 [num_tokens, num_heads], like
    `numbers` and `log_decay`. Reads and writes `states`, float32 [num_slots, num_heads, 1], as the step says.
    """
    if step.is_decode:
        largest = torch.maximum(states[step.reads].squeeze(-1) + log_decay, numbers)
        states[step.writes] = largest.unsqueeze(-1)
        return largest
    largest = torch.empty_like(numbers)
    places = torch.stack((step.starts[:-1], step.starts[1:], step.reads, step.writes), dim=1)
    for start, end, read, write in places.tolist():  # a segment follows the one whose state it reads
        total = log_decay[start:end].cumsum(0)
        since_start = (numbers[start:end] - total).cummax(0).values
        largest[start:end] = total + torch.maximum(states[read].squeeze(-1), since_start)
        states[write] = largest[end - 1].unsqueeze(-1)
    return largest

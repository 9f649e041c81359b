"""The windows of convolutions, whose states are stored by head so that ranks split heads."""

from __future__ import annotations

import torch


def channels_of(states: torch.Tensor) -> torch.Tensor:
    """Returns a view of windows [num_slots, num_heads, channels of a head, width - 1] as those of all channels,
    [num_slots, num_channels, width - 1].
    """
    return states.view(len(states), -1, states.shape[-1])

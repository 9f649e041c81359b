"""The memory of each layer on the device: the keys and values of its attention, and its recurrent states."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from manta.workers.kernels.protocol import KVCaches
from manta.workers.kv_groups import LayerGroups, one_group
from manta.workers.models.recurrent_shapes import StateShape
from manta.workers.step import ZERO_STATE

LayerStates = Sequence[tuple[torch.Tensor, ...]]
"""The tensors of the recurrent state of each layer, float32 [num_slots, *shape]; empty for a layer without one."""


def layer_caches(kv_cache: torch.Tensor, layers: LayerGroups, states: LayerStates = ()) -> KVCaches:
    """Returns what each layer keeps. `kv_cache` is [layers_per_block, num_cached, num_blocks, ...]. Where keys are the
    values too, a layer gets them twice. Without `states` no layer has one.
    """
    by_layer = [() if place is None else kv_cache[place.number].unbind() for place in layers.layers]
    keys = [(each[0], each[-1]) if each else () for each in by_layer]
    return [(*each, *state) for each, state in zip(keys, states or ((),) * len(keys), strict=True)]


def allocate_states(states: Sequence[StateShape | None], num_slots: int, device: torch.device) -> LayerStates:
    """Returns the states of each layer (`ModelConfig.states`): float32 tensors [num_slots, *shape], none for a layer
    without. They are uninitialised but for slot `ZERO_STATE`, which is zeros.
    """
    shapes = [() if state is None else state.tensors for state in states]
    return [tuple(_allocate(shape, num_slots, device) for shape in tensors) for tensors in shapes]


def allocate_hidden(
    hidden_size: int, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Returns room for the final hidden state of every token whose keys and values are cached, which a draft head
    reads: zeros [1, 1, num_blocks, block_size, hidden_size].
    """
    return torch.zeros((1, 1, num_blocks, block_size, hidden_size), dtype=dtype, device=device)


def draft_head_caches(kv_cache: torch.Tensor, hidden_states: torch.Tensor) -> KVCaches:
    """Returns what the layer of a draft head keeps: keys and values, of which `kv_cache` has one layer, and the result
    of `allocate_hidden`, [num_blocks * block_size, hidden_size].
    """
    return layer_caches(kv_cache, one_group((True,)), [(hidden_states.flatten(0, 3),)])


def _allocate(shape: tuple[int, ...], num_slots: int, device: torch.device | None) -> torch.Tensor:
    tensor = torch.empty((num_slots, *shape), dtype=torch.float32, device=device)
    tensor[ZERO_STATE] = 0
    return tensor

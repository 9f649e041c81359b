"""Whether the weights of a model have room in a machine's memory, before any of them is read. Called by the loader."""

from __future__ import annotations

import pathlib

from manta.workers.checkpoints.memory import weight_bytes
from manta.workers.checkpoints.memory_check import check_memory, smaller_weights
from manta.workers.models.model_config import ModelConfig, ModelError
from manta.workers.platforms import Platform


def check_room(
    folder: pathlib.Path, config: ModelConfig, dtype: str, weights: str, platform: Platform, num_ranks: int
) -> None:
    """Raises `ModelError` if a rank's share of the weights does not fit into the machine's free memory. What older
    formats hold is not known before they are read.
    """
    if not platform.shares_memory:
        return  # a GPU's own memory, whose allocator refuses
    try:
        needed = weight_bytes(folder, dtype, config, weights) // num_ranks
    except ModelError:
        return
    free = platform.free_memory(lambda: None)
    if needed >= free:
        smaller = smaller_weights(folder, dtype, config, platform.name)
        check_memory(needed, 0, dtype, free, {form: each // num_ranks for form, each in smaller.items()})

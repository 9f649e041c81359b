"""The ranks of a model on CUDA GPUs, joined by NCCL."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from manta.workers.parallel.group import LONGEST_WAIT, CollectiveGroup, join_store


class NcclGroup(CollectiveGroup):
    """A call returns when it is queued. The device's stream waits for the other ranks, the host does not."""

    def __init__(self, rank: int, num_ranks: int, address: str, device: torch.device) -> None:
        store = join_store(address, num_ranks)
        nccl: Any = distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = LONGEST_WAIT
        super().__init__(rank, num_ranks, store, nccl(store, rank, num_ranks, options), device)

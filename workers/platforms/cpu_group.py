"""The ranks of a model on CPUs: shared memory on one machine, gloo across machines."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from manta.workers.kernels import cpu_all_reduce
from manta.workers.kernels.cpu_all_reduce import SharedGroup
from manta.workers.kernels.weights import Linear
from manta.workers.parallel.group import GlooGroup


class CpuGroup(GlooGroup):
    """Sums and gathers through shared memory if all ranks can map one file, else through gloo."""

    def __init__(self, rank: int, num_ranks: int, address: str) -> None:
        super().__init__(rank, num_ranks, address)
        self.shared = self._share_memory()
        """None if the ranks share no memory or nothing can be compiled. Gloo then serves."""

    def _share_memory(self) -> SharedGroup | None:
        """Rank 0 creates a file and shares its path through the store. If one rank cannot map it, all ranks use gloo.

        Ranks of several machines share no memory, because whoever can write to their store could name any file.
        """
        if not self.is_private:
            return None
        created = None
        if self.rank == 0:
            created = cpu_all_reduce.create_file(self.num_ranks)
            self.store.set("shared_memory", created or "")
        path = self.store.get("shared_memory").decode()
        shared = None
        try:
            with contextlib.suppress(OSError):
                shared = SharedGroup(path, self.rank, self.num_ranks)
            have_all = self.least(int(shared is not None))
        finally:
            if self.rank == 0 and created is not None:
                os.unlink(created)  # so that no file is left, however the ranks end
        return shared if have_all else None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(x) if self.shared is None else self.shared.all_reduce(x)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        if self.shared is None or self.is_alone:
            return super().gather(x)
        return self.shared.gather(x)

    def row_parallel(self, linear: Linear, out_features: int, dtype: torch.dtype) -> Linear:
        if self.shared is None:
            return super().row_parallel(linear, out_features, dtype)
        return self.shared.row_parallel(linear, out_features, dtype)

    def column_parallel(self, linear: Linear, in_features: int, out_features: int, dtype: torch.dtype) -> Linear:
        if self.shared is None:
            return super().column_parallel(linear, in_features, out_features, dtype)
        return self.shared.column_parallel(linear, in_features, out_features, dtype)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with super().alone(), contextlib.nullcontext() if self.shared is None else self.shared.alone():
            yield

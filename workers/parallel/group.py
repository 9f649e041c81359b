"""The ranks of one model replica as a group that computes together: sums, gathers and minima.

Each rank is one process. All ranks make the same calls in the same order, with tensors of the same shapes, and a call
returns when all have made it. The platform chooses the group (`Platform.open_group`), the worker opens it, and the
sharded layers (`workers/parallel/sharded_layers.py`) call it in every step.

Ranks find each other through a store of torch.distributed. On one machine it is a file that only this user can reach.
On several machines it is a TCP server on rank 0's machine. It has no authentication, and neither have gloo and NCCL, so
the machines need a private network (`docs/security.md`).
"""

from __future__ import annotations

import contextlib
import datetime
import pathlib
import socket
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import distributed

from manta.structured import host
from manta.workers.checkpoints.shard import Shard
from manta.workers.kernels.linears import GatheringLinear, SummedLinear
from manta.workers.kernels.weights import Linear
from manta.workers.models.model_config import ModelConfig

LONGEST_WAIT = datetime.timedelta(minutes=30)
"""Timeout for the store and for the other ranks in each call, which may still be reading weights."""
LOOPBACK = "127.0.0.1"
"""Address for gloo's connections between ranks of one machine."""
_PRIVATE = "file:"
"""Prefix of the address of a store that is a file."""


class Group(Protocol):
    """A group of ranks. Its methods raise `RuntimeError` if another rank has died. If a rank hangs, the driver detects
    it and ends all ranks.
    """

    rank: int
    num_ranks: int
    num_sharing_memory: int
    """Number of ranks that share this one's memory, itself included: on CPUs those of one machine."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all ranks' `x`, of any shape, in its dtype and with the same bits on every rank. May
        overwrite `x`.
        """
        ...

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Returns every rank's `x`, in the order of ranks, on rank 0; None on the others."""
        ...

    def least(self, value: int) -> int:
        """Returns the minimum of all ranks' values, for plans that must hold on every rank."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        ...

    def row_parallel(self, linear: Linear, out_features: int, dtype: torch.dtype) -> Linear:
        """Returns a layer that applies `linear` to this rank's share of the inputs, then sums over ranks, in
        `dtype`.
        """
        ...

    def column_parallel(self, linear: Linear, in_features: int, out_features: int, dtype: torch.dtype) -> Linear:
        """Returns a layer that gathers all ranks' inputs, applies `linear`, which has this rank's outputs, and gathers
        all ranks' outputs. A rank has `in_features` of the inputs and `out_features` of the outputs, in `dtype`.
        """
        ...

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which calls return at once with this rank's own values, to measure one rank alone."""
        ...


def private_address(folder: pathlib.Path) -> str:
    """Returns the address of a file store in `folder`, for ranks of one machine.

    `folder` must belong to this user alone, because anyone who can write to it can control the ranks.
    """
    return f"{_PRIVATE}{folder / 'store'}"


def open_store(host: str) -> tuple[distributed.TCPStore, str]:
    """Opens a store in this process for ranks of several machines. Returns it with its address, "host:port".

    It listens only at `host`, an address of this machine, and has no authentication: anyone who reaches it can write to
    it. The system chooses the port when it binds the socket, so no other process can take it. Rank 0's process keeps
    the store as long as the group lives.
    """
    listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listening.getsockname()[1]
    store = distributed.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    return store, f"{host}:{port}"


def open_group(folder: pathlib.Path, host: str | None) -> tuple[distributed.TCPStore | None, str]:
    """Opens the store of a group; see `manta.workers.ranks.rank_worker.open_group`."""
    return (None, private_address(folder)) if host is None else open_store(host)


class OneRank:
    """The group of a single rank, which holds the whole model."""

    rank = 0
    num_ranks = 1
    num_sharing_memory = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        return [x]

    def least(self, value: int) -> int:
        return value

    def barrier(self) -> None:
        pass

    def row_parallel(self, linear: Linear, out_features: int, dtype: torch.dtype) -> Linear:
        return linear

    def column_parallel(self, linear: Linear, in_features: int, out_features: int, dtype: torch.dtype) -> Linear:
        return linear

    def alone(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class CollectiveGroup:
    """A group over any process group of torch.distributed, with tensors on `device`."""

    def __init__(self, rank: int, num_ranks: int, store: distributed.Store, backend: Any, device: torch.device) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.store = store
        self._backend = backend
        self._device = device
        self.is_alone = False
        """Whether calls return at once with this rank's own values, as within `alone`."""
        self.num_sharing_memory = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums in a ring: one rank completes the sum of each part and the others copy it, so all have the same bits.

        With more than two ranks the sum is rounded at each hop. Gathering all parts over gloo and summing them in
        float32 took two to three times as long.
        """
        if not self.is_alone:
            x = x.contiguous()
            self._backend.allreduce([x]).wait()
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        if self.is_alone:
            return [x] * self.num_ranks
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.num_ranks)] if self.rank == 0 else None
        self._backend.gather([] if parts is None else [parts], [x], _to_rank_0()).wait()
        return parts

    def least(self, value: int) -> int:
        return min(self._all(value))

    def barrier(self) -> None:
        self._all(0)

    def row_parallel(self, linear: Linear, out_features: int, dtype: torch.dtype) -> Linear:
        return SummedLinear(linear, self.all_reduce)

    def column_parallel(self, linear: Linear, in_features: int, out_features: int, dtype: torch.dtype) -> Linear:
        return GatheringLinear(linear, self._all_gather)

    def _all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Returns all ranks' x [num_rows, width] side by side, [num_rows, num_ranks * width]."""
        if self.is_alone:
            return torch.cat([x] * self.num_ranks, dim=1)
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.num_ranks)]
        self._backend.allgather([parts], [x]).wait()
        return torch.cat(parts, dim=1)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        self.is_alone = True
        try:
            yield
        finally:
            self.is_alone = False

    def _all(self, value: int) -> list[int]:
        parts = [torch.empty(1, dtype=torch.int64, device=self._device) for _ in range(self.num_ranks)]
        self._backend.allgather([parts], [torch.tensor([value], device=self._device)]).wait()
        return [int(part) for part in parts]


class GlooGroup(CollectiveGroup):
    """A group over torch.distributed's gloo: TCP between machines, or over the loopback address of one."""

    def __init__(self, rank: int, num_ranks: int, address: str) -> None:
        store = join_store(address, num_ranks)
        self.is_private = address.startswith(_PRIVATE)
        """Whether the store is a file, on the one machine that has all ranks."""
        gloo: Any = distributed.ProcessGroupGloo  # torch's type stubs lack most of it
        options = gloo._Options()
        # Set explicitly, because this host's name often resolves to a loopback address or to none
        own_address = LOOPBACK if self.is_private else _own_address(*_host_and_port(address))
        options._devices = [gloo.create_device(hostname=own_address)]
        options._timeout = LONGEST_WAIT
        super().__init__(rank, num_ranks, store, gloo(store, rank, num_ranks, options), torch.device("cpu"))
        self.num_sharing_memory = self._all(host.identity()).count(host.identity())


def join_store(address: str, num_ranks: int) -> distributed.Store:
    """Connects to the group's store from any rank. `address` comes from `private_address` or `open_store`."""
    if address.startswith(_PRIVATE):
        store = distributed.FileStore(address.removeprefix(_PRIVATE), num_ranks)
        store.set_timeout(LONGEST_WAIT)
        return store
    hostname, port = _host_and_port(address)
    return distributed.TCPStore(hostname, port, timeout=LONGEST_WAIT, wait_for_workers=False)


def _host_and_port(address: str) -> tuple[str, int]:
    hostname, port = address.rsplit(":", 1)
    return hostname, int(port)


def _to_rank_0() -> distributed.GatherOptions:
    options = distributed.GatherOptions()
    options.rootRank = 0
    return options


def _own_address(hostname: str, port: int) -> str:
    """Returns the address from which this host would send to the store; sends nothing."""
    family, kind, _, _, to = socket.getaddrinfo(hostname, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(to)
        return str(probe.getsockname()[0])


def rank_shard(config: ModelConfig, group: Group) -> Shard | None:
    """Returns the share of the model that this rank of a group has; None if it has all."""
    return Shard(group.rank, group.num_ranks, config.num_kv_heads) if group.num_ranks > 1 else None

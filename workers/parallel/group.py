"""The ranks of one model replica as a group that computes together: sums, gathers and agreements.

One process is one rank. Every rank makes the same calls in the same order, with tensors of the same shape; a call
returns when all have made it. Which group serves is the platform's choice (`Platform.open_group`). The worker opens it,
the sharded layers (`workers/parallel/layers.py`) call it in every step.

Ranks find each other through a store of torch.distributed. On one machine it is a file that only this user can reach.
On several machines it is a TCP server on rank 0's machine without authentication, as are gloo and NCCL themselves, so
those machines need a network of their own (`docs/security.md`).
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

from workers import host
from workers.kernels.linears import SummedLinear
from workers.kernels.weights import Linear

LONGEST_WAIT = datetime.timedelta(minutes=30)
"""How long a rank waits for the store, and in each call for the other ranks, which may still be reading weights."""
LOOPBACK = "127.0.0.1"
"""The address of gloo's connections between ranks of one machine."""
_PRIVATE = "file:"
"""The beginning of the address of a store that is a file."""


class Group(Protocol):
    """Its methods raise `RuntimeError` if another rank has died. If one hangs, the driver finds out and ends all."""

    rank: int
    num_ranks: int
    num_sharing_memory: int
    """Ranks that plan with the same memory, this one included: on CPUs those of one machine."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, of any shape, in its dtype and with the same bits on every rank. `x` may be
        overwritten.
        """
        ...

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """Every rank's `x`, in the order of ranks, on rank 0; None on the others."""
        ...

    def least(self, value: int) -> int:
        """The least of all ranks' values, for plans that must hold everywhere."""
        ...

    def row_parallel(self, linear: Linear, out_features: int, dtype: torch.dtype) -> Linear:
        """`linear`, which multiplies this rank's share of the inputs, followed by the sum over ranks, in `dtype`."""
        ...

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """A context in which calls return at once with this rank's own values, for measurements of one rank alone."""
        ...


def private_address(folder: pathlib.Path) -> str:
    """Returns the address of a store that is a file in `folder`, for ranks of one machine.

    `folder` must belong to this user alone: whoever can write there can tell the ranks what to do.
    """
    return f"{_PRIVATE}{folder / 'store'}"


def open_store(host: str) -> tuple[distributed.TCPStore, str]:
    """Opens a store in this process for ranks of several machines, and returns it with its address, "host:port".

    It listens at `host` only, an address of this machine, and asks nobody for a secret: whoever reaches it can write to
    it. The system chooses the port when the socket is bound, so nobody can take it in between. Rank 0's process keeps
    the store as long as the group lives.
    """
    listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listening.getsockname()[1]
    store = distributed.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    return store, f"{host}:{port}"


def open_group(folder: pathlib.Path, host: str | None) -> tuple[distributed.TCPStore | None, str]:
    """See `workers.ranks.rank_worker.open_group`."""
    return (None, private_address(folder)) if host is None else open_store(host)


class OneRank:
    """A group of one, whose model is whole."""

    rank = 0
    num_ranks = 1
    num_sharing_memory = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        return [x]

    def least(self, value: int) -> int:
        return value

    def row_parallel(self, linear: Linear, out_features: int, dtype: torch.dtype) -> Linear:
        return linear

    def alone(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class CollectiveGroup:
    """Over a process group of torch.distributed, whichever it is; its tensors are on `device`."""

    def __init__(self, rank: int, num_ranks: int, store: distributed.Store, backend: Any, device: torch.device) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.store = store
        self._backend = backend
        self._device = device
        self.is_alone = False
        """Within `alone`."""
        self.num_sharing_memory = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """In a ring, in which one rank completes the sum of a part and all others copy it, so that all have the same
        bits; with more than two ranks it is rounded at each hop. To gather all parts over gloo and sum them here in
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

    def row_parallel(self, linear: Linear, out_features: int, dtype: torch.dtype) -> Linear:
        return SummedLinear(linear, self.all_reduce)

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
    """Over torch.distributed's gloo: TCP between any machines, or over the loopback address of one."""

    def __init__(self, rank: int, num_ranks: int, address: str) -> None:
        store = join_store(address, num_ranks)
        self.is_private = address.startswith(_PRIVATE)
        """Whether the store is a file of this user, on the one machine that has all ranks."""
        gloo: Any = distributed.ProcessGroupGloo  # torch's type stubs know little of it
        options = gloo._Options()
        # Not the address that this host's name stands for, which is often a loopback one, or none
        own_address = LOOPBACK if self.is_private else _own_address(*_host_and_port(address))
        options._devices = [gloo.create_device(hostname=own_address)]
        options._timeout = LONGEST_WAIT
        super().__init__(rank, num_ranks, store, gloo(store, rank, num_ranks, options), torch.device("cpu"))
        self.num_sharing_memory = self._all(host.identity()).count(host.identity())


def join_store(address: str, num_ranks: int) -> distributed.Store:
    """Opens the group's store from any rank; `address` is from `private_address` or `open_store`."""
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
    """The address by which this host would send to the store; nothing is sent."""
    family, kind, _, _, to = socket.getaddrinfo(hostname, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(to)
        return str(probe.getsockname()[0])

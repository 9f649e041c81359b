"""Linears with low-rank adapters (LoRA; Hu et al., 2021): `y = linear(x) + scale * (x @ a.T) @ b`, for each row by its
sequence's adapter.

`TorchAdaptedLinear` defines what they compute; `cpu_adapters.py` and `triton/adapted_linear.py` compute it faster. A
bank of adapters (`workers/adapters/adapter_bank.py`) gives them their values, and `AttentionMetadata.adapters` says
which rows have one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.linear_protocol import Linear
from manta.workers.kernels.linears import GatedLinear

MOST_ADAPTERS = 1024
"""Most adapters that a model holds. Each of its linears has a table of so many entries, of 24 bytes on CPUs."""


class LowRankPart(NamedTuple):
    """What an adapter adds to some outputs of a linear, such as its queries."""

    b: torch.Tensor
    """[rank, outputs]"""
    first_rank: int
    """The first of its rows of `LowRank.a`."""
    first_output: int
    scale: float


class LowRank(NamedTuple):
    """What an adapter adds to one linear."""

    a: torch.Tensor
    """[sum of ranks, in_features]"""
    parts: tuple[LowRankPart, ...]
    """Parts with different outputs; other outputs stay as they are."""

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + sum(part.b.nbytes for part in self.parts)

    def on(self, device: torch.device) -> LowRank:
        """Returns the same values on a device, without a copy if they are there."""
        return LowRank(self.a.to(device), tuple(part._replace(b=part.b.to(device)) for part in self.parts))


class HoldsAdapters(Protocol):
    """What has the values of adapters, by the adapters' numbers. They may change between steps for numbers that no
    running sequence has.
    """

    def hold(self, number: int, low_rank: LowRank) -> None:
        """Keeps the values of an adapter."""
        ...

    def drop(self, number: int) -> None:
        """Forgets the values of an adapter; harmless if there are none."""
        ...


class AdaptedLinear(Linear, HoldsAdapters, Protocol):
    """A linear with adapters."""


@runtime_checkable
class HasOwnGate(Protocol):
    """A linear that may compute its gate too."""

    def with_gate_apart(self) -> Linear:
        """Returns the same function as a linear and its gate; itself if it has none."""
        ...


LinearAdapting = Callable[[Linear], AdaptedLinear]
"""Function that makes the linears with adapters of one model on one device. It takes linears without a gate."""


def adapt(linear: Linear, adapting: LinearAdapting) -> tuple[Linear, AdaptedLinear]:
    """Returns a linear that computes the same for rows without an adapter, and the one in it that holds adapters."""
    if isinstance(linear, HasOwnGate):
        linear = linear.with_gate_apart()
    if isinstance(linear, GatedLinear):
        inner, adapted = adapt(linear.linear, adapting)
        return linear.around(inner), adapted
    adapted = adapting(linear)
    return adapted, adapted


class TorchAdaptedLinear:
    """The linear with adapters by torch alone, on any device."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        self._held: dict[int, LowRank] = {}

    def hold(self, number: int, low_rank: LowRank) -> None:
        self._held[number] = low_rank

    def drop(self, number: int) -> None:
        self._held.pop(number, None)

    def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
        y = self._linear.forward(x, step)
        adapted = None if step is None else step.adapters
        if adapted is None:
            return y
        for number, first, count, scale in adapted.segments.tolist():
            low_rank = self._held.get(number)
            if low_rank is None:
                continue
            if low_rank.a.device != x.device:
                low_rank = self._held[number] = low_rank.on(x.device)
            rows = torch.from_numpy(adapted.rows[first : first + count]).long().to(x.device)
            products = x[rows].float() @ low_rank.a.float().T
            for part in low_rank.parts:
                rank, num_outputs = part.b.shape
                outputs = slice(part.first_output, part.first_output + num_outputs)
                added = products[:, part.first_rank : part.first_rank + rank] @ part.b.float()
                y[rows, outputs] = (y[rows, outputs].float() + added * (part.scale * scale)).to(y.dtype)
        return y

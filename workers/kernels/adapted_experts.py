"""The experts of a layer with low-rank adapters. Rows without an adapter of experts are computed as without adapters;
those of an adapter go through the experts one by one, whose linears add what it adds.

`workers/adapters/expert_places.py` gives them their values.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from manta.workers.kernels.adapted_linear import LinearAdapting, LowRank, adapt
from manta.workers.kernels.adapter_rows import SEGMENT, AdapterRows
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.looped_experts import run_each
from manta.workers.kernels.weights import Experts, GatedMlpWeights, Linear

GATED, DOWN = 0, 1
"""The linears of an expert."""
_ONLY = 0
"""The number of the only adapter in an expert's own linears."""


@runtime_checkable
class HasOneByOne(Protocol):
    """Experts that have copied those of which they were made."""

    def one_by_one(self) -> list[GatedMlpWeights]:
        """Returns the experts, in the memory of the layer's."""
        ...


class AdaptedExperts:
    """Experts that compute what `experts` do for rows without an adapter of theirs. `each` are the same experts one by
    one, `adapting` makes linears with a single adapter, and `scales_inputs` is that of `LoopedExperts`.
    """

    def __init__(
        self, experts: Experts, each: Sequence[GatedMlpWeights], adapting: LinearAdapting, scales_inputs: bool
    ) -> None:
        self._experts = experts
        self._each = each
        self._adapting = adapting
        self._scales_inputs = scales_inputs
        self._held: dict[int, dict[tuple[int, int], LowRank]] = {}
        """What each adapter adds, by its number, then by expert and linear."""
        self._adapted: dict[tuple[int, int], GatedMlpWeights] = {}
        """The experts with an adapter that have run, by its number and the expert's."""

    def hold(self, number: int, expert: int, which: int, low_rank: LowRank) -> None:
        """Keeps what an adapter adds to the linear `which` of an expert."""
        self._held.setdefault(number, {})[expert, which] = low_rank

    def drop(self, number: int) -> None:
        """Forgets an adapter; harmless if there is none."""
        if self._held.pop(number, None) is not None:
            self._adapted = {key: mlp for key, mlp in self._adapted.items() if key[0] != number}

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return self._experts.forward(x, chosen, shares)

    def forward_adapted(
        self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, step: AttentionMetadata
    ) -> torch.Tensor:
        """Returns what `forward` does, with the adapters of a step whose rows x are."""
        adapters = step.adapters
        segments = [] if adapters is None else [each for each in adapters.segments.tolist() if each[0] in self._held]
        if adapters is None or not segments:
            return self._experts.forward(x, chosen, shares)
        total = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        is_plain = torch.ones(len(x), dtype=torch.bool, device=x.device)
        for number, first, count, scale in segments:
            rows = torch.from_numpy(adapters.rows[first : first + count]).long().to(x.device)
            is_plain[rows] = False
            run, own = functools.partial(self._run, number, scale, step), (x[rows], chosen[rows], shares[rows])
            total[rows] = run_each(run, len(self._each), *own, self._scales_inputs)
        if (plain := is_plain.nonzero()[:, 0]).numel():
            total[plain] = self._experts.forward(x[plain], chosen[plain], shares[plain])
        return total

    def _run(
        self, number: int, scale: float, step: AttentionMetadata, expert: int, inputs: torch.Tensor
    ) -> torch.Tensor:
        """Returns the result of an expert with an adapter, [num_rows, hidden]."""
        if (number, expert) not in self._adapted:
            self._adapted[number, expert] = self._with_adapter(number, expert)
        mlp, count = self._adapted[number, expert], len(inputs)
        segments = np.array([(_ONLY, 0, count, scale)], dtype=SEGMENT)
        of_rows = dataclasses.replace(step, adapters=AdapterRows(segments, np.arange(count, dtype=np.int32)))
        return mlp.down.forward(mlp.gated.forward(inputs, of_rows), of_rows)

    def _with_adapter(self, number: int, expert: int) -> GatedMlpWeights:
        linears: list[Linear] = []
        for which, linear in enumerate((self._each[expert].gated, self._each[expert].down)):
            low_rank = self._held[number].get((expert, which))
            if low_rank is not None:
                linear, adapted = adapt(linear, self._adapting)
                adapted.hold(_ONLY, low_rank)
            linears.append(linear)
        return GatedMlpWeights(*linears)


class ExpertLinear(NamedTuple):
    """A linear of an expert, where a bank of adapters holds what they add."""

    experts: AdaptedExperts
    expert: int
    which: int
    """`GATED` or `DOWN`."""

    def hold(self, number: int, low_rank: LowRank) -> None:
        """Keeps the values of an adapter."""
        self.experts.hold(number, self.expert, self.which, low_rank)

    def drop(self, number: int) -> None:
        """Forgets the values of an adapter at all linears of the layer's experts."""
        self.experts.drop(number)

"""The experts of a layer on a GPU: two products of all pairs of a row and an expert, and no wait for the device.

Each expert is copied, as it is read, into tensors that hold those of the whole layer. `expert_rows.py` sorts the pairs
and adds their results, `expert_products.py` multiplies. `workers/platforms/cuda.py` joins experts by `join`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from manta.workers.kernels.linears import GatedLinear, TorchLinear
from manta.workers.kernels.looped_experts import LoopedExperts
from manta.workers.kernels.triton.device_weight import DeviceWeight, WeightForm, WeightTensors
from manta.workers.kernels.triton.expert_products import NONE, Activation, block_rows, multiply, multiply_quantized
from manta.workers.kernels.triton.expert_rows import ExpertBlocks, combine, sort_pairs
from manta.workers.kernels.triton.quantized_linear import TritonQuantizedLinear
from manta.workers.kernels.triton.rounded_rows import round_rows
from manta.workers.kernels.weights import Experts, GatedMlpWeights, Linear

_Tensors = tuple[torch.Tensor | None, ...]


class StackedLinear:
    """One linear of all experts of a layer. Each of its tensors [num_experts, ...] is one piece of memory."""

    def __init__(self, first: Linear, num_experts: int) -> None:
        """`first` is the first expert's linear, like which the others are to be."""
        linear = _inner(first)
        self.form = _form_of(linear)
        self._layout = _layout(linear)
        self.num_experts = num_experts
        self._tensors: _Tensors = tuple(
            None if each is None else each.new_empty((num_experts, *each.shape)) for each in _tensors_of(linear)
        )
        self._example = self._made_of(first, 0)

    @property
    def out_features(self) -> int:
        weight = self._tensors[0]
        assert weight is not None
        return weight.shape[1] if self.form is None else self.form.out_features

    @property
    def in_features(self) -> int:
        weight = self._tensors[0]
        assert weight is not None
        return weight.shape[2] if self.form is None else self.form.rounding.in_features

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self._tensors if each is not None)

    def put(self, expert: int, linear: Linear) -> bool:
        """Copies the linear of an expert, unless it is of another form than the first one's: then it returns False."""
        own = _inner(linear)
        if _layout(own) != self._layout:
            return False
        for stacked, tensor in zip(self._tensors, _tensors_of(own), strict=True):
            if stacked is not None and tensor is not None:
                stacked[expert].copy_(tensor)
        return True

    def linear(self, expert: int, copies: bool = False) -> Linear:
        """Returns the linear of an expert, in the memory of all or, if it `copies`, in its own."""
        return self._made_of(self._example, expert, copies)

    def _made_of(self, example: Linear, expert: int, copies: bool = False) -> Linear:
        """Returns a linear like `example`, made of an expert's tensors."""
        views = [None if each is None else each[expert] for each in self._tensors]
        tensors = [None if each is None else each.clone() for each in views] if copies else views
        if self.form is None:
            weight, bias = tensors
            assert weight is not None
            own: Linear = TorchLinear(weight, bias)
        else:
            inner = _inner(example)
            assert isinstance(inner, TritonQuantizedLinear)
            own = TritonQuantizedLinear(DeviceWeight(self.form, WeightTensors(*tensors)), inner.gated)  # type: ignore[arg-type]
        return example.around(own) if isinstance(example, GatedLinear) else own

    def multiply(
        self, x: torch.Tensor, chosen: torch.Tensor, blocks: ExpertBlocks, activation: Activation, pairs_of_row: int
    ) -> torch.Tensor:
        """Returns the results [num_pairs, width] of x [num_pairs / pairs_of_row, in_features], after the activation."""
        if self.form is None:
            weight, bias = self._tensors
            assert weight is not None
            return multiply(x.contiguous(), blocks, weight, bias, activation, pairs_of_row)
        weights = DeviceWeight(self.form, WeightTensors(*self._tensors))  # type: ignore[arg-type]
        order = weights.tensors.order
        if order is not None:  # each expert has its own
            experts = chosen.flatten().clamp(0, len(order) - 1)
            x = x.repeat_interleave(pairs_of_row, 0).gather(1, order[experts].long())
            pairs_of_row = 1
        return multiply_quantized(round_rows(x, self.form.rounding), blocks, weights, activation, pairs_of_row)


class GroupedExperts:
    """Computes what `LoopedExperts` does, with the roundings of its linears."""

    def __init__(self, gated: StackedLinear, down: StackedLinear, activation: str, scales_inputs: bool) -> None:
        self.linears = gated, down
        self.activation = Activation(activation, is_gated=gated.out_features == 2 * down.in_features)
        self._scales_inputs = scales_inputs

    def one_by_one(self) -> list[GatedMlpWeights]:
        """Returns the experts, in the memory of the layer's."""
        gated, down = self.linears
        return [GatedMlpWeights(gated.linear(each), down.linear(each)) for each in range(gated.num_experts)]

    def block_rows(self, num_pairs: int, dtype: torch.dtype) -> int:
        """Returns the pairs of a block, for rows of this dtype."""
        are_quantized = all(each.form is not None for each in self.linears)
        return block_rows(num_pairs, self.linears[0].num_experts, dtype, are_quantized)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        num_experts = self.linears[0].num_experts
        blocks = sort_pairs(chosen, num_experts, self.block_rows(chosen.numel(), x.dtype))
        pairs_of_row = chosen.shape[1]
        if self._scales_inputs:
            x = (x.float().unsqueeze(1) * shares.unsqueeze(-1)).to(x.dtype).flatten(0, 1)
            pairs_of_row = 1
        gated, down = self.linears
        inner = gated.multiply(x, chosen, blocks, self.activation, pairs_of_row)
        results = down.multiply(inner, chosen, blocks, NONE, 1)
        return combine(results, chosen, shares, num_experts, has_shares=not self._scales_inputs)


def join(experts: Iterable[GatedMlpWeights], num_experts: int, activation: str, scales_inputs: bool) -> Experts:
    """Returns the experts as one. Experts of different forms, such as some of 4 bits and some of 8, run one by one."""
    each = iter(experts)
    first = next(each)
    gated, down = StackedLinear(first.gated, num_experts), StackedLinear(first.down, num_experts)
    others: dict[int, GatedMlpWeights] = {}
    for index, expert in enumerate(itertools.chain((first,), each)):
        if not gated.put(index, expert.gated) or not down.put(index, expert.down):
            others[index] = expert
    if not others:
        return GroupedExperts(gated, down, activation, scales_inputs)
    alone = (
        others.get(index) or GatedMlpWeights(gated.linear(index, copies=True), down.linear(index, copies=True))
        for index in range(num_experts)
    )
    return LoopedExperts(alone, scales_inputs)


def _inner(linear: Linear) -> TorchLinear | TritonQuantizedLinear:
    """Returns the linear that a gate or another activation follows."""
    inner = linear.linear if isinstance(linear, GatedLinear) else linear
    inner = inner.linear if isinstance(inner, GatedLinear) else inner
    assert isinstance(inner, TorchLinear | TritonQuantizedLinear)
    return inner


def _form_of(linear: TorchLinear | TritonQuantizedLinear) -> WeightForm | None:
    return None if isinstance(linear, TorchLinear) else linear.weight.form


def _tensors_of(linear: TorchLinear | TritonQuantizedLinear) -> _Tensors:
    return (linear.weight, linear.bias) if isinstance(linear, TorchLinear) else linear.weight.tensors


def _layout(linear: TorchLinear | TritonQuantizedLinear) -> tuple[Any, ...]:
    """Returns what the linears of all experts have in common."""
    shapes = [None if each is None else (each.shape, each.dtype) for each in _tensors_of(linear)]
    return _form_of(linear), *shapes

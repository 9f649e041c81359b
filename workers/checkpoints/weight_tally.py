"""Counts the weights of a model: the quantised linears by kind, and the bytes of all weights after loading."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

import torch

from manta.workers.checkpoints.stored_linears import StoredLinears
from manta.workers.kept_weights import kept_bytes
from manta.workers.kernels.linears import TorchLinear
from manta.workers.kernels.looped_experts import LoopedExperts
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.kernels.weights import Experts, ExpertsWeights, GatedMlpWeights, Linear, LinearWeight
from manta.workers.models.model_config import DTYPE_BYTES, ExpertsConfig


@dataclasses.dataclass
class WeightTally:
    num_floats: int = 0
    """Number of elements of norms, biases, unquantised linears and embeddings."""
    num_float8: int = 0
    """Number of elements of linears that a platform may keep in E4M3."""
    float8_bytes: int = 0
    """Bytes of those elements in E4M3, with scales."""
    num_integers: int = 0
    """Number of elements of linears of integers."""
    integer_bytes: int = 0
    """Bytes of those elements as integers, with scales and offsets."""
    other_bytes: int = 0
    """Bytes of tensors that keep a dtype of their own, such as a quantised embedding, and of linears that are rounded
    at load.
    """
    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Number of linears by kind, such as `4 bits in groups of 128`."""
    stored: StoredLinears | None = None
    """How the checkpoint stores them; None if it is not quantised."""

    def add(self, tensor: torch.Tensor, is_in_dtype: bool) -> None:
        """Counts a tensor that is not the weight of a linear. `is_in_dtype` says whether it has the dtype of the
        activations.
        """
        if is_in_dtype:
            self.num_floats += tensor.numel()
        else:
            self.other_bytes += tensor.numel() * tensor.element_size()

    def add_linear(self, linear: LinearWeight) -> None:
        weight = linear.quantized
        if weight is None:
            if linear.rounded_to is None:
                self.num_floats += linear.weight.numel()
            else:
                out_features, in_features = linear.weight.shape
                self.other_bytes += kept_bytes(out_features, in_features, linear.rounded_to)
            return
        if weight.is_float8:
            self.num_float8 += weight.values.numel()
            self.float8_bytes += weight.values.numel() + weight.scales.numel() * weight.scales.element_size()
            return
        self.kinds[_kind(weight)] += 1
        self.num_integers += weight.values.numel()
        num_scales = weight.scales.numel() * (1 if weight.offsets is None else 2)
        self.integer_bytes += weight.values.numel() * weight.least_bits // 8 + num_scales * weight.scales.element_size()

    def num_bytes(self, dtype: str, keeps_integers: bool, keeps_float8: bool = False) -> int:
        """Returns the bytes of all weights on a platform that computes in `dtype`, a key of `DTYPE_BYTES`."""
        floats = (
            self.num_floats + (0 if keeps_integers else self.num_integers) + (0 if keeps_float8 else self.num_float8)
        )
        kept = (self.integer_bytes if keeps_integers else 0) + (self.float8_bytes if keeps_float8 else 0)
        return floats * DTYPE_BYTES[dtype] + self.other_bytes + kept


class CountingPlatform:
    """A platform for headers without data: it counts the weights that it gets and keeps none."""

    dtype = torch.bfloat16
    """The dtype that stands for the activations' while weights are counted. No weight has it as a dtype of its own."""
    keeps_float8 = True
    reads_tables_in_files = False

    def __init__(self) -> None:
        self.tally = WeightTally()

    def make_linear(self, weight: LinearWeight) -> Linear:
        self.tally.add_linear(weight)
        return TorchLinear(weight.weight, weight.bias)

    def make_router(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return TorchLinear(weight, bias)

    def join_experts(self, experts: Iterable[GatedMlpWeights], config: ExpertsConfig, activation: str) -> Experts:
        return LoopedExperts(experts, config.scales_inputs)

    def fuse_mixture(self, mixture: ExpertsWeights, dtype: torch.dtype) -> Linear | None:
        return None

    def place_weight(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        weight = view.to(dtype)
        self.tally.add(weight, is_in_dtype=dtype == self.dtype)
        return weight

    place_embedding = place_weight

    def tied_head(self, table: torch.Tensor) -> None:
        """Gives no head, so that a tied one is read like any other linear."""


def _kind(weight: QuantizedWeight) -> str:
    where = "by output" if weight.scales.shape[1] == 1 else f"in groups of {weight.group_size}"
    return f"{weight.least_bits} bits {where}"

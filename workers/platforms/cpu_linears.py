"""Chooses the form of a linear on the CPU: the packed kernels, else oneDNN's blocked layout, else torch's own.

A linear is no `nn.Module`, which would add the cost of its calls to each step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch

from manta.workers.kept_weights import LOSSLESS_BITS
from manta.workers.kernels import cpu_adapters, cpu_linear, cpu_quantized_linear, processor
from manta.workers.kernels.adapted_linear import MOST_ADAPTERS, AdaptedLinear, TorchAdaptedLinear
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.cpu_adapters import StepAdapters
from manta.workers.kernels.cpu_gates import GateShape, capped_gate, with_gate
from manta.workers.kernels.cpu_linear import PackedLinear, Place, place_alone
from manta.workers.kernels.cpu_quantized_linear import PackedQuantizedLinear
from manta.workers.kernels.linears import GatedLinear, TorchLinear
from manta.workers.kernels.quantized_reference import TorchQuantizedLinear
from manta.workers.kernels.quantized_weight import QuantizedWeight
from manta.workers.kernels.rounding import round_weight, rounded_shape
from manta.workers.kernels.shared_weights import SharedWeights
from manta.workers.kernels.weights import Linear, LinearWeight

_reorder = torch.ops.mkldnn._reorder_linear_weight
_apply = torch.ops.mkldnn._linear_pointwise.default
_PACK_ROWS = 32
"""The batch size for which oneDNN chooses a layout. Layouts for 1 to 1024 rows were equally fast within noise."""


def make_dense_linear(weight: LinearWeight, place: Place = place_alone) -> Linear:
    """Returns a linear that keeps its weight in the activations' dtype, however the checkpoint stores it. Its bytes may
    be fewer, without loss.
    """
    lossless = weight.rounded_to == LOSSLESS_BITS
    if weight.gated and not _has_bounds(weight):
        return make_cpu_gated_linear(weight.dense(), weight.bias, place, weight.activation, lossless)
    linear = make_cpu_linear(weight.dense(), weight.bias, place, lossless)
    return _gated(linear, weight) if weight.gated else linear


Know = Callable[[Callable[[], bool]], bool]
"""Returns what its argument would, which is called only by the process that packs the weights."""


def find_out(find: Callable[[], bool]) -> bool:
    return find()


def make_linear(weight: LinearWeight, place: Place = place_alone, know: Know = find_out) -> Linear:
    """Returns a linear for any weight. Packed copies lie in memory from `place`."""
    if weight.quantized is None and weight.rounded_to in (None, LOSSLESS_BITS):
        return make_dense_linear(weight, place)
    return make_quantized_linear(weight, place, know)


def make_quantized_linear(weight: LinearWeight, place: Place = place_alone, know: Know = find_out) -> Linear:
    """Returns a linear that keeps its weight as integers and rounds activations to int8.

    A row of activations has one scale if the checkpoint was made for that, else one for each group of inputs.
    """

    stored = None if weight.quantized is None else _with_half_scales(weight.quantized, know)

    def read() -> QuantizedWeight:
        if stored is not None:
            return stored
        assert weight.rounded_to is not None
        return round_weight(weight.weight, weight.rounded_to)

    shape = stored
    if shape is None:
        assert weight.rounded_to is not None
        shape = rounded_shape(weight.weight, weight.rounded_to)
    pack = functools.partial(cpu_quantized_linear.pack, shape, weight.bias, weight.dtype, place=place, fill=read)
    has_silu = weight.gated and weight.activation == "silu" and not _has_bounds(weight)
    gated = pack(gated=True) if has_silu else None
    if gated is not None:
        return gated
    # The kernel takes no other gates, and none of other sizes
    linear: Linear | None = pack()
    if linear is None and has_silu:
        return TorchQuantizedLinear(read(), weight.bias, gated=True)
    linear = linear or TorchQuantizedLinear(read(), weight.bias)
    return _gated(linear, weight) if weight.gated else linear


def _has_bounds(weight: LinearWeight) -> bool:
    return bool(weight.gate_limit or weight.gate_caps)


def _gated(linear: Linear, weight: LinearWeight) -> GatedLinear:
    """Returns the linear of a gated weight, which computes gates and what they let through, with its gate."""
    if weight.gate_caps:
        return GatedLinear(linear, functools.partial(capped_gate, weight.gate_caps))
    out_features, in_features = weight.weight.shape
    return with_gate(
        linear, GateShape(weight.activation, weight.gate_limit, weight.dtype, out_features // 2, in_features)
    )


def _with_half_scales(weight: QuantizedWeight, know: Know) -> QuantizedWeight:
    """Returns the weight with `has_half_scales` set if its scales and offsets are exact in float16."""
    numbers = [each for each in (weight.scales, weight.offsets) if each is not None]
    is_exact = know(lambda: all(torch.equal(each.half().float(), each) for each in numbers))
    return dataclasses.replace(weight, has_half_scales=is_exact)


class CpuSharedLinears:
    """Makes linears with packed weights in shared memory."""

    def __init__(self, weights: SharedWeights) -> None:
        self._weights = weights

    @property
    def are_packed(self) -> bool:
        return self._weights.is_whole

    @property
    def takes_memory(self) -> bool:
        return self._weights.takes_memory

    def make_linear(self, weight: LinearWeight) -> Linear:
        # To place exceptions their number is read from the rest, so experts without loss would not stay unread
        is_unread = weight.is_expert and weight.rounded_to != LOSSLESS_BITS
        place = self._weights.place_expert if is_unread else self._weights.place
        return make_linear(weight, place, self._weights.fact)


class CpuLinearAdapting:
    """Makes linears with adapters: by the kernels around packed linears, by torch around others. With `exact` what
    adapters add has the same bits in every form of the kernels, and every linear is packed. A linear has the adapters
    with numbers below `num_adapters`.
    """

    def __init__(self, exact: bool = False, num_adapters: int = MOST_ADAPTERS) -> None:
        self._step_adapters = StepAdapters()
        self._exact = exact
        self._num_adapters = num_adapters

    def __call__(self, linear: Linear) -> AdaptedLinear:
        if isinstance(linear, PackedLinear | PackedQuantizedLinear):
            return cpu_adapters.adapt(linear, self._step_adapters, self._exact, self._num_adapters)
        assert not self._exact, "the kernels take every linear of integers"
        return TorchAdaptedLinear(linear)


def make_cpu_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, place: Place = place_alone, lossless: bool = False
) -> Linear:
    """Returns a linear `x @ weight.T + bias` with a packed copy of the weight [out_features, in_features].

    `kernels/native/linear.cpp` avoids oneDNN's 20 us for each call: it is as fast as oneDNN on large weights and 1.3 to
    2.5 times faster on small ones. Without a compiler, oneDNN's blocked layout is up to 1.6 times faster than
    `F.linear`.
    """
    linear = cpu_linear.pack(weight, bias, place=place, lossless=lossless)
    if linear is not None:
        return linear
    # F.linear's weight is copied, because the caller may unmap its memory
    return make_onednn_linear(weight, bias) or TorchLinear(weight.clone(), bias)


def make_onednn_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> OneDnnLinear | None:
    """Returns a linear of oneDNN; None if it computes no products with this weight on this processor."""
    has_dtype = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and processor.form().has_bfloat16)
    return OneDnnLinear(weight, bias) if has_dtype and torch.backends.mkldnn.is_available() else None


class OneDnnLinear:
    """`x @ weight.T + bias`, with the weight in oneDNN's blocked layout."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = _reorder(weight, _PACK_ROWS)
        self._bias = bias
        self._no_scalars: list[float] = []

    def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
        return _apply(x, self._packed, self._bias, "none", self._no_scalars, "")


def make_cpu_gated_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    place: Place = place_alone,
    activation: str = "silu",
    lossless: bool = False,
) -> Linear:
    """Returns `activation(x @ gate.T) * (x @ up.T)` (Shazeer, 2020). The weight has the rows of gate, then those of up.

    In bfloat16 one kernel computes it, which keeps the products out of memory: at 2,048 rows, those of Qwen2.5-0.5B are
    40 MB.
    """
    gated = cpu_linear.pack(weight, bias, activation, place, lossless)
    if gated is not None:
        return gated
    shape = GateShape(activation, 0.0, weight.dtype, weight.shape[0] // 2, weight.shape[1])
    return with_gate(make_cpu_linear(weight, bias, place, lossless), shape)

"""Quantised linears on the CPU: thin ctypes calls into `quantized_linear.cpp`.

`workers/platforms/cpu_linears.py` calls it, and uses `quantized_reference.py`, which gives the same bits, if `pack`
returns None. Nothing is compiled at import.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from typing import Any

import torch

from manta.workers.kernels import build, layout
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.cpu_linear import (
    DTYPES,
    NativeLinear,
    Place,
    gated_bias,
    gates_fit,
    native_of,
    place_alone,
)
from manta.workers.kernels.kept_memory import KeptMemory
from manta.workers.kernels.layout import address_of
from manta.workers.kernels.quantized_reference import input_group
from manta.workers.kernels.quantized_weight import QuantizedWeight

_SIZES = "dtype bits in_features out_features group half_scales offsets one_scale one_input_scale gated"
_QuantizedLinear = layout.structure("_QuantizedLinear", "packed bias input_order codebook", _SIZES)


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = build.load_library()
    if library is not None:
        sizes = {"a QuantizedLinear's size": ctypes.sizeof(_QuantizedLinear)}
        layout.check("quantized_linear.cpp", library.manta_quantized_layout, sizes)
        library.manta_quantized_bytes.argtypes = [c_int] * 7
        library.manta_quantized_bytes.restype = c_int64
        library.manta_pack_quantized.argtypes = [*[c_void_p] * 5, *[c_int] * 7]
        library.manta_quantized_linear.argtypes = [c_int, *[c_void_p] * 6, *[c_int] * 10]
        library.manta_pack_quantized.restype = library.manta_quantized_linear.restype = None
    return library


class PackedQuantizedLinear:
    """`x @ weight.T + bias` for x [..., in_features] in `dtype`; activations are rounded to int8.

    With `gated`, the result is `silu` of its first half times its second half.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        gated: bool,
        place: Place,
        fill: Callable[[], QuantizedWeight],
    ) -> None:
        self.out_features, self.in_features = weight.values.shape
        self.width = self.out_features // 2 if gated else self.out_features
        self.dtype = dtype
        self._library = library
        self._bits = weight.least_bits
        self._codebook = None if weight.codebook is None else torch.tensor(weight.codebook, dtype=torch.int8)
        self._group = input_group(weight)
        self._has_half_scales = weight.has_half_scales
        self._has_offsets = weight.offsets is not None
        self._has_one_scale = weight.scales.shape[1] == 1
        self._has_one_input_scale = weight.has_int8_activations
        self._gated = gated
        self._order = None if weight.input_order is None else weight.input_order.contiguous()
        self._outputs = KeptMemory()
        self._state: Any = None
        size = library.manta_quantized_bytes(
            self._bits,
            self.out_features,
            self.in_features,
            self._group,
            self._has_half_scales,
            self._has_offsets,
            self._has_one_scale,
        )
        self.packed = place(size, torch.uint8, lambda packed: self._pack(fill(), packed))
        self.bias = gated_bias(bias) if gated or bias is None else bias.contiguous()

    def _pack(self, weight: QuantizedWeight, packed: torch.Tensor) -> None:
        values, scales = weight.values.contiguous(), weight.scales.contiguous()
        offsets = None if weight.offsets is None else weight.offsets.contiguous()
        self._library.manta_pack_quantized(
            values.data_ptr(),
            scales.data_ptr(),
            address_of(offsets),
            address_of(self._codebook),
            packed.data_ptr(),
            self._bits,
            self.out_features,
            self.in_features,
            self._group,
            self._has_half_scales,
            self._has_one_scale,
            self._gated,
        )

    @property
    def _sizes(self) -> tuple[int, ...]:
        return (
            self._bits,
            self.in_features,
            self.out_features,
            self._group,
            self._has_half_scales,
            self._has_offsets,
            self._has_one_scale,
            self._has_one_input_scale,
            self._gated,
        )

    def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
        x = x.contiguous()
        y = self._outputs.empty((*x.shape[:-1], self.width), self.dtype)
        self._library.manta_quantized_linear(
            DTYPES[self.dtype],
            x.data_ptr(),
            self.packed.data_ptr(),
            address_of(self.bias),
            address_of(self._order),
            address_of(self._codebook),
            y.data_ptr(),
            x.numel() // self.in_features,
            *self._sizes,
        )
        return y

    def native(self) -> NativeLinear:
        """The same linear, for C++ to call."""
        if self._state is None:  # callers keep its address
            pointers = map(address_of, (self.packed, self.bias, self._order, self._codebook))
            self._state = _QuantizedLinear(*pointers, DTYPES[self.dtype], *self._sizes)
        return native_of(self._library, "quantized_linear", self._state)


def pack(
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    gated: bool = False,
    place: Place = place_alone,
    fill: Callable[[], QuantizedWeight] | None = None,
) -> PackedQuantizedLinear | None:
    """A linear with a packed copy of `weight`, for activations in `dtype`; None if nothing can be compiled, or if the
    kernels do not support the dtype or size.

    With `fill`, only the shapes of `weight` are looked at, and `fill` returns the weight when its values are needed. If
    `place` finds that another process has packed them, that is never.
    """
    if dtype not in DTYPES or (library := _library()) is None or (gated and not gates_fit(weight.values.shape[0])):
        return None
    return PackedQuantizedLinear(library, weight, bias, dtype, gated, place, fill or (lambda: weight))

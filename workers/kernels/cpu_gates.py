"""Gates on the CPU, alone and behind a linear of the kernels: calls of `gates.cpp`. Nothing is compiled at import."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int, c_void_p
from typing import NamedTuple

import torch

from manta.workers.kernels import build, cpu_recurrence, reference
from manta.workers.kernels.cpu_linear import ALL_GATE_KINDS, DTYPES, HasNative, LinearCall, NativeLinear, parts_of
from manta.workers.kernels.layout import check
from manta.workers.kernels.linears import GatedLinear
from manta.workers.kernels.weights import Linear


class _GatedLinear(ctypes.Structure):
    _fields_ = [
        ("linear", c_void_p),
        ("parts", c_void_p),
        *[(name, c_int) for name in ("dtype", "width", "in_features", "kind", "is_whole")],
        ("limit", c_float),
    ]


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = build.load_library()
    if library is not None:
        check("gates.cpp", library.manta_gates_layout, {"the size of GatedLinear": ctypes.sizeof(_GatedLinear)})
        library.manta_gate.argtypes = [c_int, c_int, c_float, c_void_p, c_void_p, c_int, c_int]
        library.manta_gate.restype = None
    return library


def gate(activation: str, gate_up: torch.Tensor) -> torch.Tensor:
    """Computes `reference.gate`."""
    return limited_gate(activation, 0.0, gate_up)


def limited_gate(activation: str, limit: float, gate_up: torch.Tensor) -> torch.Tensor:
    """Computes `gate` of gates that are at most `limit`, and of what they let through between `-limit` and `limit`. A
    limit of 0 is none.
    """
    library = _library()
    if library is None:
        gates, up = gate_up.chunk(2, dim=-1)
        bounded = torch.cat((gates.clamp(max=limit), up.clamp(-limit, limit)), dim=-1) if limit else gate_up
        return reference.gate(activation, bounded)
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape
    output = gate_up.new_empty((rows, width // 2))
    kind, limit = ALL_GATE_KINDS[activation], rounded_limit(limit, gate_up.dtype)
    addresses = gate_up.data_ptr(), output.data_ptr()
    library.manta_gate(DTYPES[gate_up.dtype], kind, limit, *addresses, rows, width // 2)
    return output


def capped_gate(caps: tuple[float, ...], gate_up: torch.Tensor) -> torch.Tensor:
    """Computes `gate` with SiLU, in which the gate that its sigmoid multiplies, and what it lets through, have these
    soft bounds. Each function has the same bits in every form of the kernels.
    """
    gates, up = gate_up.float().chunk(2, dim=-1)
    bounded, let_through = (cpu_recurrence.cap(each, limit) for each, limit in zip((gates, up), caps, strict=True))
    return (bounded * cpu_recurrence.sigmoid(gates) * let_through).to(gate_up.dtype)


class GateShape(NamedTuple):
    activation: str
    """A key of `ALL_GATE_KINDS`."""
    limit: float
    """The bound of the gate, as `limited_gate` has it; 0 for none."""
    dtype: torch.dtype
    width: int
    """The width of the result."""
    in_features: int
    """The inputs of the linear before the gate."""


class NativeGatedLinear(GatedLinear):
    """A linear of the kernels and its gate, which C++ can call without Python between them."""

    def __init__(self, linear: Linear, shape: GateShape) -> None:
        super().__init__(linear, functools.partial(limited_gate, shape.activation, shape.limit))
        self._shape = shape
        self._state: _GatedLinear | None = None

    def around(self, linear: Linear) -> GatedLinear:
        return with_gate(linear, self._shape)

    def native(self) -> NativeLinear:
        """The same linear, for C++ to call."""
        library = _library()
        assert library is not None
        assert isinstance(self.linear, HasNative)
        inner = self.linear.native()
        if self._state is None:  # callers keep its address
            self._call = LinearCall(inner.run, inner.state)
            shape, call = self._shape, ctypes.addressof(self._call)
            kind, limit = ALL_GATE_KINDS[shape.activation], rounded_limit(shape.limit, shape.dtype)
            sizes, is_whole = (shape.width, shape.in_features), inner.begin is not None
            self._state = _GatedLinear(call, inner.parts, DTYPES[shape.dtype], *sizes, kind, is_whole, limit)
        run = ctypes.cast(library.manta_run_gated_linear, c_void_p).value
        assert run is not None
        parts = None if inner.parts is None else parts_of(library, "gated_linear")
        return NativeLinear(run, ctypes.addressof(self._state), inner.raise_error, parts=parts, begin=inner.begin)


def with_gate(linear: Linear, shape: GateShape) -> GatedLinear:
    """Returns the gate behind a linear, which computes gates and what they let through, one after the other."""
    if isinstance(linear, HasNative) and _library() is not None:
        return NativeGatedLinear(linear, shape)
    return GatedLinear(linear, functools.partial(limited_gate, shape.activation, shape.limit))


def rounded_limit(limit: float, dtype: torch.dtype) -> float:
    """Returns the bound of gates in `dtype`, as torch rounds it."""
    return torch.tensor(limit).to(dtype).item()

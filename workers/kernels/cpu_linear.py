"""Packed linears on the CPU, in bfloat16 and float32: thin ctypes calls into `linear.cpp`.

`workers/platforms/cpu_linears.py` calls it, and uses torch if `pack` returns None. Nothing is compiled at import.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from manta.workers.kernels import build, layout
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.kept_memory import KeptMemory
from manta.workers.kernels.layout import address_of

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The numbers by which the kernels know dtypes."""


_PackedLinear = layout.structure("_PackedLinear", "packed bias exceptions", "dtype in_features out_features gate")


LinearCall = layout.structure("_Linear", "run state")
"""A linear as C++ calls it (`native_linear.h`)."""


class NativeLinear(NamedTuple):
    """The function that C++ calls to run a linear: `run(state, x, y, num_rows)`."""

    run: int
    """Address of the function."""
    state: int | None
    """Address of its first argument; the linear keeps what is there alive."""
    raise_error: Callable[[], None] | None = None
    """Raises an error that occurred in the function: no exception can pass through C++."""
    run_adding: int | None = None
    """Address of the same function with addends of the sums, float32 rows or null, as its last argument; None if there
    is none.
    """
    parts: int | None = None
    """Address of the pieces of its work, `LinearParts` in C++; None if there are none."""
    begin: Callable[[AttentionMetadata], None] | None = None
    """Called before the function runs for a step, for linears that differ by sequence."""


@runtime_checkable
class HasNative(Protocol):
    """A linear that C++ can call directly, without going through Python."""

    def native(self) -> NativeLinear: ...


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = build.load_library()
    if library is not None:
        sizes = {"a PackedLinear's size": ctypes.sizeof(_PackedLinear)}
        layout.check("linear.cpp", library.manta_linear_layout, sizes)
        layout.check("linear.cpp", lambda _: library.manta_linear_layout(3), {"GATES": GATES})
        library.manta_pack_linear.argtypes = [c_int, c_void_p, c_void_p, c_int, c_int, c_int]
        library.manta_linear.argtypes = [c_int, *[c_void_p] * 5, *[c_int] * 4]
        library.manta_pack_lossless.argtypes = [*[c_void_p] * 2, *[c_int] * 3]
        library.manta_pack_exceptions.argtypes = [*[c_void_p] * 3, *[c_int] * 3]
        library.manta_pack_linear.restype = library.manta_linear.restype = None
        library.manta_pack_lossless.restype = library.manta_pack_exceptions.restype = None
        library.manta_lossless_bytes.argtypes = [c_int, c_int]
        library.manta_count_exceptions.argtypes = [c_void_p, c_int, c_int]
        library.manta_lossless_bytes.restype = library.manta_count_exceptions.restype = c_int64
    return library


Fill = Callable[[torch.Tensor], None]
"""Writes all of a tensor."""
Place = Callable[[int, torch.dtype, Fill], torch.Tensor]
"""(size, dtype, fill) -> a tensor [size] with what `fill` writes."""


def place_alone(size: int, dtype: torch.dtype, fill: Fill) -> torch.Tensor:
    """Returns the filled tensor in memory of this process alone."""
    packed = torch.empty(size, dtype=dtype)
    fill(packed)
    return packed


GATES = 16
"""Outputs of a gate that lie together in packed weights, followed by as many of what it lets through."""


GATE_KINDS = {"silu": 1, "gelu_tanh": 2}
"""The gates that linears compute with their products, by their numbers in `simd.h`."""
ALL_GATE_KINDS = {**GATE_KINDS, "gelu": 3, "clamped": 4}
"""All that are compiled, by their numbers in `simd.h` and `activations.h`."""


def gates_fit(out_features: int) -> bool:
    """Whether the kernels take gates and what they let through, `out_features` together."""
    return out_features % (2 * GATES) == 0


def gated_bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    """Returns a bias [out_features] of gates, then of what they let through, in the order of packed weights."""
    return None if bias is None else bias.view(2, -1, GATES).transpose(0, 1).reshape(-1)


class PackedLinear:
    """`x @ weight.T + bias` for x [..., in_features] in the weight's dtype, accumulated in float32.

    With a `gate`, a key of `GATE_KINDS`, the result is the gate of its first half times its second half, rounded once.
    A `lossless` one keeps bfloat16 weights in about 12 bits each (`lossless.h`) and gives the same bits.
    """

    __slots__ = (
        "_exceptions",
        "_library",
        "_outputs",
        "_run",
        "_state",
        "bias",
        "dtype",
        "gate",
        "in_features",
        "out_features",
        "packed",
        "width",
    )

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gate: str | None = None,
        place: Place = place_alone,
        lossless: bool = False,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.gate = 0 if gate is None else GATE_KINDS[gate]
        self.width = self.out_features // 2 if gate else self.out_features
        self.dtype = weight.dtype
        self._library = library
        self._run = library.manta_linear
        self._state: Any = None
        self._outputs = KeptMemory()
        self._exceptions: torch.Tensor | None = None
        self.packed = self._placed_without_loss(weight, place) if lossless else self._placed(weight, place)
        self.bias = bias
        if bias is not None:
            self.bias = gated_bias(bias) if gate else bias.contiguous()

    def _placed(self, weight: torch.Tensor, place: Place) -> torch.Tensor:
        panel, step = (self._library.manta_linear_layout(which) for which in (1, 2))
        size = -(-self.out_features // panel) * panel * (-(-self.in_features // step) * step)
        return place(size, self.dtype, lambda packed: self._pack(weight.contiguous(), packed))

    def _placed_without_loss(self, weight: torch.Tensor, place: Place) -> torch.Tensor:
        library, sizes = self._library, (self.out_features, self.in_features)
        num_bytes = library.manta_lossless_bytes(*sizes)
        packed = place(num_bytes, torch.uint8, lambda to: self._pack_without_loss(weight.contiguous(), to))
        # How many exceptions there are is known once the rest is packed, by whichever process
        count = max(1, library.manta_count_exceptions(packed.data_ptr(), *sizes))
        self._exceptions = place(count, torch.int32, lambda to: self._pack_exceptions(weight.contiguous(), packed, to))
        return packed

    def _pack_without_loss(self, weight: torch.Tensor, packed: torch.Tensor) -> None:
        sizes = self.out_features, self.in_features, self.gate
        self._library.manta_pack_lossless(weight.data_ptr(), packed.data_ptr(), *sizes)

    def _pack_exceptions(self, weight: torch.Tensor, packed: torch.Tensor, exceptions: torch.Tensor) -> None:
        sizes = self.out_features, self.in_features, self.gate
        pointers = weight.data_ptr(), packed.data_ptr(), exceptions.data_ptr()
        self._library.manta_pack_exceptions(*pointers, *sizes)

    def _pack(self, weight: torch.Tensor, packed: torch.Tensor) -> None:
        self._library.manta_pack_linear(
            DTYPES[self.dtype],
            weight.data_ptr(),
            packed.data_ptr(),
            self.out_features,
            self.in_features,
            self.gate,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weight."""
        return self.packed.nbytes + (0 if self._exceptions is None else self._exceptions.nbytes)

    def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
        x = x.contiguous()
        y = self._outputs.empty((*x.shape[:-1], self.width), self.dtype)
        self._run(
            DTYPES[self.dtype],
            x.data_ptr(),
            self.packed.data_ptr(),
            address_of(self.bias),
            address_of(self._exceptions),
            y.data_ptr(),
            x.numel() // self.in_features,
            self.in_features,
            self.out_features,
            self.gate,
        )
        return y

    def native(self) -> NativeLinear:
        """The same linear, for C++ to call."""
        if self._state is None:  # callers keep its address
            pointers = self.packed.data_ptr(), address_of(self.bias), address_of(self._exceptions)
            sizes = self.in_features, self.out_features, self.gate
            self._state = _PackedLinear(*pointers, DTYPES[self.dtype], *sizes)
        return native_of(self._library, "packed_linear", self._state)


def native_of(library: ctypes.CDLL, name: str, state: Any) -> NativeLinear:
    """Returns the call of a linear: `manta_run_NAME`, the same with addends `manta_run_NAME_adding`, and
    `manta_NAME_parts`.
    """
    run, run_adding = (ctypes.cast(library[f"manta_run_{each}"], c_void_p).value for each in (name, f"{name}_adding"))
    assert run is not None
    return NativeLinear(run, ctypes.addressof(state), run_adding=run_adding, parts=parts_of(library, name))


def parts_of(library: ctypes.CDLL, name: str) -> int:
    """Returns the address of `manta_NAME_parts`."""
    return ctypes.addressof(ctypes.c_char.in_dll(library, f"manta_{name}_parts"))


def pack(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gate: str | None = None,
    place: Place = place_alone,
    lossless: bool = False,
) -> PackedLinear | None:
    """A linear with a packed copy of `weight`; None if nothing can be compiled, or if the kernels do not support the
    dtype, size or gate. A `lossless` one takes weights in bfloat16.
    """
    if weight.dtype not in DTYPES or (library := _library()) is None:
        return None
    if gate is not None and (gate not in GATE_KINDS or not gates_fit(weight.shape[0])):
        return None
    if lossless and weight.dtype != torch.bfloat16:
        return None
    return PackedLinear(library, weight, bias, gate, place, lossless)

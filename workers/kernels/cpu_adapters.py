"""Linears with adapters on the CPU: thin ctypes calls into `adapters.cpp`, around the packed linears.

`workers/platforms/cpu_linears.py` makes them. Nothing is compiled at import.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int, c_void_p
from typing import Any

import torch

from manta.workers.kernels import build, layout
from manta.workers.kernels.adapted_linear import MOST_ADAPTERS, LowRank
from manta.workers.kernels.adapter_rows import SEGMENT, AdapterRows
from manta.workers.kernels.attention_metadata import AttentionMetadata
from manta.workers.kernels.cpu_linear import DTYPES, GATES, NativeLinear, PackedLinear
from manta.workers.kernels.cpu_quantized_linear import PackedQuantizedLinear
from manta.workers.kernels.kept_memory import KeptMemory

_Part = layout.structure("_Part", "b", "first_rank rank first_output num_outputs is_interleaved", "scale")
_LowRank = layout.structure("_LowRank", "a parts", "rank num_parts")
_StepRows = layout.structure("_StepRows", "segments rows", "num_segments")
_AdaptedLinear = layout.structure(
    "_AdaptedLinear", "run run_adding self adapters step", "dtype in_features out_features width exact"
)


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = build.load_library()
    if library is not None:
        sizes = {f"the size of {each.__name__[1:]}": ctypes.sizeof(each) for each in (_AdaptedLinear, _LowRank, _Part)}
        sizes |= {"the size of Segment": SEGMENT.itemsize, "the size of StepRows": ctypes.sizeof(_StepRows)}
        layout.check("adapters.cpp", library.manta_adapters_layout, sizes)
        library.manta_run_adapted_linear.argtypes = [c_void_p, c_void_p, c_void_p, c_int]
        library.manta_run_adapted_linear.restype = None
    return library


class StepAdapters:
    """The rows of the step under way that have adapters, where all linears of a model find them."""

    def __init__(self) -> None:
        self.state: Any = _StepRows(None, None, 0)
        self._rows: AdapterRows | None = None

    def begin(self, step: AttentionMetadata | None) -> None:
        """Makes the linears compute the rows of this step; None stands for rows without adapters."""
        rows = None if step is None else step.adapters
        if rows is self._rows:
            return
        self._rows = rows  # their memory is pointed to
        if rows is None:
            self.state.num_segments = 0
        else:
            self.state.segments, self.state.rows = rows.segments.ctypes.data, rows.rows.ctypes.data
            self.state.num_segments = len(rows.segments)


class PackedAdaptedLinear:
    """A packed linear with adapters, of which each row of a step may have another one."""

    def __init__(
        self,
        library: ctypes.CDLL,
        linear: PackedLinear | PackedQuantizedLinear,
        step_adapters: StepAdapters,
        exact: bool = False,
        num_adapters: int = MOST_ADAPTERS,
    ) -> None:
        """With `exact`, what adapters add to a row has the same bits in every form of the kernels. The linear has
        adapters with numbers below `num_adapters`, and no step has others.
        """
        self._library = library
        self._linear = linear
        self._step_adapters = step_adapters
        self._outputs = KeptMemory()
        self._is_gated = linear.width < linear.out_features
        self._held: dict[int, tuple[LowRank, Any]] = {}
        """What the table points to, by the number of the adapter."""
        self._table = (_LowRank * num_adapters)()
        inner = linear.native()
        self._state = _AdaptedLinear(
            inner.run,
            inner.run_adding,
            inner.state,
            ctypes.addressof(self._table),
            ctypes.addressof(step_adapters.state),
            DTYPES[linear.dtype],
            linear.in_features,
            linear.out_features,
            linear.width,
            exact,
        )

    def hold(self, number: int, low_rank: LowRank) -> None:
        parts = (_Part * len(low_rank.parts))()
        for to, part in zip(parts, low_rank.parts, strict=True):
            rank, num_outputs = part.b.shape
            place = part.first_output
            if self._is_gated:  # packed weights have gates and what they let through in turns
                place = GATES if part.first_output else 0
            to.b, to.scale = part.b.data_ptr(), part.scale
            to.first_rank, to.rank, to.first_output, to.num_outputs = part.first_rank, rank, place, num_outputs
            to.is_interleaved = self._is_gated
        self._held[number] = low_rank, parts
        self._table[number] = _LowRank(low_rank.a.data_ptr(), ctypes.addressof(parts), len(low_rank.a), len(parts))

    def drop(self, number: int) -> None:
        self._table[number] = _LowRank(None, None, 0, 0)
        self._held.pop(number, None)

    def forward(self, x: torch.Tensor, step: AttentionMetadata | None = None) -> torch.Tensor:
        if step is None or step.adapters is None:
            return self._linear.forward(x, step)
        self._step_adapters.begin(step)
        x = x.contiguous()
        y = self._outputs.empty((*x.shape[:-1], self._linear.width), self._linear.dtype)
        self._library.manta_run_adapted_linear(
            ctypes.addressof(self._state), x.data_ptr(), y.data_ptr(), x.numel() // self._linear.in_features
        )
        return y

    def native(self) -> NativeLinear:
        """The same linear, for C++ to call."""
        run = ctypes.cast(self._library.manta_run_adapted_linear, c_void_p).value
        assert run is not None
        return NativeLinear(run, ctypes.addressof(self._state), begin=self._step_adapters.begin)


def adapt(
    linear: PackedLinear | PackedQuantizedLinear,
    step_adapters: StepAdapters,
    exact: bool = False,
    num_adapters: int = MOST_ADAPTERS,
) -> PackedAdaptedLinear:
    """Returns the linear with adapters, whose rows `step_adapters` tells. `exact` and `num_adapters` are those of
    `PackedAdaptedLinear`.
    """
    library = _library()
    assert library is not None, "it has packed the linear"
    return PackedAdaptedLinear(library, linear, step_adapters, exact, num_adapters)

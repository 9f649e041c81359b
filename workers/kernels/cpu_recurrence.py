"""The parts of recurrent layers on the CPU: thin ctypes calls into `recurrence.cpp`, or torch without a compiler.

Same functions and meanings as `workers/kernels/recurrent_layer.py`. The C++ takes one token after the other, which on a
CPU costs no more than chunks, so a token's bits do not depend on where a step begins.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p

import torch

from manta.workers.kernels import build, convolution, cpu_products, layout, recurrence, recurrent_layer
from manta.workers.kernels.cpu_linear import DTYPES
from manta.workers.kernels.layout import address_of
from manta.workers.kernels.recurrence import RecurrentInputs
from manta.workers.kernels.recurrent_step import RecurrentStep
from manta.workers.models.recurrent_shapes import DeltaShape

_Recurrence = layout.structure(
    "_Recurrence",
    "query key value log_decay beta rates states output starts reads writes sequence_starts",
    "num_segments num_sequences num_groups num_heads key_dim value_dim has_fine_decays",
)
_Convolution = layout.structure(
    "_Convolution",
    "x kernel bias states output starts reads writes sequence_starts",
    "num_segments num_sequences channels width activates",
)
_GatedNorm = layout.structure(
    "_GatedNorm", "x gate weight output", "rows groups size gate_stride gates_first has_sigmoid has_wide_weight", "eps"
)
_RunningMax = layout.structure(
    "_RunningMax",
    "numbers log_decay states output starts reads writes sequence_starts",
    "num_segments num_sequences heads",
)
_DeltaStep = layout.structure(
    "_DeltaStep",
    "projected kernel rates time_bias norm windows states output reads writes",
    "dtype num_rows num_groups num_heads key_dim value_dim width",
    "beta_scale query_scale unit_eps norm_eps",
)
WIDTHS = (3, 4)
"""Widths of convolutions that the C++ takes."""


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = build.load_library()
    if library is not None:
        structures = (_Recurrence, _Convolution, _GatedNorm, _RunningMax, _DeltaStep)
        sizes = {f"the size of {each.__name__[1:]}": ctypes.sizeof(each) for each in structures}
        layout.check("recurrence.cpp", library.manta_recurrence_layout, sizes)
        library.manta_recur.argtypes = [POINTER(_Recurrence)]
        library.manta_convolve.argtypes = [POINTER(_Convolution)]
        library.manta_gated_norm.argtypes = [POINTER(_GatedNorm)]
        library.manta_unit_heads.argtypes = [c_void_p, c_void_p, c_int64, c_int, c_float, c_float]
        library.manta_softplus.argtypes = [c_void_p, c_void_p, c_void_p, c_int64, c_int]
        for name in ("sigmoid", "silu", "exp", "sqrt"):
            getattr(library, f"manta_{name}").argtypes = [c_void_p, c_void_p, c_int64]
        library.manta_cap.argtypes = [c_void_p, c_void_p, c_int64, c_float]
        library.manta_sums_of_squares.argtypes = [c_void_p, c_void_p, c_int64, c_int]
        library.manta_row_norm.argtypes = [*[c_void_p] * 4, c_int64, c_int, c_int, c_float]
        library.manta_centred_heads.argtypes = [c_void_p, c_void_p, c_int64, c_int, c_float]
        library.manta_running_max.argtypes = [POINTER(_RunningMax)]
        library.manta_delta_step.argtypes = [POINTER(_DeltaStep)]
        for name in (
            "recur",
            "convolve",
            "gated_norm",
            "unit_heads",
            "softplus",
            "sigmoid",
            "silu",
            "exp",
            "sqrt",
            "cap",
            "sums_of_squares",
            "row_norm",
            "centred_heads",
            "running_max",
            "delta_step",
        ):
            getattr(library, f"manta_{name}").restype = None
    return library


def recur(inputs: RecurrentInputs, states: torch.Tensor, step: RecurrentStep) -> torch.Tensor:
    library = _library()
    num_heads, value_dim = inputs.value.shape[1:]
    if library is None or not states.is_contiguous():
        return recurrence.recur(inputs, states, step)
    query, key, value, log_decay = (each.contiguous() for each in inputs[:4])
    beta = None if inputs.beta is None else inputs.beta.contiguous()
    output = torch.empty_like(value)
    library.manta_recur(
        _Recurrence(
            *map(address_of, (query, key, value, log_decay, beta, inputs.rates, states, output)),
            *_segments(step),
            len(step.reads),
            len(step.sequence_starts) - 1,
            *key.shape[1:2],
            num_heads,
            key.shape[2],
            value_dim,
            log_decay.dim() == key.dim(),
        )
    )
    return output


def convolve(
    x: torch.Tensor,
    kernel: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    step: RecurrentStep,
    activates: bool = False,
) -> torch.Tensor:
    library = _library()
    num_channels, width = kernel.shape
    if library is None or not states.is_contiguous():
        return convolution.convolve(x, kernel, bias, states, step, activates)
    if width not in WIDTHS:  # torch's products and sums have the same bits, and its SiLU has not
        convolved = convolution.convolve(x, kernel, bias, states, step)
        return silu(convolved) if activates else convolved
    x = x.contiguous()
    output = torch.empty_like(x)
    library.manta_convolve(
        _Convolution(
            *map(address_of, (x, kernel, bias, states, output)),
            *_segments(step),
            len(step.reads),
            len(step.sequence_starts) - 1,
            num_channels,
            width,
            activates,
        )
    )
    return output


def delta_step(
    projected: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    shape: DeltaShape,
    unit_eps: float,
    states: tuple[torch.Tensor, ...],
    step: RecurrentStep,
) -> torch.Tensor | None:
    """The result has the bits that the separate functions give."""
    library = _library()
    is_taken = step.is_decode and shape.width in WIDTHS and shape.value_dim > 1 and projected.dtype in DTYPES
    parts = (tensors["kernel"], tensors["rates"], tensors["time_bias"], tensors["norm"], *states)
    if library is None or not is_taken or not all(part.is_contiguous() for part in parts):
        return None
    projected = projected.contiguous()
    num_rows, width = len(projected), shape.num_value_heads * shape.value_dim
    output = projected.new_empty((num_rows, width))
    library.manta_delta_step(
        _DeltaStep(
            *map(address_of, (projected, *parts, output, step.reads, step.writes)),
            DTYPES[projected.dtype],
            num_rows,
            shape.num_key_heads,
            shape.num_value_heads,
            shape.key_dim,
            shape.value_dim,
            shape.width,
            shape.beta_scale,
            shape.key_dim**-0.5,
            unit_eps,
            shape.norm_eps,
        )
    )
    return output


def unit_heads(x: torch.Tensor, scale: float, eps: float) -> torch.Tensor:
    library = _library()
    if library is None:
        return recurrent_layer.unit_heads(x, scale, eps)
    x = x.contiguous()
    output, size = torch.empty_like(x), x.shape[-1]
    library.manta_unit_heads(x.data_ptr(), output.data_ptr(), x.numel() // size, size, scale, eps)
    return output


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    has_sigmoid: bool = False,
    gates_first: bool = False,
) -> torch.Tensor:
    library = _library()
    if library is None or gate.stride(1) != 1:
        return recurrent_layer.gated_norm(x, gate, weight, eps, has_sigmoid=has_sigmoid, gates_first=gates_first)
    x = x.contiguous()
    num_tokens, num_groups, size = x.shape
    output = x.new_empty((num_tokens, num_groups * size))
    pointers = map(address_of, (x, gate, weight, output))
    is_wide = weight.numel() != size
    sizes = num_tokens, num_groups, size, gate.stride(0)
    library.manta_gated_norm(_GatedNorm(*pointers, *sizes, gates_first, has_sigmoid, is_wide, eps))
    return output


def softplus(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    library = _library()
    if library is None:
        return recurrent_layer.softplus(x, bias)
    x = x.contiguous()
    output, width = torch.empty_like(x), x.shape[-1]
    library.manta_softplus(x.data_ptr(), bias.data_ptr(), output.data_ptr(), x.numel() // width, width)
    return output


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return _of_each("sigmoid", recurrent_layer.sigmoid, x)


def silu(x: torch.Tensor) -> torch.Tensor:
    return _of_each("silu", recurrent_layer.silu, x)


def exp(x: torch.Tensor) -> torch.Tensor:
    return _of_each("exp", recurrent_layer.exp, x)


def sqrt(x: torch.Tensor) -> torch.Tensor:
    return _of_each("sqrt", recurrent_layer.sqrt, x)


def head_products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if _library() is None:
        return recurrent_layer.head_products(x, weight)
    return cpu_products.head_products(x, weight)


def _of_each(name: str, by_torch: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Returns a function of each number of x, of any shape."""
    library = _library()
    if library is None:
        return by_torch(x)
    x = x.contiguous()
    output = torch.empty_like(x)
    getattr(library, f"manta_{name}")(x.data_ptr(), output.data_ptr(), x.numel())
    return output


def cap(x: torch.Tensor, limit: float) -> torch.Tensor:
    library = _library()
    if library is None or not limit:
        return recurrent_layer.cap(x, limit)
    x = x.contiguous()
    output = torch.empty_like(x)
    library.manta_cap(x.data_ptr(), output.data_ptr(), x.numel(), limit)
    return output


def centred_heads(x: torch.Tensor, eps: float) -> torch.Tensor:
    library = _library()
    if library is None:
        return recurrent_layer.centred_heads(x, eps)
    x = x.contiguous()
    output, size = torch.empty_like(x), x.shape[-1]
    library.manta_centred_heads(x.data_ptr(), output.data_ptr(), x.numel() // size, size, eps)
    return output


def running_max(
    numbers: torch.Tensor, log_decay: torch.Tensor, states: torch.Tensor, step: RecurrentStep
) -> torch.Tensor:
    library = _library()
    if library is None or not states.is_contiguous():
        return recurrent_layer.running_max(numbers, log_decay, states, step)
    numbers, log_decay = numbers.contiguous(), log_decay.contiguous()
    output = torch.empty_like(numbers)
    pointers = map(address_of, (numbers, log_decay, states, output))
    sizes = len(step.reads), len(step.sequence_starts) - 1, numbers.shape[1]
    library.manta_running_max(_RunningMax(*pointers, *_segments(step), *sizes))
    return output


def sums_of_squares(x: torch.Tensor) -> torch.Tensor:
    library = _library()
    if library is None:
        return recurrent_layer.sums_of_squares(x)
    x = x.contiguous()
    num_tokens, width = x.shape
    output = x.new_empty((num_tokens, 1))
    library.manta_sums_of_squares(x.data_ptr(), output.data_ptr(), num_tokens, width)
    return output


def row_norm(
    x: torch.Tensor, squares: torch.Tensor, size: int, weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    library = _library()
    if library is None:
        return recurrent_layer.row_norm(x, squares, size, weight, eps)
    x = x.contiguous()
    output, (num_tokens, width) = torch.empty_like(x), x.shape
    pointers = map(address_of, (x, squares, weight, output))
    library.manta_row_norm(*pointers, num_tokens, width, size, eps)
    return output


def _segments(step: RecurrentStep) -> list[int | None]:
    return [address_of(each) for each in (step.starts, step.reads, step.writes, step.sequence_starts)]

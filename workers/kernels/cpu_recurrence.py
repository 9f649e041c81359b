"""The parts of recurrent layers on the CPU: thin ctypes calls into `recurrence.cpp`, or torch without a compiler.

Same functions and meanings as `workers/kernels/recurrent_layer.py`. The C++ takes one token after the other, which on a
CPU costs no more than chunks, so a token's bits do not depend on where a step begins.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p

import torch

from manta.workers.kernels import build, convolution, layout, recurrence, recurrent_layer
from manta.workers.kernels.recurrence import RecurrentInputs
from manta.workers.kernels.recurrent_step import RecurrentStep

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
WIDTHS = (3, 4)
"""Widths of convolutions that the C++ takes."""
LEAST_VALUE_DIM = 4
"""Smallest heads that the C++ takes: it computes neighbouring columns of a state at once."""


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = build.load_library()
    if library is not None:
        structures = (_Recurrence, _Convolution, _GatedNorm)
        sizes = {f"the size of {each.__name__[1:]}": ctypes.sizeof(each) for each in structures}
        layout.check("recurrence.cpp", library.manta_recurrence_layout, sizes)
        library.manta_recur.argtypes = [POINTER(_Recurrence)]
        library.manta_convolve.argtypes = [POINTER(_Convolution)]
        library.manta_gated_norm.argtypes = [POINTER(_GatedNorm)]
        library.manta_unit_heads.argtypes = [c_void_p, c_void_p, c_int64, c_int, c_float, c_float]
        library.manta_softplus.argtypes = [c_void_p, c_void_p, c_void_p, c_int64, c_int]
        library.manta_sigmoid.argtypes = [c_void_p, c_void_p, c_int64]
        for name in ("recur", "convolve", "gated_norm", "unit_heads", "softplus", "sigmoid"):
            getattr(library, f"manta_{name}").restype = None
    return library


def recur(inputs: RecurrentInputs, states: torch.Tensor, step: RecurrentStep) -> torch.Tensor:
    library = _library()
    num_heads, value_dim = inputs.value.shape[1:]
    if library is None or value_dim < LEAST_VALUE_DIM or not states.is_contiguous():
        return recurrence.recur(inputs, states, step)
    query, key, value, log_decay = (each.contiguous() for each in inputs[:4])
    beta = None if inputs.beta is None else inputs.beta.contiguous()
    output = torch.empty_like(value)
    library.manta_recur(
        _Recurrence(
            *map(_address, (query, key, value, log_decay, beta, inputs.rates, states, output)),
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
    if library is None or width not in WIDTHS or not states.is_contiguous():
        return convolution.convolve(x, kernel, bias, states, step, activates)
    x = x.contiguous()
    output = torch.empty_like(x)
    library.manta_convolve(
        _Convolution(
            *map(_address, (x, kernel, bias, states, output)),
            *_segments(step),
            len(step.reads),
            len(step.sequence_starts) - 1,
            num_channels,
            width,
            activates,
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
    pointers = map(_address, (x, gate, weight, output))
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
    library = _library()
    if library is None:
        return recurrent_layer.sigmoid(x)
    x = x.contiguous()
    output = torch.empty_like(x)
    library.manta_sigmoid(x.data_ptr(), output.data_ptr(), x.numel())
    return output


def _segments(step: RecurrentStep) -> list[int | None]:
    return [_address(each) for each in (step.starts, step.reads, step.writes, step.sequence_starts)]


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()

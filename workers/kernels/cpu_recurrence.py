"""Recurrences and convolutions on the CPU: thin ctypes calls into `recurrence.cpp`, or torch without a compiler.

Same functions and meanings as `workers/kernels/recurrence.py` and `workers/kernels/convolution.py`. The C++ takes one
token after the other, which on a CPU costs no more than chunks, so a token's bits do not depend on where a step begins.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER

import torch

from manta.workers.kernels import build, convolution, layout, recurrence
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
WIDTHS = (3, 4)
"""Widths of convolutions that the C++ takes."""
LEAST_VALUE_DIM = 4
"""Smallest heads that the C++ takes: it computes neighbouring columns of a state at once."""


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = build.load_library()
    if library is not None:
        structures = (_Recurrence, _Convolution)
        sizes = {f"the size of {each.__name__[1:]}": ctypes.sizeof(each) for each in structures}
        layout.check("recurrence.cpp", library.manta_recurrence_layout, sizes)
        library.manta_recur.argtypes = [POINTER(_Recurrence)]
        library.manta_convolve.argtypes = [POINTER(_Convolution)]
        library.manta_recur.restype = library.manta_convolve.restype = None
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


def _segments(step: RecurrentStep) -> list[int | None]:
    return [_address(each) for each in (step.starts, step.reads, step.writes, step.sequence_starts)]


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()

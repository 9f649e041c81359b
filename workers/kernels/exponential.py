"""The exponential, with the same bits on every machine, for numbers that are computed once when a model is loaded.

Only operations that IEEE 754 defines to the last bit are used. The exponentials of C libraries and of torch's vector
code differ between processors.
"""

from __future__ import annotations

import math

import torch

_LN_2 = (float.fromhex("0x1.62e42fee00000p-1"), float.fromhex("0x1.a39ef35793c76p-33"))
"""ln 2 in two parts. The first one has 32 bits, so that its products with a power below 2^20 are exact."""
_TERMS = 15
"""Terms of the Taylor series: for numbers up to ln 2 / 2 the next one is below 1e-18."""
_MOST = 700.0
"""Largest magnitude of an exponent that is not cut off: float64 holds its exponential."""


def exponential(x: torch.Tensor) -> torch.Tensor:
    """Returns e^x of float32 numbers of any shape, computed in float64 to about 2e-16 and rounded once."""
    wide = x.double().clamp(-_MOST, _MOST)
    powers = (wide / sum(_LN_2)).round()
    rest = wide
    for part in _LN_2:
        rest = rest - powers * part
    result = torch.zeros_like(rest)
    for term in range(_TERMS - 1, -1, -1):
        result = result * rest
        result = result + 1 / math.factorial(term)
    of_powers = ((powers.to(torch.int64) + 1023) << 52).view(torch.float64)
    return (result * of_powers).float()

"""The sampler's noise in a Triton kernel: the function of `workers/sampling/noise.py`, which every sampler computes.

The logarithms are those of FreeBSD's and musl's C libraries (`e_logf.c`, `s_log1pf.c`, Sun Microsystems, 1993), exact
to a unit in the last place. A GPU's own instruction is off by up to 2^-22 in absolute terms, and the largest noise
comes from logarithms that are smaller than that.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SCALE = tl.constexpr(2.0**-32)
_LARGEST_V = tl.constexpr(1.0 - 2.0**-24)
_ROOT_HALF_BITS = tl.constexpr(0x3F3504F3)  # the bits of sqrt(0.5) as a float32
_OFFSET_BITS = tl.constexpr(0x3F800000 - 0x3F3504F3)
_LN2_HIGH = tl.constexpr(6.9313812256e-01)
_LN2_LOW = tl.constexpr(9.0580006145e-06)
_LG1 = tl.constexpr(0.66666662693)
_LG2 = tl.constexpr(0.40000972152)
_LG3 = tl.constexpr(0.28498786688)
_LG4 = tl.constexpr(0.24279078841)


@triton.jit
def _split(x):
    """Returns (k, r) for which x is 2^k times r, and r is in [sqrt(0.5), sqrt(2)). x must be positive and
    no denormal.
    """
    bits = x.to(tl.int32, bitcast=True) + _OFFSET_BITS
    exponent = (bits >> 23) - 127
    reduced = ((bits & 0x007FFFFF) + _ROOT_HALF_BITS).to(tl.float32, bitcast=True)
    return exponent, reduced


@triton.jit
def _log_of(exponent, f, correction):
    """Returns log(2^exponent * (1 + f)) + correction."""
    k = exponent.to(tl.float32)
    s = tl.div_rn(f, 2.0 + f)  # Triton's `/` is approximate for float32, and the CPU's is not
    z = s * s
    w = z * z
    r = w * (_LG2 + w * _LG4) + z * (_LG1 + w * _LG3)
    half_square = 0.5 * f * f
    return s * (half_square + r) + (k * _LN2_LOW + correction) - half_square + f + k * _LN2_HIGH


@triton.jit
def _log(x):
    exponent, reduced = _split(x)
    return _log_of(exponent, reduced - 1.0, 0.0)


@triton.jit
def _log1p_of_negative(v):
    """Returns log(1 - v) for v in (0, 1). The rounding error of 1 - v corrects the logarithm."""
    rounded = 1.0 - v
    exponent, reduced = _split(rounded)
    is_near_1 = exponent == 0
    f = tl.where(is_near_1, -v, reduced - 1.0)
    correction = tl.where(is_near_1, 0.0, tl.div_rn(-v - (rounded - 1.0), rounded))
    return _log_of(exponent, f, correction)


@triton.jit
def gumbel_noise(token, key_low, key_high):
    """Returns float32 noise of tokens (int32) under a key, whose halves are the bits of `noise_keys` as
    int32 scalars.
    """
    low = key_low.to(tl.uint32, bitcast=True)
    high = key_high.to(tl.uint32, bitcast=True)
    x = token.to(tl.uint32, bitcast=True) ^ low
    x = (x ^ (x >> 17)) * 0xED5AD4BB + high
    x = (x ^ (x >> 11)) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    x = x ^ (x >> 14)
    v = tl.minimum((x.to(tl.float32) + 0.5) * _SCALE, _LARGEST_V)
    return -_log(-_log1p_of_negative(v))

"""The sampler's noise: Gumbel noise as a pure function of (sequence seed, position, token id).

Nothing here keeps state or depends on the batch. Every sampler (C++, torch, Triton) computes the same function, so a
seeded request draws the same tokens everywhere. Importing this module does not import torch.

The function, in unsigned arithmetic modulo 2^64 and 2^32 (`mix64` is splitmix64's finaliser, Steele et al., OOPSLA
2014):

    key = mix64(mix64(seed + 0x9e3779b97f4a7c15) + (position + 1) * 0x9e3779b97f4a7c15)
    x = token_id ^ low32(key)
    x = (x ^ x >> 17) * 0xed5ad4bb + high32(key)
    x = (x ^ x >> 11) * 0xac4c1b51
    x = (x ^ x >> 15) * 0x31848bab
    x = x ^ x >> 14
    v = min((float32(x) + 0.5) * 2^-32, 1 - 2^-24)
    gumbel = -log(-log1p(-v))

that is -log(-log u) of the uniform u = 1 - v. The mixer is "triple32" (C. Wellons, "Prospecting for Hash Functions",
2018: bias 0.021) with the key's second half added between its rounds. It takes three 32-bit multiplications a token,
while Philox takes ten rounds of two 64-bit ones. The largest noise decides which token wins. Working with v = 1 - u
keeps 32 bits there (noise reaches 22.9); a float32 u near 1 has 24 bits, and tokens less probable than about 1e-7 would
never be drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
LARGEST_V = 1.0 - 2.0**-24


def noise_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns the noise keys of each seed and position, int64 [n] each, as uint32 [n, 2]: low half, high half."""
    key = _mix64_array(seeds.astype(np.uint64) + np.uint64(GOLDEN))
    key = _mix64_array(key + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN))
    return np.stack([key & np.uint64(0xFFFFFFFF), key >> np.uint64(32)], axis=1).astype(np.uint32)


def _mix64_array(word: np.ndarray) -> np.ndarray:
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns the noise of every token under every key, float32 [n, V]. `keys` are int32 [n, 2], the bits of
    `noise_keys`; `token_ids` are integers [V].
    """
    import torch

    first, second, third = (value - 2**32 if value >= 2**31 else value for value in MULTIPLIERS)
    x = token_ids.to(torch.int32)[None, :] ^ keys[:, :1]
    x = (x ^ _shift_right(x, 17)) * first + keys[:, 1:]
    x = (x ^ _shift_right(x, 11)) * second
    x = (x ^ _shift_right(x, 15)) * third
    x = x ^ _shift_right(x, 14)
    unsigned = (x.to(torch.int64) & 0xFFFFFFFF).to(torch.float32)
    v = ((unsigned + 0.5) * 2.0**-32).clamp_(max=LARGEST_V)
    return -torch.log(-torch.log1p(-v))


def _shift_right(x: torch.Tensor, count: int) -> torch.Tensor:
    return (x >> count) & (2 ** (32 - count) - 1)  # torch shifts int32 arithmetically; the mask drops the copied sign

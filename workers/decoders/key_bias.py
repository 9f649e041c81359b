"""Biases of keys for attention kernels that know nothing of them: what is added to all products with a key is part of
the key.

ALiBi (Press et al., 2022) has such a bias: a head's depends on the key's position alone, up to what all keys of a query
have in common. Doge computes one of each value. Each key gets further columns that hold its bias. Each query has the
same constant in these columns, and each value zeros. A product of query and key is then the old one plus the bias. The
cache grows by those columns, and shared prefixes, windows and every kernel work as they are.
"""

from __future__ import annotations

import torch

from manta.workers.checkpoints.transformers_support import BIAS_COLUMNS

_QUERY_COLUMN = 256.0
"""The constant in the queries' further columns: a power of two, so that it rounds nothing. The keys' columns hold that
much less, or the largest would exceed float16.
"""


class Alibi:
    """The bias of every head at every position, and queries, keys and values of one model that are widened by it."""

    def __init__(self, bias: torch.Tensor, width: int, device: torch.device) -> None:
        """`bias` is float32 [num_heads, num_positions]: what is added to scaled products with the key there. `width` is
        that of the widened heads.
        """
        self._bias = bias.to(device)
        self._width = width

    def widen(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns `with_key_bias` of tokens at `positions`, int64 [num_tokens]."""
        return with_key_bias(query, key, value, self._bias[:, positions], scale, self._width)


def with_key_bias(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns queries, keys and values [1, heads, num_tokens, head_dim] that are `width` wide, in their dtypes.

    `bias` is float32 [num_kv_heads, num_tokens]: what is added to scaled products with each key. `scale` is the factor
    on the products of the attention to come.
    """
    further = width - query.shape[-1]
    query_columns = query.new_zeros((*query.shape[:-1], further))
    query_columns[..., :BIAS_COLUMNS] = _QUERY_COLUMN
    key_columns = key.new_zeros((*key.shape[:-1], further))
    key_columns[0, :, :, :BIAS_COLUMNS] = _parts(bias / _QUERY_COLUMN / scale).to(key.dtype)
    return (
        torch.cat((query, query_columns), dim=-1),
        torch.cat((key, key_columns), dim=-1),
        torch.cat((value, torch.zeros_like(key_columns)), dim=-1),
    )


def _parts(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of bfloat16's precision in a further dimension of `BIAS_COLUMNS` whose sum is each float32 number."""
    parts = []
    for _ in range(BIAS_COLUMNS):
        part = numbers.bfloat16().float()
        parts.append(part)
        numbers = numbers - part
    return torch.stack(parts, dim=-1)
